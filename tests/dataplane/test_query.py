"""`where`: tables of cases, then every where against an evaluator that is slow and plain."""

from __future__ import annotations

import math
import operator
import random
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRequest
from dataplane.tags.query import compile_where
from dataplane.tags.where import MAX_DEPTH, MAX_ITEMS, MAX_TERMS

NAN = math.nan
ROW = {
    "status": "finished",
    "global_steps": 7,
    "score": 1.0,
    "is_prompt": True,
    "error_msg": None,
    "spans": [[3, 2], [4, 1]],
    "extra": {"a": 1},
    "bad": NAN,
}


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        (None, True),
        ({}, True),
        ({"status": "finished"}, True),
        ({"status": "running"}, False),
        ({"status": {"=": "finished"}}, True),
        ({"status": "finished", "global_steps": {">=": 5}}, True),
        ({"status": "finished", "global_steps": {">=": 8}}, False),
        ({"global_steps": {">": 6, "<": 8}}, True),
        ({"global_steps": {">": 6, "<": 7}}, False),
        ({"global_steps": {"<=": 7}}, True),
        ({"status": {">=": "f", "<": "g"}}, True),
        ({"status": {"in": ["running", "finished"]}}, True),
        ({"status": {"in": ("running",)}}, False),
        ({"status": {"in": {"finished", "x"}}}, True),
        ({"status": {"in": []}}, False),
        ({"status": {"!=": "running"}}, True),
        ({"status": {"!=": "finished"}}, False),
        # absent
        ({"nope": None}, False),
        ({"nope": {"!=": 1}}, True),
        ({"nope": {"!=": None}}, True),
        ({"nope": {"<": 1}}, False),
        ({"nope": {"in": [None, 1]}}, False),
        ({"nope": {"exists": False}}, True),
        ({"nope": {"exists": True}}, False),
        # present with None
        ({"error_msg": None}, True),
        ({"error_msg": {"exists": True}}, True),
        ({"error_msg": {"in": [None, 1]}}, True),
        ({"error_msg": {"!=": None}}, False),
        ({"error_msg": {"<": 1}}, False),
        # kinds
        ({"is_prompt": True}, True),
        ({"is_prompt": 1}, False),
        ({"is_prompt": {"in": [1, 0]}}, False),
        ({"is_prompt": {"in": [1, True]}}, True),
        ({"is_prompt": {">=": 0}}, False),
        ({"score": 1}, True),
        ({"score": True}, False),
        ({"score": {"in": [True, False]}}, False),
        ({"score": {"in": [True, 1]}}, True),
        ({"global_steps": {"<": "z"}}, False),
        ({"global_steps": {">": "a"}}, False),
        ({"status": {"<": 5}}, False),
        ({"global_steps": {"!=": "7"}}, True),
        # lists and maps
        ({"spans": [[3, 2], [4, 1]]}, True),
        ({"spans": ((3, 2), (4.0, 1))}, True),
        ({"spans": [[3, 2], [4, True]]}, False),
        ({"spans": [[3, 2]]}, False),
        ({"spans": []}, False),
        ({"spans": {"in": [[], [[3, 2], [4, 1]]]}}, True),
        ({"spans": {"in": [1, "a"]}}, False),
        ({"spans": {"<": 9}}, False),
        ({"extra": {"exists": True}}, True),
        ({"extra": {"in": [1, None]}}, False),
        ({"extra": "a"}, False),
        # NaN
        ({"bad": NAN}, False),
        ({"bad": {"in": [NAN, 1]}}, False),
        ({"bad": {"!=": NAN}}, True),
        ({"bad": {"<=": NAN}}, False),
        ({"bad": {">=": 0}}, False),
        ({"score": {"<": math.inf, ">": -math.inf}}, True),
        # combinators
        ({"or": [{"status": "x"}, {"global_steps": 7}]}, True),
        ({"or": [{"status": "x"}, {"global_steps": 8}]}, False),
        ({"and": [{"status": "finished"}, {"global_steps": 7}]}, True),
        ({"and": [{"status": "finished"}, {"global_steps": 8}, {}]}, False),
        ({"not": {"status": "x"}}, True),
        ({"not": {}}, False),
        ({"not": None}, False),
        ({"and": [None, {}]}, True),
        ({"or": [{"status": "x"}, {}]}, True),
        ({"status": "finished", "or": [{"score": 0}, {"score": 1}], "not": {"bad": 1}}, True),
        ({"or": [{"a": 1}, {"b": 2}, {"not": {"or": [{"status": "x"}, {"a": 1}]}}]}, True),
        # numpy scalars
        ({"global_steps": {">=": np.int64(7)}, "score": np.float32(1.0)}, True),
        ({"is_prompt": np.bool_(True)}, True),
    ],
)
def test_a_where_means_what_the_table_says(where: Any, holds: bool) -> None:
    predicate = compile_where(where)
    assert predicate(ROW) is holds
    assert predicate.match(ROW) is holds
    again = compile_where(msgpack.unpackb(predicate.canonical))
    assert again(ROW) is holds


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("status", "where: a mapping of tags is due, not str"),
        ([{"a": 1}], "where: a mapping of tags is due, not list"),
        ({3: 1}, "where: a tag name is a string, not int"),
        (
            {"global_steps": {"=>": 5}},
            "where: at 'global_steps': unknown operator '=>'; one of = != < <= > >= in exists",
        ),
        ({"a": {1: 5}}, "where: at 'a': unknown operator 1; one of"),
        ({"a": {"not_in": [5]}}, "where: at 'a': unknown operator 'not_in'"),
        ({"a": {}}, "where: at 'a': no operator given; one of"),
        ({"a": {"<": None}}, "where: at 'a': '<' takes a number or a string, not NoneType"),
        ({"a": {">=": True}}, "where: at 'a': '>=' takes a number or a string, not bool"),
        ({"a": {">=": [1]}}, "where: at 'a': '>=' takes a number or a string, not list"),
        ({"a": {"in": "abc"}}, "where: at 'a': 'in' takes a list, not str"),
        ({"a": {"in": [b"x"]}}, "where: at 'a': 'in' compares scalars and lists, not bytes"),
        ({"a": {"in": [{}]}}, "where: at 'a': 'in' compares scalars and lists, not dict"),
        ({"a": {"=": {"b": 1}}}, "where: at 'a': '=' compares scalars and lists, not dict"),
        ({"a": object}, "where: at 'a': '=' compares scalars and lists, not type"),
        ({"a": {"exists": 1}}, "where: at 'a': 'exists' takes true or false, not int"),
        ({"a": 1 << 64}, "where: at 'a': an integer is out of the range of 64 bits"),
        ({"a": {"<": -(1 << 63) - 1}}, "where: at 'a': an integer is out of the range"),
        ({"a": "\ud800"}, "where: at 'a': a string is not valid Unicode"),
        ({"a": {"in": ["x", "\ud800"]}}, "where: at 'a': a string is not valid Unicode"),
        ({"a": {"in": [0, 1 << 64]}}, "where: at 'a': an integer is out of the range of 64 bits"),
        ({"a": {"in": [-(1 << 63) - 1, 0]}}, "where: at 'a': an integer is out of the range"),
        ({"\ud800": 1}, "a string is not valid Unicode"),
        ({"and": {"a": 1}}, "where: at and: a list of wheres is due, not dict"),
        ({"or": []}, "where: at or: at least one where is due"),
        ({"and": []}, "where: at and: at least one where is due"),
        ({"not": [{"a": 1}]}, "where: at not: a mapping of tags is due, not list"),
        (
            {"or": [{"a": 1}, {"not": {"b\n": {"~": 1}}}]},
            "where: at or[1].not.'b\\n': unknown operator '~'",
        ),
        ({"a": {"in": range(3)}}, "where: at 'a': 'in' takes a list, not range"),
        ({"x" * 10_000: {"~": 1}}, "...: unknown operator '~'"),
    ],
)
def test_a_wrong_where_names_the_place(where: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_where(where)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


def test_limits_hold_at_their_edge_and_not_before() -> None:
    def deep(levels: int) -> dict[str, object]:
        where: dict[str, object] = {"a": 1}
        for _ in range(levels - 1):
            where = {"not": where}
        return where

    def nested(levels: int) -> list[object]:
        value: list[object] = []
        for _ in range(levels - 1):
            value = [value]
        return value

    def wide(terms: int) -> dict[str, object]:
        return {"or": [{"a": i} for i in range(terms)]}

    compile_where(deep(MAX_DEPTH))
    with pytest.raises(InvalidRequest, match="nested deeper than 16"):
        compile_where(deep(MAX_DEPTH + 1))
    compile_where({"a": nested(MAX_DEPTH)})
    with pytest.raises(InvalidRequest, match="lists nested deeper than 16"):
        compile_where({"a": nested(MAX_DEPTH + 1)})
    assert compile_where(wide(MAX_TERMS))({"a": MAX_TERMS - 1})
    with pytest.raises(InvalidRequest, match="more than 1000 comparisons"):
        compile_where(wide(MAX_TERMS + 1))
    with pytest.raises(InvalidRequest, match="more than 1000 comparisons"):
        compile_where({"and": [{}] * (MAX_TERMS + 1)})
    with pytest.raises(InvalidRequest, match="more than 1000 comparisons"):
        compile_where({f"t{i}": {">": 0, "<": 9} for i in range(MAX_TERMS // 2 + 1)})
    many = [f"u{i}" for i in range(MAX_ITEMS)]
    assert compile_where({"a": {"in": many}})({"a": many[-1]})
    for items in ([*many, "one more"], list(range(MAX_ITEMS + 1))):
        with pytest.raises(InvalidRequest, match="at most 65536 items, not 65537"):
            compile_where({"a": {"in": items}})
    with pytest.raises(InvalidRequest, match="at most 65536 items"):
        compile_where({"a": [0] * (MAX_ITEMS + 1)})


def test_a_where_that_contains_itself_is_refused() -> None:
    where: dict[str, object] = {}
    where["not"] = where
    with pytest.raises(InvalidRequest, match="nested deeper"):
        compile_where(where)
    items: list[object] = []
    items.append(items)
    with pytest.raises(InvalidRequest, match="nested deeper"):
        compile_where({"a": items})


def test_a_stored_list_deeper_than_any_operand_equals_nothing() -> None:
    stored: list[object] = []
    for _ in range(400):
        stored = [stored]
    assert not compile_where({"a": [[]]})({"a": stored})
    assert not compile_where({"a": {"in": [[1], [2]]}})({"a": [[{}]]})


@pytest.mark.parametrize(
    ("where", "terms"),
    [
        (None, ()),
        ({"a": 1}, (("a", 1),)),
        ({"a": {"=": "x"}, "b": {">": 1}}, (("a", "x"),)),
        ({"a": None, "b": False}, (("a", None), ("b", False))),
        ({"a": 1, "and": [{"b": 2}, {"and": [{"c": 3}, {"a": 1.0}]}]}, "abc"),
        ({"a": {"in": ["x"]}}, (("a", "x"),)),
        ({"a": {"in": ["x", "y"]}}, ()),
        ({"a": [1, 2]}, ()),
        ({"a": {"!=": 1}}, ()),
        ({"or": [{"a": 1}, {"b": 2}]}, ()),
        ({"or": [{"a": 1}]}, (("a", 1),)),
        ({"not": {"a": 1}}, ()),
        ({"not": {"not": {"a": 1}}}, (("a", 1),)),
        ({"a": NAN}, ()),
    ],
)
def test_terms_are_the_equalities_every_match_satisfies(where: Any, terms: object) -> None:
    found = compile_where(where).terms
    if terms == "abc":
        terms = (("a", 1), ("b", 2), ("c", 3))
    assert found == terms


def test_only_a_where_that_asks_nothing_matches_all() -> None:
    for where in (None, {}, {"and": [{}, None]}, {"or": [{"a": 1}, {}]}, {"not": {"not": {}}}):
        assert compile_where(where).matches_all
        assert compile_where(where).canonical == compile_where(None).canonical
    for where in ({"a": 1}, {"not": {}}, {"a": {"exists": True}}, {"a": {"in": []}}):
        assert not compile_where(where).matches_all


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"a": {"=": 1.0}}),
        ({"a": 1}, {"a": {"in": [1, 1.0]}}),
        ({"a": {"in": [3, 2, 1]}}, {"a": {"in": {1, 2, 3}}}),
        ({"a": {"in": [[1], [2]]}}, {"a": {"in": [[2.0], [1], [2]]}}),
        ({"a": 1, "b": 2}, {"and": [{"b": 2}, {"a": 1}, {"a": 1}, {}]}),
        ({"a": {"!=": 1}}, {"not": {"a": 1}}),
        ({"a": {">": 1, "<": 5}}, {"and": [{"a": {"<": 5}}, {"a": {">": 1}}]}),
        ({"a": {"exists": False}}, {"not": {"a": {"exists": True}}}),
        ({"or": [{"a": 1}, {"or": [{"b": 1}, {"c": 1}]}]}, {"or": [{"c": 1}, {"b": 1}, {"a": 1}]}),
        ({"c": 1, "or": [{"a": 1, "b": 1}, {"b": 1, "a": 1}]}, {"a": 1, "b": 1, "c": 1}),
        ({"a": {"in": []}}, {"not": {}}),
        ({"not": {"or": [{"not": {"a": 1}}, {"not": {"a": 1}}]}}, {"a": 1}),
    ],
)
def test_equal_predicates_are_recognised(one: Any, other: Any) -> None:
    left, right = compile_where(one), compile_where(other)
    assert left.canonical == right.canonical
    assert compile_where(msgpack.unpackb(left.canonical)).canonical == left.canonical


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": True}),
        ({"a": 0}, {"a": None}),
        ({"a": "1"}, {"a": 1}),
        ({"a": [1]}, {"a": [True]}),
        ({"a": 1}, {"b": 1}),
        ({"a": {"<": 1}}, {"a": {"<=": 1}}),
        ({"a": {"in": [1, 2]}}, {"a": {"in": [True, 2]}}),
        ({"a": 1, "b": 2}, {"or": [{"a": 1}, {"b": 2}]}),
    ],
)
def test_different_predicates_are_kept_apart(one: Any, other: Any) -> None:
    left, right = compile_where(one), compile_where(other)
    assert left.canonical != right.canonical


