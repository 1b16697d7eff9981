"""Rows as messages list them, as the Listing that the client's own answers make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dataplane.client.results import Listing
from dataplane.protocol.values import tags_from
from dataplane.tags.listing import FIELDS, KEYS, LENGTHS
from dataplane.types import KVBatchMeta, Revision
from dataplane.v1 import dataplane_pb2 as pb
from dataplane.wire.columns import ABSENT, decode, encode


def listing_of(
    partition_id: str,
    revision: Revision,
    rows: Sequence[pb.Row],
    *,
    full: bool = True,
    cleared: Sequence[str] = (),
) -> Listing:
    """The listing of these rows, in one piece."""
    pieces: dict[str, list[tuple[str, Any] | None]] = {}
    sets: dict[tuple[str, ...], int] = {}
    if rows:
        tags = [tags_from(row.tags) for row in rows]
        codes = [sets.setdefault(tuple(sorted(row.fields)), len(sets)) for row in rows]
        pieces[KEYS] = [_column([row.key for row in rows])]
        pieces[FIELDS] = [("n", np.array(codes, np.int32))]
        for name in sorted({name for each in tags for name in each}):
            pieces[name] = [_column([each.get(name, ABSENT) for each in tags])]
        for name in sorted({name for row in rows for name in row.lengths}):
            lengths = [row.lengths.get(name, -1) for row in rows]
            pieces[LENGTHS + name] = [("n", np.array(lengths, np.int32))]
    return Listing(
        partition_id,
        revision,
        full=full,
        cleared=list(cleared),
        rows=[len(rows)] if rows else [],
        field_sets=[[list(names) for names in sets]] if rows else [],
        pieces=pieces,
    )


def meta_of(partition_id: str, revision: Revision, rows: Sequence[pb.Row]) -> KVBatchMeta:
    """The batch of these rows; `fields` are those that every row has."""
    sets = [set(row.fields) for row in rows]
    return KVBatchMeta.checked(
        partition_id,
        [row.key for row in rows],
        [tags_from(row.tags) for row in rows],
        sorted(sets[0].intersection(*sets)) if sets else [],
        revision,
    )


def _column(cells: list[Any]) -> tuple[str, Any]:
    column = encode(cells)
    return column.kind, decode(column.kind, column.rows, column.buffers)
