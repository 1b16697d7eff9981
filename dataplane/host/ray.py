"""A plane hosted by Ray: the tag store and one value store per node are detached actors.

Ray gives placement, naming and supervision; values and tags never travel through its calls. Each
actor serves sockets from an event loop in a thread of its own. Actors are pinned to their node:
a store lives and dies with its node's memory, so restarting it elsewhere would be another store.

Starting or attaching is one call of Ray's (`get_if_exists`), so racing starters meet in one plane.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any, cast

import ray as untyped_ray
import uvloop
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dataplane.client.core import Joined
from dataplane.config import Config
from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PlaneLost,
    from_wire,
    to_wire,
)
from dataplane.host.folders import (
    Folders,
    Ownership,
    check_name,
    claim,
    mark_ray_session,
    plane_folders,
    remove_unowned,
    sweep,
)
from dataplane.host.records import Record, write_record, write_secret
from dataplane.server.plane import PlaneServer, prepare_process
from dataplane.server.ports import RemoteTags
from dataplane.wire.address import Address
from dataplane.wire.auth import SECRET_BYTES
from dataplane.wire.channel import Channel

log = logging.getLogger("dataplane.host")

NAMESPACE = "dataplane"
KILLED_LOCK_S = 2.0
"""How long a value store waits at its end for others of the plane to let go of its folders."""

Answer = dict[str, Any]

ray = cast("Any", untyped_ray)
"""Ray's own annotations leave most of what is used here unknown."""


def start_or_attach(name: str, config: Config) -> Joined:
    """The plane of this name on the cluster that this process is connected to.

    Raises:
        DeadlineExceeded: it did not come up in time; what was started was stopped again.
    """
    check_name(name)
    if not ray.is_initialized():
        ray.init(ignore_reinit_error=True)
    node_id = ray.get_runtime_context().get_node_id()
    actor, new = _actor(_TagActor, f"{name}/tags", node_id)
    tags = actor.remote(name, _plain(config))
    described = _ask(tags, "describe", config.start_timeout_s, new=new)
    return _joined(name, described, node_id, config)


def attach(name: str, config: Config) -> Joined:
    """The plane of this name, if it is there. PlaneLost otherwise."""
    check_name(name)
    try:
        tags = ray.get_actor(f"{name}/tags", namespace=NAMESPACE)
    except ValueError:
        raise PlaneLost(
            f"no plane {name!r} runs on this Ray cluster: start one with dataplane.init()"
        ) from None
    described = _ask(tags, "describe", config.start_timeout_s, new=False)
    return _joined(name, described, ray.get_runtime_context().get_node_id(), config)


def _joined(name: str, tags: Answer, node_id: str, config: Config) -> Joined:
    """Join as a client of this node, whose value store is started if it is not there."""
    home = _store_id(node_id)
    plane_id = tags["plane_id"]
    actor, new = _actor(_ValueActor, f"{name}/values/{plane_id}/{home}", node_id)
    _ask(actor.remote(name, home, tags), "describe", config.start_timeout_s, new=new)
    return Joined(name, plane_id, tags["secret"], Address.from_wire(tags["address"]), home)


def _store_id(node_id: str) -> str:
    return node_id[:10]


def _actor(cls: Any, name: str, node_id: str) -> tuple[Any, bool]:
    """How to start an actor, or to get it if it is there; and whether it was not."""
    try:
        ray.get_actor(name, namespace=NAMESPACE)
        new = False
    except ValueError:
        new = True
    return cls.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=0,
        max_concurrency=16,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    ), new


def _ask(actor: Any, method: str, timeout_s: float, *, new: bool) -> Answer:
    """The answer of an actor. A new one that is not up in time is stopped; one that was there may
    only be slow, and others' rows are in it."""
    try:
        answer: Answer = ray.get(getattr(actor, method).remote(timeout_s), timeout=timeout_s)
    except GetTimeoutError:
        if not new:
            raise DeadlineExceeded(
                f"the plane is there and did not answer within {timeout_s:g} s",
                waited_s=timeout_s,
            ) from None
        ray.kill(actor, no_restart=True)
        total, free = ray.cluster_resources(), ray.available_resources()
        raise DeadlineExceeded(
            f"the plane's actor did not start within {timeout_s:g} s. It wants 0 CPUs; the "
            f"cluster has {total.get('CPU', 0):g}, of which {free.get('CPU', 0):g} are free, so "
            "look at the raylet's log for why no worker process comes up. It was stopped; init "
            "may be repeated",
            waited_s=timeout_s,
        ) from None
    except RayActorError as error:
        raise PlaneLost(f"the plane's actor died: {error}") from error
    except RayError as error:
        raise InternalError(f"Ray could not start the plane: {error}") from error
    if "error" in answer:
        raise from_wire(answer["error"])
    return answer


