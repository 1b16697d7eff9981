"""Values of msgpack and JSON as trees: every part found, changed, replaced. Pure.

A decoder of such a format is hardly reached by flipping bytes: the first one that is wrong ends it.
So trees are changed as trees, and packed again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgpack

MAX_WAY: Final = 60
"""Steps down into a value that is changed."""

Path = tuple[Any, ...]
_NO_TREE = (ValueError, TypeError, OverflowError, IndexError, KeyError, RecursionError)

ODD: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, 2, -1, 255, 65_536, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40,
    (1 << 63) - 1, (1 << 64) - 1, -(1 << 63), 0.0, -0.0, 0.5, 1e308, float("nan"), float("inf"),
    "", "a", "p", "x" * 300, "\0", "..", "key", "\u2028", b"", b"\0", b"\xff" * 8, b"\x80", [], {},
    [None], [[]], {"": None}, {"a": 1}, {1: 2}, [0] * 20, [1, 2], msgpack.ExtType(1, b""),
    msgpack.ExtType(3, b"\x93\xa5int64\x90\xc4\x08" + bytes(8)), msgpack.Timestamp(1),
)  # fmt: skip
"""What decoders do not expect where something else was."""


def unpacked(data: bytes) -> Any:
    """The value that is packed. An error if it is none."""
    return msgpack.unpackb(data, strict_map_key=False)


def value_in(data: bytes) -> Any:
    """The value that is packed; None if it is none."""
    try:
        return unpacked(data)
    except (ValueError, TypeError, RecursionError):
        return None


def packed(value: Any) -> bytes:
    """The value, packed. An error if it cannot be."""
    return msgpack.packb(value)


def nodes(value: Any) -> Iterator[tuple[Path, Any]]:
    """Every part of a value with the way to it, the whole first; not those that lie very deep."""
    left: list[tuple[Path, Any]] = [((), value)]
    while left:
        path, part = left.pop()
        yield path, part
        if len(path) > MAX_WAY:
            continue
        if isinstance(part, list | tuple) and type(part) is not msgpack.ExtType:
            left += [((*path, i), item) for i, item in enumerate(part)]
        elif isinstance(part, dict):
            left += [((*path, key), item) for key, item in part.items()]


def replaced(value: Any, path: Path, by: Any) -> Any:
    """The value with another part at the end of a way; the rest is shared."""
    if not path:
        return by
    step, *rest = path
    if isinstance(value, dict):
        return {**value, step: replaced(value[step], tuple(rest), by)}
    return [*value[:step], replaced(value[step], tuple(rest), by), *value[step + 1 :]]


def mutated(value: Any, chance: random.Random) -> Any:
    """The value with one to three of its parts changed."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        found = list(nodes(value))
        path, part = chance.choice(found)
        if isinstance(part, bytes) and chance.random() < 0.7:
            by: Any = _bytes(part, chance)
        else:
            by = _other(part, found, chance)
        value = replaced(value, path, by)
    return value


def _other(part: Any, found: list[tuple[Path, Any]], chance: random.Random) -> Any:
    """Something else in the place of a part."""
    how = chance.random()
    if isinstance(part, list | tuple) and part and how < 0.5:
        items = list(part)
        at = chance.randrange(len(items))
        match chance.randrange(5):
            case 0:
                del items[at]
            case 1:
                items.insert(at, items[at])
            case 2:
                other = chance.randrange(len(items))
                items[at], items[other] = items[other], items[at]
            case 3:
                items = items[:at]
            case _:
                items.insert(at, chance.choice(ODD))
        return items
    if isinstance(part, dict) and part and how < 0.5:
        entries = dict(part)
        key = chance.choice(list(entries))
        if chance.random() < 0.5:
            del entries[key]
        else:
            entries[chance.choice(("", "a", "dataplane.lost", 5, b"k", None, "x" * 300))] = entries[
                key
            ]
        return entries
    if type(part) is int and how < 0.6:
        step = chance.choice((-1, 1, 2, -part, part, 256, 1 << 31, -(1 << 31)))
        return max(-(1 << 63), min(part + step, (1 << 64) - 1))
    if type(part) is str and how < 0.4:
        return part + chance.choice(("x", "\n", "é", "", "@2", "_0")) if how < 0.2 else part[:-1]
    if how < 0.8:
        return chance.choice(found)[1]
    return [part] * chance.choice((1, 2, 3)) if how < 0.85 else chance.choice(ODD)


def _bytes(part: bytes, chance: random.Random) -> bytes:
    """Other bytes; what is packed within them is changed as a tree."""
    if chance.random() < 0.6:
        try:
            return packed(mutated(unpacked(part), chance))
        except _NO_TREE:
            pass
    return flipped(part, chance)


def flipped(data: bytes, chance: random.Random) -> bytes:
    """The bytes with a few of them changed, left out or put in."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(6):
            case 0:
                out[at:at] = chance.randbytes(chance.choice((1, 2, 4, 8)))
            case 1:
                del out[at : at + chance.choice((1, 2, 4, 8, 16))]
            case 2:
                out[at : at + 4] = chance.choice((0, 1, 0xFF, 1 << 31, (1 << 32) - 1)).to_bytes(
                    4, "little"
                )
            case 3:
                del out[at:]
            case _:
                if at < len(out):
                    out[at] ^= 1 << chance.randrange(8)
    return bytes(out)


def by_trees(
    unpack: Callable[[bytes], Any] = unpacked, pack: Callable[[Any], bytes] = packed
) -> Callable[[bytes, random.Random], bytes]:
    """A mutation of inputs that are one packed value; of any that is none, its bytes."""

    def mutate(data: bytes, chance: random.Random) -> bytes:
        if chance.random() < 0.8:
            try:
                return pack(mutated(unpack(data), chance))
            except _NO_TREE:
                pass
        return flipped(data, chance)

    return mutate


def planted(
    unpack: Callable[[bytes], Any] = unpacked, pack: Callable[[Any], bytes] = packed
) -> Callable[[bytes, bytes], Iterator[bytes]]:
    """What puts some bytes in the place of each part of inputs that are one packed value."""

    def plant(data: bytes, payload: bytes) -> Iterator[bytes]:
        try:
            value = unpack(data)
        except Exception:  # a seed that lies
            return
        for path, part in nodes(value):
            if isinstance(part, list | dict) and path:
                continue
            for by in (payload, msgpack.ExtType(1, payload)):
                try:
                    yield pack(replaced(value, path, by))
                except _NO_TREE:
                    continue

    return plant
