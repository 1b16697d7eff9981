"""Planes that tests may stop, kill and fill, each in folders of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import uvloop

from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.host import embedded
from dataplane.host.folders import Folders, plane_folders
from dataplane.server.plane import PlaneServer
from dataplane.server.process import new_plane_id, serve
from tests.deadline import eventually

MiB = 1 << 20
SMALL_STORE: dict[str, Any] = {"capacity_bytes": 8 * MiB, "segment_bytes": 4 * MiB}
"""Settings of a store of two segments."""
SEGMENT_ROOM = 4 * MiB - 4096
"""What blocks can take of one of them: all but its header page."""


@dataclass
class Plane:
    """A plane without Ray, and a client of it."""

    joined: Joined
    folders: Folders
    config: Config
    client: Client
    host: embedded.EmbeddedHost | None = None
    """The parent's side, where the plane is a child process."""
    server: PlaneServer | None = None
    """The server, where it is in this process."""

    @property
    def pid(self) -> int:
        assert self.host is not None
        assert self.host.pid is not None
        return self.host.pid

    def kill(self) -> None:
        """Kill the process that serves; another one is started in its place."""
        os.kill(self.pid, signal.SIGKILL)

    def lose(self) -> None:
        """Kill the process that serves, and have nobody left to start another one."""
        assert self.host is not None
        self.host._stopping.set()
        self.kill()
        self.host._supervisor.join(10)
        self.host._ownership.release()

    def another(self, **settings: Any) -> Client:
        """One more client, of this process."""
        return Client(self.joined, self.config.model_copy(update=settings))

    def counts(self) -> dict[str, Any]:
        """What the value store says of itself."""
        return self.client.status()["values"]["local"]

    def payload_bytes(self, partition: str) -> int:
        """Bytes of the live cells of a partition."""
        return self.client.status()["partitions"][partition]["payload_bytes"]

    def segments(self) -> set[int]:
        """Inode numbers of the segment files that are there."""
        return {path.stat().st_ino for path in self.folders.segments.glob("*/segment-*")}

    def comes_to(self, **counts: int) -> None:
        """Wait until the value store's counts are these."""

        def told() -> bool:
            there = self.counts()
            return all(there[name] == value for name, value in counts.items())

        eventually(told, f"the value store has {counts}")

    def fill(self) -> None:
        """Take all room of a SMALL_STORE with two rows of the partition `full`."""
        row = {"x": torch.zeros(SEGMENT_ROOM - 64, dtype=torch.uint8)}  # 64 bytes: block's front
        for key in ("0", "1"):
            self.client.kv_put(key, "full", row)
        assert self.counts()["used_bytes"] == 2 * SEGMENT_ROOM

    def make_room(self) -> None:
        """Undo `fill`."""
        self.client.kv_clear(["0", "1"], "full")

    def content(self, key: str, partition: str) -> list[Any]:
        """The values that occur in field x of a key."""
        rows = self.client.kv_batch_get([key], partition, layout="list")
        return rows.fields["x"][0].unique().tolist()

    def reads(self, key: str, partition: str) -> list[Any]:
        """Field x of a key."""
        return self.client.kv_batch_get([key], partition, layout="list").fields["x"][0].tolist()


def start(stack: ExitStack, name: str, **settings: Any) -> Plane:
    """A plane in a child process, which ends with the stack however the test went."""
    config = Config(**settings)
    host = embedded.start(name, config)
    stack.callback(host.stop)
    client = Client(host.joined, config)
    stack.callback(client.close)
    return Plane(host.joined, host.folders, config, client, host)


@contextmanager
def in_thread(name: str, **settings: Any) -> Iterator[Plane]:
    """A plane in a thread of this process, where a test can take a guard out of its server."""
    config = Config(**settings)
    folders = plane_folders(name, new_plane_id(), config.runtime_dir, config.shm_dir)
    up = threading.Event()
    servers: list[PlaneServer] = []
    ends: list[asyncio.Event] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        ends.append(asyncio.Event())

        def ready(server: PlaneServer) -> None:
            servers.append(server)
            up.set()

        await serve(folders, config, ready=ready, until=ends[0])

    thread = threading.Thread(target=lambda: uvloop.run(main()), name="plane")
    thread.start()
    try:
        assert up.wait(10)
        joined = Joined(name, folders.plane_id, servers[0].secret, servers[0].address)
        with Client(joined, config) as client:
            yield Plane(joined, folders, config, client, server=servers[0])
    finally:
        loops[0].call_soon_threadsafe(ends[0].set)
        thread.join(10)
        assert not thread.is_alive()