def test_compiling_leaves_no_tie_to_the_callers_lists() -> None:
    items, spans = ["x", "y"], [[1]]
    predicate = compile_where({"a": {"in": items}, "b": spans})
    items.clear()
    spans[0].append(2)
    assert predicate({"a": "x", "b": [[1]]})


# The plain evaluator: one if per rule of the docstring, no normal form, no sets.

_ABSENT = object()


def _kind(value: object) -> str:
    if value is _ABSENT:
        return "absent"
    if value is None:
        return "null"
    if type(value) is bool:
        return "bool"
    if type(value) in (int, float):
        return "number"
    return type(value).__name__


def _same(value: Any, operand: Any) -> bool:
    if _kind(value) != _kind(operand) or _kind(value) in ("absent", "dict"):
        return False
    if isinstance(value, list) and isinstance(operand, list):
        return len(value) == len(operand) and all(
            _same(a, b) for a, b in zip(value, operand, strict=True)
        )
    return value == operand


def _one(value: Any, op: str, operand: Any) -> bool:
    if op == "=":
        return _same(value, operand)
    if op == "!=":
        return not _same(value, operand)
    if op == "in":
        return any(_same(value, item) for item in operand)
    if op == "exists":
        return (value is not _ABSENT) is operand
    order = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}[op]
    return _kind(value) == _kind(operand) and order(value, operand)


