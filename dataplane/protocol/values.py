"""Python values as `Value` messages, and back.

Owns which values the outside protocol can carry: None, bool, int of 64 bits, float, str, bytes,
lists, tuples, maps with string keys, and tensors. A numpy scalar becomes the number that it is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from dataplane.codec.shapes import ITEM_BYTES, MAX_RANK, OBJECT
from dataplane.errors import InvalidRequest
from dataplane.v1 import dataplane_pb2 as pb

MAX_DEPTH: Final = 30
"""Levels of lists and maps in one value. Parsers of protobuf stop at 100 nested messages, and a
level takes up to three."""

_INT64: Final = 1 << 63

MakeTensor: TypeAlias = Callable[[str, tuple[int, ...], bytes], object]
"""A tensor of a dtype, a shape and the bytes of that."""


def to_value(value: object, place: str = "value") -> pb.Value:
    """The message of a value. InvalidRequest, naming the place in it, if there is none."""
    message = pb.Value()
    _fill(message, value, place, 0)
    return message


def from_value(message: pb.Value, tensor: MakeTensor | None = None) -> Any:
    """The value of a message; tensors are numpy arrays unless `tensor` makes something else.

    InvalidRequest if the message says nothing, or a tensor is not what it says.
    """
    return _read(message, tensor or as_numpy, 0)


def tags_to(tags: Mapping[str, object], place: str = "tags") -> pb.Tags:
    """The message of the tags of one key."""
    message = pb.Tags()
    into = message.values
    for name, value in tags.items():
        _check_name(name, place)
        _fill(into[name], value, f"{place}[{name!r:.80}]", 0)
    return message


def tags_from(message: pb.Tags) -> dict[str, Any]:
    """The tags of one key."""
    return {name: _read(value, as_numpy, 0) for name, value in message.values.items()}


def pack_object(value: object, place: str = "value") -> bytes:
    """A row of an object field as its bytes travel."""
    return to_value(value, place).SerializeToString()


def unpack_object(data: bytes | memoryview, tensor: MakeTensor | None = None) -> Any:
    """The value of a row of an object field. InvalidRequest if the bytes are none."""
    message = pb.Value()
    try:
        message.ParseFromString(bytes(data))
    except Exception:  # protobuf's own class of it differs by its implementation
        raise InvalidRequest("the bytes of an object row are not a Value") from None
    return from_value(message, tensor)


def as_numpy(dtype: str, shape: tuple[int, ...], data: bytes) -> npt.NDArray[Any]:
    """A tensor's bytes as a numpy array of its own, checked.

    numpy has no bfloat16: it comes as float32, exactly. Eight-bit floats come as their bits.
    """
    check_tensor(dtype, shape, len(data))
    return numpy_of(np.frombuffer(bytearray(data), np.uint8), dtype).reshape(shape)


def check_tensor(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    """InvalidRequest unless a tensor of this dtype and shape has so many bytes."""
    size = ITEM_BYTES.get(dtype)
    if size is None or dtype == OBJECT:
        raise InvalidRequest(f"a tensor of unknown dtype {dtype!r:.80}")
    if len(shape) > MAX_RANK or min(shape, default=0) < 0:
        raise InvalidRequest(f"a tensor of shape {shape!r:.200}")
    if math.prod(shape) * size != nbytes:
        raise InvalidRequest(f"{nbytes} bytes for {dtype} of shape {shape!r:.200}")
    if not nbytes and math.prod(max(1, dim) for dim in shape) >= _INT64 // 16:
        # Where one dimension is 0, numpy still counts the others in 64 bits.
        raise InvalidRequest(f"a tensor of shape {shape!r:.200}")


def numpy_of(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[Any]:
    """Flat bytes as numpy's numbers; see `as_numpy` for those that numpy lacks."""
    if dtype == "bfloat16":
        bits = raw.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    if dtype == "complex32":
        return raw.view(np.float16).reshape(-1, 2).astype(np.float32).view(np.complex64)[:, 0]
    return raw.view(_CARRIED.get(dtype, dtype))


