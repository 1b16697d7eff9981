"""What callers put, as columns of a block: keys and fields in, a template and bytes out.

Owns which forms of input are accepted and how each becomes rows lying back to back. Copies
nothing that lies contiguous already: the bytes stay the caller's until somebody sends or writes
them. Never converts a dtype and never pads.

Letters: B rows, F free dimensions of a template.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch

from dataplane.codec import objects
from dataplane.codec.dtypes import (
    DTYPE_NAME,
    NUMPY_NAME,
    array_bytes,
    as_tensor,
    byte_view,
    dtype_name,
    integers,
    is_plain,
    plain,
)
from dataplane.codec.template import (
    ALIGN,
    ITEM_BYTES,
    MAX_COLUMNS,
    MAX_NAME_BYTES,
    MAX_RANK,
    MAX_ROWS,
    OBJECT,
    Column,
    Template,
)
from dataplane.errors import InvalidRequest, SchemaMismatch, quote
from dataplane.fields import KNOWN_FIELDS, ragged_dim

Array: TypeAlias = npt.NDArray[Any]
Chunks: TypeAlias = "list[torch.Tensor] | list[Array] | list[bytes]"

JOIN_BELOW_BYTES: Final = 2 * 1024
"""Rows smaller than this on average are copied into one piece: handing a row on by itself costs
a microsecond, as much as copying it."""

SERIAL_ITEMS: Final = 32_768
"""Torch copies fewer elements than this on the calling thread, and more on a pool, for which it
waits several times the copy's length where the cores are busy with other processes."""

MAX_SIZE: Final = 1 << 31
"""Every dimension of a row, and the bytes of a packed value, are below this."""

_PADDING: Final = [bytes(n) for n in range(ALIGN)]
_FREE: Final = (-1,)


class Part(NamedTuple):
    """One column as encoded: what the template says of it, and where its bytes are."""

    column: Column
    lengths: list[Array]  # [free dims] of [B]
    chunks: Chunks  # the whole column in one, or one per row
    nbytes: int


