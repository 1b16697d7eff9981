"""What stands behind the sockets of one process: a tag store, a value store, or both.

Both in one process is the embedded plane and saves a hop; under Ray each is a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import secrets
import socket
from collections.abc import Callable
from typing import Any, cast

import pyarrow

from dataplane.config import Config
from dataplane.errors import InternalError, InvalidRequest, PermissionDenied, PlaneLost
from dataplane.host.folders import Folders
from dataplane.server.connection import GREETING_S, Connection, Payload, Verb
from dataplane.server.ports import LocalTags, LocalValues, RemoteTags
from dataplane.server.spinner import Spinner
from dataplane.server.tag_service import TagService
from dataplane.server.value_service import TagPort, ValueService
from dataplane.tags.history import History
from dataplane.tags.journal import FileJournal
from dataplane.tags.store import TagStore
from dataplane.values.budget import shared_memory_budget
from dataplane.values.store import ValueStore
from dataplane.wire import columns
from dataplane.wire.address import Address
from dataplane.wire.channel import Channel
from dataplane.wire.frames import Body, Header


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
        self.address = Address(None)
        self.ended = asyncio.Event()
        """Set when the plane is to end: destroyed, or its tag store is gone."""
        self._spinner = Spinner()
        self._servers: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._connections: set[Connection] = set()
        self._idle: asyncio.TimerHandle | None = None

    # -- building ----------------------------------------------------------------------------

    def serve_tags(self, *, linger: bool = False) -> TagService:
        """Give this process the plane's tag store, journal and all."""
        store = TagStore(
            epoch=1,
            history=History(self.config.history_changes, self.config.history_age_s),
            open_schemas=self.config.open_schemas,
        )
        journal = FileJournal(
            self.folders.runtime / "journal", self.plane_id, store.epoch,
            open_schemas=self.config.open_schemas,
        )  # fmt: skip
        self.tags = TagService(store, journal, on_destroy=self.ended.set)
        self.verbs.update(self.tags.verbs)
        self._tasks.append(asyncio.get_running_loop().create_task(self.tags.upkeep()))
        if linger:
            # The first client comes when a value store is up as well.
            self._watch_idle(self.config.start_timeout_s)
        return self.tags

    async def serve_values(
        self, node_id: str, tags: TagPort, *, reserved_bytes: int = 0
    ) -> ValueService:
        """Give this process the node's value store."""
        # Stores of several Ray nodes can share a machine, and then this folder.
        folder = self.folders.segments / node_id
        folder.mkdir(mode=0o700)
        budget = shared_memory_budget(folder, self.config.capacity_bytes, reserved_bytes)
        if self.config.segment_bytes < budget.segment_bytes:
            budget = budget._replace(segment_bytes=self.config.segment_bytes)
        store = ValueStore(
            folder,
            budget,
            plane_id=self.plane_id,
            store_id=node_id,
            nonce=secrets.token_bytes(16),
        )
        await store.start()
        self.values = ValueService(store, tags)
        self.verbs.update(self.values.verbs)
        return self.values

    async def serve_both(self, node_id: str) -> None:
        """The embedded plane: both stores, publishing by a call."""
        tags = self.serve_tags()
        values = await self.serve_values(node_id, LocalTags(tags, node_id))
        tags.register(LocalValues(values, self.address.to_wire()))

    async def join_tags(self, channel: Channel, port: RemoteTags) -> None:
        """Register this process's value store at the plane's tag store."""
        if self.values is None:
            raise InternalError("there is no value store to register")
        await port.join(channel, self.values, self.address.to_wire())

    async def listen(self, socket_name: str, tcp_host: str | None) -> Address:
        """Open the sockets; where they are."""
        loop = asyncio.get_running_loop()
        path = self.folders.socket(socket_name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._servers.append(
            await loop.create_unix_server(lambda: self._accepted(local=True), path, backlog=4096)
        )
        os.chmod(path, 0o600)
        tcp = None
        if tcp_host is not None:
            tls = self.config.tls
            server = await loop.create_server(
                lambda: self._accepted(local=False),
                tcp_host,
                0,
                backlog=4096,
                ssl=tls.server() if tls else None,
                ssl_handshake_timeout=GREETING_S if tls else None,
            )
            self._servers.append(server)
            tcp = (tcp_host, int(server.sockets[0].getsockname()[1]))
        self.address = Address(path, tcp)
        return self.address

    async def close(self) -> None:
        """Stop serving and give back all shared memory."""
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.transport.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.sleep(0)
        if self.values is not None:
            self.values.store.close()
        if self.tags is not None:
            self.tags.journal.close()

    # -- what connections ask ----------------------------------------------------------------

    def _accepted(self, *, local: bool) -> Connection:
        return Connection(self, local=local)

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
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        greeting: dict[str, Any] = {}
        if self.tags is not None:
            self.tags.attach(connection.client_id, connection.label)
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
