"""A `where` taken apart: what it requires of a row, one requirement at a time and in words. Pure.

Every part of its outermost `and` is one requirement; each holds or fails on its own. Words are
short, one line each, and made to be read: they are no `where` any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

from dataplane.tags.explain.wording import ITEMS, named, short, shown
from dataplane.tags.query import Match, Predicate, compile_where

NOTHING = "nothing (it holds for no row)"


class Requirement(NamedTuple):
    """One of the things that a row has to fulfil."""

    text: str
    match: Match
    tags: frozenset[str]
    """The tags that it looks at."""


def requirements(predicate: Predicate) -> list[Requirement]:
    """What a predicate requires, in the order of its canonical spelling; none if it takes all.

    Example: {"status": "finished", "step": {">=": 5}} are `status = 'finished'` and `step >= 5`.
    """
    where: dict[str, Any] = msgpack.unpackb(predicate.canonical)
    if not where:
        return []
    found: dict[str, Requirement] = {}
    for part in where.get("and", [where]):
        text = short(words(part))
        if text in found:
            text = f"{text} ({len(found) + 1})"  # they differ in what was cut off
        found[text] = Requirement(text, compile_where(part).match, frozenset(_tags(part)))
    return list(found.values())


def words(where: Mapping[str, Any]) -> str:
    """A canonical where in words."""
    if not where:
        return "anything"
    [(name, operand)] = where.items()
    if name == "not":
        return _denied(operand)
    if name in ("and", "or"):
        return _joined(name, operand)
    [(op, value)] = operand.items()
    if op == "exists":
        return f"{named(name)} exists"
    return f"{named(name)} {op} {shown(value)}"


def _denied(where: Mapping[str, Any]) -> str:
    if not where:
        return NOTHING
    [(name, operand)] = where.items()
    if name not in ("and", "or"):
        [(op, value)] = operand.items()
        if op == "=":
            return f"{named(name)} != {shown(value)}"
        if op == "exists":
            return f"{named(name)} is absent"
    return f"not ({words(where)})"


def _joined(op: str, parts: Sequence[Mapping[str, Any]]) -> str:
    texts = [
        f"({words(part)})" if "and" in part or "or" in part else words(part)
        for part in parts[:ITEMS]
    ]
    if len(parts) > ITEMS:
        texts.append(f"{len(parts) - ITEMS} more")
    return f" {op} ".join(texts)


def _tags(where: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for name, operand in where.items():
        if name == "not":
            found |= _tags(operand)
        elif name in ("and", "or"):
            for part in operand:
                found |= _tags(part)
        else:
            found.add(name)
    return found
