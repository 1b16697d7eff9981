"""Value stores in a folder, killed and started again in one process, and a reader of theirs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from dataplane.client.mappings import Mappings
from dataplane.values.blocks import Extent
from dataplane.values.budget import Budget
from dataplane.values.extents import PAGE
from dataplane.values.segments import Header, segment_path
from dataplane.values.store import Live, ValueStore

PLANE = "0123456789abcdef"
SEGMENT = 16 * PAGE
"""Bytes of a segment in these tests: 15 pages of it hold blocks."""
WHOLE = SEGMENT - PAGE
NOW = 1_800_000_000.0


def live_of(extents: Iterable[Extent]) -> Live:
    """These blocks as the tag store says them."""
    columns = np.array(list(extents), np.int64).reshape(-1, 4).T
    return Live(*(np.ascontiguousarray(column) for column in columns))


class Node:
    """A folder in which one incarnation of a value store follows another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = NOW
        self.random = random.Random(7)
        self.content: dict[int, bytes] = {}
        """What was put into each block."""
        self._stores: list[ValueStore] = []

    async def start(self, capacity: int = 64 * SEGMENT, **changed: str) -> ValueStore:
        """The next incarnation; whatever ran before counts as killed."""
        self.kill()
        self.now += 1.0
        names = {"plane_id": PLANE, "store_id": "s0"} | changed
        store = ValueStore(
            self.folder,
            Budget(capacity, SEGMENT),
            nonce=self.random.randbytes(16),
            clock=lambda: self.now,
            **names,
        )
        self._stores.append(store)
        await store.start()
        return store

    def kill(self) -> None:
        """Let go of all stores as a SIGKILL does: nothing is given back, no file changes."""
        for store in self._stores:
            store._maker.shutdown(wait=True)
            for segment in store.segments.values():
                segment.close()
        self._stores.clear()

    async def put(self, store: ValueStore, nbytes: int = PAGE, *, publish: bool = True) -> Extent:
        """A block of random bytes, published or about to be."""
        extent = await self.reserve(store, nbytes)
        data = self.random.randbytes(nbytes)
        store.memory(extent)[:] = data
        store.blocks.seal(extent.block, "writer")
        if publish:
            store.published(extent.block)
        self.content[extent.block] = data
        return extent

    async def reserve(self, store: ValueStore, nbytes: int = PAGE) -> Extent:
        """A block that is not written yet."""
        place = store.allocate(nbytes, "writer", 0.0)
        extent = place if isinstance(place, Extent) else await place
        assert extent.block not in self.content
        return extent

    def intact(self, store: ValueStore, extents: Iterable[Extent]) -> bool:
        """Whether these blocks hold what was put into them, in the store and for a reader."""
        reader = self.reader(store)
        return all(
            bytes(store.memory(extent)) == self.content[extent.block]
            and read(reader, extent) == self.content[extent.block]
            for extent in extents
        )

    def reader(self, store: ValueStore) -> Mappings:
        """A client's mappings, by what the store says in its greeting."""
        return Mappings(str(self.folder), PLANE, store.nonce)

    def files(self) -> list[str]:
        """The segments that are there."""
        return sorted(path.name for path in self.folder.glob("segment-*"))

    def rights(self, segment: int) -> str:
        """With which rights this process maps a segment."""
        (line,) = (
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.endswith(f"{self.folder}/segment-{segment}")
        )
        return line.split()[1]

    def rewrite_header(self, segment: int, **changed: str | int | bytes) -> None:
        """Change what the first page of a segment says."""
        with open(segment_path(self.folder, segment), "r+b") as file:
            header = Header.unpack(file.read(PAGE))._replace(**changed)
            file.seek(0)
            file.write(header.pack())

    def wipe_header(self, segment: int) -> None:
        """Make the first page of a segment zeros."""
        with open(segment_path(self.folder, segment), "r+b") as file:
            file.write(bytes(PAGE))

    def bytes_there(self) -> Mapping[str, bytes]:
        """What each segment's file holds now."""
        return {path.name: path.read_bytes() for path in self.folder.glob("segment-*")}


def read(reader: Mappings, extent: Extent) -> bytes:
    """A block's bytes as a client of the node reads them."""
    _, segment, offset, nbytes = extent
    return reader.readable(segment)[offset : offset + nbytes].tobytes()
