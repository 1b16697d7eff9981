"""The fields of a batch of rows as they travel outside: columns that describe, bytes that follow.

Owns how rows become columns and bytes, and what of a peer's columns is believed: nothing before its
sizes have been added up. The bytes of a column are its rows back to back, and columns follow each
other without a gap.

Letters: B rows, F free dimensions over all columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from dataplane.codec.shapes import (
    ITEM_BYTES,
    MAX_COLUMNS,
    MAX_ROWS,
    MAX_SIZE,
    OBJECT,
    Column,
    check_cells,
    column_of,
)
from dataplane.errors import InvalidRequest, SchemaMismatch, quote
from dataplane.fields import KNOWN_FIELDS, ragged_dim
from dataplane.protocol.values import MakeTensor, numpy_of, pack_object, tensor_bytes, unpack_object
from dataplane.v1 import dataplane_pb2 as pb

Array: TypeAlias = npt.NDArray[Any]
Buffer: TypeAlias = "bytes | bytearray | memoryview"

_LONGEST: Final = float(1 << 62)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a batch looks like, without its bytes."""

    rows: int
    columns: tuple[Column, ...]
    lengths: npt.NDArray[np.int32]  # [F, B]
    row_bytes: tuple[npt.NDArray[np.int64], ...]  # of each column [B]
    column_bytes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(self.column_bytes)

    def to_columns(self) -> list[pb.Column]:
        """The columns as messages."""
        messages: list[pb.Column] = []
        first = 0
        for column in self.columns:
            free = len(column.free)
            lengths = self.lengths[first : first + free].reshape(-1).tolist()
            first += free
            messages.append(
                pb.Column(
                    name=column.name,
                    dtype=column.dtype,
                    dims=column.dims,
                    ragged_dim=column.ragged_dim,
                    lengths=lengths,
                )
            )
        return messages


def shape_of(columns: Sequence[Column], lengths: npt.NDArray[np.int32], rows: int) -> Shape:
    """The shape of columns whose free dimensions have these lengths [F, B].

    InvalidRequest if a length is negative or a row has more bytes than can be counted.
    """
    if lengths.size and int(lengths.min()) < 0:
        raise InvalidRequest("a row length is negative")
    row_bytes: list[npt.NDArray[np.int64]] = []
    first = 0
    for column in columns:
        fixed = ITEM_BYTES[column.dtype]
        for size in column.dims:
            fixed *= size if size >= 0 else 1
        own = lengths[first : first + len(column.free)]
        first += len(column.free)
        # Integers of numpy wrap silently; the same product in floats tells when they would.
        bound = float(fixed) * rows
        for sizes_of_dim in own:
            bound *= max(1.0, float(sizes_of_dim.max(initial=0)))
        if bound > _LONGEST:
            raise InvalidRequest(f"field {column.name!r}: more bytes than can be counted")
        sizes = np.full(rows, fixed, np.int64)
        for sizes_of_dim in own:
            sizes *= sizes_of_dim
        row_bytes.append(sizes)
    return Shape(
        rows,
        tuple(columns),
        lengths,
        tuple(row_bytes),
        tuple(int(sizes.sum()) for sizes in row_bytes),
    )


def shape_from(columns: Sequence[pb.Column], rows: int) -> Shape:
    """The shape that a peer described. InvalidRequest says what is wrong with it."""
    if not 0 < rows <= MAX_ROWS:
        raise InvalidRequest(f"a batch has 1 to {MAX_ROWS} rows, not {rows}")
    if len(columns) > MAX_COLUMNS:
        raise InvalidRequest(f"{len(columns)} fields; at most {MAX_COLUMNS}")
    check_cells(rows, len(columns))
    found: list[Column] = []
    lengths: list[npt.NDArray[np.int32]] = []
    for message in columns:
        ragged = message.ragged_dim if message.HasField("ragged_dim") else None
        if ragged is None and message.dims:
            ragged = ragged_dim(message.name, len(message.dims))
        column = column_of((message.name, message.dtype, ragged, tuple(message.dims)))
        due = len(column.free) * rows
        if len(message.lengths) != due:
            raise InvalidRequest(
                f"field {column.name!r}: {len(message.lengths)} lengths, where "
                f"{len(column.free)} free dimensions x {rows} rows are due"
            )
        found.append(column)
        lengths.append(np.array(message.lengths, np.int32).reshape(len(column.free), rows))
    names = [column.name for column in found]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidRequest(f"a put has each field once; repeated: {quote(twice)}")
    joined = np.concatenate(lengths) if lengths else np.empty((0, rows), np.int32)
    return shape_of(found, joined, rows)


