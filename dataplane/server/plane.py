"""What stands behind the sockets of one process: a tag store, a value store, or both.

Both in one process is the embedded plane and saves a hop; under Ray each is a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import secrets
import sys
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import pyarrow

from dataplane.config import Config
from dataplane.errors import InternalError, InvalidRequest, PermissionDenied, PlaneLost
from dataplane.host.folders import Folders
from dataplane.metrics.timing import Meter
from dataplane.server.connection import GREETING_S, Connection, Payload, Verb
from dataplane.server.ports import LocalTags, LocalValues, RemoteTags
from dataplane.server.snapshotting import Snapshots
from dataplane.server.spinner import Spinner
from dataplane.server.tag_service import TagService
from dataplane.server.value_service import TagPort, ValueService
from dataplane.tags.history import History
from dataplane.tags.journal_folder import open_journal
from dataplane.tags.lineage.lineage import Lineage
from dataplane.tags.store import TagStore
from dataplane.values.budget import shared_memory_budget
from dataplane.values.incarnation import bytes_left
from dataplane.values.store import ValueStore
from dataplane.wire import columns
from dataplane.wire.address import Address, prepare_tcp
from dataplane.wire.frames import Body, Header

if TYPE_CHECKING:
    from dataplane.metrics.serving import ServedMetrics

log = logging.getLogger("dataplane.server")

JOURNAL = "journal"
"""The folder of the journal, in a plane's runtime folder."""

SWITCH_S = 0.0005
"""How long a thread of Python keeps others waiting; by default it is ten times as long."""
CLOSING_TURNS = 100
"""Of the loop, within which all connections have ended."""

Endpoint = tuple[str, int]
"""Host and port; port 0 stands for any."""


