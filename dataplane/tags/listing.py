"""Listings: chunks of rows as columns, each piece encoded once and kept until a row of it changes.

Pure. The server walks a cut piece by piece, so that no listing holds its loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from dataplane.tags.placement import Placement
from dataplane.tags.rows import Chunk, Row
from dataplane.wire.columns import ABSENT, Column, encode

KEYS = "\1key"
FIELDS = "\0fields"
LENGTHS = "\0len:"
"""Names of the columns that are not tags, which no tag has: tag names are printable. Those with
NUL depend on the row's layers and are dropped from a chunk's cache when they change."""


class Piece(NamedTuple):
    """The rows of one chunk that a listing takes, column by column."""

    rows: int
    columns: dict[str, Column]
    field_sets: list[list[str]]
    """The distinct sets of produced fields; the FIELDS column counts from 0 in it."""


def piece_of_chunk(chunk: Chunk, wanted: Collection[str] | None) -> Piece:
    """All rows of a frozen chunk; encoded columns come from it and are kept in it."""
    rows = chunk.live_rows()
    if chunk.names is None:
        chunk.names = set[str]().union(*[row.tags for row in rows])
    names = chunk.names if wanted is None else chunk.names.intersection(wanted)
    cache = chunk.columns
    columns = {KEYS: cache.get(KEYS) or cache.setdefault(KEYS, encode([row.key for row in rows]))}
    for name in names:
        column = cache.get(name)
        if column is None:
            column = cache[name] = encode([row.tags.get(name, ABSENT) for row in rows])
        columns[name] = column
    # Lengths first: their cached names tell whether the fields column is still good.
    fields = cache.get(FIELDS)
    if fields is None:
        for name, column in _field_columns(rows).items():
            cache[name] = column
        fields = cache[FIELDS]
    for name, column in cache.items():
        if name.startswith(LENGTHS):
            columns[name] = column
    columns[FIELDS] = fields
    return Piece(len(rows), columns, fields.buffers[2])


def piece_of_rows(rows: Sequence[Row], wanted: Collection[str] | None) -> Piece:
    """The given rows, encoded for this listing only."""
    names = set[str]().union(*[row.tags for row in rows])
    if wanted is not None:
        names.intersection_update(wanted)
    columns = {KEYS: encode([row.key for row in rows])}
    for name in names:
        columns[name] = encode([row.tags.get(name, ABSENT) for row in rows])
    columns.update(_field_columns(rows))
    return Piece(len(rows), columns, columns[FIELDS].buffers[2])


def _field_columns(rows: Sequence[Row]) -> dict[str, Column]:
    """FIELDS: for each row the number of its field set. LENGTHS + field: int32, -1 if absent.

    The sets themselves ride as the FIELDS column's last buffer, which never travels as bytes.
    """
    sets: dict[tuple[str, ...], int] = {}
    by_layers: dict[tuple[int, ...], int] = {}
    codes = array("i")
    lengths: dict[str, Any] = {}
    count = len(rows)
    for i, row in enumerate(rows):
        layers = row.layers
        signature = tuple([id(p.template) for p in layers[::2]])  # pyright: ignore
        code = by_layers.get(signature)
        if code is None:
            names = {name for p in layers[::2] for name in p.template.names}  # pyright: ignore
            code = by_layers[signature] = sets.setdefault(tuple(sorted(names)), len(sets))
        codes.append(code)
        seen: set[str] = set()
        for k in range(0, len(layers), 2):
            placement: Placement = layers[k]  # pyright: ignore[reportAssignmentType]
            at: int = layers[k + 1]  # pyright: ignore[reportAssignmentType]
            template = placement.template
            raw = memoryview(placement.lengths).cast("i")
            for c, column in enumerate(template.columns):
                if column.name in seen or column.ragged_dim is None:
                    continue
                into = lengths.get(column.name)
                if into is None:
                    into = lengths[column.name] = np.full(count, -1, np.int32)
                free = column.free
                size = column.dims[column.ragged_dim]
                if size < 0:
                    f = template.first_free[c] + free.index(column.ragged_dim)
                    size = raw[f * placement.rows + at]
                into[i] = size
            if len(layers) > 2:
                seen.update(template.names)
    out = {
        LENGTHS + name: Column("n", count, (None, values.tobytes()))
        for name, values in lengths.items()
    }
    names = [list(fields) for fields in sets]
    out[FIELDS] = Column("n", count, (None, codes.tobytes(), names))
    return out
