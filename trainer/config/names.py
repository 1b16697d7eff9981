"""Which names settings have: what is unknown, and what was probably meant.

Owns the tree of names, read off the types that validate the values, so that a name is known here
exactly if it is known there. A setting that moved under another section is found by its last name.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel

Path: TypeAlias = tuple[str | int, ...]
"""The way to a setting: names of mappings, places of lists."""


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """The settings of one section."""

    children: Mapping[str, Names | None]
    """None: a value, or plain data whose names are not ours."""
    is_open: bool = False
    """Other names are passed on too."""
    is_list: bool = False
    """These are the settings of each entry of a list."""

    def paths(self) -> Iterator[tuple[str, ...]]:
        """Every setting there is, sections included."""
        for name, child in self.children.items():
            yield (name,)
            if child is not None and not child.is_list:
                yield from ((name, *below) for below in child.paths())


def names_of(kind: Any) -> Names | None:
    """The names of a settings type: a pydantic model or a dataclass, also inside of unions."""
    origin = get_origin(kind)
    if origin is Annotated:
        return names_of(get_args(kind)[0])
    if origin in (Union, types.UnionType):
        found = [names for arg in get_args(kind) if (names := names_of(arg)) is not None]
        return found[0] if found else None
    if origin in (list, tuple):
        inner = names_of(get_args(kind)[0])
        return None if inner is None else dataclasses.replace(inner, is_list=True)
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        return Names(
            {name: names_of(field.annotation) for name, field in kind.model_fields.items()},
            is_open=kind.model_config.get("extra") == "allow",
        )
    known = getattr(kind, "__dataclass_fields__", None)
    if known is not None:
        hints = get_type_hints(kind)
        return Names({name: names_of(hints[name]) for name in known})
    return None


def unknown(data: Mapping[str, Any], names: Names, at: Path = ()) -> Iterator[Path]:
    """The way to every name in the data that is no setting."""
    for name, value in data.items():
        here = (*at, name)
        if name not in names.children:
            if not names.is_open:
                yield here
            continue
        child = names.children[name]
        if child is None:
            continue
        entries: list[tuple[Path, Any]] = [(here, value)]
        if child.is_list and isinstance(value, list):
            entries = [((*here, i), entry) for i, entry in enumerate(cast("list[Any]", value))]
        for place, entry in entries:
            if isinstance(entry, Mapping):
                yield from unknown(cast("Mapping[str, Any]", entry), child, place)


def without(data: Mapping[str, Any], dropped: Sequence[Path]) -> dict[str, Any]:
    """A copy of the data without these."""

    def copied(value: Any, at: Path) -> Any:
        if isinstance(value, Mapping):
            named = cast("Mapping[str, Any]", value).items()
            return {n: copied(v, (*at, n)) for n, v in named if (*at, n) not in gone}
        if isinstance(value, list):
            return [copied(v, (*at, i)) for i, v in enumerate(cast("list[Any]", value))]
        return value

    gone = set(dropped)
    return cast("dict[str, Any]", copied(data, ()))


def dotted(path: Path) -> str:
    """The way as it is written after `--set`.

    Example: ("warmup", 0, "lr") is "warmup.0.lr".
    """
    return ".".join(map(str, path))


def nearest(path: Path, names: Names) -> str | None:
    """The setting that was probably meant by an unknown one; None if none is like it.

    A name of the same section comes first, then the same name in another section, then one that
    resembles it anywhere.

    Example: train.batchsize is near train.batch_size, and checkpoint_interval alone is near
    checkpoint.checkpoint_interval.
    """
    section, place = names, path[:-1]
    for part in place:
        if isinstance(part, int):
            continue
        below = section.children.get(part)
        if below is None:
            section, place = names, ()
            break
        section = below
    asked = str(path[-1])
    if place and f"{place[-1]}_{asked}" in section.children:
        return dotted((*place, f"{place[-1]}_{asked}"))
    close = _closest(asked, list(section.children))
    elsewhere = [way for way in names.paths() if _plain(way[-1]) == _plain(asked)]
    if close is not None and (not elsewhere or _plain(close) == _plain(asked)):
        return dotted((*place, close))
    if elsewhere:
        return ".".join(min(elsewhere, key=len))
    ways = list(names.paths())
    found = _closest(asked, [way[-1] for way in ways])
    return None if found is None else ".".join(next(way for way in ways if way[-1] == found))


def _closest(asked: str, known: Sequence[str]) -> str | None:
    if not known:
        return None
    best = max(known, key=lambda name: _likeness(asked, name))
    return best if _likeness(asked, best) >= 0.6 else None


def _likeness(asked: str, name: str) -> float:
    one, other = _plain(asked), _plain(name)
    words, others = set(asked.lower().split("_")), set(name.lower().split("_"))
    # interval for checkpoint_interval: one has all the words of the other.
    inside = 0.8 if len(one) > 3 and (words <= others or others <= words) else 0.0
    return max(inside, difflib.SequenceMatcher(None, one, other).ratio())


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