@dataclass(frozen=True, slots=True)
class Cells:
    """A batch of rows: its shape, and its bytes in pieces that follow each other."""

    shape: Shape
    pieces: Sequence[Buffer]

    def chunks(self, size: int, offset: int = 0) -> Iterator[tuple[int, bytes]]:
        """The bytes from an offset on, in parts of at most `size`, each with where it begins."""
        at, part = 0, bytearray()
        begin = offset
        for piece in self.pieces:
            view = memoryview(piece).cast("B")
            skipped = max(0, min(len(view), offset - at))
            at += len(view)
            view = view[skipped:]
            while view:
                if not part and len(view) >= size:
                    yield begin, bytes(view[:size])  # no detour
                    begin, view = begin + size, view[size:]
                    continue
                took = view[: size - len(part)]
                part += took
                view = view[len(took) :]
                if len(part) == size:
                    yield begin, bytes(part)
                    begin += size
                    part.clear()
        if part:
            yield begin, bytes(part)


def cells_of(keys: Sequence[str], fields: Mapping[str, object]) -> Cells:
    """Numpy columns as cells, in the order of the keys.

    A column is an array whose first dimension counts the keys, or a list of as many rows. A row
    that is an array (or a tensor of torch, where that is loaded) becomes a tensor; other rows are
    kept as Python values.

    Raises:
        InvalidRequest: a field is neither, or has another number of rows than there are keys.
        SchemaMismatch: the rows of a field differ in dtype or rank.
    """
    columns: list[Column] = []
    lengths: list[npt.NDArray[Any]] = []
    pieces: list[Buffer] = []
    for name, values in fields.items():
        column, sizes, parts = _column(name, values, keys)
        column_of(tuple(column))
        columns.append(column)
        lengths.extend(sizes)
        pieces.extend(parts)
    rows = len(keys)
    stacked = np.stack(lengths) if lengths else np.empty((0, rows), np.int64)
    if stacked.size and int(stacked.max()) >= MAX_SIZE:
        raise InvalidRequest(f"a row of {int(stacked.max())} entries or bytes; under {MAX_SIZE}")
    return Cells(shape_of(columns, stacked.astype(np.int32), rows), pieces)


def arrays_of(
    shape: Shape, data: Buffer, tensor: MakeTensor | None = None
) -> dict[str, list[Any] | Array]:
    """The fields of cells: of rank 0 one array [B], else a list with an array or value per row.

    The arrays lie over `data`, which is the caller's to give away; it holds exactly the cells.
    """
    view = memoryview(data)
    fields: dict[str, list[Any] | Array] = {}
    at = first = 0
    for column, sizes, total in zip(
        shape.columns, shape.row_bytes, shape.column_bytes, strict=True
    ):
        raw = view[at : at + total]
        at += total
        free = column.free
        own = shape.lengths[first : first + len(free)]
        first += len(free)
        if column.dtype == OBJECT:
            fields[column.name] = [unpack_object(row, tensor) for row in _rows(raw, sizes)]
            continue
        flat = numpy_of(np.frombuffer(raw, np.uint8), column.dtype)
        if not column.dims:
            fields[column.name] = flat
            continue
        rows: list[Any] = []
        begin = 0
        for i in range(shape.rows):
            dims = list(column.dims)
            for k, dim in enumerate(free):
                dims[dim] = int(own[k, i])
            count = int(sizes[i]) // ITEM_BYTES[column.dtype]
            rows.append(flat[begin : begin + count].reshape(dims))
            begin += count
        fields[column.name] = rows
    return fields