def _plain(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _session() -> str:
    """The Ray session that this process belongs to, as its folder."""
    node: Any = ray._private.worker._global_node
    return str(node.get_session_dir_path())


def session_alive(folder: str) -> bool:
    """Whether a Ray session still runs on this machine: its raylet takes connections."""
    for path in Path(folder).glob("sockets/raylet*"):
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        probe.settimeout(0.2)
        try:
            probe.connect(str(path))
            return True
        except OSError:
            continue
        finally:
            probe.close()
    return False


class _Served:
    """An event loop in a thread, with a server of the plane in it."""

    def __init__(self) -> None:
        self._described: Answer | None = None
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
            log.exception("the plane's store ended")
            text = f"{type(error).__name__}: {error}"
            self._described = {"error": to_wire(InternalError(text))}
        if failed and not self._ready.is_set():
            self._ready.set()
            threading.Event().wait(5.0)  # time for who started it to read why it failed
        self._leave()

    async def _serve(self) -> None:
        raise NotImplementedError

    def came_up(self, described: Answer) -> None:
        """Clients can connect; `described` is what they are told."""
        self._described = described
        self._ready.set()

    def _leave(self) -> None:
        """End this actor for good, so that its name is free."""
        try:
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
        except Exception:
            log.exception("the actor could not end itself through Ray")
        threading.Event().wait(5.0)
        os._exit(0)


def _claim(name: str, plane_id: str, config: Config) -> Ownership:
    folders = plane_folders(name, plane_id, config.runtime_dir, config.shm_dir)
    sweep(config.runtime_dir, config.shm_dir, is_session_alive=session_alive)
    ownership = claim(folders)
    mark_ray_session(folders, _session())
    return ownership


def _tell(folders: Folders, secret: bytes, tags: Address) -> None:
    """Leave on this node what processes need that join by the plane's address, without Ray."""
    assert tags.unix is not None
    write_secret(folders, secret)
    write_record(folders, Record(folders.name, folders.plane_id, tags.unix, tags.tcp))


@ray.remote
class _TagActor(_Served):
    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self._name = name
        self._config = Config(**config)
        super().__init__()

    async def _serve(self) -> None:
        config = self._config
        ownership = _claim(self._name, secrets.token_hex(8), config)
        folders = ownership.folders
        try:
            secret = secrets.token_bytes(SECRET_BYTES)
            server = PlaneServer(folders, config, secret)
            host = config.tcp_host or ray.util.get_node_ip_address()
            address = await server.listen("tags.sock", host)
            _tell(folders, secret, address)
            server.serve_tags(linger=True)
            prepare_process()
            self.came_up({
                "plane_id": folders.plane_id,
                "secret": secret,
                "address": address.to_wire(),
                "config": _plain(config),
            })  # fmt: skip
            await server.ended.wait()
            await server.close()
        finally:
            ownership.release()
            remove_unowned(folders)


@ray.remote
class _ValueActor(_Served):
    def __init__(self, name: str, store_id: str, tags: Answer) -> None:
        self._name = name
        self._store_id = store_id
        self._tags = tags
        super().__init__()

    async def _serve(self) -> None:
        config = Config(**self._tags["config"])
        ownership = _claim(self._name, self._tags["plane_id"], config)
        folders = ownership.folders
        try:
            server = PlaneServer(folders, config, self._tags["secret"])
            # The plane's own address is the tag store's node; this one is ours.
            address = await server.listen(f"{self._store_id}.sock", ray.util.get_node_ip_address())
            _tell(folders, self._tags["secret"], Address.from_wire(self._tags["address"]))
            port = RemoteTags(server.ended.set)
            await server.serve_values(
                self._store_id, port, reserved_bytes=_object_store_bytes(config.shm_dir)
            )
            tags = Address.from_wire(self._tags["address"])
            channel = await Channel.connect(
                tags,
                self._tags["secret"],
                client_id=self._store_id,
                role="store",
                plane_id=self._tags["plane_id"],
                tls=config.tls,
                local=tags.is_here(),
                on_request=port.on_request,
            )
            await server.join_tags(channel, port)
            prepare_process()
            self.came_up({"address": address.to_wire()})
            await server.ended.wait()
            channel.close()
            await server.close()
        finally:
            ownership.release()
            # A tag store that was killed holds its lock a moment longer than its sockets.
            deadline = time.monotonic() + KILLED_LOCK_S
            while not remove_unowned(folders) and folders.runtime.exists():
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.02)


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