class PlaneServer:
    """The services of one process of a plane, and their sockets. For one running event loop."""

    def __init__(self, folders: Folders, config: Config, secret: bytes) -> None:
        self.folders = folders
        self.config = config
        self.plane_id = folders.plane_id
        self.secret = secret
        self.tags: TagService | None = None
        self.values: ValueService | None = None
        self.verbs: dict[str, Verb] = {}
        self.meter: Meter | None = None
        if config.metrics_port is not None:
            self.meter = Meter(self.verbs, ("put_block",))
        self.metrics: ServedMetrics | None = None
        self.address = Address(None)
        self.ended = asyncio.Event()
        """Set when the plane is to end: destroyed, or its tag store is gone."""
        self._spinner = Spinner()
        self._servers: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._accepted: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._connections: set[Connection] = set()
        """Those that have greeted."""
        self._idle: asyncio.TimerHandle | None = None
        self._port: RemoteTags | None = None
        self._snapshots: Snapshots | None = None

    # -- building ----------------------------------------------------------------------------

    def serve_tags(self, *, linger: bool = False) -> TagService:
        """Give this process the plane's tag store: a new one, or what the journal says of it.

        JournalDamaged, with the file and the offset, if the journal is not as it was written.
        """
        config = self.config
        history = History(config.history_changes, config.history_age_s)
        lineage = None
        if config.lineage != "off":
            lineage = Lineage(config.lineage_bytes, config.lineage)
        opened = open_journal(
            self.folders.runtime / JOURNAL,
            self.plane_id,
            open_schemas=config.open_schemas,
            sync=config.journal_sync,
            history=history,
            now=time.time(),
            lineage=lineage,
        )
        replay = opened.replay
        if replay is not None:
            store = replay.store
        else:
            store = TagStore(1, history, open_schemas=config.open_schemas)
        self.tags = TagService(store, opened.journal, on_destroy=self.ended.set, lineage=lineage)
        if replay is not None:
            self.tags.resume(replay)
        self.verbs.update(self.tags.verbs)
        snapshots = Snapshots(opened.journal, config.snapshot_bytes)
        self._snapshots = snapshots
        loop = asyncio.get_running_loop()
        self._tasks += [loop.create_task(self.tags.upkeep()), loop.create_task(snapshots.run())]
        if linger:
            # The first client comes when a value store is up as well.
            self._watch_idle(config.start_timeout_s)
        return self.tags

    async def serve_values(
        self, store_id: str, tags: TagPort, *, reserved_bytes: int = 0
    ) -> ValueService:
        """Give this process the node's value store, with what an earlier process left of it."""
        # Stores of several Ray nodes can share a machine, and then this folder.
        folder = self.folders.segments / store_id
        folder.mkdir(mode=0o700, exist_ok=True)
        budget = shared_memory_budget(
            folder, self.config.capacity_bytes, reserved_bytes, own_bytes=bytes_left(folder)
        )
        if self.config.segment_bytes < budget.segment_bytes:
            budget = budget._replace(segment_bytes=self.config.segment_bytes)
        store = ValueStore(
            folder,
            budget,
            plane_id=self.plane_id,
            store_id=store_id,
            nonce=secrets.token_bytes(16),
        )
        await store.start()
        self.values = ValueService(store, tags)
        self.verbs.update(self.values.verbs)
        return self.values

    async def serve_both(self, store_id: str, socket_name: str, tcp: Endpoint | None) -> None:
        """The embedded plane: both stores behind one socket, publishing by a call."""
        tags = self.serve_tags()
        values = await self.serve_values(store_id, LocalTags(tags, store_id))
        registering = tags.registering
        lost = await values.store.reconcile(await registering.live(store_id))
        without_room = values.store.reconcile_holds(registering.kept(store_id))
        address = await self.bind(socket_name, tcp)
        registering.register(LocalValues(values, address.to_wire()), lost, without_room)
        await self.listen()

    async def join_tags(self, port: RemoteTags) -> None:
        """Register this process's value store at the plane's tag store."""
        if self.values is None:
            raise InternalError("there is no value store to register")
        self._port = port
        await port.join(self.values, self.address.to_wire())

    async def bind(self, socket_name: str, tcp: Endpoint | None) -> Address:
        """Where the sockets are to be, which nobody can connect to yet. Should the port be taken,
        it is another one."""
        loop = asyncio.get_running_loop()
        path = self.folders.socket(socket_name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._servers.append(
            await loop.create_unix_server(
                lambda: self._accept(local=True), path, backlog=4096, start_serving=False
            )
        )
        os.chmod(path, 0o600)
        bound = None
        if tcp is not None:
            host, port = tcp
            try:
                server = await self._listen_tcp(host, port)
            except OSError as error:
                if not port:
                    raise
                log.warning("%s:%d cannot be had again: %s", host, port, error)
                server = await self._listen_tcp(host, 0)
            self._servers.append(server)
            bound = (host, int(server.sockets[0].getsockname()[1]))
        self.address = Address(path, bound)
        return self.address

    async def _listen_tcp(self, host: str, port: int) -> asyncio.Server:
        tls = self.config.tls
        return await asyncio.get_running_loop().create_server(
            lambda: self._accept(local=False),
            host,
            port,
            backlog=4096,
            ssl=tls.server() if tls else None,
            ssl_handshake_timeout=GREETING_S if tls else None,
            start_serving=False,
        )

    async def listen(self) -> None:
        """Serve who connects from now on."""
        for server in self._servers:
            await server.start_serving()

    def open_metrics(self, role: str, host: str | None = None, offset: int = 0) -> None:
        """Serve metrics, where the settings ask for it: on this host, unless they name one, and
        so many ports above theirs. InvalidRequest if there is no such host."""
        port, meter = self.config.metrics_port, self.meter
        if port is None or meter is None:
            return
        # Not needed by others, and costs as much to load as half of this server.
        from dataplane.metrics.serving import LOCAL, ServedMetrics, read_connections
        from dataplane.metrics.tag_store import TagStoreReader
        from dataplane.metrics.value_store import read_values

        folders, tags, values = self.folders, self.tags, self.values
        self.metrics = metrics = ServedMetrics(
            role, folders.name, folders.plane_id, folders.runtime,
            instance="" if tags is not None or values is None else values.store.store_id,
            host=self.config.metrics_host or host or LOCAL, port=port and port + offset,
            known_as=host or LOCAL,
        )  # fmt: skip
        metrics.add(lambda: read_connections(meter, [(c.role, c.begun) for c in self._connections]))
        if tags is not None:
            assert self._snapshots is not None
            metrics.add(TagStoreReader(tags, self._snapshots).read)
            metrics.others = lambda: tags.registering.metrics
        if values is not None:
            metrics.add(lambda: read_values(values))
        # The thread that writes the text of a scrape must not keep the loop from running.
        sys.setswitchinterval(SWITCH_S)
        target = metrics.open(self._why_unready)
        if tags is not None:
            tags.metrics = target
        if values is not None:
            values.metrics = target

    def _why_unready(self) -> str | None:
        """Why this process cannot do its work now; None if it can."""
        tags, values = self.tags, self.values
        if tags is not None and tags.ending:
            return "the plane is ending"
        if self._snapshots is not None and self._snapshots.journal.is_broken:
            return "the journal takes no more changes until a restart"
        if values is not None and not values.tags.is_joined:
            return "the tag store is away"
        if values is None and tags is not None and not tags.registering.connected:
            return "no value store is connected"
        return None

    async def close(self, *, keep_memory: bool = False) -> None:
        """Stop serving for good and give back all shared memory; or keep it for another process,
        which goes on from it."""
        if self.tags is not None:
            self.tags.registering.end()
        if self._port is not None:
            self._port.close()
        if self.metrics is not None:
            await asyncio.to_thread(self.metrics.close)
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end_connections()
        if self.values is not None:
            self.values.store.close(keep=keep_memory)
        if self.tags is not None:
            self.tags.journal.close()

    async def _end_connections(self) -> None:
        """Close all connections, those too that are being accepted."""
        for _ in range(CLOSING_TURNS):
            there = [connection for connection in self._accepted if not connection.closed]
            for connection in there:
                if connection.transport is not None:  # pyright: ignore[reportUnnecessaryComparison]
                    connection.transport.close()
            if not there:
                return
            await asyncio.sleep(0)

    def descriptors(self) -> list[int]:
        """The sockets that are open, so that a forked child can let go of its copies."""
        sockets: list[Any] = [s for server in self._servers for s in server.sockets]
        sockets += [c.transport.get_extra_info("socket") for c in self._connections]
        return [fd for s in sockets if s is not None and (fd := s.fileno()) >= 0]

    # -- what connections ask ----------------------------------------------------------------

    def _accept(self, *, local: bool) -> Connection:
        connection = Connection(self, local=local)
        self._accepted.add(connection)
        return connection

    def served(self, connection: Connection, /) -> None:
        # A value store alone waits for its tag store, which needs the core more than it does.
        if self.tags is not None and connection.role == "client":
            self._spinner.served(connection)

    def greet(self, connection: Connection) -> Body:
        if connection.role == "store" and self.values is not None:
            raise PermissionDenied("value stores register at the tag store of their plane")
        if self.tags is not None and self.tags.ending:
            raise PlaneLost(f"plane {self.folders.name!r} ({self.plane_id}) was destroyed")
        self._connections.add(connection)
        if not connection.local:
            raw: Any = connection.transport.get_extra_info("socket")
            prepare_tcp(raw)
        greeting: dict[str, Any] = {}
        if self.tags is not None:
            self.tags.attach(connection.client_id, connection.label)
            self.tags.tracing.greet(connection, greeting)
            greeting["revision"] = self.tags.store.revision()
            if self._idle is not None and connection.role == "client":
                self._idle.cancel()
                self._idle = None
        if self.values is not None:
            store = self.values.store
            greeting["segments"] = [store.store_id, str(store.folder), store.nonce]
        return greeting

    def accept(
        self, connection: Connection, header: Header, nbytes: int
    ) -> Payload | asyncio.Future[Payload]:
        if self.values is None:
            raise InvalidRequest(f"the verb {header.kind!r:.80} takes no payload here")
        return self.values.accept(connection, header, nbytes)

    def gone(self, connection: Connection, *, stopped: bool) -> None:
        self._connections.discard(connection)
        if self.values is not None:
            self.values.gone(connection, stopped=stopped)
        if self.tags is not None:
            if connection.role == "store":
                self.tags.registering.gone(connection)
            self.tags.detach(connection.client_id)
            if connection.role == "client" and self._lingers:
                self._watch_idle()

    # -- the end of an idle plane ------------------------------------------------------------

    _lingers = False

    def _watch_idle(self, at_least_s: float = 0.0) -> None:
        """End the plane when no client has been attached for `linger_s`."""
        self._lingers = True
        if self._idle is not None or any(c.role == "client" for c in self._connections):
            return
        loop = asyncio.get_running_loop()
        linger_s = max(self.config.linger_s, at_least_s)
        self._idle = loop.call_later(linger_s, self.ended.set)


def prepare_process() -> None:
    """Settings of a process that serves: many descriptors, and no pause for garbage collection.

    Rows are millions of long-lived objects without cycles. What survives a young collection is
    frozen at once, so that no collection ever walks the store (250 ms for 700,000 rows).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Arrow's own pool commits 4 MiB at a time, which holds the loop for 5 ms; malloc does not.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    for cells in (["a"], [1], [1.0], [True]):
        columns.encode(cells)  # the first use of each costs as much
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 1_000_000, 1_000_000)

    def freeze(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            gc.freeze()

    gc.callbacks.append(cast("Callable[[str, dict[str, int]], None]", freeze))