def evaluate(where: dict[str, Any] | None, tags: dict[str, Any]) -> bool:
    return all(_entry(name, operand, tags) for name, operand in (where or {}).items())


def _entry(name: str, operand: Any, tags: dict[str, Any]) -> bool:
    if name == "and":
        return all(evaluate(part, tags) for part in operand)
    if name == "or":
        return any(evaluate(part, tags) for part in operand)
    if name == "not":
        return not evaluate(operand, tags)
    value = tags.get(name, _ABSENT)
    if isinstance(operand, dict):
        return all(_one(value, op, wanted) for op, wanted in operand.items())
    return _same(value, operand)


# Few names and few values, so that terms meet rows often.
names = st.sampled_from(["a", "b", "status"])
numbers = st.sampled_from(
    [0, 1, 2, -1, 0.0, -0.0, 1.0, 1.5, NAN, math.inf, 1 << 60, float(1 << 60)]
)
texts = st.sampled_from(["", "0", "1", "a", "b", "\x00", "\U0001f600"])
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2), max_leaves=4)
tag_values = values | st.dictionaries(names, scalars, max_size=1)
rows = st.dictionaries(names, tag_values, max_size=3)
operators = st.one_of(
    st.dictionaries(st.sampled_from(["=", "!="]), values, min_size=1, max_size=2),
    st.dictionaries(st.sampled_from(["<", "<=", ">", ">="]), numbers | texts, min_size=1),
    st.fixed_dictionaries({"in": st.lists(values, max_size=4)}),
    st.fixed_dictionaries({"exists": st.booleans()}),
)
leaves = st.dictionaries(names, values | operators, max_size=2) | st.none()
wheres = st.recursive(
    leaves,
    lambda inner: st.builds(
        lambda leaf, branch: {**(leaf or {}), **branch},
        leaves,
        st.fixed_dictionaries({"not": inner})
        | st.dictionaries(
            st.sampled_from(["and", "or"]), st.lists(inner, min_size=1, max_size=3), min_size=1
        ),
    ),
    max_leaves=6,
)


