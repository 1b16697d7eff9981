"""What callers put, as a block: keys and fields in, an `Encoded` out.

Owns which forms the fields of a put may have as a whole, and the limits of a block; what a single
column may be is for columns.py. Copies nothing that lies contiguous already.

Letters: B rows, F free dimensions of a template.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import cast

import numpy as np
import torch

from dataplane.codec.columns import is_tensordict, of_tensordict, part_of, row_of
from dataplane.codec.dtypes import DTYPE_NAME, NUMPY_NAME, array_bytes, byte_view, is_plain
from dataplane.codec.encoded import PADDING, Array, Encoded
from dataplane.codec.shapes import (
    MAX_COLUMNS,
    MAX_NAME_BYTES,
    MAX_RANK,
    MAX_ROWS,
    MAX_SIZE,
    OBJECT,
    Column,
    check_cells,
)
from dataplane.codec.template import ALIGN, Template
from dataplane.errors import InvalidRequest, quote
from dataplane.fields import ragged_dim


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
                value = row_of(name, value, key)
            if isinstance(value, bytes):
                columns.append((name, OBJECT, 0, (-1,)))
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
                columns.append((name, dtype, 0, (-1,)))
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
                pieces.append(PADDING[gap])
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
    parts = [part_of(name, value, keys) for name, value in _columns(keys, fields).items()]
    if not rows:
        return Encoded(_template(()), b"", 0, 0, pieces=[])
    check_cells(rows, len(parts))
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


def _check_one_row(key: str, fields: object) -> None:
    if is_tensordict(fields):
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
    if is_tensordict(fields):
        size = fields.batch_size
        if not size or size[0] != len(keys):
            raise InvalidRequest(
                f"a TensorDict of batch size {[*size]} for {len(keys)} keys: its first "
                "dimension counts the keys"
            )
        if not isinstance(fields, of_tensordict("LazyStackedTensorDict")):
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
