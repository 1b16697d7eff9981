"""Rows of fields as Arrow record batches, and back to blocks that a value store takes. Pure.

Owns the columns of a values file. A field is a column of its rows, each flattened to a list of
numbers, with their shapes in a second column; a row without the field is null in both. Numbers
that Arrow does not know (bfloat16, the float8 kinds, complex, booleans of a byte) are unsigned
integers as wide, or 16 plain bytes. Python values are the msgpack bytes of codec/objects.py, in a
column without shapes. The metadata of a column says which field it is and of which dtype.

Never looks at a number and needs no torch. What is read is checked before it is believed: offsets,
shapes and sizes, so that nothing is made of them that is larger than the file.

Letters: K rows that have a field.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataplane.checkpoint.manifest import FieldEntry, Malformed
from dataplane.codec.shapes import ITEM_BYTES, OBJECT, Column
from dataplane.codec.template import ALIGN, Template
from dataplane.errors import InvalidRequest, quote

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

META: Final = b"dataplane"

_NATIVE: Final[dict[str, pa.DataType]] = {
    "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(),
    "uint8": pa.uint8(), "uint16": pa.uint16(), "uint32": pa.uint32(), "uint64": pa.uint64(),
    "float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64(),
}  # fmt: skip
_BY_WIDTH: Final[dict[int, pa.DataType]] = {
    1: pa.uint8(), 2: pa.uint16(), 4: pa.uint32(), 8: pa.uint64(), 16: pa.binary(16),
}  # fmt: skip
_SHAPE: Final = pa.list_(pa.field("item", pa.int32(), nullable=False))


class ValueColumn(NamedTuple):
    """A field as rows of one put have it. Where a schema is open, a field can be several."""

    name: str
    dtype: str
    rank: int
    ragged_dim: int | None

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return ITEM_BYTES[self.dtype]


class Cells(NamedTuple):
    """One field of those rows of a batch that have it."""

    column: ValueColumn
    rows: Ints  # [K], which rows of the batch; ascending
    shapes: Ints32  # [K, rank]; for Python values [K, 1], bytes
    data: Bytes
    """The rows back to back."""

    @property
    def nbytes(self) -> Ints:
        """[K], bytes of each row."""
        return row_bytes(self.column, self.shapes)


def row_bytes(column: ValueColumn, shapes: Ints32) -> Ints:
    """Bytes of rows of these shapes."""
    return shapes.prod(axis=1, dtype=np.int64) * column.item_bytes


# -- to Arrow --------------------------------------------------------------------------------


def schema_of(columns: Sequence[ValueColumn]) -> pa.Schema:
    """The columns of a file that holds these fields."""
    fields: list[pa.Field] = []
    taken = {column.name for column in columns}
    named: set[str] = set()
    for column in columns:
        name = column.name
        if name in named:  # of another dtype or rank than before
            name = _free(f"{column.name}.{column.dtype}.{column.rank}", taken)
        named.add(name)
        taken.add(name)
        meta = {
            "field": column.name, "dtype": column.dtype, "rank": column.rank,
            "ragged_dim": column.ragged_dim,
        }  # fmt: skip
        fields.append(pa.field(name, _values_type(column), metadata=_packed(meta)))
        if column.dtype != OBJECT:
            shape = _free(f"{name}.shape", taken)
            taken.add(shape)
            fields.append(pa.field(shape, _SHAPE, metadata=_packed({"shape_of": name})))
    return pa.schema(fields)


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _packed(meta: Mapping[str, Any]) -> dict[bytes, bytes]:
    return {META: json.dumps(meta, ensure_ascii=False).encode()}


def _item_type(column: ValueColumn) -> pa.DataType:
    return _NATIVE.get(column.dtype) or _BY_WIDTH[column.item_bytes]


def _values_type(column: ValueColumn) -> pa.DataType:
    if column.dtype == OBJECT:
        return pa.large_binary()
    return pa.large_list(pa.field("item", _item_type(column), nullable=False))


def encode(
    schema: pa.Schema, columns: Sequence[ValueColumn], cells: Sequence[Cells], count: int
) -> pa.RecordBatch:
    """A batch of `count` rows; a column without cells is null in all of them."""
    by_column = {of.column: of for of in cells}
    arrays: list[pa.Array] = []
    for column in columns:
        of = by_column.get(column)
        if of is None:
            rank = max(column.rank, 1) if column.dtype == OBJECT else column.rank
            of = Cells(
                column, np.zeros(0, np.int64), np.zeros((0, rank), np.int32), np.zeros(0, np.uint8)
            )
        validity = _validity(of.rows, count)
        sizes = np.zeros(count, np.int64)
        sizes[of.rows] = of.nbytes // column.item_bytes
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        if offsets[-1] * column.item_bytes != len(of.data):
            raise ValueError(f"{len(of.data)} bytes of field {column.name!r} for its shapes")
        nulls = count - len(of.rows)
        if column.dtype == OBJECT:
            buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(of.data)]
            arrays.append(pa.Array.from_buffers(pa.large_binary(), count, buffers, nulls))
            continue
        items = pa.Array.from_buffers(
            _item_type(column), int(offsets[-1]), [None, pa.py_buffer(of.data)], 0
        )
        arrays.append(
            pa.Array.from_buffers(
                _values_type(column), count, [validity, pa.py_buffer(offsets)], nulls, 0, [items]
            )
        )
        ends = np.zeros(count + 1, np.int32)
        ends[of.rows + 1] = column.rank
        np.cumsum(ends, out=ends)
        flat = np.ascontiguousarray(of.shapes, np.int32).reshape(-1)
        dims = pa.Array.from_buffers(pa.int32(), len(flat), [None, pa.py_buffer(flat)], 0)
        arrays.append(
            pa.Array.from_buffers(_SHAPE, count, [validity, pa.py_buffer(ends)], nulls, 0, [dims])
        )
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _validity(rows: Ints, count: int) -> pa.Buffer | None:
    if len(rows) == count:
        return None
    present = np.zeros(count, np.bool_)
    present[rows] = True
    return pa.py_buffer(np.packbits(present, bitorder="little"))


# -- from Arrow ------------------------------------------------------------------------------


def columns_of(schema: pa.Schema) -> list[ValueColumn]:
    """The fields of a file. Malformed unless `schema_of` could have made its columns."""
    columns: list[ValueColumn] = []
    for field in schema:
        try:
            meta: Any = json.loads((field.metadata or {})[META])
            if "shape_of" in meta:
                continue
            of = FieldEntry(dtype=meta["dtype"], rank=meta["rank"], ragged_dim=meta["ragged_dim"])
            column = ValueColumn(meta["field"], of.dtype, of.rank, of.ragged_dim)
            # What a put may not bring, a file may not either.
            Template.parse(Template((_column(column),)).blob)
        except (KeyError, TypeError, ValueError, RecursionError, InvalidRequest) as error:
            raise Malformed(f"column {field.name!r:.80} says not what it holds: {error}") from None
        if column.dtype == OBJECT and (column.rank, column.ragged_dim) != (1, 0):
            raise Malformed(f"column {field.name!r:.80} of Python values has a shape")
        columns.append(column)
    if len(set(columns)) < len(columns):
        raise Malformed("two columns of one field")
    if not schema.equals(schema_of(columns), check_metadata=True):
        raise Malformed("its columns are not those that a save writes")
    return columns


def _column(column: ValueColumn) -> Column:
    return Column(column.name, column.dtype, column.ragged_dim, (-1,) * column.rank)


def decode(batch: pa.RecordBatch, columns: Sequence[ValueColumn]) -> list[Cells]:
    """The fields of a batch whose schema is that of `columns`; they lie over the batch's memory.

    Malformed says what is wrong with it.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise Malformed(f"it is inconsistent: {error}") from None
    cells: list[Cells] = []
    at = 0
    for column in columns:
        array = batch.column(at)
        rows, ends = _rows_and_ends(array, column, np.int64)
        at += 1
        if column.dtype == OBJECT:
            sizes = np.diff(ends)[rows]
            data = _bytes(array.buffers()[2], int(ends[-1]), 1)
            if sizes.max(initial=0) >= 1 << 31:
                raise Malformed(f"a Python value of field {column.name!r} is over 2 GiB")
            cells.append(Cells(column, rows, sizes.astype(np.int32)[:, None], data))
            continue
        items = cast("pa.ListArray", array).values
        data = _bytes(_plain(items, column, int(ends[-1])), int(ends[-1]), column.item_bytes)
        shapes_array = batch.column(at)
        at += 1
        same, shape_ends = _rows_and_ends(shapes_array, column, np.int32)
        ranks = np.diff(shape_ends)
        if len(same) != len(rows) or (same != rows).any() or (ranks[rows] != column.rank).any():
            raise Malformed(f"the shapes of field {column.name!r} are not those of its rows")
        dims = cast("pa.ListArray", shapes_array).values
        flat = _bytes(_plain(dims, column, int(shape_ends[-1])), int(shape_ends[-1]), 4)
        shapes = flat.view(np.int32).reshape(len(rows), column.rank)
        _check_lengths(column, shapes, np.diff(ends)[rows])
        cells.append(Cells(column, rows, shapes, data))
    return cells


