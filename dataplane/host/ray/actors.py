"""What runs in Ray's actors: a store of a plane, served from an event loop in a thread of its own.

The actors themselves have no coroutine, and so no event loop of Ray's. Each comes up with what an
earlier process of it left, and ends for good when its plane does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import uvloop
from ray.exceptions import RayError

from dataplane.config import Config
from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    JournalDamaged,
    QuotaExceeded,
    Unauthenticated,
    Unreachable,
    to_wire,
)
from dataplane.host.folders import (
    Folders,
    Ownership,
    claim,
    keep,
    mark_ray_session,
    plane_folders,
    remove_unowned,
    sweep,
)
from dataplane.host.presence import session_alive
from dataplane.host.ray.ending import end_this_actor
from dataplane.host.ray.lookup import Answer, find_tags, ray, store_id_of
from dataplane.host.records import Record, endpoint_of, secret_of, write_record, write_secret
from dataplane.logs.process import Role, hide, set_up
from dataplane.server.connection import GREETING_S
from dataplane.server.plane import JOURNAL, PlaneServer, prepare_process
from dataplane.server.ports import RemoteTags
from dataplane.server.process import KILLED_LOCK_S
from dataplane.wire.address import Address
from dataplane.wire.channel import Channel
from dataplane.wire.frames import Header

log = logging.getLogger("dataplane.host")

JOIN_PAUSE_S = 0.1
AGAIN_PAUSE_S = 2.0
"""Before a store that could not come up, on a full disk say, is started once more."""
NODES_LOOK_S = 1.0
"""Between two looks at which nodes are alive."""


@ray.remote
class TagActor:
    def __init__(self, name: str, plane_id: str, config: dict[str, Any]) -> None:
        self._serving = _TagServing(name, plane_id, Config(**config))

    def describe(self, timeout_s: float) -> Answer:
        return self._serving.describe(timeout_s)


@ray.remote
class ValueActor:
    def __init__(self, name: str, store_id: str, tags: Answer) -> None:
        self._serving = _ValueServing(name, store_id, tags)

    def describe(self, timeout_s: float) -> Answer:
        return self._serving.describe(timeout_s)


def plain(config: Config) -> dict[str, Any]:
    """Settings as they travel to an actor."""
    return config.model_dump(mode="json")


def _session() -> str:
    """The Ray session that this process belongs to, as its folder."""
    node: Any = ray._private.worker._global_node
    return str(node.get_session_dir_path())


class _Serving(ABC):
    """An event loop in a thread, with a server of the plane in it."""

    def __init__(self) -> None:
        self._described: Answer | None = None
        self._was_here = False
        """Whether an earlier process of it left something to go on from."""
        self._tries_again = False
        """Whether it is to be started once more: what kept it from coming up may pass."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dataplane", daemon=True)
        self._thread.start()

    def describe(self, timeout_s: float) -> Answer:
        """How to reach this store, or the error that kept it from starting."""
        if not self._ready.wait(timeout_s):
            return {"error": to_wire(DeadlineExceeded("still starting", waited_s=timeout_s))}
        return cast("Answer", self._described)

    def _run(self) -> None:
        failed = False
        try:
            uvloop.run(self._serve())
        except DataplaneError as error:
            failed = True
            self._described = {"error": to_wire(error)}
        except Exception as error:
            failed = True
            log.exception("the plane's store ended by an error")
            text = f"{type(error).__name__}: {error}"
            self._described = {"error": to_wire(InternalError(text))}
        if self._tries_again:
            why = (self._described or {}).get("error", {}).get("message")
            log.warning("the plane's store did not come up again: %s", why)
            threading.Event().wait(AGAIN_PAUSE_S)
            os._exit(1)  # Ray starts it again
        if failed and not self._ready.is_set():
            self._ready.set()
            threading.Event().wait(5.0)  # time for who started it to read why it failed
        end_this_actor()

    @abstractmethod
    async def _serve(self) -> None:
        """Serve until the plane ends."""

    def _own(self, folders: Folders, config: Config) -> Ownership:
        try:
            return _claim(folders, config)
        except (QuotaExceeded, OSError):
            self._may_pass()
            raise

    def _may_pass(self) -> None:
        """A full disk, say, keeps it from coming up. What was there before is not given up for
        that."""
        self._tries_again = self._was_here and not self._ready.is_set()

    def came_up(self, described: Answer) -> None:
        """Clients can connect; `described` is what they are told."""
        self._described = described
        self._ready.set()
        log.info("the store is up: %s", described["address"])


