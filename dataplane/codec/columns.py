"""One field of a put, in any form that callers have it, as a column of a block.

Owns which forms of a column and of a row are accepted, and how each becomes rows lying back to
back. Copies nothing that lies contiguous already, never converts a dtype and never pads.

Letters: B rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, TypeGuard, cast

import numpy as np
import torch

from dataplane.codec import objects
from dataplane.codec.dtypes import NUMPY_NAME, as_tensor, dtype_name, is_plain, plain
from dataplane.codec.encoded import Array, Chunks, Part
from dataplane.codec.shapes import ITEM_BYTES, OBJECT, Column
from dataplane.errors import InvalidRequest, SchemaMismatch
from dataplane.fields import KNOWN_FIELDS, ragged_dim

_FREE: Final = (-1,)


def of_tensordict(name: str) -> Any:
    """This name of tensordict, or None if the process has not imported it (yet): an import of
    our own would take a second, and without it no value can be one of its types."""
    return getattr(sys.modules.get("tensordict"), name, None)


def is_tensordict(value: object) -> TypeGuard[Any]:
    """Whether it is one, without importing what could make one."""
    base = of_tensordict("TensorDictBase")
    return base is not None and isinstance(value, base)


def is_non_tensor(value: object) -> TypeGuard[Any]:
    """Whether it is tensordict's wrapper of something else, without importing tensordict."""
    check = of_tensordict("is_non_tensor")
    return check is not None and check(value)


def part_of(name: str, value: object, keys: Sequence[str]) -> Part:
    """A field's values for all of these keys as a column; InvalidRequest if they are none."""
    if isinstance(value, list | tuple):
        return _rows_part(name, cast("Sequence[object]", value), keys)
    if isinstance(value, torch.Tensor):
        if is_plain(value):
            return _dense_part(name, value.detach(), dtype_name(value.dtype, _at(name)), keys)
        if value.is_nested:
            return _nested_part(name, value, keys)
        dense = plain(value, _at(name))
        return _dense_part(name, dense, dtype_name(dense.dtype, _at(name)), keys)
    if isinstance(value, np.ndarray):
        values = cast("Array", value)
        if values.dtype.kind in "OUS" and values.ndim == 1:
            return _rows_part(name, cast("list[object]", values.tolist()), keys)
        values = _native(name, values)
        return _dense_part(name, values, NUMPY_NAME[values.dtype], keys)
    if is_non_tensor(value):
        return _non_tensor_part(name, value, keys)
    if is_tensordict(value):
        raise InvalidRequest(
            f"field {name!r} is itself a TensorDict; flatten it (flatten_keys) or put its "
            "leaves as fields of their own"
        )
    raise InvalidRequest(
        f"field {name!r}: a column of many rows is a tensor, an array or a list with one entry "
        f"per key, not a {type(value).__name__}"
    )


def _at(name: str) -> str:
    return f"field {name!r}"


def _check_rows(name: str, rows: int, keys: Sequence[str]) -> None:
    if rows != len(keys):
        raise InvalidRequest(f"field {name!r} has {rows} rows for {len(keys)} keys")


def _native(name: str, values: Array) -> Array:
    """The array in a dtype that torch shares. InvalidRequest for any other kind of array."""
    if type(values) is not np.ndarray and type(values) is not np.memmap:
        raise InvalidRequest(
            f"field {name!r}: a {type(values).__name__} cannot be stored; np.asarray() it"
        )
    if values.dtype in NUMPY_NAME:
        return values
    native = values.dtype.newbyteorder("=")
    if native in NUMPY_NAME:
        return values.astype(native)
    raise InvalidRequest(
        f"field {name!r}: a numpy array of {values.dtype} cannot be stored; pass numbers, or "
        "a list of Python values"
    )


@dataclass(frozen=True, slots=True)
class Whole:
    """A value of one row that is kept as a Python value, also where it is an array."""

    value: object


