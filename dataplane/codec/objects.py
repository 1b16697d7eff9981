"""Python values to msgpack and back, and the tags of keys to msgpack.

Owns what a value that is no tensor looks like in a block, and which tags are allowed. Never
pickles and never evaluates: what comes back is an equal object of the same type, and what could
not come back so is refused. Imports no torch: a process without tensors does without it.

Values, beyond plain msgpack (`None bool int float str bytes list dict`), have extension types
for tuples, tensors, numpy arrays, numpy scalars, integers over 64 bits and complex numbers.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgpack
import numpy as np
import numpy.typing as npt

from dataplane.codec.template import ITEM_BYTES
from dataplane.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

MAX_DEPTH: Final = 64
"""Levels of lists, maps and tuples in one value."""

MAX_TAGS: Final = 1024
MAX_TAG_NAME_BYTES: Final = 256
SHORT_NAME: Final = MAX_TAG_NAME_BYTES // 4
"""Characters of a name that is short enough however they are encoded."""
MAX_TAG_BYTES: Final = 64 * 1024
"""Packed tags of one key."""

# Extension types, part of the stored format. A tuple is a list that starts with an empty _TUPLE:
# were it packed within the extension, reading nested ones would take 50 kB of C stack a level.
_TUPLE, _TENSOR, _ARRAY, _SCALAR, _BIG_INT, _COMPLEX = 1, 2, 3, 4, 5, 6

_TUPLE_MARK: Final = msgpack.ExtType(_TUPLE, b"")
_COMPLEX_PARTS: Final = struct.Struct("<dd")
_TAG_LEAVES: Final = frozenset({type(None), bool, int, float, str})
_LEAVES: Final = _TAG_LEAVES | {bytes}
_TAG_SCALARS: Final = _TAG_LEAVES | {
    *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.float16, np.float32, np.float64),
}

_Path: TypeAlias = "tuple[_Path, object] | None"
"""The way from a value down to a part of it: built while walking, written out on refusal."""


def _place(path: _Path) -> str:
    steps: list[str] = []
    while path is not None:
        path, step = path
        text = repr(step)
        steps.append(f"[{text if len(text) <= 60 else text[:57] + '...'}]")
    return "value" + "".join(reversed(steps))


def _dtypes() -> Any:
    # Servers pack tags in this file and have no torch; only a value with a tensor needs it.
    from dataplane.codec import dtypes

    return dtypes


def _is_tensor(value: object) -> bool:
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
        raise InvalidRequest(f"the bytes of a value are malformed: {error!r}") from None


def _check(value: object, path: _Path, depth: int) -> None:
    """Refuses what msgpack would change without a word or could not name the place of."""
    kind = type(value)
    if kind is list or kind is tuple:
        items = cast("Sequence[object]", value)
        _check_depth(depth)
        if not _LEAVES.issuperset(map(type, items)):
            for i, item in enumerate(items):
                if type(item) not in _LEAVES:
                    _check(item, (path, i), depth + 1)
    elif kind is dict:
        map_ = cast("dict[object, object]", value)
        _check_depth(depth)
        for key, item in map_.items():
            if type(key) not in _LEAVES:
                raise InvalidRequest(
                    f"{_place(path)}: a key of type {type(key).__name__}; keys of a map are "
                    "str, int, bytes, bool, float or None"
                )
            if type(item) not in _LEAVES:
                _check(item, (path, key), depth + 1)
    elif kind not in _LEAVES and kind is not complex:
        _check_extension(value, path)


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise InvalidRequest(f"the value is nested more than {MAX_DEPTH} levels deep")


def _check_extension(value: object, path: _Path) -> None:
    kind = type(value)
    if kind is np.ndarray or issubclass(kind, np.generic):
        dtype = cast("npt.NDArray[Any]", value).dtype
        if not _is_number(dtype) and kind not in (np.str_, np.bytes_):
            raise InvalidRequest(
                f"{_place(path)}: numpy dtype {dtype} cannot be stored; for strings and objects "
                "pass tolist()"
            )
    elif _is_tensor(value):
        dtypes = _dtypes()
        dtypes.dtype_name(dtypes.plain(value, _place(path)).dtype, _place(path))
    else:
        raise InvalidRequest(
            f"{_place(path)}: a {type(value).__name__} cannot be stored; a value is made of "
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
    if _is_tensor(value):
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


def pack_tags(tags: Mapping[str, object]) -> bytes:
    """The tags of one key as a msgpack map.

    Tags are `None bool int float str` and lists or string-keyed maps of those. Scalars of numpy
    and torch become Python's, tuples become lists. Raises InvalidRequest, naming the tag, for
    anything else, for integers over 64 bits, for over 1,024 tags, names over 256 bytes, and
    over 64 KiB in all.
    """
    kind: type[object] = type(tags)
    if kind is dict and len(tags) <= MAX_TAGS:
        for name, value in tags.items():
            if type(name) is not str or len(name) > SHORT_NAME:
                break
            if type(value) not in _TAG_SCALARS:
                _check_one_tag(name, value, 0, 1)
        else:
            try:
                packed = msgpack.packb(tags, default=_tag_scalar, strict_types=True)
            except (ValueError, TypeError, OverflowError):
                raise _blame((tags,)) from None
            if len(packed) <= MAX_TAG_BYTES:
                return packed
    return pack_tags_many((tags,))


def pack_tags_many(tags: Sequence[Mapping[str, object]]) -> bytes:
    """The tags of many keys as msgpack maps, one behind the other. See `pack_tags`."""
    maps = cast(
        "list[dict[str, object]]",
        [item if type(item) is dict else _as_dict(item, i) for i, item in enumerate(tags)],
    )
    # The whole batch is judged by the sets of its names and types: a pass in C, not a loop.
    names = set(chain.from_iterable(maps))
    if not all(map(_is_tag_name, names)) or not _are_plain(maps):
        for i, map_ in enumerate(maps):
            _check_tags(map_, i, len(maps))
    packer = msgpack.Packer(default=_tag_scalar, strict_types=True)
    try:
        parts: list[bytes] = list(map(packer.pack, maps))
    except (ValueError, TypeError, OverflowError):
        raise _blame(maps) from None
    if parts and (max(map(len, parts)) > MAX_TAG_BYTES or max(map(len, maps)) > MAX_TAGS):
        _check_sizes(maps, parts)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _are_plain(maps: Sequence[dict[str, object]]) -> bool:
    """True if all tags are scalars, or lists, a few levels deep, of scalars."""
    values: Iterable[object] = chain.from_iterable(map(_VALUES, maps))
    kinds = set(map(type, values))
    values = chain.from_iterable(map(_VALUES, maps))
    for _ in range(4):
        beyond = kinds - _TAG_SCALARS
        if not beyond:
            return True
        if beyond != {list}:
            return False
        lists = cast("list[list[object]]", [value for value in values if type(value) is list])
        kinds = set(map(type, chain.from_iterable(lists)))
        values = chain.from_iterable(lists)
    return False


_VALUES: Final = methodcaller("values")


def _as_dict(tags: object, i: int) -> dict[str, object]:
    if not isinstance(tags, Mapping):
        raise InvalidRequest(
            f"tags[{i}]: the tags of a key are a mapping, not a {type(tags).__name__}"
        )
    return dict(cast("Mapping[str, object]", tags))


def _is_tag_name(name: object) -> bool:
    if type(name) is not str:
        return False
    return len(name) <= SHORT_NAME or len(name.encode(errors="replace")) <= MAX_TAG_NAME_BYTES


def _tag_place(name: object, i: int, count: int) -> str:
    text = repr(name)
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"tag {text}" if count == 1 else f"tags[{i}]: tag {text}"


def _check_tags(tags: Mapping[str, object], i: int, count: int) -> None:
    for name, value in tags.items():
        if not _is_tag_name(name):
            raise InvalidRequest(
                f"{_tag_place(name, i, count)}: the name of a tag is a string of at most "
                f"{MAX_TAG_NAME_BYTES} bytes"
            )
        if type(value) not in _TAG_SCALARS:
            _check_one_tag(name, value, i, count)


def _check_one_tag(name: str, value: object, i: int, count: int) -> None:
    try:
        _check_tag(value, None, 0)
    except InvalidRequest as error:
        raise InvalidRequest(f"{_tag_place(name, i, count)}: {error}") from None


def _check_tag(value: object, path: _Path, depth: int) -> None:
    kind = type(value)
    if kind is list or kind is tuple:
        items = cast("Sequence[object]", value)
        _check_depth(depth)
        if not _TAG_LEAVES.issuperset(map(type, items)):
            for i, item in enumerate(items):
                _check_tag(item, (path, i), depth + 1)
    elif kind is dict:
        map_ = cast("dict[object, object]", value)
        _check_depth(depth)
        for key, item in map_.items():
            if type(key) is not str:
                raise InvalidRequest(f"{_place(path)}: the keys of a map are strings, not {key!r}")
            _check_tag(item, (path, key), depth + 1)
    elif kind not in _TAG_LEAVES:
        try:
            _tag_scalar(value)
        except TypeError:
            raise InvalidRequest(
                f"{_place(path)}: a {kind.__name__} cannot be a tag; tags are None, bool, int, "
                "float, str, lists and string-keyed maps of those, and numpy or torch scalars"
            ) from None


def _tag_scalar(value: object) -> object:
    """The Python value that stands for a tag that msgpack does not know. TypeError if none."""
    if type(value) is tuple:
        return list(cast("tuple[object, ...]", value))
    if isinstance(value, np.generic) or (type(value) is np.ndarray and not value.shape):
        item: object = cast("np.generic", value).item()
    elif _is_tensor(value) and not cast("torch.Tensor", value).shape:
        try:
            item = cast("torch.Tensor", value).item()
        except RuntimeError as error:  # on the meta device
            raise TypeError(str(error)) from None
    else:
        raise TypeError(f"a {type(value).__name__}")
    if type(item) not in _TAG_LEAVES:
        raise TypeError(f"a {type(item).__name__}")
    return item


def _blame(maps: Sequence[Mapping[str, object]]) -> InvalidRequest:
    """The error of the first tag that msgpack refuses: a huge integer or half a surrogate."""
    for i, tags in enumerate(maps):
        for name, value in tags.items():
            try:
                msgpack.packb([name, value], default=_tag_scalar, strict_types=True)
            except (ValueError, TypeError, OverflowError) as error:
                why = str(error) if isinstance(error, UnicodeEncodeError) else "over 64 bits"
                place = _tag_place(name, i, len(maps))
                return InvalidRequest(f"{place}: a string or an integer cannot be packed: {why}")
    return InvalidRequest("the tags cannot be packed")


def _check_sizes(maps: Sequence[Mapping[str, object]], parts: Sequence[bytes]) -> None:
    for i, (tags, part) in enumerate(zip(maps, parts, strict=True)):
        place = "the tags" if len(maps) == 1 else f"tags[{i}]"
        if len(tags) > MAX_TAGS:
            raise InvalidRequest(f"{place}: {len(tags)} tags; a key has at most {MAX_TAGS}")
        if len(part) > MAX_TAG_BYTES:
            name, value = max(
                tags.items(),
                key=lambda tag: len(msgpack.packb(tag[1], default=_tag_scalar, strict_types=True)),
            )
            size = len(msgpack.packb(value, default=_tag_scalar, strict_types=True))
            raise InvalidRequest(
                f"{place}: {len(part)} bytes packed, at most {MAX_TAG_BYTES} a key; the largest, "
                f"{name!r}, has {size}; put large data in a field"
            )
