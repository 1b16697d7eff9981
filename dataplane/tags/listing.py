"""Listings: chunks of rows as columns, each piece encoded once and kept until a row of it changes.

Pure. The server walks a cut piece by piece, so that no listing holds its loop.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.tags.placement import Placement
from dataplane.tags.rows import Chunk, Row
from dataplane.types import FieldSchema
from dataplane.wire.columns import ABSENT, Column, encode

KEYS = "\1key"
FIELDS = "\0fields"
LENGTHS = "\0len:"
"""Names of the columns that are not tags, which no tag has: tag names are printable. Those with
NUL depend on the row's layers and are dropped from a chunk's cache when they change."""


STEP_RUNS = 128
"""Runs of rows whose fields are gone through in one step."""


class Piece(NamedTuple):
    """The rows of one chunk that a listing takes, column by column."""

    rows: int
    columns: dict[str, Column]
    field_sets: list[list[str]]
    """The distinct sets of produced fields; the FIELDS column counts from 0 in it."""


Schema = Mapping[str, FieldSchema]


def encode_chunk(
    chunk: Chunk, wanted: Collection[str] | None, schema: Schema
) -> Generator[str, None, None]:
    """Encode what a frozen chunk has not encoded yet, a step at a time; yields what was done."""
    rows = chunk.live_rows()
    cache = chunk.columns
    if chunk.names is None:
        chunk.names = set[str]().union(*[row.tags for row in rows])
    if KEYS not in cache:
        cache[KEYS] = encode([row.key for row in rows])
        yield KEYS
    for name in _names(chunk.names, wanted):
        if name not in cache:
            cache[name] = encode([row.tags.get(name, ABSENT) for row in rows])
            yield name
    if FIELDS not in cache:
        columns, chunk.field_sets = yield from _field_columns(rows, schema)
        cache.update(columns)
        yield FIELDS


def piece_of_chunk(chunk: Chunk, wanted: Collection[str] | None, schema: Schema) -> Piece:
    """All rows of a frozen chunk; encoded columns come from it and are kept in it."""
    for _ in encode_chunk(chunk, wanted, schema):
        pass
    cache = chunk.columns
    assert chunk.names is not None
    names = [KEYS, FIELDS, *_names(chunk.names, wanted)]
    names += [name for name in cache if name.startswith(LENGTHS)]
    return Piece(chunk.live, {name: cache[name] for name in names}, chunk.field_sets)


def piece_of_rows(rows: Sequence[Row], wanted: Collection[str] | None, schema: Schema) -> Piece:
    """The given rows, encoded for this listing only."""
    columns = {KEYS: encode([row.key for row in rows])}
    for name in _names(set[str]().union(*[row.tags for row in rows]), wanted):
        columns[name] = encode([row.tags.get(name, ABSENT) for row in rows])
    steps = _field_columns(rows, schema)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        more, field_sets = end.value
    return Piece(len(rows), columns | more, field_sets)


def _names(names: set[str], wanted: Collection[str] | None) -> list[str]:
    return sorted(names if wanted is None else names.intersection(wanted))


def _field_columns(
    rows: Sequence[Row], schema: Schema
) -> Generator[str, None, tuple[dict[str, Column], list[list[str]]]]:
    """FIELDS: for each row the number of its field set. LENGTHS + field: int32, -1 if absent.
    A length is along the dimension that the schema calls ragged, whatever a put held it to be.

    Yields now and then, so that a walk can give way.
    """
    sets: dict[tuple[str, ...], int] = {}
    by_layers: dict[tuple[int, ...], int] = {}
    codes = np.empty(len(rows), np.int32)
    lengths: dict[str, npt.NDArray[np.int32]] = {}
    at = done = 0
    while at < len(rows):
        end = _run_end(rows, at)
        layers = rows[at].layers
        signature = tuple([id(p.template) for p in layers[::2]])
        code = by_layers.get(signature)
        if code is None:
            names = {name for p in layers[::2] for name in p.template.names}
            code = by_layers[signature] = sets.setdefault(tuple(sorted(names)), len(sets))
        codes[at:end] = code
        seen: set[str] = set()
        for k in range(0, len(layers), 2):
            placement: Placement = layers[k]
            _lengths_of(placement, layers[k + 1], at, end, seen, schema, lengths, len(rows))
            if len(layers) > 2:
                seen.update(placement.template.names)
        at = end
        done += 1
        if not done % STEP_RUNS:
            yield FIELDS
    out = {
        LENGTHS + name: Column("n", len(rows), (None, values.tobytes()))
        for name, values in lengths.items()
    }
    out[FIELDS] = Column("n", len(rows), (None, codes.tobytes()))
    return out, [list(fields) for fields in sets]


def _run_end(rows: Sequence[Row], at: int) -> int:
    """Where the run of rows ends that lie one behind the other in one put: read at once."""
    layers = rows[at].layers
    end = at + 1
    if len(layers) != 2:
        while not layers and end < len(rows) and not rows[end].layers:
            end += 1
        return end
    placement, place = layers
    while end < len(rows):
        other = rows[end].layers
        if len(other) != 2 or other[0] is not placement or other[1] != place + end - at:
            break
        end += 1
    return end


def _lengths_of(
    placement: Placement,
    place: int,
    at: int,
    end: int,
    seen: set[str],
    schema: Schema,
    lengths: dict[str, npt.NDArray[np.int32]],
    count: int,
) -> None:
    """Note the lengths of a run of rows that starts at `place` of a put."""
    template = placement.template
    raw = memoryview(placement.lengths).cast("i")
    for c, column in enumerate(template.columns):
        known = schema[column.name]
        # Where the schema is open, a put may bring another rank.
        same = known.rank == len(column.dims)
        ragged_dim = known.ragged_dim if same else column.ragged_dim
        if column.name in seen or ragged_dim is None:
            continue
        into = lengths.get(column.name)
        if into is None:
            into = lengths[column.name] = np.full(count, -1, np.int32)
        size = column.dims[ragged_dim]
        if size >= 0:
            into[at:end] = size
            continue
        f = template.first_free[c] + column.free.index(ragged_dim)
        first = f * placement.rows + place
        if end - at == 1:
            into[at] = raw[first]
        else:
            into[at:end] = raw[first : first + end - at]
