"""One partition: its rows, its key index, its schema, its bytes. Pure.

Checks change nothing; `apply_put` and `apply_clear` cannot fail after their checks passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import msgpack

from dataplane.codec.tags import MAX_TAG_BYTES, MAX_TAGS
from dataplane.errors import (
    AlreadyWritten,
    InvalidRequest,
    KeyNotFound,
    SchemaMismatch,
    StaleWrite,
    quote,
)
from dataplane.tags.layers import Layers, cover, live_fields, moved, release, release_whole
from dataplane.tags.placement import Placement
from dataplane.tags.rows import CHUNK_ROWS, SHARDS, Chunk, KeyIndex, Row, Slot, Slots, Tombstone
from dataplane.types import FieldSchema, Tags, TagValue


class PutRows(NamedTuple):
    """One put as the tag store sees it."""

    partition_id: str
    keys: list[str]
    tags: list[Tags] | None
    tag_sizes: list[int] | None
    placement: Placement | None
    must_exist: bool = False
    if_absent: bool = False
    stamp: int | None = None
    """Revision at which the put began; None if it begins now."""


class Found(NamedTuple):
    """The keys of a put as they were before it."""

    positions: list[int | None]
    slots: list[Slot] | None
    """None if none of the keys has a row."""
    cleared: Iterable[int]
    """When each key was cleared last, where none has a row; 0 if it never was."""


_NO_TAGS: Tags = {}


class Partition:
    def __init__(self, partition_id: str) -> None:
        self.partition_id = partition_id
        self.revision = 0
        """Last change of this partition."""
        self.index = KeyIndex()
        self.slots = Slots()
        self.schema: dict[str, FieldSchema] = {}
        self.payload_bytes = 0
        """Bytes of all live cells."""
        self.tag_bytes = 0
        self._templates: set[bytes] = set()
        """Templates whose columns agree with the schema."""

    def __len__(self) -> int:
        return self.slots.live

    def row(self, key: str) -> Row | None:
        position = self.index.get(key)
        if position is None:
            return None
        slot = self.slots.at(position)
        return slot if type(slot) is Row else None

    # -- put ---------------------------------------------------------------------------------

    def find(self, keys: Sequence[str]) -> list[int | None]:
        """The position of each key's row or tombstone; None where the key is not known."""
        shards = self.index.shards
        return [shards[hash(key) & (SHARDS - 1)].get(key) for key in keys]

    def check_put(self, put: PutRows, floor: int) -> Found:
        """Raise what is wrong with the put; nothing is changed. What it found goes to apply."""
        placement = put.placement
        if placement is not None and placement.template.blob not in self._templates:
            self._check_schema(placement, put.keys[0])
        if put.stamp is not None and put.stamp < floor:
            raise StaleWrite(
                f"the put began at revision {put.stamp}, before what history still covers "
                f"(from {floor}): whether its keys were cleared since cannot be told; put again",
                partition_id=self.partition_id,
                keys=put.keys,
                cleared_at=None,
            )
        positions = self.find(put.keys)
        cleared: Iterable[int] = repeat(0)
        if positions.count(None) == len(positions):
            slots: list[Slot] | None = None  # all of them are new: nothing to compare with
        else:
            at = self.slots.at
            slots = [None if p is None else at(p) for p in positions]
            if put.stamp is not None:
                self._check_stale(put.keys, slots, put.stamp)
            if Row not in set(map(type, slots)):
                cleared = [slot.revision if type(slot) is Tombstone else 0 for slot in slots]
                slots = None
        if put.must_exist:
            self._check_exist(put.keys, slots)
        if put.if_absent and slots is not None:
            self._check_absent(put.keys, slots)
        if put.tags is not None:
            self._check_tags(put, slots)
        return Found(positions, slots, cleared)

    def _check_exist(self, keys: Sequence[str], slots: Sequence[Slot] | None) -> None:
        if slots is None:
            missing = list(keys)
        else:
            missing = [k for k, slot in zip(keys, slots, strict=True) if type(slot) is not Row]
        if missing:
            raise KeyNotFound(
                f"partition {self.partition_id!r} has no key {quote(missing)}; "
                "must_exist=True writes to rows that exist only",
                partition_id=self.partition_id,
                keys=missing,
            )

    def _check_absent(self, keys: Sequence[str], slots: Sequence[Slot]) -> None:
        present = [k for k, slot in zip(keys, slots, strict=True) if type(slot) is Row]
        if present:
            raise AlreadyWritten(
                f"partition {self.partition_id!r} has {quote(present)} already; "
                "if_absent=True writes new rows only",
                partition_id=self.partition_id,
                keys=present,
            )

    def _check_schema(self, placement: Placement, key: str) -> None:
        for column in placement.template.columns:
            known = self.schema.get(column.name)
            if known is None or (known.dtype == column.dtype and known.rank == len(column.dims)):
                continue
            raise SchemaMismatch(
                f"field {column.name!r} of partition {self.partition_id!r} holds {known.dtype} of "
                f"rank {known.rank}, and key {quote([key])} brings {column.dtype} of rank "
                f"{len(column.dims)}: convert it, or use another field name",
                partition_id=self.partition_id,
                keys=[key],
                fields=[column.name],
            )

    def _check_stale(self, keys: Sequence[str], slots: Sequence[Slot], stamp: int) -> None:
        stale: list[str] = []
        cleared_at = 0
        for key, slot in zip(keys, slots, strict=True):
            if type(slot) is Tombstone:
                last = slot.revision
            elif type(slot) is Row:
                last = slot.cleared_at
            else:
                continue
            if last > stamp:
                stale.append(key)
                cleared_at = max(cleared_at, last)
        if stale:
            raise StaleWrite(
                f"{quote(stale)} of partition {self.partition_id!r} were cleared at revision "
                f"{cleared_at}, after this put began at {stamp}: drop it, or put again if the "
                "rows are wanted",
                partition_id=self.partition_id,
                keys=stale,
                cleared_at=cleared_at,
            )

    def _check_tags(self, put: PutRows, slots: Sequence[Slot] | None) -> None:
        """The merged tags of each key stay within their limits."""
        assert put.tags is not None
        assert put.tag_sizes is not None
        if slots is None:
            if max(map(len, put.tags)) <= MAX_TAGS:
                return  # their bytes were checked as they arrived
            slots = [None] * len(put.keys)
        for key, slot, tags, size in zip(put.keys, slots, put.tags, put.tag_sizes, strict=True):
            if type(slot) is not Row:
                count = len(tags)
            elif slot.tag_bytes + size <= MAX_TAG_BYTES and len(slot.tags) + len(tags) <= MAX_TAGS:
                continue
            else:
                # The sum is an upper bound; only when it is over is the merge itself measured.
                merged = {**slot.tags, **tags}
                count, size = len(merged), len(msgpack.packb(merged))
            if size > MAX_TAG_BYTES or count > MAX_TAGS:
                raise InvalidRequest(
                    f"key {quote([key])} would have {count} tags of {size} bytes; at most "
                    f"{MAX_TAGS} of {MAX_TAG_BYTES} bytes are kept: store what is large as a field"
                )

    def apply_put(self, put: PutRows, found: Found, revision: int) -> list[Placement]:
        """Make the rows as the checked put says; returns the placements that died of it."""
        placement = put.placement
        count = len(put.keys)
        tags: Iterable[Tags] = repeat(_NO_TAGS, count) if put.tags is None else put.tags
        sizes: Iterable[int] = repeat(1, count) if put.tag_sizes is None else put.tag_sizes
        dead: list[Placement] = []
        if found.slots is None:
            positions = self._append(put.keys, tags, sizes, placement, revision, found.cleared)
        else:
            positions = self._merge(put.keys, tags, sizes, placement, found, revision, dead)
        self.revision = revision
        if placement is not None:
            placement.partition_id = self.partition_id
            placement.positions = positions
            self.payload_bytes += placement.payload_bytes
            self._learn(placement)
        return dead

    def _append(
        self,
        keys: Sequence[str],
        tags: Iterable[Tags],
        sizes: Iterable[int],
        placement: Placement | None,
        revision: int,
        cleared: Iterable[int],
    ) -> range:
        """New rows for keys of which none has one."""
        layers: Iterable[Layers] = (
            repeat((), len(keys)) if placement is None else zip(repeat(placement), range(len(keys)))
        )
        rows = list(map(Row, keys, tags, sizes, layers, repeat(revision), cleared))
        first = self.slots.extend(rows)
        shards = self.index.shards
        for position, key in enumerate(keys, first):
            shards[hash(key) & (SHARDS - 1)][key] = position
        self.tag_bytes += sum(row.tag_bytes for row in rows)
        return range(first, first + len(rows))

    def _merge(
        self,
        keys: Sequence[str],
        tags: Iterable[Tags],
        sizes: Iterable[int],
        placement: Placement | None,
        found: Found,
        revision: int,
        dead: list[Placement],
    ) -> Sequence[int]:
        """Rows for keys of which some exist, or did."""
        assert found.slots is not None
        positions: list[int] = []
        fresh: list[Row] = []
        whole: dict[Placement, list[int]] = {}
        names = frozenset[str]() if placement is None else placement.template.name_set
        for i, (key, tag, size, position, slot) in enumerate(
            zip(keys, tags, sizes, found.positions, found.slots, strict=True)
        ):
            if type(slot) is Row:
                assert position is not None
                layers = slot.layers
                if placement is not None:
                    if len(layers) == 2 and layers[0].template.name_set <= names:
                        whole.setdefault(layers[0], []).append(layers[1])
                        layers = (placement, i)
                    else:
                        layers, nbytes = cover(layers, placement, i, dead)
                        self.payload_bytes -= nbytes
                self._replace(slot, position, tag, size, layers, revision)
                positions.append(position)
            else:
                layers = () if placement is None else (placement, i)
                cleared_at = slot.revision if type(slot) is Tombstone else 0
                fresh.append(Row(key, tag, size, layers, revision, cleared_at))
                positions.append(-len(fresh))  # not known yet
        self.payload_bytes -= release_whole(whole, dead)
        if fresh:
            first = self.slots.extend(fresh)
            positions = [p if p >= 0 else first - p - 1 for p in positions]
            shards = self.index.shards
            for position, row in enumerate(fresh, first):
                shards[hash(row.key) & (SHARDS - 1)][row.key] = position
                self.tag_bytes += row.tag_bytes
        return _compact(positions)

    def _replace(
        self, row: Row, position: int, tags: Tags, size: int, layers: Layers, revision: int
    ) -> None:
        chunk = self.slots.writable(position)
        columns = chunk.columns
        if tags:
            old = row.tags
            merged = {**old, **tags}
            total = row.tag_bytes + size
            if total > MAX_TAG_BYTES:
                total = len(msgpack.packb(merged))
            if columns:
                for name, value in tags.items():
                    # Writers send all tags of a row when one of them changed.
                    if not _same(old.get(name), value):
                        columns.pop(name, None)
            if chunk.names is not None:
                chunk.names.update(tags)
            self.tag_bytes += total - row.tag_bytes
        else:
            merged, total = row.tags, row.tag_bytes
        if columns and layers is not row.layers:
            for name in [name for name in columns if name[:1] == "\0"]:
                del columns[name]
        chunk.rows[position & (CHUNK_ROWS - 1)] = Row(
            row.key, merged, total, layers, revision, row.cleared_at
        )

    def _learn(self, placement: Placement) -> None:
        template = placement.template
        if template.blob in self._templates:
            return
        for column in template.columns:
            if column.name not in self.schema:
                self.schema[column.name] = FieldSchema(
                    column.dtype, len(column.dims), column.ragged_dim
                )
        if len(self._templates) > 4096:
            self._templates.clear()  # only a cache: sizes of dense fields make ever new ones
        self._templates.add(template.blob)

    # -- clear -------------------------------------------------------------------------------

    def present(self, keys: Iterable[str]) -> tuple[list[str], list[int]]:
        """Those of the keys that exist, each once, and their positions."""
        found: dict[str, int] = {}
        for key in keys:
            position = self.index.get(key)
            if position is not None and type(self.slots.at(position)) is Row:
                found[key] = position
        return list(found), list(found.values())

    def apply_clear(self, positions: Iterable[int], revision: int) -> list[Placement]:
        """Empty these slots, all of which hold rows; returns the placements that died of it."""
        tombstone = Tombstone(revision)
        slots = self.slots
        rows: list[Row] = []
        for position in positions:
            row = slots.at(position)
            assert type(row) is Row
            rows.append(row)
            slots.bury(position, tombstone)
        self.revision = revision
        return self.release(rows)

    def swap_clear(self, number: int, chunk: Chunk, removed: int, revision: int) -> None:
        """Put a chunk with rows already buried in the place of the one it was made from."""
        self.slots.chunks[number] = chunk
        self.slots.live -= removed
        self.revision = revision

    def release(self, rows: Iterable[Row]) -> list[Placement]:
        """Let go of the cells of rows that are cleared; returns the placements that died."""
        taken: dict[Placement, list[int]] = {}
        dead: list[Placement] = []
        for row in rows:
            self.tag_bytes -= row.tag_bytes
            layers = row.layers
            if len(layers) == 2:
                # A row's only layer has no dead cell: whatever covered one would be a layer too.
                taken.setdefault(layers[0], []).append(layers[1])
            elif layers:
                self.payload_bytes -= release(layers, dead)
        self.payload_bytes -= release_whole(taken, dead)
        return dead

    # -- repack ------------------------------------------------------------------------------

    def live_rows_of(self, placement: Placement) -> list[tuple[int, int, frozenset[str]]]:
        """Rows of a placement with live cells: (row in it, position, live field names)."""
        found: list[tuple[int, int, frozenset[str]]] = []
        for row, position in enumerate(placement.positions):
            slot = self.slots.at(position)
            if type(slot) is not Row:
                continue
            live = live_fields(slot.layers, placement, row)
            if live:
                found.append((row, position, live))
        return found

    def apply_repack(
        self, old: Placement, new: Placement, moves: Sequence[tuple[int, int]]
    ) -> list[Placement]:
        """Point cells from an old block to their copies; returns the placements that died of it.

        `moves[i]` is (row in old, position) of new's row i. Compare and set per cell: one that
        was cleared or overwritten meanwhile stays so. Changes no revision.
        """
        new.live = 0
        names = set(new.template.names)
        for at, (row, position) in enumerate(moves):
            slot = self.slots.at(position)
            if type(slot) is not Row:
                continue
            live = live_fields(slot.layers, old, row)
            if not live or not live <= names:
                continue
            layers = moved(slot.layers, old, row, new, at)
            chunk = self.slots.writable(position)
            chunk.rows[position & (CHUNK_ROWS - 1)] = Row(
                slot.key, slot.tags, slot.tag_bytes, layers, slot.revision, slot.cleared_at
            )
            old.live -= len(live)
            new.live += len(live)
        new.partition_id = self.partition_id
        new.positions = [position for _, position in moves]
        return [placement for placement in (old, new) if not placement.live]


def _same(old: TagValue, new: TagValue) -> bool:
    """Whether two tags are surely the same scalar; lists and maps are not looked into."""
    kind = type(old)
    return kind is type(new) and kind in _SCALARS and old == new


_SCALARS = frozenset((bool, int, float, str))


def _compact(positions: list[int]) -> Sequence[int]:
    """A range where the positions are one: a put of new rows nearly always is."""
    first = positions[0]
    if positions[-1] - first == len(positions) - 1 and all(
        position == first + i for i, position in enumerate(positions)
    ):
        return range(first, first + len(positions))
    return positions
