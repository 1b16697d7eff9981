"""Planes of one tag store and several value stores, each behind sockets of its own, in a thread.

As Ray hosts them, without Ray: stores reach each other through channels, and a test reaches into
them.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import uvloop

from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.host.folders import claim, plane_folders, remove_unowned
from dataplane.server.freeing import Values
from dataplane.server.plane import PlaneServer
from dataplane.server.ports import RemoteTags
from dataplane.server.process import new_plane_id
from dataplane.values.store import ValueStore
from dataplane.wire.address import Address
from dataplane.wire.auth import SECRET_BYTES
from dataplane.wire.channel import Channel
from dataplane.wire.frames import Header
from tests.deadline import eventually

CALL_S = 10.0


class Stores:
    """A plane with value stores `s0`, `s1` …"""

    def __init__(self, name: str, config: Config, joined: Joined) -> None:
        self.name = name
        self.config = config
        self.joined = joined
        self.loop: asyncio.AbstractEventLoop
        self.tags: PlaneServer
        self.values: list[PlaneServer] = []
        self.ports: list[RemoteTags] = []

    def client(self, home: int | None = 0, **settings: Any) -> Client:
        """A client whose puts go to this store."""
        joined = Joined(
            self.joined.name, self.joined.plane_id, self.joined.secret, self.joined.tags,
            None if home is None else f"s{home}",
        )  # fmt: skip
        return Client(joined, self.config.model_copy(update=settings))

    def at(self, store: int) -> Joined:
        """How to reach a value store, for a raw connection."""
        return Joined(
            self.name, self.joined.plane_id, self.joined.secret, self.values[store].address
        )

    def call(self, work: Callable[[], Any]) -> Any:
        """The result of a function on the servers' loop."""

        async def run() -> Any:
            return work()

        return self.start(run()).result(CALL_S)

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on the servers' loop; what comes of it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def seen(self, store: int = 0) -> Values:
        """A value store as the tag store sees it."""
        assert self.tags.tags is not None
        return self.tags.tags.freeing.stores[f"s{store}"]

    def hold(self, attempt: int, nbytes: int, timeout_s: float = 0.0, store: int = 0) -> Any:
        """Have a store hold room, as the tag store does; raises what it answers."""
        return self.start(self.holding(attempt, nbytes, timeout_s, store)).result(CALL_S)

    async def holding(self, attempt: int, nbytes: int, timeout_s: float, store: int = 0) -> None:
        """The same, not waited for."""
        await self.seen(store).hold(attempt, nbytes, timeout_s)

    def held(self, *updates: tuple[int, int], store: int = 0) -> None:
        """Tell a store what is outstanding."""
        self.call(lambda: self.seen(store).held(updates))

    def store(self, store: int = 0) -> ValueStore:
        """A value store itself."""
        values = self.values[store].values
        assert values is not None
        return values.store

    def counts(self, store: int = 0) -> dict[str, Any]:
        """What a store says of itself."""
        return self.call(self.store(store).counts)

    def comes_to(self, store: int = 0, **counts: int) -> None:
        """Wait until a store's counts are these."""

        def told() -> bool:
            there = self.counts(store)
            return all(there[name] == value for name, value in counts.items())

        eventually(told, f"store {store} has {counts}")

    def stop(self, store: int) -> None:
        """End a store as if its process had died: nobody listens any more."""
        self.start(self.values[store].close()).result(CALL_S)


@contextmanager
def running(name: str, stores: Sequence[dict[str, Any]], **settings: Any) -> Iterator[Stores]:
    """A plane whose stores have these settings; the first is the client's home where none is
    named."""
    config = Config(**settings)
    folders = plane_folders(name, new_plane_id(), config.runtime_dir, config.shm_dir)
    secret = secrets.token_bytes(SECRET_BYTES)
    plane = Stores(name, config, Joined(name, folders.plane_id, secret, Address(None)))
    ready = threading.Event()
    ends: list[asyncio.Event] = []

    async def main() -> None:
        plane.loop = asyncio.get_running_loop()
        ends.append(asyncio.Event())
        ownership = claim(folders)
        try:
            plane.tags = PlaneServer(folders, config, secret)
            plane.tags.serve_tags()
            address = await plane.tags.bind("tags.sock", None)
            await plane.tags.listen()
            plane.joined = Joined(name, folders.plane_id, secret, address)
            for number, own in enumerate(stores):
                await _serve_values(plane, f"s{number}", config.model_copy(update=own), address)
            ready.set()
            await ends[0].wait()
            for server in (*plane.values, plane.tags):
                await server.close()
        finally:
            ownership.release()
            remove_unowned(folders)

    thread = threading.Thread(target=lambda: uvloop.run(main()), name="stores")
    thread.start()
    with ExitStack() as stack:
        stack.callback(thread.join, CALL_S)
        stack.callback(lambda: plane.loop.call_soon_threadsafe(ends[0].set))
        assert ready.wait(CALL_S)
        yield plane
    assert not thread.is_alive()


async def _serve_values(plane: Stores, store_id: str, config: Config, tags: Address) -> None:
    secret = plane.joined.secret
    server = PlaneServer(plane.tags.folders, config, secret)

    async def connect(on_request: Callable[[Channel, Header], None]) -> Channel:
        return await Channel.connect(
            tags,
            secret,
            client_id=store_id,
            role="store",
            plane_id=plane.joined.plane_id,
            on_request=on_request,
        )

    port = RemoteTags(connect, server.ended.set)
    await server.serve_values(store_id, port)
    await server.bind(f"{store_id}.sock", None)
    await server.join_tags(port)
    await server.listen()
    plane.values.append(server)
    plane.ports.append(port)