def _folders(name: str, plane_id: str, config: Config) -> Folders:
    return plane_folders(name, plane_id, config.runtime_dir, config.shm_dir)


def _set_up_logs(role: Role, folders: Folders, config: Config) -> None:
    set_up(
        role, level=config.log_level, form=config.log_format,
        plane=folders.name, plane_id=folders.plane_id,
    )  # fmt: skip


def _claim(folders: Folders, config: Config) -> Ownership:
    sweep(config.runtime_dir, config.shm_dir, is_session_alive=session_alive)
    ownership = claim(folders)
    mark_ray_session(folders, _session())
    return ownership


def _tell(folders: Folders, secret: bytes, tags: Address) -> None:
    """Leave on this node what processes need that join by the plane's address, without Ray."""
    assert tags.unix is not None
    write_secret(folders, secret)
    write_record(folders, Record(folders.name, folders.plane_id, tags.unix, tags.tcp))


def _install_switches(server: PlaneServer, role: Literal["tags", "values"]) -> None:
    if os.environ.get("DATAPLANE_SWITCHES"):
        from dataplane.testing import switches

        switches.install(server, role)


class _TagServing(_Serving):
    def __init__(self, name: str, plane_id: str, config: Config) -> None:
        self._name = name
        self._plane_id = plane_id
        self._config = config
        super().__init__()

    async def _serve(self) -> None:
        config = self._config
        folders = _folders(self._name, self._plane_id, config)
        _set_up_logs("tag_store", folders, config)
        self._was_here = (folders.runtime / JOURNAL).exists()
        ownership = self._own(folders, config)
        try:
            secret = secret_of(folders)
            hide(secret)
            server = PlaneServer(folders, config, secret)
            host = config.tcp_host or ray.util.get_node_ip_address()
            server.serve_tags(linger=True)
            address = await server.bind("tags.sock", endpoint_of(folders, host))
            server.open_metrics("tag_store", host)
            _tell(folders, secret, address)
            await server.listen()
            _install_switches(server, "tags")
            prepare_process()
            watching = asyncio.create_task(self._watch_nodes(server))
            self.came_up({
                "plane_id": folders.plane_id,
                "secret": secret,
                "address": address.to_wire(),
                "config": plain(config),
            })  # fmt: skip
            await server.ended.wait()
            watching.cancel()
            await server.close()
        except JournalDamaged as error:
            keep(folders, str(error))
            raise
        except (QuotaExceeded, OSError):
            self._may_pass()
            raise
        finally:
            ownership.release()
            if not self._tries_again:
                remove_unowned(folders)

    async def _watch_nodes(self, server: PlaneServer) -> None:
        """Say which value stores are lost: those of nodes that Ray says are dead."""
        assert server.tags is not None
        registering = server.tags.registering
        told = True
        unsaid = set[str]()
        while True:
            await asyncio.sleep(NODES_LOOK_S)
            try:
                nodes = await asyncio.to_thread(ray.nodes)
            except RayError as error:
                if told:  # and not each time that it is asked again
                    log.warning("Ray does not say which nodes are alive: %s", error)
                told = False
                continue
            told = True
            alive = {store_id_of(node["NodeID"]): bool(node["Alive"]) for node in nodes}
            for store_id in list(registering.known):
                # A node that Ray has forgotten was dead long before.
                if not alive.get(store_id, False):
                    try:
                        await registering.lost(store_id)
                    except DataplaneError as error:
                        if store_id not in unsaid:
                            log.error("that store %s is lost cannot be said: %s", store_id, error)
                        unsaid.add(store_id)