_CARRIED: Final = {name: "uint8" for name in ITEM_BYTES if name.startswith("float8")}


def tensor_bytes(value: object) -> tuple[str, tuple[int, ...], bytes] | None:
    """Dtype, shape and bytes of an array, or of a tensor of torch; None if it is neither."""
    if isinstance(value, np.ndarray):
        array = cast("npt.NDArray[Any]", value)
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        if native.dtype.name not in ITEM_BYTES or native.dtype.kind == "O":
            raise InvalidRequest(f"a numpy array of {array.dtype} cannot travel")
        return native.dtype.name, native.shape, native.tobytes()
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    tensor: Any = value
    dense = tensor.detach().cpu().contiguous()
    name = str(dense.dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise InvalidRequest(f"a tensor of {dense.dtype} cannot travel")
    return name, tuple(dense.shape), dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def _fill(message: pb.Value, value: object, place: str, depth: int) -> None:
    kind = type(value)
    if kind is str:
        text = cast("str", value)
        if not text.isascii():
            _check_text(text, place)
        message.string_value = text
    elif kind is bool:
        message.bool_value = cast("bool", value)
    elif kind is int:
        number = cast("int", value)
        if not -_INT64 <= number < _INT64:
            raise InvalidRequest(f"{place}: an integer over 64 bits cannot travel")
        message.int_value = number
    elif kind is float:
        message.float_value = cast("float", value)
    elif value is None:
        message.null_value = True
    elif kind is bytes:
        message.bytes_value = cast("bytes", value)
    elif kind is list or kind is tuple:
        _check_depth(depth, place)
        message.list_value.fixed = kind is tuple
        items = message.list_value.items
        for i, item in enumerate(cast("Sequence[object]", value)):
            _fill(items.add(), item, f"{place}[{i}]", depth + 1)
    elif isinstance(value, Mapping):
        _check_depth(depth, place)
        message.map_value.SetInParent()
        entries = message.map_value.entries
        for name, item in cast("Mapping[object, object]", value).items():
            _check_name(name, place)
            _fill(entries[cast("str", name)], item, f"{place}[{name!r:.80}]", depth + 1)
    elif isinstance(value, np.generic):
        _fill(message, cast("np.generic", value).item(), place, depth)
    else:
        _fill_tensor(message, value, place)


def _fill_tensor(message: pb.Value, value: object, place: str) -> None:
    try:
        found = tensor_bytes(value)
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}: {error}") from None
    if found is None:
        raise InvalidRequest(
            f"{place}: a {type(value).__name__} cannot travel; a value is made of None, bool, int, "
            "float, str, bytes, lists, maps with string keys, and arrays"
        )
    dtype, shape, data = found
    tensor = message.tensor_value
    tensor.dtype = dtype
    tensor.shape.extend(shape)
    tensor.data = data


def _read(message: pb.Value, tensor: MakeTensor, depth: int) -> Any:
    kind = message.WhichOneof("kind")
    if kind == "list_value":
        _check_depth(depth, "value")
        items = [_read(item, tensor, depth + 1) for item in message.list_value.items]
        return tuple(items) if message.list_value.fixed else items
    if kind == "map_value":
        _check_depth(depth, "value")
        entries = message.map_value.entries
        return {name: _read(item, tensor, depth + 1) for name, item in entries.items()}
    if kind == "tensor_value":
        found = message.tensor_value
        return tensor(found.dtype, tuple(found.shape), found.data)
    if kind == "null_value":
        return None
    if kind is None:
        raise InvalidRequest("a Value says nothing: set one of its kinds, `null_value` for none")
    return getattr(message, kind)


def _check_depth(depth: int, place: str) -> None:
    if depth >= MAX_DEPTH:
        raise InvalidRequest(f"{place:.200}: nested more than {MAX_DEPTH} levels deep")


def _check_name(name: object, place: str) -> None:
    if type(name) is not str:
        raise InvalidRequest(f"{place:.200}: a key is a string, not {type(name).__name__}")
    if not name.isascii():
        _check_text(name, place)


def _check_text(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{place:.200}: a string holds half a surrogate pair, which is not text"
        ) from None
