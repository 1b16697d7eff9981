"""Python values of object fields as JSON, and back. Pure.

Owns the notation for what JSON lacks. A map with one key that begins with `$` stands for it:

    {"$bytes": base64}                              bytes
    {"$tensor": [dtype, shape, base64]}             a tensor, its bytes in row-major order
    {"$array": [dtype, shape, base64]}              a numpy array; "$scalar" a numpy number
    {"$tuple": [...]}  {"$map": [[key, value]...]}  a tuple; a map with keys that are no strings
    {"$float": "7ff8000000000000"}                  a float that is not finite, its 8 bytes in hex
    {"$complex": [real, imaginary]}

A key of a map that begins with `$` itself has one more of them.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from typing import Any, Final, cast

import numpy as np

from dataplane.codec.objects import MAX_DEPTH, is_tensor
from dataplane.codec.shapes import ITEM_BYTES, OBJECT
from dataplane.errors import InvalidRequest

_FLOAT: Final = struct.Struct(">d")


def to_text(value: object) -> str:
    """The value as one line of JSON."""
    return json.dumps(to_plain(value), ensure_ascii=True, allow_nan=False)


def to_plain(value: object) -> Any:
    """The value as what JSON has. InvalidRequest for what no object field can hold."""
    if value is None or type(value) in (bool, int, str):
        return value
    kind = type(value)
    if kind is float:
        number = cast("float", value)
        return number if math.isfinite(number) else {"$float": _FLOAT.pack(number).hex()}
    if kind is dict:
        return _map(cast("dict[object, object]", value))
    if kind is list:
        return [to_plain(item) for item in cast("list[object]", value)]
    if kind is tuple:
        return {"$tuple": [to_plain(item) for item in cast("tuple[object, ...]", value)]}
    if kind is bytes:
        return {"$bytes": _base64(cast("bytes", value))}
    if kind is complex:
        number = cast("complex", value)
        return {"$complex": [to_plain(number.real), to_plain(number.imag)]}
    if isinstance(value, np.ndarray | np.generic):
        return _array(cast("Any", value))
    if is_tensor(value):
        from dataplane.codec.dtypes import byte_view, dtype_name

        tensor = cast("Any", value)
        name = dtype_name(tensor.dtype, "a value")
        return {"$tensor": [name, _sizes(tensor), _base64(byte_view(tensor, "a value"))]}
    raise InvalidRequest(f"a {kind.__name__} is no value of an object field")


def _map(value: dict[object, object]) -> Any:
    if any(type(key) is not str for key in value):
        return {"$map": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    items = cast("dict[str, object]", value).items()
    return {"$" + key if key[:1] == "$" else key: to_plain(item) for key, item in items}


def _array(value: Any) -> Any:
    shape: list[int] = []
    if isinstance(value, np.str_):
        return {"$scalar": ["str", shape, str(value)]}
    if isinstance(value, np.bytes_):
        return {"$scalar": ["bytes", shape, _base64(bytes(value))]}
    array = cast("Any", np.asarray(value))
    kind = "$scalar" if isinstance(value, np.generic) else "$array"
    return {kind: [array.dtype.name, _sizes(array), _base64(array.tobytes())]}


def _sizes(array: Any) -> list[int]:
    return [int(size) for size in array.shape]


def _base64(data: bytes | memoryview) -> str:
    return base64.b64encode(data).decode()


def from_text(text: str) -> Any:
    """The value of a JSON text. InvalidRequest says what is wrong with it."""
    try:
        return from_plain(json.loads(text, parse_constant=_no_constant))
    except (ValueError, RecursionError, TypeError, binascii.Error) as error:
        raise InvalidRequest(f"{text!r:.60} is not JSON of a value: {error}") from None


def from_plain(value: Any, depth: int = 0) -> Any:
    """What `to_plain` was given. ValueError or TypeError if this came of none."""
    if depth > 4 * MAX_DEPTH:
        raise ValueError("too many levels")
    if type(value) is list:
        return [from_plain(item, depth + 1) for item in cast("list[Any]", value)]
    if type(value) is not dict:
        return value
    items = cast("dict[str, Any]", value)
    if len(items) == 1:
        ((key, inner),) = items.items()
        if key[:1] == "$" and key[:2] != "$$":
            return _special(key, inner, depth + 1)
    return {_one_less(key): from_plain(item, depth + 1) for key, item in items.items()}


def _special(key: str, inner: Any, depth: int) -> Any:
    if key == "$float":
        return _FLOAT.unpack(bytes.fromhex(inner))[0] if len(inner) == 16 else _bad(key)
    if key == "$bytes":
        return base64.b64decode(inner, validate=True)
    if key == "$tuple":
        return tuple(from_plain(item, depth) for item in inner)
    if key == "$map":
        return {from_plain(name, depth): from_plain(item, depth) for name, item in inner}
    if key == "$complex":
        real, imaginary = (from_plain(part, depth) for part in inner)
        return complex(real, imaginary)
    if key in ("$tensor", "$array", "$scalar"):
        return _restored(key, *inner)
    return _bad(key)


def _restored(key: str, name: str, shape: list[int], data: str) -> Any:
    if key == "$scalar" and name == "str":
        return np.str_(data)
    raw = bytearray(base64.b64decode(data, validate=True))
    if key == "$scalar" and name == "bytes":
        return np.bytes_(bytes(raw))
    sizes = all(type(size) is int and size >= 0 for size in shape)
    width = ITEM_BYTES.get(name, 0) if name != OBJECT else 0
    if not width or not sizes or len(raw) != math.prod(shape) * width:
        raise ValueError(f"{len(raw)} bytes for {name!r:.40} of shape {shape!r:.80}")
    flat = np.frombuffer(raw, np.uint8)
    if key == "$tensor":
        from dataplane.codec.dtypes import as_tensor

        return as_tensor(flat, name).view(shape)
    array = flat.view(np.dtype(name)).reshape(shape)
    return array if key == "$array" else array[()]


def _one_less(key: str) -> str:
    if key[:1] != "$":
        return key
    return key[1:] if key[:2] == "$$" else _bad(key)


def _bad(key: str) -> Any:
    raise ValueError(f"{key!r:.40} stands for nothing")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