@given(wheres, st.lists(rows, min_size=1, max_size=8))
def test_a_predicate_agrees_with_the_plain_evaluator(
    where: dict[str, object] | None, many: list[dict[str, object]]
) -> None:
    predicate = compile_where(where)
    again = compile_where(msgpack.unpackb(predicate.canonical))
    assert again.canonical == predicate.canonical
    assert set(again.terms) == set(predicate.terms)
    for tags in many:
        expected = evaluate(where, tags)
        assert predicate(tags) is expected
        assert again(tags) is expected
        if expected:
            assert all(_same(tags.get(name, _ABSENT), value) for name, value in predicate.terms)
        if predicate.matches_all:
            assert expected


@given(st.lists(wheres, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_parts_makes_no_difference(
    parts: list[dict[str, Any] | None], order: random.Random
) -> None:
    shuffled = list(parts)
    order.shuffle(shuffled)
    for op in ("and", "or"):
        assert compile_where({op: parts}).canonical == compile_where({op: shuffled}).canonical


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["and", "or", "not", "=", "in", "exists", "<", "a"]) | st.integers(),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@given(json_like)
def test_anything_at_all_compiles_or_is_refused(where: Any) -> None:
    try:
        canonical = compile_where(where).canonical
    except InvalidRequest:
        return
    assert compile_where(msgpack.unpackb(canonical)).canonical == canonical