def _rows_and_ends(
    array: pa.Array, column: ValueColumn, of: type[np.integer[Any]]
) -> tuple[Ints, npt.NDArray[Any]]:
    """Which rows have the field, and where each of all rows begins and ends."""
    count = len(array)
    validity, offsets = array.buffers()[:2]
    if array.offset:
        raise Malformed(f"field {column.name!r} is part of a longer column")
    if validity is None or not array.null_count:
        rows = np.arange(count)
    else:
        bits = np.frombuffer(memoryview(validity), np.uint8)
        rows = np.flatnonzero(np.unpackbits(bits, count=count, bitorder="little"))
    if offsets is None or not len(offsets):  # as Arrow writes a batch of no rows
        ends = np.zeros(1, of)
    else:
        ends = np.frombuffer(memoryview(offsets), of)[: count + 1]
    sizes = np.diff(ends)
    if len(ends) != count + 1 or ends[0] or sizes.sum() != sizes[rows].sum():
        raise Malformed(f"field {column.name!r} has numbers that belong to no row")
    return rows, ends


def _plain(items: pa.Array, column: ValueColumn, count: int) -> pa.Buffer | None:
    """The numbers of a column, which are exactly those of its rows, and no null."""
    if items.offset or items.null_count or len(items) != count:
        raise Malformed(f"field {column.name!r} has numbers that belong to no row")
    return items.buffers()[1]


