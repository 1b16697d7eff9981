"""The planes that the contract is tried on, each behind one blocking face.

Owns starting, ending and the adapters. A test sees a `Plane` and never asks which one it is,
except where a promise is about one kind.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensordict._reductions
import torch
from tensordict import TensorDict

import dataplane
import dataplane.session
import dataplane.testing
import dataplane.types
from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.errors import DataplaneError
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.server import GatewayServer
from dataplane.host.folders import plane_folders
from dataplane.server.plane import PlaneServer
from dataplane.server.process import new_plane_id, serve
from dataplane.values.segments import open_segment
from tests.deadline import eventually

MAPPED = pytest.mark.kinds("embedded-sync", "embedded-async", "memory", "ray")
"""For tests of what clients do with segments that they map."""

STEPS = pytest.mark.inside("it goes through the steps of a client, and outside there are others")
"""For tests that cut a client's own way to the plane, effect by effect."""

SHM = Path("/dev/shm")

SETTINGS: dict[str, Any] = {
    "linger_s": 5.0,
    # On a machine that does other things as well, an actor's process takes its time to come up.
    "start_timeout_s": 60.0,
    "capacity_bytes": 256 << 20,
    "segment_bytes": 16 << 20,
}
"""What all planes of tests are started with."""


@dataclass
class Plane:
    """One plane and a client of it."""

    kind: str
    name: str
    settings: dict[str, Any]
    client: Any
    """The verbs, blocking, whatever the client behind them is."""
    connect: Callable[[], Any]
    """Another client of the same plane and the same kind."""
    others: list[Any] = field(default_factory=list[Any])
    _witness: Client | None = None

    @property
    def maps_segments(self) -> bool:
        """Whether clients read and write segments themselves."""
        return self.kind != "ray-remote"

    @property
    def core(self) -> Core:
        """What the client's verbs are made with, for `step`."""
        return _bare(self.client)._core

    @property
    def witness(self) -> Client:
        """A blocking client beside the one under test: its calls may be made in a step."""
        if self._witness is None:
            self._witness = dataplane.connect(self.name, config=self.settings)
            self.others.append(self._witness)
        return self._witness

    def step(
        self,
        verb: Verb[Any],
        *,
        before: Callable[[Any], None] | None = None,
        after: Callable[[Any, Any], None] | None = None,
    ) -> Any:
        """The result of a verb of the client's core, effect by effect.

        `before` sees each effect before it is done; `after` sees it with what came of it. What
        they raise, the verb sees as the outcome: `Broken` is a connection that ended.
        """
        client = _bare(self.client)
        driven = client._drive(_watched(verb, before, after), self.deadline())
        return _finished(self.client, driven)

    def another(self) -> Any:
        """A second client, closed with the plane."""
        client = self.connect()
        self.others.append(client)
        return client

    def used_bytes(self) -> int:
        """Bytes of extents in use in all value stores."""
        return sum(store["used_bytes"] for store in self.client.status()["values"].values())

    def deadline(self) -> float:
        """The deadline of a verb that begins now."""
        return _bare(self.client)._deadline(None)

    def settle(self) -> None:
        """Wait until the value stores have freed what the tag store says is dead.

        By the witness: the client under test may be in the middle of a step.
        """
        eventually(lambda: not self.witness.status()["dead_blocks"], "dead blocks are freed")

    def left_behind(self) -> list[Path]:
        """Files of this plane that are still there."""
        plane_id = self.client.plane_id
        root = Path(self.settings["runtime_dir"])
        return [*SHM.glob(f"dataplane-*-{plane_id}"), *root.glob(plane_id)]


def _bare(client: Any) -> Any:
    """The Client or AsyncClient behind a face."""
    if isinstance(client, Blocking):
        return client.client
    return client.here if isinstance(client, TwoNodes) else client


def _finished(client: Any, result: Any) -> Any:
    return client._run(result) if isinstance(client, Blocking) else result


def _watched(
    verb: Verb[Any],
    before: Callable[[Any], None] | None,
    after: Callable[[Any, Any], None] | None,
) -> Generator[Any, Any, Any]:
    try:
        effect = verb.send(None)
        while True:
            try:
                if before is not None:
                    before(effect)
                value = yield effect
                if after is not None:
                    after(effect, value)
            except BaseException as error:
                effect = verb.throw(error)
            else:
                effect = verb.send(value)
    except StopIteration as end:
        return end.value


# -- the kinds -------------------------------------------------------------------------------


def hosted(
    kind: str, name: str, settings: dict[str, Any], request: pytest.FixtureRequest
) -> AbstractContextManager[Plane]:
    """A plane of one of the kinds. Only those of Ray have its cluster started."""
    if kind == "memory":
        return memory(name, settings)
    if kind == "embedded-sync":
        return embedded_sync(name, settings)
    if kind == "embedded-async":
        return embedded_async(name, settings)
    if kind == "outside":
        return outside(name, settings)
    _, other = request.getfixturevalue("ray_cluster")
    if kind == "ray":
        return ray_hosted(name, settings)
    return ray_remote(name, settings, other)


