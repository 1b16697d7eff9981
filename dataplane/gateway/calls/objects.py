"""Object fields on their way between producers and the plane: equal values, packed in two ways.

Owns the translation, row by row: `Value` messages outside, msgpack in the store, where a tensor is
torch's. Torch is loaded when the first tensor within an object comes by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dataplane.codec import objects
from dataplane.codec.foreign import Buffer, Cutter, Foreign, block_of
from dataplane.codec.shapes import OBJECT
from dataplane.errors import InvalidRequest
from dataplane.protocol.cells import Shape
from dataplane.protocol.values import check_tensor, pack_object, unpack_object

INLINE_BYTES: Final = 64 << 10
"""Objects of fewer bytes may be translated on the event loop."""


def has_objects(shape: Shape) -> bool:
    """Whether any field holds values that are no tensors."""
    return any(column.dtype == OBJECT for column in shape.columns)


def object_bytes(shape: Shape) -> int:
    """Bytes of all rows of object fields."""
    return sum(
        size
        for column, size in zip(shape.columns, shape.column_bytes, strict=True)
        if column.dtype == OBJECT
    )


def bool_bytes(shape: Shape) -> int:
    """Bytes of all rows of bools, each of which is looked at."""
    return sum(
        size
        for column, size in zip(shape.columns, shape.column_bytes, strict=True)
        if column.dtype == "bool"
    )


def stored_block(shape: Shape, keys: Sequence[str], pieces: Sequence[Buffer]) -> Foreign:
    """The block of what a producer sent.

    InvalidRequest, naming field and key, if a row of an object field is no value.
    """
    if not has_objects(shape):
        return block_of(shape.columns, shape.lengths, shape.rows, pieces)
    source = Cutter(pieces)
    lengths = shape.lengths.copy()
    laid: list[Buffer] = []
    first = 0
    for column, sizes, nbytes in zip(
        shape.columns, shape.row_bytes, shape.column_bytes, strict=True
    ):
        parts = source.cut(nbytes)
        if column.dtype == OBJECT:
            rows = _stored_rows(column.name, keys, sizes.tolist(), b"".join(parts))
            lengths[first] = [len(row) for row in rows]
            laid.extend(rows)
        else:
            laid.extend(parts)
        first += len(column.free)
    if source.left():
        raise InvalidRequest("more bytes came than the columns have")
    return block_of(shape.columns, lengths, shape.rows, laid)


def _stored_rows(name: str, keys: Sequence[str], sizes: list[int], data: bytes) -> list[bytes]:
    view = memoryview(data)
    rows: list[bytes] = []
    at = 0
    for key, size in zip(keys, sizes, strict=True):
        try:
            rows.append(objects.pack(unpack_object(view[at : at + size], _torch_tensor)))
        except InvalidRequest as error:
            raise InvalidRequest(f"field {name!r} of key {key!r:.200}: {error}") from None
        at += size
    return rows


def sent_rows(
    name: str, keys: Sequence[str], nbytes: npt.NDArray[np.int64], buffer: npt.NDArray[np.uint8]
) -> list[bytes]:
    """The rows of an object field as a producer gets them. InvalidRequest, naming field and key, if
    one holds what the protocol has no form for."""
    view = buffer.data
    rows: list[bytes] = []
    at = 0
    for key, size in zip(keys, nbytes.tolist(), strict=True):
        value: Any = objects.unpack(view[at : at + size])
        rows.append(pack_object(value, f"field {name!r} of key {key!r:.200}"))
        at += size
    return rows


def _torch_tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> object:
    """A tensor of torch: what those inside the cluster put, and expect."""
    check_tensor(dtype, shape, len(data))
    own = np.frombuffer(bytearray(data), np.uint8)
    if dtype == "bool" and own.max(initial=0) > 1:
        raise InvalidRequest("a bool of a tensor is a byte 0 or 1")
    from dataplane.codec import dtypes

    return dtypes.as_tensor(own, dtype).view(shape)
