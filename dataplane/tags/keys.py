"""What a key, a partition name and the tags of a put may look like. Pure.

Keys are never parsed and never become paths here, but they end in file names of exports, in shells
and in terminals of operators; so control characters and `..` components are refused at the door.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgpack

from dataplane.codec.tags import MAX_TAG_BYTES, MAX_TAG_NAME_BYTES
from dataplane.errors import InvalidRequest, quote
from dataplane.fields import PLANE_TAGS, RESERVED
from dataplane.types import Tags

MAX_KEY_BYTES = 1024
MAX_KEYS = 65_536

MAX_TAG_DEPTH = 256
"""Lists and maps inside each other in one key's tags; msgpack unpacks more than it packs."""

MAX_SAVED_TAG_BYTES = 1 << 20
"""Packed tags of one key with what the plane itself says of it: a row may have lost many fields."""

MAX_GOOD_NAMES = 4096
_GOOD_NAMES: set[str] = set()
"""Tag names that passed their check before; a plane has few."""


def _no_extension(code: int, data: bytes) -> object:
    raise ValueError(f"an extension type ({code}) is no tag")


_PLAIN: dict[str, Any] = {
    "strict_map_key": True, "max_bin_len": 0, "max_ext_len": 0, "ext_hook": _no_extension,
}  # fmt: skip
"""Unpack null, bool, numbers, strings, lists and maps, and nothing else that msgpack knows."""


def check_keys(keys: list[str], *, unique: bool = True) -> list[str]:
    """The keys of a request. InvalidRequest names the first few that will not do."""
    if type(keys) is not list:
        raise InvalidRequest(f"keys are a list of strings, not {type(keys).__name__}")
    if len(keys) > MAX_KEYS:
        raise InvalidRequest(
            f"{len(keys)} keys in one request; at most {MAX_KEYS} are taken: split it"
        )
    if not keys:
        return []
    if set(map(type, keys)) != {str}:
        wrong = next(key for key in keys if type(key) is not str)
        raise InvalidRequest(f"a key is a string, not {type(wrong).__name__}: {wrong!r:.80}")
    if len(keys) == 1:
        check_name(keys[0], "key")
        return keys
    if unique and len(set(keys)) != len(keys):
        seen: set[str] = set()
        twice = sorted({key for key in keys if key in seen or seen.add(key)})
        raise InvalidRequest(f"a put names each key once; repeated: {quote(twice)}")
    # One pass over all of them in C settles the usual case.
    lengths = list(map(len, keys))
    text = "".join(keys)
    if (
        min(lengths) == 0
        or max(lengths) > MAX_KEY_BYTES // 4
        or not text.isprintable()
        or (".." in text)
    ):
        for key in keys:
            check_name(key, "key")
    return keys


