"""Python values to msgpack and back.

Owns what a value that is no tensor looks like in a block. Never pickles and never evaluates: what
comes back is an equal object of the same type, and what could not come back so is refused. Imports
no torch: a process without tensors does without it.

Values, beyond plain msgpack (`None bool int float str bytes list dict`), have extension types
for tuples, tensors, numpy arrays, numpy scalars, integers over 64 bits and complex numbers.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgpack
import numpy as np
import numpy.typing as npt

from dataplane.codec.shapes import ITEM_BYTES
from dataplane.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

MAX_DEPTH: Final = 64
"""Levels of lists, maps and tuples in one value."""

# Extension types, part of the stored format. A tuple is a list that starts with an empty _TUPLE:
# were it packed within the extension, reading nested ones would take 50 kB of C stack a level.
_TUPLE, _TENSOR, _ARRAY, _SCALAR, _BIG_INT, _COMPLEX = 1, 2, 3, 4, 5, 6

_TUPLE_MARK: Final = msgpack.ExtType(_TUPLE, b"")
_COMPLEX_PARTS: Final = struct.Struct("<dd")
_LEAVES: Final = frozenset({type(None), bool, int, float, str, bytes})

ValuePath: TypeAlias = "tuple[ValuePath, object] | None"
"""The way from a value down to a part of it: built while walking, written out on refusal."""


def place(path: ValuePath) -> str:
    """The path as errors name it."""
    steps: list[str] = []
    while path is not None:
        path, step = path
        text = repr(step)
        steps.append(f"[{text if len(text) <= 60 else text[:57] + '...'}]")
    return "value" + "".join(reversed(steps))


def _dtypes() -> Any:
    # Servers import this file and have no torch; only a value with a tensor needs it.
    from dataplane.codec import dtypes

    return dtypes


def is_tensor(value: object) -> bool:
    """Whether it is one, without importing torch: where nobody did, nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def pack(value: object) -> bytes:
    """The value as bytes that `unpack` turns into an equal value of the same types.

    Tensors come back detached and on the CPU. Raises InvalidRequest, naming the place, for
    what could not come back so: sets, objects, bytearrays, subclasses of builtin types (enums,
    OrderedDict), keys of maps that are no `str int bytes bool float None`, over 64 levels.
    """
    if type(value) not in _LEAVES:
        _check(value, None, 0)
    try:
        return msgpack.packb(value, default=_extend, strict_types=True)
    except UnicodeEncodeError:
        raise InvalidRequest("a string holds half a surrogate pair, which is not text") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"the value cannot be packed: {error}") from None


def unpack(buffer: Buffer) -> Any:
    """The value that `pack` was given; it shares no memory with the buffer.

    Raises InvalidRequest if the bytes are not such a value.
    """
    try:
        return msgpack.unpackb(
            buffer, ext_hook=_restore, list_hook=_restore_list, strict_map_key=False
        )
    except Exception as error:
        # Not its repr: that can hold what was read before, a number of any length for one.
        why = f"{type(error).__name__}: {error}"
        raise InvalidRequest(f"the bytes of a value are malformed: {why}") from None


def _check(value: object, path: ValuePath, depth: int) -> None:
    """Refuses what msgpack would change without a word or could not name the place of."""
    kind = type(value)
    if kind is list or kind is tuple:
        items = cast("Sequence[object]", value)
        check_depth(depth)
        if not _LEAVES.issuperset(map(type, items)):
            for i, item in enumerate(items):
                if type(item) not in _LEAVES:
                    _check(item, (path, i), depth + 1)
    elif kind is dict:
        map_ = cast("dict[object, object]", value)
        check_depth(depth)
        for key, item in map_.items():
            if type(key) not in _LEAVES:
                raise InvalidRequest(
                    f"{place(path)}: a key of type {type(key).__name__}; keys of a map are "
                    "str, int, bytes, bool, float or None"
                )
            if type(item) not in _LEAVES:
                _check(item, (path, key), depth + 1)
    elif kind not in _LEAVES and kind is not complex:
        _check_extension(value, path)


def check_depth(depth: int) -> None:
    """Refuses too many levels; a value that holds itself has no end of them."""
    if depth >= MAX_DEPTH:
        raise InvalidRequest(f"the value is nested more than {MAX_DEPTH} levels deep")