def _rows(raw: memoryview, sizes: Iterable[int]) -> Iterator[memoryview]:
    at = 0
    for size in sizes:
        yield raw[at : at + int(size)]
        at += int(size)


def _column(
    name: str, values: object, keys: Sequence[str]
) -> tuple[Column, list[npt.NDArray[Any]], list[Buffer]]:
    array = cast("Array", values) if isinstance(values, np.ndarray) else None
    if array is not None and array.ndim and array.dtype.kind in "biufc":
        _check_rows(name, len(array), keys)
        dtype = _dtype(name, array)
        native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        dims = array.shape[1:]
        piece = _bytes(native)
        if not dims:
            return Column(name, dtype, None, ()), [], [piece]
        ragged = cast("int", ragged_dim(name, len(dims)))
        column = Column(name, dtype, ragged, (*dims[:ragged], -1, *dims[ragged + 1 :]))
        return column, [np.full(len(array), dims[ragged])], [piece]
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise InvalidRequest(
            f"field {name!r}: a column is an array of {len(keys)} rows or a list of them, not a "
            f"{type(cast('object', values)).__name__}"
        )
    rows = cast("Sequence[object]", values)
    _check_rows(name, len(rows), keys)
    arrays = [_array_of(row) for row in rows]
    if rows and all(array is not None for array in arrays):
        return _ragged(name, cast("list[tuple[str, tuple[int, ...], Buffer]]", arrays), keys)
    packed = [
        pack_object(row, f"field {name!r} of key {key!r:.200}")
        for row, key in zip(rows, keys, strict=True)
    ]
    sizes = np.fromiter(map(len, packed), np.int64, len(packed))
    return Column(name, OBJECT, 0, (-1,)), [sizes], list(packed)


def _ragged(
    name: str, rows: list[tuple[str, tuple[int, ...], Buffer]], keys: Sequence[str]
) -> tuple[Column, list[npt.NDArray[Any]], list[Buffer]]:
    dtype, shape, _ = rows[0]
    for key, (other, dims, _) in zip(keys, rows, strict=True):
        if other != dtype or len(dims) != len(shape):
            raise SchemaMismatch(
                f"field {name!r}: key {keys[0]!r:.200} has {dtype} of rank {len(shape)}, key "
                f"{key!r:.200} {other} of rank {len(dims)}",
                keys=[key],
                fields=[name],
            )
    pieces = [piece for _, _, piece in rows]
    rank = len(shape)
    if not rank:
        return Column(name, dtype, None, ()), [], pieces
    shapes = np.array([dims for _, dims, _ in rows], np.int64)
    differ: list[int] = np.flatnonzero((shapes != shapes[0]).any(axis=0)).tolist()
    ragged = cast("int", ragged_dim(name, rank))
    if len(differ) == 1 and name not in KNOWN_FIELDS:
        ragged = differ[0]
    free = sorted({ragged, *differ})
    dims = tuple(-1 if i in free else size for i, size in enumerate(shape))
    return Column(name, dtype, ragged, dims), [shapes[:, i] for i in free], pieces


def _array_of(row: object) -> tuple[str, tuple[int, ...], Buffer] | None:
    if isinstance(row, np.ndarray):
        array = cast("Array", row)
        if array.dtype.kind not in "biufc":
            return None
        native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        return _dtype("a row", array), array.shape, _bytes(native)
    return tensor_bytes(row) if type(row).__module__.partition(".")[0] == "torch" else None


def _dtype(name: str, array: Array) -> str:
    dtype = array.dtype.newbyteorder("=").name
    if dtype not in ITEM_BYTES:
        raise InvalidRequest(f"field {name!r}: a numpy array of {array.dtype} cannot travel")
    return dtype


def _bytes(array: Array) -> Buffer:
    return array.reshape(-1).view(np.uint8).data if array.size else b""


def _check_rows(name: str, rows: int, keys: Sequence[str]) -> None:
    if rows != len(keys):
        raise InvalidRequest(f"field {name!r}: {rows} rows for {len(keys)} keys")