class _ValueServing(_Serving):
    def __init__(self, name: str, store_id: str, tags: Answer) -> None:
        self._name = name
        self._store_id = store_id
        self._tags = tags
        super().__init__()

    async def _serve(self) -> None:
        config = Config(**self._tags["config"])
        plane_id, secret = self._tags["plane_id"], self._tags["secret"]
        folders = _folders(self._name, plane_id, config)
        _set_up_logs("value_store", folders, config)
        hide(secret)
        self._was_here = (folders.segments / self._store_id).exists()
        ownership = self._own(folders, config)
        try:
            server = PlaneServer(folders, config, secret)
            port = RemoteTags(self._connect, server.ended.set)
            await server.serve_values(
                self._store_id, port, reserved_bytes=_object_store_bytes(config.shm_dir)
            )
            # The plane's own address is the tag store's node; this one is ours.
            host = ray.util.get_node_ip_address()
            address = await server.bind(f"{self._store_id}.sock", (host, 0))
            _tell(folders, secret, Address.from_wire(self._tags["address"]))
            server.open_metrics("value_store", host, offset=1)
            # Before it is known which of its blocks are live, nobody may ask for one.
            await self._join(server, port)
            await server.listen()
            _install_switches(server, "values")
            prepare_process()
            self.came_up({"address": address.to_wire()})
            await server.ended.wait()
            await server.close()
        except (QuotaExceeded, OSError):
            self._may_pass()
            raise
        finally:
            ownership.release()
            # A tag store that was killed holds its lock a moment longer than its sockets.
            deadline = time.monotonic() + KILLED_LOCK_S
            while (
                not self._tries_again and not remove_unowned(folders) and folders.runtime.exists()
            ):
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.02)

    async def _join(self, server: PlaneServer, port: RemoteTags) -> None:
        """Join the tag store, which may be being started again."""
        while True:
            try:
                return await server.join_tags(port)
            except (OSError, Unreachable) as error:
                log.debug("the tag store cannot be joined yet: %s", error)
                await asyncio.sleep(JOIN_PAUSE_S)

    async def _connect(self, on_request: Callable[[Channel, Header], None]) -> Channel:
        """A channel to where the tag store is now. PlaneLost if the plane has ended."""
        address = Address.from_wire(self._tags["address"])
        try:
            return await self._connect_to(address, on_request)
        except (OSError, Unauthenticated):  # nobody, or something else that listens there by now
            config = Config(**self._tags["config"])
            folders = plane_folders(
                self._name, self._tags["plane_id"], config.runtime_dir, config.shm_dir
            )
            found = await asyncio.to_thread(find_tags, folders)
            if found is None:
                raise
        return await self._connect_to(found, on_request)

    async def _connect_to(
        self, address: Address, on_request: Callable[[Channel, Header], None]
    ) -> Channel:
        async with asyncio.timeout(GREETING_S):
            return await Channel.connect(
                address,
                self._tags["secret"],
                client_id=self._store_id,
                role="store",
                plane_id=self._tags["plane_id"],
                tls=Config(**self._tags["config"]).tls,
                local=address.is_here(),
                on_request=on_request,
            )


def _object_store_bytes(shm_dir: Path) -> int:
    """Shared memory that Ray's own object store of this node may still take."""
    node_id = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            size = int(node["Resources"].get("object_store_memory", 0))
            stat = os.statvfs(shm_dir)
            # Larger than the mount, Ray keeps it elsewhere.
            return size if size <= stat.f_blocks * stat.f_frsize else 0
    raise InvalidRequest(f"Ray does not know the node {node_id} that this process runs on")