@contextmanager
def memory(name: str, settings: dict[str, Any]) -> Iterator[Plane]:
    """The plane that users test with, in a thread of this process."""
    settings = {**settings, "host": "embedded"}
    with dataplane.testing.plane(name, **settings) as made:
        plane = Plane("memory", name, settings, made.client, connect=made.connect)
        yield from _until_destroyed(plane, made.client)


@contextmanager
def embedded_sync(name: str, settings: dict[str, Any]) -> Iterator[Plane]:
    settings = {**settings, "host": "embedded"}
    client = dataplane.init(settings, name=name)
    plane = Plane(
        "embedded-sync", name, settings, client,
        connect=lambda: dataplane.connect(name, config=settings),
    )  # fmt: skip
    yield from _until_destroyed(plane, client)


@contextmanager
def embedded_async(name: str, settings: dict[str, Any]) -> Iterator[Plane]:
    settings = {**settings, "host": "embedded"}
    owner = dataplane.init(settings, name=name)
    with ExitStack() as stack:
        loop = stack.enter_context(running_loop())

        def connect() -> Blocking:
            return Blocking(loop, name, settings)

        plane = Plane("embedded-async", name, settings, connect(), connect)
        yield from _until_destroyed(plane, owner)


@contextmanager
def outside(name: str, settings: dict[str, Any]) -> Iterator[Plane]:
    """A client that reaches an embedded plane through a gateway only."""
    settings = {**settings, "host": "embedded"}
    owner = dataplane.init(settings, name=name)
    joined = dataplane.session.join(name, None, Config(**settings))
    with tempfile.TemporaryDirectory(prefix="gateway-") as folder, running_loop() as loop:
        listen = (f"unix:{folder}/socket",)
        # Who has left is not waited for long; who holds a claim and is here says so.
        config = GatewayConfig(listen=listen, absence_s=1.0, drain_s=0.0)
        server = GatewayServer(joined, config, Config(**settings))
        try:
            asyncio.run_coroutine_threadsafe(server.start(), loop).result(30.0)
            (address,) = server.addresses

            def connect() -> Any:
                return Outside(dataplane.connect(address=address), owner)

            plane = Plane("outside", name, settings, connect(), connect)
            yield from _until_destroyed(plane, owner)
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30.0)


class Outside:
    """A client of a gateway. What no gateway tells, sizes of stores and the like, its plane's own
    client says."""

    def __init__(self, client: Client, owner: Client) -> None:
        self.client = client
        self._owner = owner

    def status(self, **named: Any) -> dict[str, Any]:
        if self.client.closed:
            return self.client.status(**named)
        return self._owner.status(**named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


@contextmanager
def ray_hosted(name: str, settings: dict[str, Any]) -> Iterator[Plane]:
    client = dataplane.init(settings, name=name)
    plane = Plane(
        "ray", name, settings, client, connect=lambda: dataplane.connect(name, config=settings)
    )
    yield from _until_destroyed(plane, client)


@contextmanager
def ray_remote(name: str, settings: dict[str, Any], node_id: str) -> Iterator[Plane]:
    """Two value stores, nothing mapped, and every second put made on the other node."""
    settings = {**settings, "same_node_reads": False}
    client = dataplane.init(settings, name=name)
    opened: list[str] = []
    with spying_on_segments(opened):
        plane = Plane(
            "ray-remote", name, settings, TwoNodes(client, other_node(name, settings, node_id)),
            connect=lambda: dataplane.connect(name, config=settings),
        )  # fmt: skip
        yield from _until_destroyed(plane, client)
    assert [path for path in opened if client.plane_id in path] == []


def _until_destroyed(plane: Plane, owner: Client) -> Iterator[Plane]:
    try:
        yield plane
    finally:
        for other in plane.others:
            other.close()
        if plane.client is not owner:
            plane.client.close()
        owner.close(destroy=True)
    eventually(lambda: not plane.left_behind(), f"nothing is left of {plane.name}")


@contextmanager
def spying_on_segments(opened: list[str]) -> Iterator[None]:
    """Notes the path of every segment that clients of this process open meanwhile."""
    from dataplane.client import mappings

    def spy(path: Any, **arguments: Any) -> Any:
        opened.append(str(path))
        return open_segment(path, **arguments)

    mappings.open_segment = spy
    try:
        yield
    finally:
        mappings.open_segment = open_segment


# -- an AsyncClient behind blocking verbs ----------------------------------------------------


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="test-loop")
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        assert not thread.is_alive()
        loop.close()