def check_name(name: object, what: str) -> str:
    """The name of a key or partition. InvalidRequest says what is wrong with it."""
    if type(name) is not str:
        raise InvalidRequest(f"a {what} is a string, not {type(name).__name__}")
    if 0 < len(name) <= MAX_KEY_BYTES // 4 and name.isprintable() and ".." not in name:
        return name
    if not name:
        raise InvalidRequest(f"the empty string is no {what}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"the {what} {quote([name])} is not valid Unicode") from None
    if size > MAX_KEY_BYTES:
        raise InvalidRequest(
            f"the {what} {quote([name])} has {size} bytes; at most {MAX_KEY_BYTES} are taken"
        )
    if any(ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u2028\u2029" for c in name):
        raise InvalidRequest(f"the {what} {quote([name])} has control characters")
    if ".." in name and ".." in name.replace("\\", "/").split("/"):
        raise InvalidRequest(f"the {what} {quote([name])} has a '..' path component")
    return name


def unpack_tags(
    packed: bytes | memoryview, keys: Sequence[str], *, saved: bool = False
) -> tuple[list[Tags], list[int]]:
    """The tags of each key from concatenated msgpack maps, and their packed sizes. With `saved`
    they are those of rows as they were, which may have tags of the plane's own.

    InvalidRequest names the key whose tags will not do.
    """
    if len(keys) == 1 and not saved:
        return _unpack_one(packed, keys[0])
    unpacker = msgpack.Unpacker(**_PLAIN, max_buffer_size=max(len(packed), 1))
    unpacker.feed(packed)
    unpack, tell = unpacker.unpack, unpacker.tell
    tags: list[Tags] = []
    sizes: list[int] = []
    at = 0
    try:
        for _ in keys:
            tags.append(unpack())
            now = tell()
            sizes.append(now - at)
            at = now
    except Exception as error:
        raise InvalidRequest(
            f"the tags of key {quote([keys[len(tags)]])} are no msgpack of plain values: {error}"
        ) from None
    if at != len(packed):
        raise InvalidRequest(f"tags for more than the {len(keys)} keys of the put")
    if keys and set(map(type, tags)) != {dict}:
        wrong = next(key for key, tag in zip(keys, tags, strict=True) if type(tag) is not dict)
        raise InvalidRequest(f"the tags of key {quote([wrong])} are not a mapping")
    limit = MAX_SAVED_TAG_BYTES if saved else MAX_TAG_BYTES
    if sizes and max(sizes) > limit:
        large = sizes.index(max(sizes))
        raise InvalidRequest(
            f"the tags of key {quote([keys[large]])} take {sizes[large]} bytes; at most "
            f"{limit} are kept: store what is large as a field"
        )
    names = set[str]().union(*tags)
    if saved and not names.isdisjoint(PLANE_TAGS):
        _check_plane_tags(tags, keys)
        names -= PLANE_TAGS.keys()
    _check_tag_names(names, tags, keys)
    if sizes and max(sizes) > MAX_TAG_DEPTH:  # every list and map takes a byte at least
        _check_depth(tags, keys)
    return tags, sizes


def _unpack_one(packed: bytes | memoryview, key: str) -> tuple[list[Tags], list[int]]:
    """As above for a single put, which is worth a path of its own."""
    try:
        tags = msgpack.unpackb(packed, **_PLAIN)
    except Exception as error:
        raise InvalidRequest(
            f"the tags of key {quote([key])} are no msgpack of plain values: {error}"
        ) from None
    if type(tags) is not dict:
        raise InvalidRequest(f"the tags of key {quote([key])} are not a mapping")
    if len(packed) > MAX_TAG_BYTES:
        raise InvalidRequest(
            f"the tags of key {quote([key])} take {len(packed)} bytes; at most "
            f"{MAX_TAG_BYTES} are kept: store what is large as a field"
        )
    both = [cast("Tags", tags)]
    _check_tag_names(both[0], both, [key])
    if len(packed) > MAX_TAG_DEPTH:
        _check_depth(both, [key])
    return both, [len(packed)]


def _check_depth(tags: Sequence[Tags], keys: Sequence[str]) -> None:
    for key, of in zip(keys, tags, strict=True):
        inner: list[Any] = [of]
        for _ in range(MAX_TAG_DEPTH):
            deeper: list[Any] = []
            for outer in inner:
                values = cast("Iterable[Any]", outer.values() if type(outer) is dict else outer)
                deeper += [value for value in values if type(value) in (dict, list)]
            if not deeper:
                break
            inner = deeper
        else:
            raise InvalidRequest(
                f"the tags of key {quote([key])} are lists and maps more than {MAX_TAG_DEPTH} deep"
            )


def _check_plane_tags(tags: Sequence[Tags], keys: Sequence[str]) -> None:
    """What the plane is to have said of rows is what it says."""
    for key, of in zip(keys, tags, strict=True):
        for name, tag in PLANE_TAGS.items():
            value: Any = of.get(name)
            if name in of and not (
                type(value).__name__ == tag.type
                and (type(value) is not list or set(map(type, cast("Any", value))) == {str})
            ):
                raise InvalidRequest(
                    f"the tag {name!r} of key {quote([key])} is no {tag.type} as the plane has it: "
                    f"{value!r:.80}"
                )


def _check_tag_names(names: Iterable[str], tags: Sequence[Tags], keys: Sequence[str]) -> None:
    for name in names:
        if name in _GOOD_NAMES:
            continue
        if (
            type(name) is not str
            or not 0 < len(name.encode("utf-8", "replace")) <= MAX_TAG_NAME_BYTES
            or not name.isprintable()
        ):
            key = next(key for key, of in zip(keys, tags, strict=True) if name in of)
            raise InvalidRequest(
                f"a tag name is a printable string of 1 to {MAX_TAG_NAME_BYTES} bytes, "
                f"not {name!r:.80} as of key {quote([key])}"
            )
        if name.startswith(RESERVED):
            key = next(key for key, of in zip(keys, tags, strict=True) if name in of)
            raise InvalidRequest(
                f"tags whose names begin with {RESERVED!r} are the plane's own, and key "
                f"{quote([key])} brings {name!r:.80}: leave it out, or name it otherwise"
            )
        if len(_GOOD_NAMES) < MAX_GOOD_NAMES:
            _GOOD_NAMES.add(name)
