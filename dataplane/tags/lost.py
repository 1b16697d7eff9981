"""Rows that lost fields: found by the blocks that are gone, and told of by their tags. Pure.

A row is lost when a value store that held any of its fields is gone for good, or came back without
them. It stays where it is, with its tags and with what lies elsewhere, until it is cleared or its
group begins anew. All that is known of its loss is in its tags, so that it lasts as long as they.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import msgpack

from dataplane.errors import ValueLost, quote
from dataplane.fields import LOST, LOST_AT, LOST_STORES
from dataplane.tags.layers import has_layer
from dataplane.tags.placement import Placement
from dataplane.tags.rows import Row
from dataplane.types import Tags

if TYPE_CHECKING:
    from dataplane.tags.partition import Partition
    from dataplane.tags.store import TagStore


class Losses(NamedTuple):
    """What is lost with blocks of a value store."""

    store_id: str
    blocks: frozenset[int] | None
    """Which ones; None for all that it had."""
    placements: list[Placement]
    """Those of them that are not dead anyhow."""
    positions: dict[Partition, list[int]]
    """Rows that have cells in them, in the order of their slots."""

    @property
    def rows(self) -> int:
        """How many rows that is."""
        return sum(map(len, self.positions.values()))

    def names(self, placement: Placement) -> bool:
        """Whether a block is one of these."""
        return placement.store == self.store_id and (
            self.blocks is None or placement.block in self.blocks
        )


def find_losses(store: TagStore, store_id: str, blocks: Collection[int] | None) -> Losses:
    """What is lost if these blocks of a value store are, or with None all of its blocks."""
    if blocks is None:
        gone = [p for p in store.placements.values() if p.store == store_id]
    else:
        named = [store.placements.get((store_id, block)) for block in dict.fromkeys(blocks)]
        gone = [placement for placement in named if placement is not None]
    found: dict[str, set[int]] = {}
    for placement in gone:
        partition = store.partitions.get(placement.partition_id)
        if partition is not None:
            into = found.setdefault(placement.partition_id, set())
            into.update(_rows_in(partition, placement))
    positions = {
        store.partitions[name]: sorted(found[name]) for name in sorted(found) if found[name]
    }
    return Losses(store_id, None if blocks is None else frozenset(blocks), gone, positions)


def _rows_in(partition: Partition, placement: Placement) -> Iterable[int]:
    slots = partition.slots
    end = slots.end
    for row, position in enumerate(placement.positions):
        # A partition of this name that was dropped, and is still being released, had other slots.
        slot = slots.at(position) if position < end else None
        if type(slot) is Row and has_layer(slot.layers, placement, row):
            yield position


class LossTags:
    """Makes the tags of rows that lose fields with one store. Most rows lose the same ones: what is
    said of them is made once."""

    def __init__(self, store_id: str, now: float) -> None:
        self._store_id = store_id
        self._now = now
        self._said: dict[frozenset[str], tuple[Tags, int]] = {}

    def of(self, row: Row, fields: frozenset[str]) -> tuple[Tags, int]:
        """The tags of a row that loses these fields too, and their packed size."""
        tags = row.tags
        if LOST in tags:
            merged = {**tags, **self._more(tags, fields)}
            return merged, len(msgpack.packb(merged))
        said = self._said.get(fields)
        if said is None:
            more = self._more({}, fields)
            said = self._said[fields] = more, len(msgpack.packb(more)) - 1
        more, size = said
        merged = {**tags, **more}
        if len(tags) < _SMALL_MAP <= len(merged):
            size += 2  # the front of the map grows
        return merged, row.tag_bytes + size

    def _more(self, tags: Tags, fields: Iterable[str]) -> Tags:
        return {
            LOST: [*sorted({*_names(tags, LOST), *fields})],
            LOST_STORES: [*sorted({*_names(tags, LOST_STORES), self._store_id})],
            LOST_AT: tags.get(LOST_AT, self._now),
        }


_SMALL_MAP = 16
"""Entries from which on a packed map begins with three bytes instead of one."""


def _names(tags: Tags, tag: str) -> list[str]:
    return cast("list[str]", tags.get(tag, []))


def lost_of(rows: Iterable[Row], fields: Collection[str] | None) -> list[Row]:
    """Those of the rows that have lost any of these fields, or with None any at all."""
    lost = [row for row in rows if LOST in row.tags]
    if not lost or fields is None:
        return lost
    wanted = frozenset(fields)
    return [row for row in lost if not wanted.isdisjoint(_names(row.tags, LOST))]


def stores_of(rows: Iterable[Row]) -> list[str]:
    """The value stores that held what these rows have lost."""
    return sorted({name for row in rows for name in _names(row.tags, LOST_STORES)})


def value_lost(
    partition_id: str, rows: Sequence[Row], fields: Collection[str] | None, what: str
) -> ValueLost:
    """The error of whoever asks rows for fields that they have lost: it names all of both.

    Example of `what`: "clear them, and produce them anew".
    """
    keys = list(dict.fromkeys(row.key for row in rows))
    gone = {name for row in rows for name in _names(row.tags, LOST)}
    names = sorted(gone if fields is None else gone.intersection(fields))
    stores = stores_of(rows)
    where = f"value store {quote(stores)}"
    return ValueLost(
        f"partition {partition_id!r} has lost field {quote(names)} of key {quote(keys)} with "
        f"{where}: {what}",
        partition_id=partition_id,
        keys=keys,
        fields=names,
        stores=stores,
    )
