"""Rows of fields as Arrow columns: what `get` and `export` write. Pure.

Owns the layout. `field.<name>` holds a field: a scalar where the partition's schema has rank 0,
else a list of the row's elements in row-major order, and beside it `shape.<name>`, a list of the
row's dimensions. Null is a row without the field. A dtype that Parquet lacks is carried by its
bits: bfloat16, float8 and complex as unsigned integers as wide, complex128 as 16 bytes; the
column's metadata `dataplane` names the dtype. Python values are JSON text (plain_values.py), and
`dataplane` is `json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataplane.cli.values.plain_values import to_text
from dataplane.codec.shapes import ITEM_BYTES, OBJECT
from dataplane.errors import InvalidRequest
from dataplane.types import FieldSchema

FIELD: Final = "field."
SHAPE: Final = "shape."
MARK: Final = b"dataplane"

_NATIVE: Final[dict[str, Any]] = {
    "bool": pa.bool_(),
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(),
    "uint8": pa.uint8(), "uint16": pa.uint16(), "uint32": pa.uint32(), "uint64": pa.uint64(),
}  # fmt: skip
_AS_WIDE: Final[dict[int, Any]] = {
    1: pa.uint8(), 2: pa.uint16(), 4: pa.uint32(), 8: pa.uint64(), 16: pa.binary(16),
}  # fmt: skip


def item_type(dtype: str) -> Any:
    """The Arrow type that carries elements of a dtype."""
    return _NATIVE.get(dtype) or _AS_WIDE[ITEM_BYTES[dtype]]


def columns_of(schema: Mapping[str, FieldSchema]) -> list[pa.Field]:
    """The columns of these fields, in their order."""
    columns: list[pa.Field] = []
    for name, of in schema.items():
        if of.dtype == OBJECT:
            columns.append(pa.field(FIELD + name, pa.large_string(), metadata={MARK: b"json"}))
            continue
        mark = {MARK: of.dtype.encode()}
        item = item_type(of.dtype)
        kind = item if of.rank == 0 else pa.large_list(item)
        columns.append(pa.field(FIELD + name, kind, metadata=mark))
        if of.rank:
            columns.append(pa.field(SHAPE + name, pa.list_(pa.int32())))
    return columns


def cells_of(
    name: str, of: FieldSchema, rows: Sequence[Any], keys: Sequence[str]
) -> list[pa.Array]:
    """The arrays of a field's columns. `rows` are tensors or Python values, None without the field
    (a Python value that is None is given in a tuple of its own, as all Python values are).

    InvalidRequest, naming the key, where a row is not of the field's dtype or rank any more.
    """
    if of.dtype == OBJECT:
        texts = [None if row is None else to_text(row[0]) for row in rows]
        return [pa.array(texts, pa.large_string())]
    for key, row in zip(keys, rows, strict=True):
        if row is not None and (_dtype(row) != of.dtype or row.dim() != of.rank):
            raise InvalidRequest(
                f"field {name!r} of key {key!r:.200} is {_dtype(row)} of rank {row.dim()}, and the "
                f"partition's other rows are {of.dtype} of rank {of.rank}: choose rows of one kind "
                "with --where, or leave the field out with --fields"
            )
    absent = np.array([row is None for row in rows], bool)
    items = _items(_joined([row for row in rows if row is not None], of.dtype), of.dtype)
    if of.rank == 0:
        places = np.cumsum(~absent) - 1
        return [items.take(pa.array(places, pa.int64(), mask=absent))]
    sizes = [0 if row is None else row.numel() for row in rows]
    offsets = pa.array(np.cumsum([0, *sizes], dtype=np.int64), pa.int64())
    lists = pa.LargeListArray.from_arrays(offsets, items, mask=pa.array(absent, pa.bool_()))
    shapes = [None if row is None else list(row.shape) for row in rows]
    return [lists, pa.array(shapes, pa.list_(pa.int32()))]


def string_columns(schema: pa.Schema) -> list[str]:
    """The columns that Parquet may keep a dictionary of: in one of floats, all NaNs are one."""
    return [field.name for field in schema if field.type == pa.string()]


def _dtype(row: Any) -> str:
    return str(row.dtype).removeprefix("torch.")


def _joined(rows: Sequence[Any], dtype: str) -> npt.NDArray[np.uint8]:
    """The bytes of the rows, back to back."""
    from dataplane.codec.dtypes import byte_view

    return np.frombuffer(b"".join(byte_view(row, dtype) for row in rows), np.uint8)


def _items(flat: npt.NDArray[np.uint8], dtype: str) -> pa.Array:
    kind = item_type(dtype)
    if dtype == "bool":
        return pa.array(flat.astype(bool), kind)
    count = len(flat) // ITEM_BYTES[dtype]
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(flat)])
