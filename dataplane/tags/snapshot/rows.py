"""Rows of a partition as columns, chunk by chunk, and rows that only old answers hold. Pure.

Every row keeps its slot, since positions are what history, groups and blocks know it by. Slots
without a row are left empty: which of them have tombstones follows from the history (history.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from dataplane.tags.groups import Group
from dataplane.tags.partition import Partition
from dataplane.tags.rows import CHUNK_BITS, SHARDS, Chunk, Row
from dataplane.tags.snapshot.format import CHUNK, OLD_ROWS, Part
from dataplane.tags.snapshot.references import References, Referred
from dataplane.types import Tags
from dataplane.wire.messages import tags_from_wire, tags_to_wire

OLD_ROWS_PIECE = 1024
_NO_TAGS: Tags = {}


def chunk_parts(partition: Partition, references: References) -> Iterator[Part]:
    """All rows that there are, each after what it refers to."""
    for number, chunk in enumerate(partition.slots.chunks):
        if chunk is None:
            yield [CHUNK, number, 0]
            continue
        rows = chunk.live_rows()
        offsets = None
        if len(rows) < len(chunk.rows):
            live = [at for at, slot in enumerate(chunk.rows) if type(slot) is Row]
            offsets = array("H", live).tobytes()
        columns = _columns(rows, references)
        yield from references.parts()
        yield [CHUNK, number, len(chunk.rows), offsets, *columns]


def take_chunk(
    partition: Partition,
    referred: Referred,
    number: int,
    count: int,
    offsets: bytes | None = None,
    *columns: Any,
) -> None:
    """One chunk, after those before it."""
    slots = partition.slots
    if number != len(slots.chunks):
        raise ValueError(f"chunk {number} follows {len(slots.chunks)} chunks")
    if not count:
        slots.chunks.append(None)
        return
    rows = _rows(columns, referred)
    base = number << CHUNK_BITS
    chunk = Chunk()
    chunk.live = len(rows)
    slots.live += len(rows)
    positions: Iterable[int]
    if offsets is None:
        chunk.rows = list(rows)
        positions = range(base, base + len(rows))
    else:
        chunk.rows = [None] * count
        live = _unpacked("H", offsets)
        for at, row in zip(live, rows, strict=True):
            chunk.rows[at] = row
        positions = [base + at for at in live]
    slots.chunks.append(chunk)
    shards = partition.index.shards
    mask = SHARDS - 1
    for position, row in zip(positions, rows, strict=True):
        key = row.key
        shards[hash(key) & mask][key] = position
        account = row.account
        if account.__class__ is Group:
            account.positions.add(position)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]  # a group, as was just seen


class OldRows:
    """The numbers of rows that are not in their slots any more as they were, while they are
    written: a claim is answered once more with its rows as they were granted."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._numbers: dict[Row, int] = {}
        self._new: list[Row] = []

    def number(self, row: Row) -> int:
        """The number of a row."""
        number = self._numbers.get(row)
        if number is None:
            number = self._numbers[row] = len(self._numbers)
            self._new.append(row)
        return number

    def parts(self) -> Iterator[Part]:
        """Those that have got a number since the last time, and what they refer to."""
        new, self._new = self._new, []
        for at in range(0, len(new), OLD_ROWS_PIECE):
            columns = _columns(new[at : at + OLD_ROWS_PIECE], self._references)
            yield from self._references.parts()
            yield [OLD_ROWS, *columns]


def old_rows(referred: Referred, *columns: Any) -> list[Row]:
    """The old rows of one part."""
    return _rows(columns, referred)


def _columns(rows: Sequence[Row], references: References) -> list[Any]:
    names = tags = None
    if any(row.tags for row in rows):
        names, tags = tags_to_wire([row.tags for row in rows])
    place: list[int] = []
    at: list[int] = []
    counts = bytearray()
    for row in rows:
        layers = row.layers
        counts.append(len(layers) >> 1)
        for k in range(0, len(layers), 2):
            place.append(references.placement(layers[k]))
            at.append(layers[k + 1])
    single = counts.count(1) == len(rows)
    return [
        [row.key for row in rows], names, tags,
        array("i", [row.tag_bytes for row in rows]).tobytes(),
        array("q", [row.revision for row in rows]).tobytes(),
        array("q", [row.cleared_at for row in rows]).tobytes(),
        array("i", [references.account(row.account) for row in rows]).tobytes(),
        None if single else bytes(counts), array("i", place).tobytes(), array("i", at).tobytes(),
    ]  # fmt: skip


def _rows(columns: Sequence[Any], referred: Referred) -> list[Row]:
    keys, names, tags, sizes, revisions, cleared, owners, counts, places, at = columns
    all_tags = repeat(_NO_TAGS, len(keys)) if tags is None else tags_from_wire([names, tags])
    placements = map(referred.placements.__getitem__, _unpacked("i", places))
    cells = zip(placements, _unpacked("i", at), strict=True)
    layers: Iterable[tuple[Any, ...]]
    if counts is None:
        layers = cells
    else:
        layers = [tuple(part for _ in range(count) for part in next(cells)) for count in counts]
    accounts = map(referred.accounts.__getitem__, _unpacked("i", owners))
    rows = list(
        map(
            Row, keys, all_tags, _unpacked("i", sizes), layers, _unpacked("q", revisions),
            _unpacked("q", cleared), accounts,
        )
    )  # fmt: skip
    if len(rows) != len(keys):
        raise ValueError(f"{len(rows)} rows for {len(keys)} keys")
    return rows


def _unpacked(kind: str, packed: bytes) -> list[int]:
    numbers: array[int] = array(kind)
    numbers.frombytes(packed)
    return numbers.tolist()
