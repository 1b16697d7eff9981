"""The tags of keys as msgpack, as they travel and as they are counted.

Owns which tags are allowed and their limits, for clients and for the server that checks them
again. Never pickles; imports no torch, though a scalar of torch is a tag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import methodcaller
from typing import TYPE_CHECKING, Final, cast

import msgpack
import numpy as np

from dataplane.codec.objects import ValuePath, check_depth, is_tensor, place
from dataplane.errors import InvalidRequest
from dataplane.types import Tags

if TYPE_CHECKING:
    import torch

MAX_TAGS: Final = 1024
MAX_TAG_NAME_BYTES: Final = 256
MAX_TAG_BYTES: Final = 64 * 1024
"""Packed tags of one key."""

_SHORT_NAME: Final = MAX_TAG_NAME_BYTES // 4
"""Characters of a name that is short enough however they are encoded."""
_TAG_LEAVES: Final = frozenset({type(None), bool, int, float, str})
_TAG_SCALARS: Final = _TAG_LEAVES | {
    *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.float16, np.float32, np.float64),
}


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
            if type(name) is not str or len(name) > _SHORT_NAME:
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


def as_stored(tags: Sequence[Mapping[str, object]], packed: bytes) -> list[Tags]:
    """The tags as a listing would bring them, from what `pack_tags` (or `_many`) was given and
    made; the maps belong to the caller."""
    values: Iterable[object] = chain.from_iterable(map(_VALUES, tags))
    if set(map(type, values)) <= _TAG_LEAVES:
        return [dict(cast("Tags", each)) for each in tags]
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=len(packed))
    unpacker.feed(packed)
    return [cast("Tags", unpacker.unpack()) for _ in tags]


_VALUES: Final = methodcaller("values")


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


def _as_dict(tags: object, i: int) -> dict[str, object]:
    if not isinstance(tags, Mapping):
        raise InvalidRequest(
            f"tags[{i}]: the tags of a key are a mapping, not a {type(tags).__name__}"
        )
    return dict(cast("Mapping[str, object]", tags))


def _is_tag_name(name: object) -> bool:
    if type(name) is not str:
        return False
    return len(name) <= _SHORT_NAME or len(name.encode(errors="replace")) <= MAX_TAG_NAME_BYTES


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


def _check_tag(value: object, path: ValuePath, depth: int) -> None:
    kind = type(value)
    if kind is list or kind is tuple:
        items = cast("Sequence[object]", value)
        check_depth(depth)
        if not _TAG_LEAVES.issuperset(map(type, items)):
            for i, item in enumerate(items):
                _check_tag(item, (path, i), depth + 1)
    elif kind is dict:
        map_ = cast("dict[object, object]", value)
        check_depth(depth)
        for key, item in map_.items():
            if type(key) is not str:
                raise InvalidRequest(f"{place(path)}: the keys of a map are strings, not {key!r}")
            _check_tag(item, (path, key), depth + 1)
    elif kind not in _TAG_LEAVES:
        try:
            _tag_scalar(value)
        except TypeError:
            raise InvalidRequest(
                f"{place(path)}: a {kind.__name__} cannot be a tag; tags are None, bool, int, "
                "float, str, lists and string-keyed maps of those, and numpy or torch scalars"
            ) from None


def _tag_scalar(value: object) -> object:
    """The Python value that stands for a tag that msgpack does not know. TypeError if none."""
    if type(value) is tuple:
        return list(cast("tuple[object, ...]", value))
    if isinstance(value, np.generic) or (type(value) is np.ndarray and not value.shape):
        item: object = cast("np.generic", value).item()
    elif is_tensor(value) and not cast("torch.Tensor", value).shape:
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
