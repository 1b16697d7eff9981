"""Blocks as cells, and cells as what gets make containers of.

Owns the two differences between what lies in a plane and what travels outside: a block has a front
and gaps behind its columns, cells have neither; and Python values are msgpack in a block, `Value`
messages outside. Copies nothing that can be handed on.

Letters: B rows, F free dimensions over all columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dataplane.client.reading import FieldRows, ReadPlan, merge
from dataplane.codec import objects
from dataplane.codec.dtypes import as_tensor
from dataplane.codec.encoded import Encoded
from dataplane.codec.shapes import MAX_RANK, MAX_SIZE, OBJECT, Column, column_of
from dataplane.codec.template import ALIGN
from dataplane.errors import InvalidRequest
from dataplane.protocol.cells import Buffer, Cells, Shape, shape_of
from dataplane.protocol.values import as_numpy, pack_object, unpack_object
from dataplane.types import FieldSchema, Revision
from dataplane.v1 import dataplane_pb2 as pb

Bytes = npt.NDArray[np.uint8]

ALIGN_ITEMS: Final = 16
"""What lies at a multiple of this can be taken for elements of any dtype in place."""


# -- out -------------------------------------------------------------------------------------


def cells_of_block(keys: Sequence[str], encoded: Encoded) -> Cells:
    """The rows of a block as they travel. InvalidRequest, naming the key and the field, for a
    Python value that the outside protocol cannot carry."""
    template, rows = encoded.template, encoded.rows
    lengths = np.frombuffer(encoded.lengths, np.int32).reshape(template.num_free, rows)
    inside = shape_of(template.columns, lengths, rows)
    columns = list(_columns(encoded, inside))
    if not any(column.dtype == OBJECT for column in template.columns):
        return Cells(inside, [piece for pieces in columns for piece in pieces])
    lengths = lengths.copy()
    out: list[Buffer] = []
    for column, first, pieces in zip(template.columns, template.first_free, columns, strict=True):
        if column.dtype != OBJECT:
            out.extend(pieces)
            continue
        packed = _values_out(keys, column, lengths[first], b"".join(pieces))
        lengths[first] = [len(value) for value in packed]
        out.extend(packed)
    return Cells(shape_of(template.columns, lengths, rows), out)


def _columns(encoded: Encoded, shape: Shape) -> Iterator[list[bytes | memoryview]]:
    """The pieces of each column, less the front and the gaps."""
    pieces = iter(encoded.pieces)
    next(pieces)
    for nbytes in shape.column_bytes:
        own: list[bytes | memoryview] = []
        left = nbytes
        while left:
            piece = next(pieces)
            own.append(piece)
            left -= len(piece)
        if -nbytes % ALIGN:
            next(pieces)
        yield own


def _values_out(
    keys: Sequence[str], column: Column, sizes: npt.NDArray[np.int32], packed: bytes
) -> list[bytes]:
    out: list[bytes] = []
    at = 0
    for key, size in zip(keys, sizes.tolist(), strict=True):
        value = objects.unpack(packed[at : at + size])
        at += size
        out.append(pack_object(value, f"field {column.name!r} of key {key!r:.200}"))
        if len(out[-1]) >= MAX_SIZE:
            raise InvalidRequest(
                f"field {column.name!r} of key {key!r:.200}: a value of {len(out[-1])} bytes; "
                f"under {MAX_SIZE}"
            )
    return out


# -- in --------------------------------------------------------------------------------------


def plan_of(
    keys: list[str], revision: Revision, shape: Shape, data: bytearray
) -> tuple[ReadPlan, list[Bytes]]:
    """Rows that came, as a plan of a read, and the bytes of each field that it speaks of."""
    whole = np.frombuffer(data, np.uint8)
    fields: list[FieldRows] = []
    sources: list[Bytes] = []
    at = first = 0
    none = np.zeros(shape.rows, np.int32)
    for column, sizes, total in zip(
        shape.columns, shape.row_bytes, shape.column_bytes, strict=True
    ):
        source = whole[at : at + total]
        at += total
        free = shape.lengths[first : first + len(column.free)]
        first += len(column.free)
        if column.dtype == OBJECT:
            source, sizes = _values_in(source, sizes)
            free = sizes.astype(np.int32)[None]
        offsets = np.cumsum(sizes) - sizes
        schema = FieldSchema(column.dtype, len(column.dims), column.ragged_dim)
        fields.append(
            FieldRows(column.name, schema, none, offsets, sizes, _row_shapes(column, free))
        )
        sources.append(source)
    nothing = np.zeros(0, np.int64)
    plan = ReadPlan(revision, keys, fields, [], nothing.astype(np.int32), nothing, nothing, nothing)
    return plan, sources


def empty_shape(columns: Sequence[pb.Column]) -> Shape:
    """The shape of no rows of these columns."""
    known = [
        column_of(
            (
                column.name,
                column.dtype,
                column.ragged_dim if column.HasField("ragged_dim") else None,
                tuple(column.dims),
            )
        )
        for column in columns
    ]
    free = sum(len(column.free) for column in known)
    return shape_of(known, np.zeros((free, 0), np.int32), 0)


def gather(plan: ReadPlan, sources: Sequence[Bytes]) -> list[Bytes]:
    """The rows of each field back to back: where they lie, if they lie so already."""
    return [_gathered(rows, source) for rows, source in zip(plan.fields, sources, strict=True)]


def _gathered(rows: FieldRows, source: Bytes) -> Bytes:
    runs = merge(rows)
    spans = list(zip(runs.offset.tolist(), runs.nbytes.tolist(), strict=True))
    if len(spans) == 1:
        ((start, size),) = spans
        span = source[start : start + size]
        if not span.ctypes.data % ALIGN_ITEMS or rows.schema.dtype == OBJECT:
            return span
    joined = np.empty(sum(size for _, size in spans), np.uint8)
    at = 0
    for start, size in spans:
        joined[at : at + size] = source[start : start + size]
        at += size
    return joined


def _row_shapes(column: Column, free: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:  # [B, rank]
    rank = len(column.dims)
    shapes = np.empty((free.shape[1], rank), np.int32)
    lengths = iter(free)
    for dim, size in enumerate(column.dims):
        shapes[:, dim] = next(lengths) if size < 0 else size
    return shapes


def _values_in(source: Bytes, sizes: npt.NDArray[np.int64]) -> tuple[Bytes, npt.NDArray[np.int64]]:
    view = source.data
    packed: list[bytes] = []
    at = 0
    for size in sizes.tolist():
        packed.append(objects.pack(unpack_object(view[at : at + size], _tensor)))
        at += size
    joined = np.frombuffer(bytearray().join(packed), np.uint8)
    return joined, np.fromiter(map(len, packed), np.int64, len(packed))


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    if len(shape) > MAX_RANK or dtype == OBJECT:
        raise InvalidRequest(f"a tensor of {dtype!r:.80} of shape {shape!r:.200}")
    as_numpy(dtype, shape, data)  # says what is wrong with it
    return as_tensor(np.frombuffer(bytearray(data), np.uint8), dtype).view(shape)