class Blocking:
    """The verbs of an AsyncClient, each run to its end on an event loop in another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, settings: Any) -> None:
        self._loop = loop
        self.client: dataplane.AsyncClient = self._run(
            dataplane.async_connect(name, config=settings)
        )

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(90.0)

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.client, name)
        if not asyncio.iscoroutinefunction(verb):
            return verb
        return lambda *args, **named: self._run(verb(*args, **named))

    @contextmanager
    def kv_view(self, *args: Any, **named: Any) -> Iterator[dataplane.Rows]:
        view = self.client.kv_view(*args, **named)
        rows = self._run(view.__aenter__())
        try:
            yield rows
        finally:
            self._run(view.__aexit__(None, None, None))


# -- a client whose puts go by turns through two nodes ---------------------------------------


class TwoNodes:
    """A client of this node whose every second put is made by a process of the other node."""

    def __init__(self, here: Client, there: Any) -> None:
        self.here = here
        self.there = there
        self._turn = 0

    def begin(self) -> None:
        """The next put is made here: who makes which put of a test is no matter of those before."""
        self._turn = 0

    def kv_put(self, *args: Any, **named: Any) -> dataplane.KVBatchMeta:
        return self._put("kv_put", *args, **named)

    def kv_batch_put(self, *args: Any, **named: Any) -> dataplane.KVBatchMeta:
        return self._put("kv_batch_put", *args, **named)

    def _put(self, verb: str, *args: Any, **named: Any) -> dataplane.KVBatchMeta:
        self._turn += 1
        if self._turn % 2:
            return getattr(self.here, verb)(*args, **named)
        return self.on_other_node(verb, *args, **named)

    def there_put(self, *args: Any, **named: Any) -> dataplane.KVBatchMeta:
        return self.on_other_node("kv_put", *args, **named)

    def there_get(self, *args: Any, **named: Any) -> dataplane.Rows:
        return self.on_other_node("kv_batch_get", *args, **named)

    def on_other_node(self, verb: str, *args: Any, **named: Any) -> Any:
        """What the verb says there."""
        import ray

        # torch's own format: plain pickle cannot carry tensors of the newest dtypes.
        sent = io.BytesIO()
        torch.save((args, named), sent)
        result, error = ray.get(self.there.ask.remote(verb, sent.getvalue()), timeout=90.0)
        if error is not None:
            raise error
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.here, name)

    def close(self) -> None:
        assert [path for path in self.leave() if self.plane_id in path] == []

    def leave(self) -> list[str]:
        """End the process of the other node; the segments that it opened."""
        import ray

        opened = ray.get(self.there.leave.remote(), timeout=30.0)
        ray.kill(self.there)
        return opened


def other_node(name: str, settings: dict[str, Any], node_id: str) -> Any:
    """An actor on another node that holds a client of the plane."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = ray.remote(OtherNode).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
    )
    there = actor.remote(name, settings)
    assert ray.get(there.node_id.remote(), timeout=60.0) == node_id
    return there


SENT: list[Any] = [
    np.ndarray,
    np.dtype,
    *(type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUVOMm"),
    np._core.multiarray._reconstruct,
    np._core.multiarray.scalar,
    tensordict._reductions._make_td,
    TensorDict,
    *(kind for kind in vars(dataplane.types).values() if isinstance(kind, type)),
]
"""What calls are made of besides plain data and tensors; nothing else is taken in."""


class OtherNode:
    """A process of another node with a client of its own."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self._opened: list[str] = []
        self._stack = ExitStack()
        self._stack.enter_context(spying_on_segments(self._opened))
        self._client = dataplane.connect(name, config=settings)

    def node_id(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def ask(self, verb: str, sent: bytes) -> tuple[Any, DataplaneError | None]:
        with torch.serialization.safe_globals(SENT):
            args, named = torch.load(io.BytesIO(sent), weights_only=True)
        try:
            return getattr(self._client, verb)(*args, **named), None
        except DataplaneError as error:
            return None, error

    def leave(self) -> list[str]:
        self._client.close()
        self._stack.close()
        return self._opened


# -- a plane in a thread of this process -----------------------------------------------------

_threads = itertools.count()


class ThreadPlane:
    """Both stores in a thread of this process: for tests that reach into a server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, settings: Any) -> None:
        self.name = name
        self.settings = {**settings, "host": "embedded"}
        self.loop = loop
        self.server: PlaneServer
        up = threading.Event()
        self._until = asyncio.Event()

        def ready(server: PlaneServer) -> None:
            self.server = server
            up.set()

        config = Config(**self.settings)
        folders = plane_folders(name, new_plane_id(), config.runtime_dir, config.shm_dir)
        self._serving = asyncio.run_coroutine_threadsafe(
            serve(folders, config, ready=ready, until=self._until), loop
        )
        assert up.wait(10.0)

    def call(self, function: Callable[[], Any]) -> Any:
        """The result of a function on the server's loop."""

        async def work() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(30.0)

    def connect(self, **settings: Any) -> Client:
        """A blocking client."""
        return dataplane.connect(self.name, config={**self.settings, **settings})

    def cut_connections(self) -> None:
        """Close every connection from the server's side."""

        def cut() -> None:
            for connection in list(self.server._connections):
                connection.transport.abort()

        self.call(cut)

    def close(self) -> None:
        self.call(self._until.set)
        self._serving.result(30.0)


@contextmanager
def thread_plane(settings: dict[str, Any]) -> Iterator[ThreadPlane]:
    with running_loop() as loop:
        plane = ThreadPlane(loop, f"thread-{os.getpid()}-{next(_threads)}", settings)
        try:
            yield plane
        finally:
            plane.close()