def _check_extension(value: object, path: ValuePath) -> None:
    kind = type(value)
    if kind is np.ndarray or issubclass(kind, np.generic):
        dtype = cast("npt.NDArray[Any]", value).dtype
        if not _is_number(dtype) and kind not in (np.str_, np.bytes_):
            raise InvalidRequest(
                f"{place(path)}: numpy dtype {dtype} cannot be stored; for strings and objects "
                "pass tolist()"
            )
    elif is_tensor(value):
        dtypes = _dtypes()
        dtypes.dtype_name(dtypes.plain(value, place(path)).dtype, place(path))
    else:
        raise InvalidRequest(
            f"{place(path)}: a {type(value).__name__} cannot be stored; a value is made of "
            "None, bool, int, float, complex, str, bytes, list, tuple, dict, tensors and numpy "
            "numbers, not of their subclasses"
        )


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" and dtype.name in ITEM_BYTES


def _extend(value: object) -> object:
    """What msgpack has no type for. `_check` has let nothing else through."""
    kind = type(value)
    if kind is tuple:
        return [_TUPLE_MARK, *cast("tuple[object, ...]", value)]
    if kind is np.ndarray:
        array = cast("npt.NDArray[Any]", value)
        return msgpack.ExtType(_ARRAY, _pack_array(array, array.dtype.name))
    if isinstance(value, np.str_):
        return msgpack.ExtType(_SCALAR, msgpack.packb(("str", (), str(value))))
    if isinstance(value, np.bytes_):
        return msgpack.ExtType(_SCALAR, msgpack.packb(("bytes", (), bytes(value))))
    if isinstance(value, np.generic):
        array = np.asarray(cast("npt.ArrayLike", value))
        return msgpack.ExtType(_SCALAR, _pack_array(array, array.dtype.name))
    if kind is int:
        number = cast("int", value)
        size = number.bit_length() // 8 + 1
        return msgpack.ExtType(_BIG_INT, number.to_bytes(size, "big", signed=True))
    if kind is complex:
        number = cast("complex", value)
        return msgpack.ExtType(_COMPLEX, _COMPLEX_PARTS.pack(number.real, number.imag))
    if is_tensor(value):
        dtypes = _dtypes()
        tensor = cast("torch.Tensor", value)
        cells = [
            dtypes.DTYPE_NAME[tensor.dtype],
            [*tensor.shape],
            dtypes.byte_view(tensor, "value"),
        ]
        return msgpack.ExtType(_TENSOR, msgpack.packb(cells))
    raise TypeError(f"a {kind.__name__}")


def _pack_array(array: npt.NDArray[Any], name: str) -> bytes:
    # tobytes() is row-major whatever the strides; the copy is small next to what follows.
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return msgpack.packb([name, [*array.shape], native.tobytes()])


def _restore(code: int, data: bytes) -> object:
    if code == _TUPLE and not data:
        return _TUPLE_MARK
    if code == _BIG_INT:
        return int.from_bytes(data, "big", signed=True)
    if code == _COMPLEX:
        return complex(*_COMPLEX_PARTS.unpack(data))
    if code in (_TENSOR, _ARRAY, _SCALAR):
        return _restore_array(code, data)
    raise ValueError(f"unknown extension type {code}")


def _restore_list(items: list[object]) -> object:
    if items and items[0] is _TUPLE_MARK:
        return tuple(items[1:])
    return items


def _restore_array(code: int, data: bytes) -> object:
    name, shape, cells = msgpack.unpackb(data)
    if code == _SCALAR and name == "str" and type(cells) is str:
        return np.str_(cells)
    if type(cells) is not bytes or type(shape) is not list or type(name) is not str:
        raise ValueError("an array is packed as [dtype, shape, bytes]")
    if code == _SCALAR and name == "bytes":
        return np.bytes_(cells)
    sizes = cast("list[object]", shape)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"an array of shape {shape}")
    dims = cast("list[int]", shape)
    if name not in ITEM_BYTES or len(cells) != math.prod(dims) * ITEM_BYTES[name]:
        raise ValueError(f"{len(cells)} bytes for {name} of shape {shape}")
    own = np.frombuffer(bytearray(cells), np.uint8)
    if code == _TENSOR:
        return _dtypes().as_tensor(own, name).view(dims)
    dtype = np.dtype(name)
    if not _is_number(dtype):
        raise ValueError(f"a numpy array of {name}")
    array = own.view(dtype).reshape(dims)
    return array if code == _ARRAY else array[()]
