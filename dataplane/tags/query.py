"""A `where` at work: compiled for rows, in its one canonical spelling, with what an index can use.

Owns what each comparison says of a row's tags; how a `where` is read is for where.py. Equal
predicates have equal `canonical` bytes, and those bytes are themselves a `where`. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias, cast

import msgpack

from dataplane.tags.where import (
    ORDERS,
    TRUE,
    Branch,
    Leaf,
    Members,
    Node,
    Where,
    frozen,
    parse_where,
)
from dataplane.types import Scalar, TagValue

Match: TypeAlias = Callable[[Mapping[str, TagValue]], bool]

_ABSENT: Final = object()


class Predicate:
    """A compiled `where`: call it with a row's tags.

    `match` is the bare function behind the call; a loop over many rows binds it once.
    """

    __slots__ = ("_canonical", "_node", "_terms", "match", "matches_all")

    def __init__(self, node: Node) -> None:
        self._node = node
        self._canonical: bytes | None = None
        self.match: Match = _compile(node)
        self.matches_all: bool = node == TRUE
        """It holds for every row whatever its tags, as None and {} do."""
        self._terms: tuple[tuple[str, Scalar], ...] | None = None

    def __call__(self, tags: Mapping[str, TagValue]) -> bool:
        return self.match(tags)

    @property
    def canonical(self) -> bytes:
        """The msgpack bytes of the where in normal form: a where again, with the same bytes.

        The order of entries, repetitions, nesting of the same combinator, spelling of equality
        and 1.0 for 1 make no difference. Made at the first use and kept.
        """
        if self._canonical is None:
            self._canonical = _pack(self._node)
        return self._canonical

    def names(self, tag: str) -> bool:
        """Whether the where is about this tag among others."""
        return _names(self._node, tag)

    @property
    def terms(self) -> tuple[tuple[str, Scalar], ...]:
        """Equalities that every matching row satisfies. True and 1 are equal to Python, so an
        index by these finds candidates, which `match` then confirms.

        Taken from the normal form, so that equal predicates have equal terms. Made at the first
        use and kept.
        """
        if self._terms is None:
            self._terms = _terms(parse_where(msgpack.unpackb(self.canonical)))
        return self._terms


def compile_where(where: Where) -> Predicate:
    """The predicate that `where` describes. InvalidRequest names the place that is wrong."""
    return Predicate(parse_where(where))


def _names(node: Node, tag: str) -> bool:
    if isinstance(node, Leaf):
        return node.tag == tag
    return any(_names(part, tag) for part in node.parts)


def _pack(node: Node) -> bytes:
    return msgpack.packb(_plain(node))


def _plain(node: Node) -> dict[str, object]:
    """The where that parses to this node again; a mapping with at most one entry."""
    if isinstance(node, Leaf):
        if not isinstance(node.operand, Members):
            return {node.tag: {node.op: node.operand}}
        scalars, bools, lists = node.operand
        return {node.tag: {"in": _sorted([*scalars, *bools, *lists.values()])}}
    if not node.parts:
        return {} if node.op == "and" else {"not": {}}
    # Parts that turn out equal melt into one, which may leave a part that nests like its parent.
    parts: list[object] = []
    for part in map(_plain, node.parts):
        if node.op == "not":
            return cast("dict[str, object]", part["not"]) if "not" in part else {"not": part}
        parts += cast("list[object]", part[node.op]) if node.op in part else [part]
    parts = _sorted(parts)
    return {node.op: parts} if len(parts) > 1 else cast("dict[str, object]", parts[0])


def _sorted(items: Iterable[object]) -> list[object]:
    """Distinct items in one fixed order: that of their msgpack bytes."""
    packed: dict[bytes, object] = {msgpack.packb(item): item for item in items}
    return [packed[key] for key in sorted(packed)]


def _terms(node: Node) -> tuple[tuple[str, Scalar], ...]:
    parts = node.parts if isinstance(node, Branch) and node.op == "and" else (node,)
    found: dict[bytes, tuple[str, Scalar]] = {}
    for part in parts:
        if isinstance(part, Leaf) and part.op == "=" and not isinstance(part.operand, list):
            found[_pack(part)] = (part.tag, cast("Scalar", part.operand))
    return tuple(found.values())


# Each node becomes one closure with everything it needs bound, so that a row costs a dict look-up
# and one comparison per term. Stored tags have exact types (the store converts), hence the checks
# by class where isinstance would take bool for int.


def _compile(node: Node) -> Match:
    if isinstance(node, Branch):
        return _compile_branch(node)
    if node.op == "exists":
        tag = node.tag
        return lambda tags: tag in tags
    if node.op == "in":
        return _compile_members(node.tag, cast("Members", node.operand))
    operand = cast("TagValue", node.operand)
    if node.op == "=":
        return _compile_equality(node.tag, operand)
    return _compile_order(node.tag, ORDERS[node.op], operand)


def _compile_branch(node: Branch) -> Match:
    matches = tuple(_compile(part) for part in node.parts)
    if node.op == "not":
        (inner,) = matches
        return lambda tags: not inner(tags)
    if not matches:
        outcome = node.op == "and"
        return lambda tags: outcome
    if len(matches) == 2:
        first, second = matches
        if node.op == "and":
            return lambda tags: first(tags) and second(tags)
        return lambda tags: first(tags) or second(tags)
    found = node.op == "or"

    def search(tags: Mapping[str, TagValue]) -> bool:
        for match in matches:
            if match(tags) is found:
                return found
        return not found

    return search


def _compile_equality(tag: str, operand: TagValue) -> Match:
    if operand is None:
        return lambda tags: tags.get(tag, _ABSENT) is None
    if isinstance(operand, bool):
        return lambda tags: tags.get(tag) is operand
    if isinstance(operand, str):
        return lambda tags: tags.get(tag) == operand
    if isinstance(operand, (int, float)):

        def number(tags: Mapping[str, TagValue]) -> bool:
            value = tags.get(tag)
            return value == operand and value.__class__ is not bool

        return number
    wanted = frozen(operand)

    def same_list(tags: Mapping[str, TagValue]) -> bool:
        value = tags.get(tag)
        return value.__class__ is list and frozen(value) == wanted

    return same_list


def _compile_order(tag: str, compare: Callable[[Any, Any], bool], operand: TagValue) -> Match:
    if isinstance(operand, str):

        def text(tags: Mapping[str, TagValue]) -> bool:
            value = tags.get(tag)
            return value.__class__ is str and compare(value, operand)

        return text

    def number(tags: Mapping[str, TagValue]) -> bool:
        value = tags.get(tag)
        kind = value.__class__
        return (kind is int or kind is float) and compare(value, operand)

    return number


def _compile_members(tag: str, members: Members) -> Match:
    scalars, bools, lists = members

    def member(tags: Mapping[str, TagValue]) -> bool:
        value = tags.get(tag, _ABSENT)
        kind = value.__class__
        if kind is bool:
            return value in bools
        if kind is list:
            return frozen(value) in lists
        return kind is not dict and value in scalars

    return member
