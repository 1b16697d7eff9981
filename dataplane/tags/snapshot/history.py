"""The history as a snapshot has it, and the tombstones that follow from it. Pure.

A slot has a tombstone, and its key leads there, exactly while the change that cleared it is in the
history: so neither is written.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from dataplane.tags.history import Chain, Change, History
from dataplane.tags.partition import Partition
from dataplane.tags.rows import CHUNK_BITS, CHUNK_ROWS, Row, Tombstone
from dataplane.tags.snapshot.format import HISTORY, Part

PIECE_KEYS = 32_768
"""Keys of changes in one part; a change of more goes on in the next."""


def history_parts(history: History) -> Iterator[Part]:
    """All changes, oldest first: [n, at, partition_id, keys, positions | nil, by, whether the next
    entry goes on with it]."""
    piece: list[Any] = []
    room = PIECE_KEYS
    for change in history:
        for entry in _entries(change):
            piece.append(entry)
            room -= len(entry[3]) + 1
            if room <= 0:
                yield [HISTORY, piece]
                piece, room = [], PIECE_KEYS
    if piece:
        yield [HISTORY, piece]


def _entries(change: Change) -> Iterator[list[Any]]:
    keys = iter(change.keys)
    positions = None if change.positions is None else iter(change.positions)
    left = len(change.keys)
    while True:
        part = list(islice(keys, PIECE_KEYS))
        left -= len(part)
        at = None
        if positions is not None:
            at = array("q", islice(positions, len(part))).tobytes()
        yield [change.n, change.at, change.partition_id, part, at, change.by, left > 0]
        if left <= 0:
            return


class HistoryReader:
    """Fills a history that is empty."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._keys: list[Sequence[str]] = []
        self._positions: list[Sequence[int]] = []

    def take(self, entries: list[Any]) -> None:
        """The changes of one part."""
        for n, at, partition_id, keys, packed, by, more in entries:
            self._keys.append(keys)
            if packed is not None:
                positions = array("q")
                positions.frombytes(packed)
                if len(positions) != len(keys):
                    raise ValueError(f"{len(positions)} slots of {len(keys)} cleared keys")
                self._positions.append(positions.tolist())
            if more:
                continue
            of = None if packed is None else _one(self._positions)
            self._history.append(Change(n, at, partition_id, _one(self._keys), of, by))
            self._keys, self._positions = [], []


def _one(parts: list[Any]) -> Collection[Any]:
    return parts[0] if len(parts) == 1 else Chain(parts)


def bury(partitions: Mapping[str, Partition], history: History) -> None:
    """Put tombstones into the slots that clears emptied which are in the history, and let the
    keys of those that did not come again lead there. Chunks of nothing else are dropped."""
    for change in history:
        partition = partitions.get(change.partition_id)
        # One of this name before was another partition.
        if change.positions is None or partition is None or change.n <= partition.born:
            continue
        tombstone = Tombstone(change.n)
        index, slots = partition.index, partition.slots
        for key, position in zip(change.keys, change.positions, strict=True):
            chunk = slots.chunks[position >> CHUNK_BITS]
            if chunk is None or type(chunk.rows[position & _OFFSET]) is Row:
                raise ValueError(f"key {key!r:.80} was cleared from slot {position}, and is there")
            chunk.rows[position & _OFFSET] = tombstone
            there = index.get(key)
            if there is None or type(slots.at(there)) is not Row:
                index.set(key, position)
    for partition in partitions.values():
        chunks = partition.slots.chunks
        for number, chunk in enumerate(chunks):
            if chunk is not None and chunk.live < len(chunk.rows):
                chunk.forgotten = chunk.rows.count(None)
                if chunk.forgotten == CHUNK_ROWS:
                    chunks[number] = None


_OFFSET = CHUNK_ROWS - 1
