"""A put as the tag store sees it, and whether a partition takes it. Pure, and changes nothing.

Owns every reason for which a put is refused, whole, before any of it is applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

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
from dataplane.fields import LOST
from dataplane.tags.groups import Group
from dataplane.tags.lost import value_lost
from dataplane.tags.placement import Placement
from dataplane.tags.rows import Row, Slot, Tombstone
from dataplane.types import Tags

if TYPE_CHECKING:
    from dataplane.tags.partition import Partition


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
    client_id: str = ""
    group: Group | None = None
    """The group whose open attempt the put names."""
    is_prompt: bool = False
    """Whether it is the row that `begin_group` and `end_group` write for a prompt."""


class Found(NamedTuple):
    """The keys of a put as they were before it."""

    positions: list[int | None]
    slots: list[Slot] | None
    """None if none of the keys has a row."""
    cleared: Iterable[int]
    """When each key was cleared last, where none has a row; 0 if it never was."""


def check_put(partition: Partition, put: PutRows, floor: int) -> Found:
    """Raise what is wrong with the put; nothing is changed. What it found goes to apply."""
    placement = put.placement
    if placement is not None and placement.template.blob not in partition.agreed:
        _check_schema(partition, placement, put.keys[0])
    if put.stamp is not None and put.stamp < floor:
        raise StaleWrite(
            f"the put began at revision {put.stamp}, before what history still covers "
            f"(from {floor}): whether its keys were cleared since cannot be told; put again",
            partition_id=partition.partition_id,
            keys=put.keys,
            cleared_at=None,
        )
    positions = partition.find(put.keys)
    cleared: Iterable[int] = repeat(0)
    if positions.count(None) == len(positions):
        slots: list[Slot] | None = None  # all of them are new: nothing to compare with
    else:
        at = partition.slots.at
        slots = [None if p is None else at(p) for p in positions]
        if put.stamp is not None:
            _check_stale(partition, put.keys, slots, put.stamp)
        if Row not in set(map(type, slots)):
            cleared = [slot.revision if type(slot) is Tombstone else 0 for slot in slots]
            slots = None
    if put.must_exist:
        _check_exist(partition, put.keys, slots)
    if put.if_absent and slots is not None:
        _check_absent(partition, put.keys, slots)
    if partition.sealed:
        _check_not_sealed(partition, put.keys, slots)
    if placement is not None and slots is not None:
        _check_not_lost(partition, slots)
    if put.tags is not None:
        _check_tags(put, slots)
    return Found(positions, slots, cleared)


def _check_exist(partition: Partition, keys: Sequence[str], slots: Sequence[Slot] | None) -> None:
    if slots is None:
        missing = list(keys)
    else:
        missing = [k for k, slot in zip(keys, slots, strict=True) if type(slot) is not Row]
    if missing:
        raise KeyNotFound(
            f"partition {partition.partition_id!r} has no key {quote(missing)}; "
            "must_exist=True writes to rows that exist only",
            partition_id=partition.partition_id,
            keys=missing,
        )


def _check_not_sealed(
    partition: Partition, keys: Sequence[str], slots: Sequence[Slot] | None
) -> None:
    fresh = [k for i, k in enumerate(keys) if slots is None or type(slots[i]) is not Row]
    if fresh:
        raise InvalidRequest(
            f"partition {partition.partition_id!r} is sealed and takes no new row; new here: "
            f"{quote(fresh)}"
        )


def _check_not_lost(partition: Partition, slots: Sequence[Slot]) -> None:
    """A row that lost fields takes no others: it would be neither what it was nor new."""
    lost = [slot for slot in slots if type(slot) is Row and LOST in slot.tags]
    if lost:
        raise value_lost(
            partition.partition_id, lost, None, "nothing was put; clear them, and put them anew"
        )


def _check_absent(partition: Partition, keys: Sequence[str], slots: Sequence[Slot]) -> None:
    present = [k for k, slot in zip(keys, slots, strict=True) if type(slot) is Row]
    if present:
        raise AlreadyWritten(
            f"partition {partition.partition_id!r} has {quote(present)} already; "
            "if_absent=True writes new rows only",
            partition_id=partition.partition_id,
            keys=present,
        )


def _check_schema(partition: Partition, placement: Placement, key: str) -> None:
    if partition.open_schema:
        return
    for column in placement.template.columns:
        known = partition.schema.get(column.name)
        if known is None or (known.dtype == column.dtype and known.rank == len(column.dims)):
            continue
        raise SchemaMismatch(
            f"field {column.name!r} of partition {partition.partition_id!r} holds {known.dtype} of "
            f"rank {known.rank}, and key {quote([key])} brings {column.dtype} of rank "
            f"{len(column.dims)}: convert it, or use another field name",
            partition_id=partition.partition_id,
            keys=[key],
            fields=[column.name],
        )


def _check_stale(
    partition: Partition, keys: Sequence[str], slots: Sequence[Slot], stamp: int
) -> None:
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
            f"{quote(stale)} of partition {partition.partition_id!r} were cleared at revision "
            f"{cleared_at}, after this put began at {stamp}: drop it, or put again if the "
            "rows are wanted",
            partition_id=partition.partition_id,
            keys=stale,
            cleared_at=cleared_at,
        )


def _check_tags(put: PutRows, slots: Sequence[Slot] | None) -> None:
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
