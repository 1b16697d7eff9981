"""Blocks that no value store made, puts of them, and a recount of all that a tag store sums up."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgpack

from dataplane.codec.shapes import ITEM_BYTES, Column
from dataplane.codec.template import Template
from dataplane.tags.accounts import Account
from dataplane.tags.groups import Group
from dataplane.tags.lost import find_losses
from dataplane.tags.partition import Partition
from dataplane.tags.placement import Placement
from dataplane.tags.puts import PutRows
from dataplane.tags.rows import CHUNK_BITS, CHUNK_ROWS, Row, Tombstone
from dataplane.tags.store import TagStore
from dataplane.types import Tags

COLUMNS = {
    "x": Column("x", "int64", 0, (-1,)),
    "m": Column("m", "float32", 1, (2, -1)),
    "s": Column("s", "float64", None, ()),
    "f": Column("f", "bfloat16", 0, (-1, 3)),
    "w": Column("w", "int8", 1, (-1, -1)),
    "o": Column("o", "object", 0, (-1,)),
}
"""A column of each shape: free in one dimension or two, in the first or the last, in none."""

FREE = {name: len(column.free) for name, column in COLUMNS.items()}

_templates: dict[tuple[Column, ...], Template] = {}


def cell_bytes(name: str, sizes: Sequence[int]) -> int:
    """Bytes of a cell of one of COLUMNS whose free dimensions are `sizes`."""
    column = COLUMNS[name]
    free = iter(sizes)
    total = ITEM_BYTES[column.dtype]
    for dim in column.dims:
        total *= next(free) if dim < 0 else dim
    return total


class Blocks:
    """Makes the blocks of one store, with ever new ids, and remembers them all."""

    def __init__(self, store: str = "v0") -> None:
        self.store = store
        self.made: list[Placement] = []

    def block(
        self, rows: int, lengths: Mapping[str, Sequence[int] | Sequence[Sequence[int]]]
    ) -> Placement:
        """A block of the named COLUMNS: per column the free sizes of each row, one number where
        there is one such dimension and nothing where there is none."""
        columns = tuple(COLUMNS[name] for name in lengths)
        return self.of(columns, rows, _flat(rows, lengths))

    def of(self, columns: Sequence[Column], rows: int, lengths: bytes) -> Placement:
        """A block of any columns; `lengths` as they travel."""
        template = _templates.setdefault(tuple(columns), Template(tuple(columns)))
        number = len(self.made) + 1
        nbytes = template.block_bytes(lengths, rows)
        made = Placement(self.store, number, 1, number << 20, nbytes, template, rows, lengths)
        self.made.append(made)
        return made


def _flat(rows: int, lengths: Mapping[str, Sequence[Any]]) -> bytes:
    flat = array("i")
    for name, sizes in lengths.items():
        free = FREE[name]
        assert len(sizes) == (rows if free else 0), name
        for dim in range(free):
            flat.extend(size if free == 1 else size[dim] for size in sizes)
    return flat.tobytes()


def put(
    store: TagStore,
    partition_id: str,
    keys: Sequence[str],
    block: Placement | None = None,
    tags: Sequence[Mapping[str, Any]] | None = None,
    *,
    now: float = 0.0,
    **options: Any,
) -> int:
    """Check and apply a put as the server does; its revision."""
    sizes = None if tags is None else [len(msgpack.packb(tag)) for tag in tags]
    copied = None if tags is None else [dict(tag) for tag in tags]
    rows = PutRows(partition_id, list(keys), copied, sizes, block, **options)
    return store.apply_put(rows, store.check_put(rows), now)


def lose(
    store: TagStore, store_id: str, blocks: Collection[int] | None = None, *, now: float = 0.0
) -> int:
    """Have blocks of a value store, or all of them, be gone for good, as the server does; how many
    rows are lost."""
    losses = find_losses(store, store_id, blocks)
    n = store.n_after_loss(losses)
    rows = store.apply_lost(losses, now)
    assert (store.n, rows) == (n, losses.rows)
    return rows


def dead_blocks(store: TagStore) -> list[int]:
    """The blocks reported dead since the last time, by number and taken from the report."""
    dead = [placement.block for placement in store.dead]
    store.dead.clear()
    return sorted(dead)


def live_cells(row: Row) -> dict[str, tuple[Placement, int]]:
    """Where each field of a row is: the newest layer that has it."""
    cells: dict[str, tuple[Placement, int]] = {}
    for placement, at in zip(row.layers[::2], row.layers[1::2], strict=True):
        for name in placement.template.names:
            cells.setdefault(name, (placement, at))
    return cells


def cell_size(placement: Placement, name: str, row: int) -> int:
    """Bytes of a cell, from its column and lengths alone."""
    template = placement.template
    column = template.columns[template.index[name]]
    lengths = memoryview(placement.lengths).cast("i")
    free = template.first_free[template.index[name]]
    total = ITEM_BYTES[column.dtype]
    for dim in column.dims:
        if dim < 0:
            total *= lengths[free * placement.rows + row]
            free += 1
        else:
            total *= dim
    return total


def rows_of(store: TagStore, partition_id: str) -> dict[str, Row]:
    """Every live row of a partition, found by walking all slots."""
    rows: dict[str, Row] = {}
    for chunk in store.partition(partition_id).slots.chunks:
        for slot in chunk.rows if chunk is not None else ():
            if type(slot) is Row:
                assert slot.key not in rows
                rows[slot.key] = slot
    return rows


def audit(
    store: TagStore,
    blocks: Iterable[Blocks] = (),
    dead: Iterable[int] = (),
    lost: Iterable[int] = (),
) -> None:
    """Assert that every sum the store keeps is what a recount over its rows gives.

    With `blocks`, every block ever put is live, or was reported dead, in `dead`, exactly once, or
    is one of those that were lost.
    """
    cells: dict[tuple[str, int], int] = {}
    for partition_id, partition in store.partitions.items():
        rows = rows_of(store, partition_id)
        assert len(partition) == len(rows)
        payload = tag_bytes = 0
        for key, row in rows.items():
            position = partition.index.get(key)
            assert position is not None
            assert partition.slots.at(position) is row
            assert row.revision <= partition.revision <= store.n
            tag_bytes += row.tag_bytes
            found = live_cells(row)
            for name, (placement, at) in found.items():
                payload += cell_size(placement, name, at)
                number = placement.store, placement.block
                cells[number] = cells.get(number, 0) + 1
                assert store.placements[number] is placement
                assert placement.partition_id == partition_id
                assert placement.positions[at] == position
                known = partition.schema[name]
                column = placement.template.columns[placement.template.index[name]]
                if not partition.open_schema:
                    assert (known.dtype, known.rank) == (column.dtype, len(column.dims))
            for placement, at in zip(row.layers[::2], row.layers[1::2], strict=True):
                live = {n for n, place in found.items() if place == (placement, at)}
                assert live, "a layer without a live cell"
        assert partition.payload_bytes == payload
        assert partition.tag_bytes == tag_bytes
        _audit_slots(store, partition_id)
        _audit_accounts(store, partition)
    open_groups = [g for p in store.partitions.values() for g in p.groups.values() if g.open]
    assert store.attempts == {group.attempt: group for group in open_groups}
    assert {number: placement.live for number, placement in store.placements.items()} == cells
    assert store.history.size == sum(len(change.keys) for change in _history(store))
    reported, lost = list(dead), set(lost)
    assert len(reported) == len(set(reported)), "a block reported dead twice"
    for maker in blocks:
        live = {block for name, block in store.placements if name == maker.store}
        assert live.isdisjoint(reported)
        assert live.isdisjoint(lost)
        made = {placement.block for placement in maker.made}
        assert live | set(reported) | made.intersection(lost) == made


def _audit_slots(store: TagStore, partition_id: str) -> None:
    partition = store.partition(partition_id)
    remembered = 0
    for number, chunk in enumerate(partition.slots.chunks):
        if chunk is None:
            continue
        assert len(chunk.rows) <= CHUNK_ROWS
        assert number == len(partition.slots.chunks) - 1 or len(chunk.rows) == CHUNK_ROWS
        kinds = [type(slot) for slot in chunk.rows]
        assert chunk.live == kinds.count(Row)
        assert chunk.forgotten == kinds.count(type(None)) < CHUNK_ROWS
        if chunk.names is not None:
            assert chunk.names >= {name for row in chunk.live_rows() for name in row.tags}
        for at, slot in enumerate(chunk.rows):
            if type(slot) is Tombstone:
                remembered += 1
                assert 0 < slot.revision <= store.n
            elif type(slot) is Row:
                assert partition.index.get(slot.key) == number << CHUNK_BITS | at
    entries = sum(map(len, partition.index.shards))
    assert len(partition) <= entries <= len(partition) + remembered


def _audit_accounts(store: TagStore, partition: Partition) -> None:
    """Rows, tags, extents and reservations by account are what the rows, blocks and groups say."""
    held: dict[Account, list[int]] = {}
    """Of each account rows, tag bytes, extent bytes, reserved bytes, reserved rows."""

    def add(account: Account | None, *amounts: int) -> None:
        while account is not None:
            sums = held.setdefault(account, [0] * 5)
            held[account] = [a + b for a, b in zip(sums, amounts, strict=True)]
            account = account.parent

    positions: dict[Account, set[int]] = {}
    for row in partition.slots:
        add(row.account, 1, row.tag_bytes, 0, 0, 0)
        if type(row.account) is Group:
            position = partition.index.get(row.key)
            assert position is not None
            positions.setdefault(row.account, set()).add(position)
            assert row.key != row.account.uid, "a prompt's row belongs to no group"
    for placement in store.placements.values():
        if placement.partition_id == partition.partition_id:
            charged = placement.charged
            assert charged is not None
            shares = charged if isinstance(charged, dict) else {charged: placement.extent_bytes}
            assert (
                sum(shares.values())
                == placement.extent_bytes
                == -(-placement.nbytes // 4096) * 4096
            )
            for account, share in shares.items():
                assert account is not partition.prompts
                assert account.parent is not partition.prompts
                add(account, 0, 0, share, 0, 0)
    for uid, group in partition.groups.items():
        assert (group.uid, group.partition_id) == (uid, partition.partition_id)
        assert group.open or group.positions
        assert group.positions == positions.pop(group, set())
        rows, tag_bytes, extent_bytes, _, _ = held.get(group, [0] * 5)
        outstanding = max(0, group.declared_bytes - extent_bytes - tag_bytes + rows)
        add(
            group, 0, 0, 0, outstanding, max(0, group.n - len(group.positions)) if group.open else 0
        )
    assert not positions, "rows of a group that is forgotten"
    known = [partition.account, partition.prompts, *partition.producers.values()]
    for account in {*known, *partition.groups.values(), *held}:
        sums = [
            account.rows, account.tag_bytes, account.extent_bytes, account.held_bytes,
            account.held_rows,
        ]  # fmt: skip
        assert sums == held.get(account, [0] * 5)
        assert account.is_empty == (sums == [0] * 5)


def _history(store: TagStore) -> list[Any]:
    # A group that begins anew makes two changes at one revision, of which one may have expired.
    before = store.history.floor - 1
    names = {**store.partitions, **store.dropped}
    return [c for name in names for c in store.history.since(name, before)]


def forget_everything(store: TagStore, now: float) -> None:
    """Let time pass until history has nothing left to forget."""
    while True:
        before = _remembered(store)
        store.upkeep(now)
        if _remembered(store) == before:
            return


def _remembered(store: TagStore) -> tuple[int, int]:
    entries = sum(len(s) for p in store.partitions.values() for s in p.index.shards)
    return store.history.size, entries


def tags_of(store: TagStore, partition_id: str, keys: Sequence[str]) -> list[Tags]:
    """The whole tags of keys; none of a key that is not there."""
    partition = store.partition(partition_id)
    return [row.tags if (row := partition.row(key)) else {} for key in keys]
