"""What a put made of its keys: their merged tags and common fields, for who asks. Pure.

Owns only the answer; it is the same when the put is made again from the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from dataplane.tags.puts import Found, PutRows
from dataplane.tags.rows import Row
from dataplane.tags.store import TagStore
from dataplane.wire.messages import tags_to_wire


def resulting(store: TagStore, put: PutRows, found: Found) -> tuple[list[Any] | None, list[str]]:
    """Merged tags of the keys of a put, and the fields that all of them have. No tags where they
    are just those that were sent: none of the keys had a row."""
    if found.slots is None:
        return None, sorted(put.placement.template.names) if put.placement is not None else []
    partition = store.partition(put.partition_id)
    at = partition.slots.at
    rows: list[Row] = []
    for key, slot, position in zip(put.keys, found.slots, found.positions, strict=True):
        # A row that was there keeps its place; one that was cleared has another now.
        row = at(position) if type(slot) is Row and position is not None else partition.row(key)
        rows.append(cast("Row", row))
    return tags_to_wire([row.tags for row in rows]), _common_fields(rows)


def _common_fields(rows: Sequence[Row]) -> list[str]:
    common: set[str] | None = None
    seen: set[tuple[int, ...]] = set()
    last: Any = None
    for row in rows:
        layers = row.layers
        # Rows of one put follow each other and share a template.
        if len(layers) == 2 and layers[0].template is last:
            continue
        last = layers[0].template if len(layers) == 2 else None
        kind = tuple(id(placement.template) for placement in layers[::2])
        if kind in seen:
            continue
        seen.add(kind)
        names = {name for placement in layers[::2] for name in placement.template.names}
        common = names if common is None else common & names
    return sorted(common or ())