def row_of(name: str, value: object, key: str) -> torch.Tensor | Array | bytes:
    """One row as it is stored; bytes are a packed Python value."""
    if isinstance(value, torch.Tensor):
        return plain(value, f"field {name!r} of key {key!r}")
    if isinstance(value, np.ndarray):
        return _native(name, cast("Array", value))
    if is_non_tensor(value):
        return row_of(name, value.tolist(), key)
    if is_tensordict(value):
        raise InvalidRequest(f"field {name!r} of key {key!r} is itself a TensorDict; flatten it")
    try:
        return objects.pack(value.value if isinstance(value, Whole) else value)
    except InvalidRequest as error:
        raise InvalidRequest(f"field {name!r} of key {key!r}: {error}") from None


# The forms of a column.


def _dense_part(name: str, values: torch.Tensor | Array, dtype: str, keys: Sequence[str]) -> Part:
    """A column in one tensor or array [B, ...]."""
    shape = tuple(values.shape)
    if not shape:
        raise InvalidRequest(f"field {name!r}: a 0-d value is one row; a column has {len(keys)}")
    _check_rows(name, shape[0], keys)
    dims = shape[1:]
    if not dims:
        column = Column(name, dtype, None, ())
        return Part(column, [], cast("Chunks", [values]), len(keys) * ITEM_BYTES[dtype])
    ragged = cast("int", ragged_dim(name, len(dims)))
    column = Column(name, dtype, ragged, (*dims[:ragged], -1, *dims[ragged + 1 :]))
    lengths = np.full(shape[0], dims[ragged])
    nbytes = ITEM_BYTES[dtype]
    for size in shape:
        nbytes *= size
    return Part(column, [lengths], cast("Chunks", [values]), nbytes)


def _ragged_column(name: str, dtype: str, shapes: Array) -> tuple[Column, list[Array]]:
    """The column of rows of these shapes [B, rank], rank at least 1, and its free lengths.

    A field that nobody declared is ragged in its last dimension, unless this put shows that
    exactly one other dimension differs.
    """
    rank = shapes.shape[1]
    if not len(shapes):
        return Column(name, dtype, ragged_dim(name, rank), _FREE * rank), []
    first = shapes[0]
    differ = np.flatnonzero((shapes != first).any(axis=0)).tolist() if rank > 1 else [0]
    ragged = cast("int", ragged_dim(name, rank))
    if len(differ) == 1 and name not in KNOWN_FIELDS:
        ragged = differ[0]
    free = sorted({ragged, *differ})
    dims = tuple(-1 if i in free else size for i, size in enumerate(first.tolist()))
    return Column(name, dtype, ragged, dims), [shapes[:, i] for i in free]


def _nested_part(name: str, value: torch.Tensor, keys: Sequence[str]) -> Part:
    _check_rows(name, value.size(0), keys)
    if value.layout is not torch.jagged:
        return _rows_part(name, cast("Sequence[object]", value.detach().unbind()), keys)
    jagged = cast("Any", value)
    values: torch.Tensor = jagged.values().detach()
    dtype = dtype_name(values.dtype, _at(name))
    offsets: Array = jagged.offsets().detach().cpu().numpy()  # [B + 1]
    holes: torch.Tensor | None = jagged.lengths()
    # The dimension of the nested tensor that is ragged; torch has no public name for it.
    dim: int = jagged._ragged_idx - 1
    if dim or holes is not None:
        starts = cast("list[int]", offsets[:-1].tolist())
        sizes: Array = np.diff(offsets) if holes is None else holes.cpu().numpy()
        counts = cast("list[int]", sizes.tolist())
        rows = [values.narrow(dim, at, n) for at, n in zip(starts, counts, strict=True)]
        return _rows_part(name, rows, keys)
    shapes = np.empty((len(keys), values.dim()), np.int64)
    shapes[:, 0] = np.diff(offsets)
    shapes[:, 1:] = values.shape[1:]
    column, lengths = _ragged_column(name, dtype, shapes)
    if offsets[0] or offsets[-1] != len(values):
        values = values[int(offsets[0]) : int(offsets[-1])]
    return Part(column, lengths, [values], values.numel() * ITEM_BYTES[dtype])


def _non_tensor_part(name: str, value: Any, keys: Sequence[str]) -> Part:
    if is_tensordict(value):  # a NonTensorStack
        return _rows_part(name, cast("list[object]", value.tolist()), keys)
    size = value.batch_size
    if size:
        _check_rows(name, size[0], keys)
    # One value for every row; a further batch dimension makes a row a list of it.
    data: object = value.data
    for repeat in reversed(size[1:]):
        data = [data] * repeat
    if not keys:
        return Part(Column(name, OBJECT, 0, _FREE), [], [], 0)
    try:
        packed = objects.pack(data)
    except InvalidRequest as error:
        raise InvalidRequest(f"field {name!r}: {error}") from None
    return _object_part(name, [packed] * len(keys))


