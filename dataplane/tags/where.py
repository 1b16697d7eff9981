"""`where` as data: which rows a listing, a wait, a claim or a clear is about.

Owns the grammar, its limits and its meaning; the outcome is a tree of comparisons, which query.py
compiles. Never touches rows, never evaluates text, does no I/O.

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

import numpy as np

from dataplane.errors import InvalidRequest, quote
from dataplane.types import Scalar, TagValue

Where: TypeAlias = Mapping[str, object] | None

MAX_DEPTH = 16
"""Wheres inside wheres, and lists inside lists of one operand."""
MAX_TERMS = 1_000
"""Comparisons in the whole of one where."""
MAX_ITEMS = 65_536
"""Items in one list operand."""

OPERATORS = ("=", "!=", "<", "<=", ">", ">=", "in", "exists")
COMBINATORS = ("and", "or", "not")

ORDERS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

_Path: TypeAlias = tuple[str | int, ...]
"""Where in the where a fault is: combinators and tags by name, list places by number."""

_UNEQUAL: Final = object()
"""Stands for what no operand can hold."""


class Members(NamedTuple):
    """The list of an `in`, by how its items are compared."""

    scalars: frozenset[Scalar]
    """All but bools and NaN. A set finds True where 1 is, so bools stay apart."""
    bools: frozenset[bool]
    lists: Mapping[object, list[TagValue]]
    """By their `frozen` form, so that a row costs one look-up here too."""


class Leaf(NamedTuple):
    """One comparison of one tag."""

    tag: str
    op: str
    """`=`, an order, `in` or `exists`; `!=` is a `not` around `=`."""
    operand: TagValue | Members


class Branch(NamedTuple):
    """Wheres under `and`, `or` or `not`."""

    op: str
    parts: tuple[Node, ...]


Node: TypeAlias = Leaf | Branch

TRUE: Final = Branch("and", ())
FALSE: Final = Branch("or", ())


def parse_where(where: object) -> Node:
    """The comparisons that `where` asks for. InvalidRequest names the place that is wrong."""
    return _Parser().where(where, (), 1)


def _join(op: str, parts: Iterable[Node]) -> Node:
    """The parts under `and` or `or`: flat, without those that decide nothing."""
    neutral, decisive = (TRUE, FALSE) if op == "and" else (FALSE, TRUE)
    kept: list[Node] = []
    for part in parts:
        if part == decisive:
            return decisive
        if isinstance(part, Branch) and part.op == op:
            kept += part.parts
        elif part != neutral:
            kept.append(part)
    return kept[0] if len(kept) == 1 else Branch(op, tuple(kept))


def _negate(node: Node) -> Node:
    if node == TRUE:
        return FALSE
    if node == FALSE:
        return TRUE
    if isinstance(node, Branch) and node.op == "not":
        return node.parts[0]
    return Branch("not", (node,))


class _Parser:
    """One reading of one where; counts its terms."""

    def __init__(self) -> None:
        self.terms = 0

    def where(self, where: object, path: _Path, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise _fault(path, f"nested deeper than {MAX_DEPTH}")
        if where is None:
            self._count(path)
            return TRUE
        if not _is_mapping(where):
            raise _fault(path, f"a mapping of tags is due, not {_kind(where)}")
        if not where:
            self._count(path)
        parts: list[Node] = []
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

    def _combination(self, op: str, operand: object, path: _Path, depth: int) -> Node:
        if not _is_sequence(operand):
            raise _fault(path, f"a list of wheres is due, not {_kind(operand)}")
        if not operand:
            raise _fault(path, "at least one where is due")
        parts = [self.where(part, (*path, i), depth + 1) for i, part in enumerate(operand)]
        return _join(op, parts)

    def _entry(self, tag: str, operand: object, path: _Path) -> Node:
        _check_text(tag, path)
        if not _is_mapping(operand):
            self._count(path)
            return _equality(tag, operand, path)
        if not operand:
            raise _fault(path, f"no operator given; one of {' '.join(OPERATORS)}")
        parts: list[Node] = []
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
                exists = Leaf(tag, "exists", True)
                parts.append(exists if value else _negate(exists))
            elif isinstance(op, str) and op in ORDERS:
                parts.append(_order(tag, op, value, path))
            else:
                raise _fault(path, f"unknown operator {quote([op])}; one of {' '.join(OPERATORS)}")
        return _join("and", parts)

    def _count(self, path: _Path) -> None:
        self.terms += 1
        if self.terms > MAX_TERMS:
            raise _fault(path, f"more than {MAX_TERMS} comparisons in one where")


def _equality(tag: str, operand: object, path: _Path) -> Node:
    value = _value(operand, path, "'='")
    return FALSE if _holds_nan(value) else Leaf(tag, "=", value)


def _order(tag: str, op: str, operand: object, path: _Path) -> Node:
    value = _value(operand, path, f"'{op}'")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _fault(path, f"'{op}' takes a number or a string, not {_kind(operand)}")
    return FALSE if _holds_nan(value) else Leaf(tag, op, value)


def _membership(tag: str, operand: object, path: _Path) -> Node:
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
                    lists[frozen(value)] = value
            elif not _holds_nan(value):
                scalars.add(cast("Scalar", value))
    distinct: list[TagValue] = [*scalars, *bools, *lists.values()]
    if not distinct:
        return FALSE
    if len(distinct) == 1:
        return Leaf(tag, "=", distinct[0])
    return Leaf(tag, "in", Members(frozenset(scalars), frozenset(bools), lists))


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


def frozen(value: object, depth: int = 1) -> object:
    """A hashable stand-in for a list: equal stand-ins are lists equal by kind all the way down.

    Python's own comparison says [True] == [1]. What no operand can hold, a map or deeper nesting,
    is equal to nothing.
    """
    if isinstance(value, bool):
        return (bool, value)
    if isinstance(value, list):
        if depth > MAX_DEPTH:
            return _UNEQUAL
        return tuple([frozen(item, depth + 1) for item in cast("list[object]", value)])
    return _UNEQUAL if isinstance(value, dict) else value