def _bytes(buffer: pa.Buffer | None, count: int, width: int) -> Bytes:
    if buffer is None:
        if count:
            raise Malformed("numbers are missing")
        return np.zeros(0, np.uint8)
    return np.frombuffer(memoryview(buffer), np.uint8)[: count * width]


def _check_lengths(column: ValueColumn, shapes: Ints32, sizes: Ints) -> None:
    """Every shape says exactly the numbers of its row: in floats too, which do not wrap."""
    if shapes.size and int(shapes.min()) < 0:
        raise Malformed(f"field {column.name!r} has a negative shape")
    wide = shapes.prod(axis=1, dtype=np.float64)
    exact = shapes.prod(axis=1, dtype=np.int64)
    if (exact != sizes).any() or (wide >= float(1 << 62)).any():
        raise Malformed(f"the shapes of field {column.name!r} are not those of its rows")


# -- to blocks -------------------------------------------------------------------------------


class Block(NamedTuple):
    """Some rows of a batch that have the same fields, as one put brings them."""

    rows: Ints  # [B], which rows of the batch; ascending
    template: Template
    lengths: bytes
    pieces: list[Any]
    """Buffers that make up the block when joined."""
    nbytes: int


def blocks(cells: Sequence[Cells], count: int, limit_bytes: int) -> Iterator[Block]:
    """All rows of a batch that have a field, in blocks of about `limit_bytes`."""
    present = np.zeros((len(cells), count), np.bool_)
    for i, of in enumerate(cells):
        present[i, of.rows] = True
    kinds, kind_of = np.unique(present, axis=1, return_inverse=True)
    kind_of = kind_of.reshape(-1)
    sizes = np.zeros(count, np.int64)
    for of in cells:
        sizes[of.rows] += of.nbytes
    for kind in range(kinds.shape[1]):
        fields = [of for of, has in zip(cells, kinds[:, kind].tolist(), strict=True) if has]
        if not fields:
            continue
        names = [of.column.name for of in fields]
        if len(set(names)) < len(names):
            raise Malformed(f"a row has a field twice: {quote(names)}")
        rows = np.flatnonzero(kind_of == kind)
        part = (np.cumsum(sizes[rows]) - sizes[rows]) // max(limit_bytes, 1)
        starts = np.flatnonzero(np.diff(part, prepend=-1))
        for start, end in itertools.pairwise([*starts.tolist(), len(rows)]):
            yield _block(fields, rows[start:end])


def _block(fields: Sequence[Cells], rows: Ints) -> Block:
    columns: list[Column] = []
    lengths: list[Ints32] = []
    parts: list[list[Any]] = []
    for of in fields:
        at = np.searchsorted(of.rows, rows)
        shapes = of.shapes[at]
        free = _free_dims(of.column, shapes)
        dims = tuple(-1 if d in free else size for d, size in enumerate(shapes[0].tolist()))
        columns.append(Column(of.column.name, of.column.dtype, of.column.ragged_dim, dims))
        lengths += [shapes[:, d] for d in free]
        parts.append(_taken(of, at))
    template = Template(tuple(columns))
    packed = np.array(lengths, np.int32).tobytes()
    front = template.front(packed, len(rows))
    pieces: list[Any] = [front]
    nbytes = len(front)
    for part in parts:
        size = sum(map(len, part))
        gap = -size % ALIGN
        pieces += part
        if gap:
            pieces.append(bytes(gap))
        nbytes += size + gap
    return Block(rows, template, packed, pieces, nbytes)


def _free_dims(column: ValueColumn, shapes: Ints32) -> list[int]:
    """Dimensions that a template leaves open: the ragged one, and those in which rows differ."""
    if column.dtype == OBJECT:
        return [0]
    free: set[int] = set(np.flatnonzero((shapes != shapes[0]).any(axis=0)).tolist())
    if column.ragged_dim is not None:
        free.add(column.ragged_dim)
    return sorted(free)


def _taken(of: Cells, at: Ints) -> list[Any]:
    """The bytes of these rows of a field, back to back."""
    sizes = of.nbytes
    ends = np.cumsum(sizes)
    first, last = int(at[0]), int(at[-1])
    if last - first == len(at) - 1:
        data = of.data[int(ends[first] - sizes[first]) : int(ends[last])]
        return [data.data] if len(data) else []
    spans = zip((ends - sizes)[at].tolist(), ends[at].tolist(), strict=True)
    data = np.concatenate([of.data[start:end] for start, end in spans])
    return [data.data] if len(data) else []