def _object_part(name: str, packed: list[bytes]) -> Part:
    sizes = np.fromiter(map(len, packed), np.int64, len(packed))
    return Part(Column(name, OBJECT, 0, _FREE), [sizes], packed, int(sizes.sum()))


# Types of rows of which no more is asked, so that most lists are not looked through.
_UNWRAPPED: Final = frozenset(
    {torch.Tensor, np.ndarray, type(None), bool, int, float, str, bytes, list, dict, tuple}
)


def _rows_part(name: str, rows: Sequence[object], keys: Sequence[str]) -> Part:
    """A column as a list of rows."""
    _check_rows(name, len(rows), keys)
    kinds = set(map(type, rows))
    if not kinds <= _UNWRAPPED:
        rows = [row.tolist() if is_non_tensor(row) else row for row in rows]
        kinds = set(map(type, rows))
    if kinds == {torch.Tensor}:
        return _tensor_rows(name, cast("Sequence[torch.Tensor]", rows), keys)
    if kinds and all(issubclass(kind, torch.Tensor | np.ndarray) for kind in kinds):
        tensors = [
            _row_tensor(row_of(name, row, key), name) for row, key in zip(rows, keys, strict=True)
        ]
        return _tensor_rows(name, tensors, keys)
    packed: list[bytes] = []
    for row, key in zip(rows, keys, strict=True):
        try:
            packed.append(objects.pack(row.value if isinstance(row, Whole) else row))
        except InvalidRequest as error:
            raise InvalidRequest(f"field {name!r} of key {key!r}: {error}") from None
    return _object_part(name, packed)


def _row_tensor(row: torch.Tensor | Array | bytes, name: str) -> torch.Tensor:
    if isinstance(row, torch.Tensor):
        return row
    values = cast("Array", row)
    flat = np.ascontiguousarray(values).reshape(-1)
    return as_tensor(flat.view(np.uint8), NUMPY_NAME[values.dtype]).view(values.shape)


_HEAD: Final = attrgetter("dtype", "ndim", "layout", "is_cpu", "is_nested")


def _tensor_rows(name: str, rows: Sequence[torch.Tensor], keys: Sequence[str]) -> Part:
    heads = set(map(_HEAD, rows))
    if len(heads) > 1 or next(iter(heads))[2:] != (torch.strided, True, False):
        rows = [
            plain(row, f"field {name!r} of key {key!r}").cpu()
            for row, key in zip(rows, keys, strict=True)
        ]
        _check_alike(name, rows, keys)
    head = rows[0]
    dtype = dtype_name(head.dtype, _at(name))
    if not head.ndim:
        size = len(rows) * ITEM_BYTES[dtype]
        return Part(Column(name, dtype, None, ()), [], list(rows), size)
    if head.ndim == 1:
        counts = np.array([row.shape[0] for row in rows])
        column, lengths = _ragged_column(name, dtype, counts[:, None])
        return Part(column, lengths, list(rows), int(counts.sum()) * ITEM_BYTES[dtype])
    shapes = np.array([row.shape for row in rows])
    column, lengths = _ragged_column(name, dtype, shapes)
    return Part(column, lengths, list(rows), int(shapes.prod(1).sum()) * ITEM_BYTES[dtype])


def _check_alike(name: str, rows: Sequence[torch.Tensor], keys: Sequence[str]) -> None:
    """SchemaMismatch naming the first row that is unlike most of the others."""
    kinds = [(row.dtype, row.ndim) for row in rows]
    usual = max(dict.fromkeys(kinds), key=kinds.count)
    for key, kind, row in zip(keys, kinds, rows, strict=True):
        if kind != usual:
            raise SchemaMismatch(
                f"field {name!r} of key {key!r} is {kind[0]} of shape {[*row.shape]}, other rows "
                f"of this put are {usual[0]} with {usual[1]} dimensions; the rows of a field "
                "have one dtype and rank",
                keys=[key],
                fields=[name],
            )
