"""Rows and the chunks they live in. Pure.

A row is immutable: a change makes a new one in the same slot, so whoever holds a row or a frozen
chunk sees one moment. Slots are handed out in order and never reused, which makes a slot number
(`position`) a lasting address; a cleared slot keeps a tombstone until history forgets the clear.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dataplane.tags.accounts import Account
from dataplane.tags.layers import Layers
from dataplane.types import Tags

if TYPE_CHECKING:
    from dataplane.wire.columns import Column

CHUNK_BITS = 10
CHUNK_ROWS = 1 << CHUNK_BITS
SHARDS = 256


class Row:
    __slots__ = ("account", "cleared_at", "key", "layers", "revision", "tag_bytes", "tags")

    def __init__(
        self,
        key: str,
        tags: Tags,
        tag_bytes: int,
        layers: Layers,
        revision: int,
        cleared_at: int,
        account: Account,
    ) -> None:
        self.key = key
        self.tags = tags
        self.tag_bytes = tag_bytes
        self.layers = layers
        self.revision = revision
        self.cleared_at = cleared_at
        """Revision of the last clear of this key within history; 0 if there is none."""
        self.account = account
        """Whose row it is: a producer's, or a group's."""


class Tombstone:
    """Fills the slots that one clear emptied."""

    __slots__ = ("revision",)

    def __init__(self, revision: int) -> None:
        self.revision = revision


Slot = Row | Tombstone | None


class Chunk:
    """About a thousand slots. Frozen once a cut holds it: a change then copies it first."""

    __slots__ = ("columns", "field_sets", "forgotten", "frozen", "live", "names", "rows")

    def __init__(self) -> None:
        self.rows: list[Slot] = []
        self.live = 0
        self.forgotten = 0
        """Slots whose tombstone history has let go of."""
        self.frozen = False
        self.names: set[str] | None = None
        """Tag names of the live rows, or more; None when not known."""
        self.columns: dict[str, Column] = {}
        """Encoded columns of the live rows, for those not changed since they were encoded."""
        self.field_sets: list[list[str]] = []
        """What the column of produced fields counts in, while that is encoded."""

    def thawed(self) -> Chunk:
        """A copy that may be changed; encoded columns are immutable and shared."""
        copy = Chunk()
        copy.rows = self.rows.copy()
        copy.live = self.live
        copy.forgotten = self.forgotten
        copy.names = None if self.names is None else set(self.names)
        copy.columns = self.columns.copy()
        copy.field_sets = self.field_sets
        return copy

    def live_rows(self) -> list[Row]:
        """The rows in slot order."""
        if self.live == len(self.rows):
            return self.rows  # pyright: ignore[reportReturnType]  # every slot is a row then
        return [row for row in self.rows if type(row) is Row]


class KeyIndex:
    """Key to position, in shards small enough that growing one never stalls the loop."""

    __slots__ = ("shards",)

    def __init__(self) -> None:
        self.shards: list[dict[str, int]] = [{} for _ in range(SHARDS)]

    def get(self, key: str) -> int | None:
        return self.shards[hash(key) & (SHARDS - 1)].get(key)

    def set(self, key: str, position: int) -> None:
        self.shards[hash(key) & (SHARDS - 1)][key] = position

    def forget(self, key: str, position: int) -> None:
        """Drop the entry if it still points there."""
        shard = self.shards[hash(key) & (SHARDS - 1)]
        if shard.get(key) == position:
            del shard[key]


class Slots:
    """All chunks of a partition: positions in, rows out."""

    __slots__ = ("chunks", "live")

    def __init__(self) -> None:
        self.chunks: list[Chunk | None] = []
        self.live = 0

    @property
    def end(self) -> int:
        """The position behind the last slot that was handed out."""
        if not self.chunks:
            return 0
        last = self.chunks[-1]
        filled = CHUNK_ROWS if last is None else len(last.rows)
        return ((len(self.chunks) - 1) << CHUNK_BITS) + filled

    def at(self, position: int) -> Slot:
        chunk = self.chunks[position >> CHUNK_BITS]
        return None if chunk is None else chunk.rows[position & (CHUNK_ROWS - 1)]

    def extend(self, rows: list[Row]) -> int:
        """Put the rows in the next free slots; the position of the first."""
        chunks = self.chunks
        first = -1
        at = 0
        while at < len(rows):
            chunk = chunks[-1] if chunks else None
            if chunk is None or len(chunk.rows) == CHUNK_ROWS:
                chunk = Chunk()
                chunks.append(chunk)
            elif chunk.frozen:
                chunk = chunks[-1] = chunk.thawed()
            filled = len(chunk.rows)
            if first < 0:
                first = ((len(chunks) - 1) << CHUNK_BITS) + filled
            part = rows[at : at + CHUNK_ROWS - filled]
            chunk.rows += part
            chunk.columns.clear()
            chunk.names = None
            chunk.live += len(part)
            at += len(part)
        self.live += len(rows)
        return first

    def writable(self, position: int) -> Chunk:
        """The chunk of a live slot, thawed."""
        number = position >> CHUNK_BITS
        chunk = self.chunks[number]
        assert chunk is not None
        if chunk.frozen:
            chunk = self.chunks[number] = chunk.thawed()
        return chunk

    def bury(self, position: int, tombstone: Tombstone) -> None:
        """Replace a row by a tombstone."""
        chunk = self.writable(position)
        chunk.rows[position & (CHUNK_ROWS - 1)] = tombstone
        chunk.columns.clear()
        chunk.names = None
        chunk.live -= 1
        self.live -= 1

    def forget(self, position: int) -> None:
        """History let go of the tombstone here; a chunk of nothing else is dropped."""
        number = position >> CHUNK_BITS
        chunk = self.chunks[number]
        if chunk is None:
            return
        if chunk.frozen:
            chunk = self.chunks[number] = chunk.thawed()
        chunk.rows[position & (CHUNK_ROWS - 1)] = None
        chunk.forgotten += 1
        if chunk.forgotten == CHUNK_ROWS:
            self.chunks[number] = None

    def cut(self) -> list[Chunk]:
        """The chunks as they are now, for good: later changes copy what they touch."""
        chunks = [chunk for chunk in self.chunks if chunk is not None and chunk.live]
        for chunk in chunks:
            chunk.frozen = True
        return chunks

    def __iter__(self) -> Iterator[Row]:
        for chunk in self.cut():
            yield from chunk.live_rows()
