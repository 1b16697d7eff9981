"""`where` as data: which rows a listing, a wait, a claim or a clear is about.

Owns the grammar, its limits and its meaning. Never touches rows, never evaluates text, does no
I/O. Equal predicates have equal `canonical` bytes, and those bytes are themselves a `where`.

    where    = None | {} | {entry, ...}                every entry is required
    entry    = tag: operand                            the same as {"=": operand}
             | tag: {operator: operand, ...}           every operator is required
             | "and": [where, ...] | "or": [where, ...] | "not": where
    operator = "=" "!=" "<" "<=" ">" ">=" "in" "exists"

Example: finished rows of step 5 or later, of two prompts.

    {"status": "finished", "global_steps": {">=": 5}, "uid": {"in": ["u1", "u2"]}}

What it means:
- A tag that is absent is not `=` to anything (not even None), not in any list and in no order;
  so `!=`, which is exactly "not =", holds for it. `exists` asks for presence: a tag that is there
  with the value None exists.
- Kinds are null, bool, number, string and list. Values of different kinds are unequal and in no
  order; that is never an error. True is not 1; 1 is 1.0. NaN equals nothing, itself included.
- `<` and its siblings order numbers by size and strings by code point. They take nothing else.
- A tag whose value is a map can be asked for with `exists` only.
- A tag named `and`, `or` or `not` cannot be queried: the names are taken.
- `in` with an empty list holds nowhere; an `and` or `or` with an empty list is refused, because
  a clear would take the empty `and` for everything.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeGuard, cast

import msgpack
import numpy as np

from dataplane.errors import InvalidRequest, quote
from dataplane.types import Scalar, TagValue

Where: TypeAlias = Mapping[str, object] | None
Match: TypeAlias = Callable[[Mapping[str, TagValue]], bool]

MAX_DEPTH = 16
"""Wheres inside wheres, and lists inside lists of one operand."""
MAX_TERMS = 1_000
"""Comparisons in the whole of one where."""
MAX_ITEMS = 65_536
"""Items in one list operand."""

OPERATORS = ("=", "!=", "<", "<=", ">", ">=", "in", "exists")
COMBINATORS = ("and", "or", "not")

_ORDERS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ABSENT: Final = object()

_Path: TypeAlias = tuple[str | int, ...]
"""Where in the where a fault is: combinators and tags by name, list places by number."""


class Predicate:
    """A compiled `where`: call it with a row's tags.

    `match` is the bare function behind the call; a loop over many rows binds it once.
    """

    __slots__ = ("_canonical", "_node", "match", "matches_all", "terms")

    def __init__(self, node: _Node) -> None:
        self._node = node
        self._canonical: bytes | None = None
        self.match: Match = _compile(node)
        self.matches_all: bool = node == _TRUE
        """It holds for every row whatever its tags, as None and {} do."""
        self.terms: tuple[tuple[str, Scalar], ...] = _terms(node)
        """Equalities that every matching row satisfies. True and 1 are equal to Python, so an
        index by these finds candidates, which `match` then confirms."""

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


def compile_where(where: Where) -> Predicate:
    """The predicate that `where` describes. InvalidRequest names the place that is wrong."""
    return Predicate(_Parser().where(where, (), 1))


class _Members(NamedTuple):
    """The list of an `in`, by how its items are compared."""

    scalars: frozenset[Scalar]
    """All but bools and NaN. A set finds True where 1 is, so bools stay apart."""
    bools: frozenset[bool]
    lists: Mapping[object, list[TagValue]]
    """By their `_frozen` form, so that a row costs one look-up here too."""


class _Leaf(NamedTuple):
    tag: str
    op: str
    """`=`, an order, `in` or `exists`; `!=` is a `not` around `=`."""
    operand: TagValue | _Members


class _Branch(NamedTuple):
    op: str
    parts: tuple[_Node, ...]


_Node: TypeAlias = _Leaf | _Branch

_TRUE: Final = _Branch("and", ())
_FALSE: Final = _Branch("or", ())


def _join(op: str, parts: Iterable[_Node]) -> _Node:
    """The parts under `and` or `or`: flat, without those that decide nothing."""
    neutral, decisive = (_TRUE, _FALSE) if op == "and" else (_FALSE, _TRUE)
    kept: list[_Node] = []
    for part in parts:
        if part == decisive:
            return decisive
        if isinstance(part, _Branch) and part.op == op:
            kept += part.parts
        elif part != neutral:
            kept.append(part)
    return kept[0] if len(kept) == 1 else _Branch(op, tuple(kept))


def _negate(node: _Node) -> _Node:
    if node == _TRUE:
        return _FALSE
    if node == _FALSE:
        return _TRUE
    if isinstance(node, _Branch) and node.op == "not":
        return node.parts[0]
    return _Branch("not", (node,))


def _pack(node: _Node) -> bytes:
    return msgpack.packb(_plain(node))


def _plain(node: _Node) -> dict[str, object]:
    """The where that parses to this node again; a mapping with at most one entry."""
    if isinstance(node, _Leaf):
        if not isinstance(node.operand, _Members):
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


def _terms(node: _Node) -> tuple[tuple[str, Scalar], ...]:
    parts = node.parts if isinstance(node, _Branch) and node.op == "and" else (node,)
    found: dict[bytes, tuple[str, Scalar]] = {}
    for part in parts:
        if isinstance(part, _Leaf) and part.op == "=" and not isinstance(part.operand, list):
            found[_pack(part)] = (part.tag, cast("Scalar", part.operand))
    return tuple(found.values())


class _Parser:
    """One reading of one where; counts its terms."""

    def __init__(self) -> None:
        self.terms = 0

    def where(self, where: object, path: _Path, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise _fault(path, f"nested deeper than {MAX_DEPTH}")
        if where is None:
            self._count(path)
            return _TRUE
        if not _is_mapping(where):
            raise _fault(path, f"a mapping of tags is due, not {_kind(where)}")
        if not where:
            self._count(path)
        parts: list[_Node] = []
        for name, operand in where.items():
            if not isinstance(name, str):
                raise _fault(path, f"a tag name is a string, not {_kind(name)}")
            here = (*path, name)
            if name == "not":
                parts.append(_negate(self.where(operand, here, depth + 1)))
            elif name in COMBINATORS:
                parts.append(self._combination(name, operand, here, depth))
            else:
                parts.append(self._entry(name, operand, here))
        return _join("and", parts)

    def _combination(self, op: str, operand: object, path: _Path, depth: int) -> _Node:
        if not _is_sequence(operand):
            raise _fault(path, f"a list of wheres is due, not {_kind(operand)}")
        if not operand:
            raise _fault(path, "at least one where is due")
        parts = [self.where(part, (*path, i), depth + 1) for i, part in enumerate(operand)]
        return _join(op, parts)

    def _entry(self, tag: str, operand: object, path: _Path) -> _Node:
        _check_text(tag, path)
        if not _is_mapping(operand):
            self._count(path)
            return _equality(tag, operand, path)
        if not operand:
            raise _fault(path, f"no operator given; one of {' '.join(OPERATORS)}")
        parts: list[_Node] = []
        for op, value in operand.items():
            self._count(path)
            if op == "=":
                parts.append(_equality(tag, value, path))
            elif op == "!=":
                parts.append(_negate(_equality(tag, value, path)))
            elif op == "in":
                parts.append(_membership(tag, value, path))
            elif op == "exists":
                if not isinstance(value, bool):
                    raise _fault(path, f"'exists' takes true or false, not {_kind(value)}")
                exists = _Leaf(tag, "exists", True)
                parts.append(exists if value else _negate(exists))
            elif isinstance(op, str) and op in _ORDERS:
                parts.append(_order(tag, op, value, path))
            else:
                raise _fault(path, f"unknown operator {quote([op])}; one of {' '.join(OPERATORS)}")
        return _join("and", parts)

    def _count(self, path: _Path) -> None:
        self.terms += 1
        if self.terms > MAX_TERMS:
            raise _fault(path, f"more than {MAX_TERMS} comparisons in one where")


def _equality(tag: str, operand: object, path: _Path) -> _Node:
    value = _value(operand, path, "'='")
    return _FALSE if _holds_nan(value) else _Leaf(tag, "=", value)


def _order(tag: str, op: str, operand: object, path: _Path) -> _Node:
    value = _value(operand, path, f"'{op}'")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _fault(path, f"'{op}' takes a number or a string, not {_kind(operand)}")
    return _FALSE if _holds_nan(value) else _Leaf(tag, op, value)


def _membership(tag: str, operand: object, path: _Path) -> _Node:
    if not _is_sequence(operand) and not isinstance(operand, (set, frozenset)):
        raise _fault(path, f"'in' takes a list, not {_kind(operand)}")
    items = cast("Sequence[object] | set[object]", operand)
    if len(items) > MAX_ITEMS:
        raise _fault(path, f"'in' takes at most {MAX_ITEMS} items, not {len(items)}")
    scalars: set[Scalar] = set()
    bools: set[bool] = set()
    lists: dict[object, list[TagValue]] = {}
    # The common long lists, uids and versions, are checked at C speed.
    kinds = set(map(type, items))
    if kinds == {str}:
        texts = cast("Iterable[str]", items)
        scalars.update(texts)
        _check_text("".join(texts), path)
    elif kinds == {int}:
        numbers = cast("Iterable[int]", items)
        scalars.update(numbers)
        _value([min(numbers), max(numbers)], path, "'in'")
    else:
        for item in items:
            value = _value(item, path, "'in'")
            if isinstance(value, bool):
                bools.add(value)
            elif isinstance(value, list):
                if not _holds_nan(value):
                    lists[_frozen(value)] = value
            elif not _holds_nan(value):
                scalars.add(cast("Scalar", value))
    distinct: list[TagValue] = [*scalars, *bools, *lists.values()]
    if not distinct:
        return _FALSE
    if len(distinct) == 1:
        return _Leaf(tag, "=", distinct[0])
    return _Leaf(tag, "in", _Members(frozenset(scalars), frozenset(bools), lists))


def _value(operand: object, path: _Path, what: str, depth: int = 1) -> TagValue:
    """The operand as tags hold values, in normal form: exact types, 1 for 1.0, lists."""
    if isinstance(operand, np.generic):
        operand = cast("object", operand.item())
    if operand is None or isinstance(operand, bool):
        return operand
    if isinstance(operand, str):
        _check_text(operand, path)
        return str(operand)
    if isinstance(operand, int):
        if not -(1 << 63) <= operand < 1 << 64:
            raise _fault(path, "an integer is out of the range of 64 bits")
        return int(operand)
    if isinstance(operand, float):
        # One spelling of equal numbers, as long as both are exact.
        return int(operand) if operand.is_integer() and abs(operand) < 1 << 53 else float(operand)
    if _is_sequence(operand):
        if depth > MAX_DEPTH:
            raise _fault(path, f"lists nested deeper than {MAX_DEPTH}")
        if len(operand) > MAX_ITEMS:
            raise _fault(path, f"a list has at most {MAX_ITEMS} items, not {len(operand)}")
        return [_value(item, path, what, depth + 1) for item in operand]
    raise _fault(path, f"{what} compares scalars and lists, not {_kind(operand)}")


def _holds_nan(value: TagValue) -> bool:
    if isinstance(value, list):
        return any(_holds_nan(item) for item in value)
    return isinstance(value, float) and math.isnan(value)


def _is_mapping(value: object) -> TypeGuard[Mapping[object, object]]:
    return isinstance(value, Mapping)


def _is_sequence(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, (list, tuple))


def _check_text(text: str, path: _Path) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _fault(path, "a string is not valid Unicode (a lone surrogate)") from None


def _kind(value: object) -> str:
    return type(value).__name__


def _fault(path: _Path, problem: str) -> InvalidRequest:
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += ("." if text else "") + (step if step in COMBINATORS else quote([step]))
    return InvalidRequest(f"where: at {text}: {problem}" if text else f"where: {problem}")


# Each node becomes one closure with everything it needs bound, so that a row costs a dict look-up
# and one comparison per term. Stored tags have exact types (the store converts), hence the checks
# by class where isinstance would take bool for int.


def _compile(node: _Node) -> Match:
    if isinstance(node, _Branch):
        return _compile_branch(node)
    if node.op == "exists":
        tag = node.tag
        return lambda tags: tag in tags
    if node.op == "in":
        return _compile_members(node.tag, cast("_Members", node.operand))
    operand = cast("TagValue", node.operand)
    if node.op == "=":
        return _compile_equality(node.tag, operand)
    return _compile_order(node.tag, _ORDERS[node.op], operand)


def _compile_branch(node: _Branch) -> Match:
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
    frozen = _frozen(operand)

    def same_list(tags: Mapping[str, TagValue]) -> bool:
        value = tags.get(tag)
        return value.__class__ is list and _frozen(value) == frozen

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


def _compile_members(tag: str, members: _Members) -> Match:
    scalars, bools, lists = members

    def member(tags: Mapping[str, TagValue]) -> bool:
        value = tags.get(tag, _ABSENT)
        kind = value.__class__
        if kind is bool:
            return value in bools
        if kind is list:
            return _frozen(value) in lists
        return kind is not dict and value in scalars

    return member


def _frozen(value: object, depth: int = 1) -> object:
    """A hashable stand-in for a list: equal stand-ins are lists equal by kind all the way down.

    Python's own comparison says [True] == [1]. What no operand can hold, a map or deeper nesting,
    is equal to nothing.
    """
    if isinstance(value, bool):
        return (bool, value)
    if isinstance(value, list):
        if depth > MAX_DEPTH:
            return _ABSENT
        return tuple([_frozen(item, depth + 1) for item in cast("list[object]", value)])
    return _ABSENT if isinstance(value, dict) else value
