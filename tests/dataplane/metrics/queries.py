"""What a PromQL expression asks for, by the grammar that Prometheus has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import promql_parser as promql

PARTS = ("lhs", "rhs", "expr", "param", "vector_selector")


class Asked(NamedTuple):
    """One selector: a metric, and the labels that the expression names."""

    name: str
    labels: frozenset[str]


def selectors(expression: str) -> Iterator[promql.VectorSelector]:
    """The selectors of an expression. ValueError if it is none."""
    todo: list[Any] = [promql.parse(expression)]
    while todo:
        node = todo.pop()
        if isinstance(node, promql.VectorSelector):
            yield node
            continue
        todo += [part for name in PARTS if (part := getattr(node, name, None)) is not None]
        todo += getattr(node, "args", None) or []


def asked(expression: str) -> list[Asked]:
    """What an expression asks for."""
    found: list[Asked] = []
    for selector in selectors(expression):
        matchers = selector.matchers.matchers
        found.append(Asked(selector.name or "", frozenset(m.name for m in matchers)))
    return found


def grouped_by(expression: str) -> frozenset[str]:
    """Labels that an expression keeps, or joins by."""
    found: set[str] = set()
    todo: list[Any] = [promql.parse(expression)]
    while todo:
        node = todo.pop()
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            found.update(node.modifier.labels)
        matching = getattr(node, "modifier", None)
        if isinstance(node, promql.BinaryExpr) and matching is not None and matching.matching:
            found.update(matching.matching.labels)
        todo += [part for name in PARTS if (part := getattr(node, name, None)) is not None]
        todo += getattr(node, "args", None) or []
    return frozenset(found)