class Encoded:
    """A block that is ready to be sent or written; its bytes are still the caller's tensors."""

    __slots__ = ("_parts", "_pieces", "lengths", "nbytes", "rows", "template")

    def __init__(
        self,
        template: Template,
        lengths: bytes,
        rows: int,
        nbytes: int,
        parts: Sequence[Part] = (),
        pieces: list[bytes | memoryview] | None = None,
    ) -> None:
        self.template = template
        self.lengths = lengths
        """int32 [F, B], little endian: what `Template.layout` takes."""
        self.rows = rows
        self.nbytes = nbytes
        """Bytes of the whole block, padding included."""
        self._parts = parts
        self._pieces = pieces

    @property
    def pieces(self) -> list[bytes | memoryview]:
        """Flat byte buffers that make up the block when joined, padding included."""
        if self._pieces is None:
            pieces: list[bytes | memoryview] = [self.template.front(self.lengths, self.rows)]
            for part in self._parts:
                if part.nbytes:
                    pieces.extend(_pieces_of(part))
                    if gap := -part.nbytes % ALIGN:
                        pieces.append(_PADDING[gap])
            self._pieces = pieces
        return self._pieces

    def write_into(self, target: memoryview) -> None:
        """Writes the block to the start of a writable buffer of at least `nbytes`.

        Other threads of the process run while it copies.
        """
        block = np.frombuffer(target, np.uint8)
        if len(block) < self.nbytes:
            raise ValueError(f"{self.nbytes} bytes do not fit in {len(block)}")
        if self._pieces is not None:
            at = 0
            for piece in self._pieces:
                block[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
            return
        front = self.template.front(self.lengths, self.rows)
        block[: len(front)] = np.frombuffer(front, np.uint8)
        at = len(front)
        for part in self._parts:
            end = at + part.nbytes
            if part.nbytes:
                _copy_part(part, block[at:end])
            at = end + -part.nbytes % ALIGN
            block[end:at] = 0


def encode_row(key: str, fields: Mapping[str, object]) -> Encoded:
    """One key's fields as a block of one row; `key` only names the culprit in an error.

    Raises InvalidRequest if a field is none of the accepted forms.
    """
    if type(fields) is not dict:
        _check_one_row(key, fields)
    columns: list[tuple[str, str, int | None, tuple[int, ...]]] = []
    lengths = array("i")
    views: list[bytes | memoryview] = []
    try:
        for name, value in cast("Mapping[str, object]", fields).items():
            if type(value) is not torch.Tensor:
                value = _row(name, value, key)
            if isinstance(value, bytes):
                columns.append((name, OBJECT, 0, _FREE))
                lengths.append(len(value))
                views.append(value)
                continue
            if isinstance(value, torch.Tensor):
                if value.numel() >= MAX_SIZE:
                    _check_dims(name, value, key)
                try:
                    view = byte_view(value, name)
                except InvalidRequest:  # a place to name is made only where it is needed
                    view = byte_view(value, f"field {name!r} of key {key!r}")
                views.append(view)
                dtype = DTYPE_NAME[value.dtype]
            else:
                if value.size >= MAX_SIZE:
                    _check_dims(name, value, key)
                views.append(array_bytes(value))
                dtype = NUMPY_NAME[value.dtype]
            shape = value.shape
            rank = len(shape)
            if rank == 1:
                columns.append((name, dtype, 0, _FREE))
                lengths.append(shape[0])
            elif rank == 0:
                columns.append((name, dtype, None, ()))
            else:
                ragged = cast("int", ragged_dim(name, rank))
                columns.append((name, dtype, ragged, (*shape[:ragged], -1, *shape[ragged + 1 :])))
                lengths.append(shape[ragged])
    except OverflowError:
        raise InvalidRequest(
            f"field {name!r} of key {key!r}: a row of {MAX_SIZE} entries or bytes, or more"  # pyright: ignore[reportPossiblyUnboundVariable] (nothing overflows before the loop)
        ) from None
    template = _template(tuple(columns))
    packed = lengths.tobytes()
    front = template.front(packed, 1)
    at = len(front)
    pieces: list[bytes | memoryview] = [front]
    for view in views:
        if size := len(view):
            pieces.append(view)
            at += size
            if gap := -size & (ALIGN - 1):
                pieces.append(_PADDING[gap])
                at += gap
    return Encoded(template, packed, 1, at, pieces=pieces)


def _check_dims(name: str, value: torch.Tensor | Array, key: str) -> None:
    """Refuses a dimension that is too large before the row is copied into one piece."""
    if isinstance(value, torch.Tensor) and not is_plain(value):
        return  # refused for that
    if max(value.shape) >= MAX_SIZE:
        raise InvalidRequest(
            f"field {name!r} of key {key!r}: a dimension of {max(value.shape)}; under {MAX_SIZE}"
        )


def encode_batch(keys: Sequence[str], fields: object) -> Encoded:
    """The rows of many keys as one block, in the order of the keys.

    `fields` is a mapping of names to columns, a TensorDict, or a list with a mapping per key.
    A column is a tensor or array with a leading dimension of B, a nested tensor, a list of B
    rows, or tensordict's NonTensorStack or NonTensorData (one value for every row). A row that
    is a tensor or an array becomes a tensor; any other is kept as a Python value.

    Raises:
        InvalidRequest: a field is none of these, or has another number of rows than `keys`.
        SchemaMismatch: the rows of a field differ in dtype or rank.
    """
    rows = len(keys)
    if rows > MAX_ROWS:
        raise InvalidRequest(f"{rows} keys in one put; at most {MAX_ROWS}")
    parts = [_part(name, value, keys) for name, value in _columns(keys, fields).items()]
    if not rows:
        return Encoded(_template(()), b"", 0, 0, pieces=[])
    template = _template(tuple(part.column for part in parts))
    nbytes = template.front_bytes(rows)
    lengths: list[Array] = []
    for part in parts:
        lengths.extend(part.lengths)
        nbytes += part.nbytes + -part.nbytes % ALIGN
    free = np.array(lengths, np.int64)
    if free.size and free.max() >= MAX_SIZE:
        for part in parts:
            for sizes in part.lengths:
                if sizes.max() >= MAX_SIZE:
                    raise InvalidRequest(
                        f"field {part.column.name!r} of key {keys[int(sizes.argmax())]!r}: "
                        f"a row of {sizes.max()} entries or bytes; under {MAX_SIZE}"
                    )
    return Encoded(template, free.astype(np.int32).tobytes(), rows, nbytes, parts)


@lru_cache(maxsize=4096)
def _template(columns: tuple[tuple[str, str, int | None, tuple[int, ...]], ...]) -> Template:
    """The template of these columns, built and checked once: producers repeat themselves."""
    if len(columns) > MAX_COLUMNS:
        raise InvalidRequest(f"{len(columns)} fields in one put; at most {MAX_COLUMNS}")
    for name, _, _, dims in columns:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
            raise InvalidRequest(f"the name of a field is a string, not {name!r}")
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            raise InvalidRequest(f"the name of a field is not text: {quote([name])}") from None
        if not 1 <= size <= MAX_NAME_BYTES:
            raise InvalidRequest(
                f"the name of a field has 1 to {MAX_NAME_BYTES} bytes, not {size}: {quote([name])}"
            )
        if len(dims) > MAX_RANK:
            raise InvalidRequest(
                f"field {name!r}: rows of {len(dims)} dimensions; at most {MAX_RANK}"
            )
        if max(dims, default=0) >= MAX_SIZE:
            raise InvalidRequest(f"field {name!r}: a dimension of {max(dims)}; under {MAX_SIZE}")
    return Template(tuple(Column(*column) for column in columns))


# What came in, as columns.


def _tensordict(name: str) -> Any:
    """This name of tensordict, or None if the process has not imported it (yet): an import of
    our own would take a second, and without it no value can be one of its types."""
    return getattr(sys.modules.get("tensordict"), name, None)


def _is_tensordict(value: object) -> TypeGuard[Any]:
    base = _tensordict("TensorDictBase")
    return base is not None and isinstance(value, base)


def _is_non_tensor(value: object) -> TypeGuard[Any]:
    is_non_tensor = _tensordict("is_non_tensor")
    return is_non_tensor is not None and is_non_tensor(value)


def _check_one_row(key: str, fields: object) -> None:
    if _is_tensordict(fields):
        if fields.batch_size:
            raise InvalidRequest(
                f"the fields of key {key!r} are a TensorDict of batch size "
                f"{[*fields.batch_size]}, which holds many rows; use kv_batch_put, with one "
                "TensorDict for all keys"
            )
    elif not isinstance(fields, Mapping):
        raise InvalidRequest(
            f"the fields of key {key!r} are a {type(fields).__name__}, not a mapping of names "
            "to values"
        )


def _columns(keys: Sequence[str], fields: object) -> Mapping[str, object]:
    if _is_tensordict(fields):
        size = fields.batch_size
        if not size or size[0] != len(keys):
            raise InvalidRequest(
                f"a TensorDict of batch size {[*size]} for {len(keys)} keys: its first "
                "dimension counts the keys"
            )
        if not isinstance(fields, _tensordict("LazyStackedTensorDict")):
            return cast("Mapping[str, object]", fields)
        fields = list(fields.unbind(0))  # its rows may differ in shape, so it has no columns
    if isinstance(fields, Mapping):
        return cast("Mapping[str, object]", fields)
    if not isinstance(fields, list | tuple):
        raise InvalidRequest(
            f"fields are a mapping of columns, a TensorDict or a list of mappings, not a "
            f"{type(fields).__name__}"
        )
    rows = cast("Sequence[object]", fields)
    if len(rows) != len(keys):
        raise InvalidRequest(f"{len(keys)} keys, but fields for {len(rows)} rows")
    return _transposed(keys, rows)


def _transposed(keys: Sequence[str], rows: Sequence[object]) -> dict[str, list[object]]:
    columns: dict[str, list[object]] = {}
    for i, row in enumerate(rows):
        if type(row) is not dict:
            _check_one_row(keys[i], row)
        row = cast("Mapping[str, object]", row)
        names = row.keys()  # a TensorDict counts and iterates over rows, not names
        if not i:
            columns = {name: [] for name in names}
        elif len(names) != len(columns):
            _differ(keys, i, columns, names)
        try:
            for name, column in columns.items():
                column.append(row[name])
        except KeyError:
            _differ(keys, i, columns, names)
    return columns


def _differ(keys: Sequence[str], i: int, first: Iterable[str], names: Iterable[str]) -> None:
    odd = set(first) ^ set(names)
    lacks = [name for name in first if name in odd]
    has = keys[0] if lacks else keys[i]
    raise InvalidRequest(
        f"the rows of one put have the same fields: key {keys[i if lacks else 0]!r} lacks "
        f"{quote(lacks or [name for name in names if name in odd])}, which key {has!r} has; "
        "put them apart"
    )


def _part(name: str, value: object, keys: Sequence[str]) -> Part:
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
    if _is_non_tensor(value):
        return _non_tensor_part(name, value, keys)
    if _is_tensordict(value):
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


def _row(name: str, value: object, key: str) -> torch.Tensor | Array | bytes:
    """One row as it is stored; bytes are a packed Python value."""
    if isinstance(value, torch.Tensor):
        return plain(value, f"field {name!r} of key {key!r}")
    if isinstance(value, np.ndarray):
        return _native(name, cast("Array", value))
    if _is_non_tensor(value):
        return _row(name, value.tolist(), key)
    if _is_tensordict(value):
        raise InvalidRequest(f"field {name!r} of key {key!r} is itself a TensorDict; flatten it")
    try:
        return objects.pack(value)
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
    if _is_tensordict(value):  # a NonTensorStack
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
        rows = [row.tolist() if _is_non_tensor(row) else row for row in rows]
        kinds = set(map(type, rows))
    if kinds == {torch.Tensor}:
        return _tensor_rows(name, cast("Sequence[torch.Tensor]", rows), keys)
    if kinds and all(issubclass(kind, torch.Tensor | np.ndarray) for kind in kinds):
        tensors = [
            _row_tensor(_row(name, row, key), name) for row, key in zip(rows, keys, strict=True)
        ]
        return _tensor_rows(name, tensors, keys)
    packed: list[bytes] = []
    for row, key in zip(rows, keys, strict=True):
        try:
            packed.append(objects.pack(row))
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


# The bytes of a column.


def _pieces_of(part: Part) -> list[bytes | memoryview]:
    chunks, name = part.chunks, part.column.name
    if len(chunks) > 1 and part.nbytes < JOIN_BELOW_BYTES * len(chunks):
        if _are_bytes(chunks):
            return [b"".join(chunks)]
        joined = np.empty(part.nbytes, np.uint8)
        _copy_part(part, joined)
        return [array_bytes(joined)]
    views: list[bytes | memoryview] = []
    for chunk in chunks:
        if isinstance(chunk, torch.Tensor):
            view = byte_view(chunk, _at(name))
        else:
            view = chunk if isinstance(chunk, bytes) else array_bytes(chunk)
        if view:
            views.append(view)
    return views


def _are_bytes(chunks: Chunks) -> TypeGuard[list[bytes]]:
    return isinstance(chunks[0], bytes)


def _copy_part(part: Part, target: npt.NDArray[np.uint8]) -> None:
    """Writes a column's rows back to back, in one copy and from any strides or device."""
    chunks, dtype = part.chunks, part.column.dtype
    first = chunks[0]
    if isinstance(first, bytes):
        target[:] = np.frombuffer(b"".join(cast("list[bytes]", chunks)), np.uint8)
        return
    if isinstance(first, np.ndarray):
        np.copyto(target.view(first.dtype).reshape(first.shape), first)
        return
    out = integers(as_tensor(target, dtype))
    rows = cast("list[torch.Tensor]", chunks)
    with torch.no_grad():
        if len(rows) == 1:
            _copy_tensor(first, target, out)
            return
        if out.dtype is not first.dtype:
            rows = [integers(row) for row in rows]
        if first.ndim == 1:
            lengths = cast("list[int]", part.lengths[0].tolist())
        else:
            rows = [row.reshape(-1) for row in rows]
            lengths = [row.shape[0] for row in rows]
        _join(rows, lengths, target, out)


def _copy_tensor(source: torch.Tensor, target: npt.NDArray[np.uint8], out: torch.Tensor) -> None:
    if source.is_contiguous() and source.is_cpu:
        target[:] = np.frombuffer(byte_view(source, "value"), np.uint8)
    else:
        out.view(source.shape).copy_(integers(source))


def _join(
    rows: list[torch.Tensor], lengths: list[int], target: npt.NDArray[np.uint8], out: torch.Tensor
) -> None:
    """Writes flat rows back to back, in runs that torch copies on this thread."""
    size = out.element_size()
    first = begin = end = 0
    for i, length in enumerate(lengths):
        if end + length - begin >= SERIAL_ITEMS:
            if i > first:
                torch.cat(rows[first:i], out=out[begin:end])
            first, begin = i, end
            if length >= SERIAL_ITEMS:
                end += length
                _copy_tensor(rows[i], target[begin * size : end * size], out[begin:end])
                first, begin = i + 1, end
                continue
        end += length
    if first < len(rows):
        torch.cat(rows[first:], out=out[begin:end])
