"""The split of a batch over ranks: exact values, and how far apart two ranks can be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRequest
from dataplane.tags.accounts import Account
from dataplane.tags.claims.shares import MAX_RANKS, Rank, Terms, split, tokens_of
from dataplane.tags.placement import Placement
from dataplane.tags.rows import Row
from dataplane.types import FieldSchema
from tests.dataplane.audit import Blocks

SPLITS: list[tuple[list[int], int, list[list[int]]]] = [
    ([9, 7, 6, 5, 4, 3], 2, [[0, 3, 5], [1, 2, 4]]),  # 17 and 17
    ([3, 4, 5, 6, 7, 9], 2, [[0, 2, 5], [1, 3, 4]]),  # the same rows the other way round
    ([7] * 9, 4, [[0, 4, 8], [1, 5], [2, 6], [3, 7]]),
    ([10, 1, 1, 1], 2, [[0, 3], [1, 2]]),  # 11 and 2: sizes are kept equal
    ([5, 4], 4, [[0], [1], [], []]),
    ([], 3, [[], [], []]),
    ([1, 2, 3], 1, [[0, 1, 2]]),
    ([0, 0, 0, 8], 2, [[2, 3], [0, 1]]),
]


@pytest.mark.parametrize(("tokens", "parts", "shares"), SPLITS, ids=str)
def test_the_split_of(tokens: list[int], parts: int, shares: list[list[int]]) -> None:
    assert split(tokens, parts) == shares


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_every_split_is_even_in_size_and_near_even_in_tokens(tokens: list[int], parts: int) -> None:
    shares = split(tokens, parts)
    assert len(shares) == parts
    assert sorted(item for share in shares for item in share) == list(range(len(tokens)))
    assert all(share == sorted(share) for share in shares)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    totals = [sum(tokens[item] for item in share) for share in shares]
    assert max(totals) - min(totals) <= max(tokens, default=0)


def row(tags: dict[str, Any], *placements: tuple[Placement, int]) -> Row:
    layers = tuple(part for pair in placements for part in pair)
    return Row("k", tags, 1, layers, 1, 0, Account())


SCHEMA = FieldSchema("int64", 1, 0)


def test_a_row_weighs_its_seq_len_else_its_length_in_the_first_field_else_one() -> None:
    blocks = Blocks()
    x = blocks.block(3, {"x": [5, 0, 7]})
    covered = blocks.block(1, {"m": [4]})
    assert tokens_of(row({"seq_len": 12}, (x, 2)), "x", SCHEMA) == 12
    assert tokens_of(row({"seq_len": 0}, (x, 2)), "x", SCHEMA) == 0
    assert [tokens_of(row({}, (x, i)), "x", SCHEMA) for i in range(3)] == [5, 0, 7]
    assert tokens_of(row({}, (covered, 0), (x, 2)), "x", SCHEMA) == 7
    for odd in (True, -3, 4.5, "9", None):
        assert tokens_of(row({"seq_len": odd}, (x, 2)), "x", SCHEMA) == 7
    assert tokens_of(row({}, (x, 2)), None, None) == 1
    assert tokens_of(row({}), "x", SCHEMA) == 1
    assert tokens_of(row({}, (x, 0)), "s", FieldSchema("float64", 0, None)) == 1


def test_a_length_is_along_the_ragged_dimension_of_the_schema() -> None:
    block = Blocks().block(2, {"m": [4, 6], "w": [[2, 9], [3, 8]]})
    assert tokens_of(row({}, (block, 1)), "m", FieldSchema("float32", 2, 1)) == 6
    assert tokens_of(row({}, (block, 1)), "m", FieldSchema("float32", 2, 0)) == 2
    assert tokens_of(row({}, (block, 1)), "w", FieldSchema("int8", 2, 0)) == 3
    assert tokens_of(row({}, (block, 1)), "w", FieldSchema("int8", 2, 1)) == 8


def test_a_replica_is_three_integers_within_bounds() -> None:
    assert Rank.parse(None) is None
    assert Rank.parse((1, 2, 0)) == Rank(1, 2, 0)
    assert Rank.parse([0, 1, 7]) == Rank(0, 1, 7)


@pytest.mark.parametrize(
    ("replica", "named"),
    [
        (5, "three integers"),
        ((0, 1), "three integers"),
        ((0, 1, 2, 3), "three integers"),
        ((0, 1, True), "three integers"),
        ((0.0, 1, 1), "three integers"),
        (("0", 1, 1), "three integers"),
        ((0, 0, 0), "dp_size"),
        ((0, MAX_RANKS + 1, 0), "dp_size"),
        ((2, 2, 0), "dp_rank"),
        ((-1, 2, 0), "dp_rank"),
        ((0, 2, -1), "batch_index"),
        ((0, 2, 1 << 63), "batch_index"),
    ],
    ids=str,
)
def test_any_other_replica_is_refused(replica: object, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Rank.parse(replica)


TERMS = Terms(2, 8, ("x",), b"\x80", None, False)


@pytest.mark.parametrize(
    ("others", "named"),
    [
        (Terms(4, 8, ("x",), b"\x80", None, False), ["dp_size=2", "dp_size=4"]),
        (Terms(2, 6, ("x",), b"\x80", None, False), ["count=8", "count=6"]),
        (Terms(2, 8, ("x", "y"), b"\x80", None, False), ["fields=['x']", "fields=['x', 'y']"]),
        (Terms(2, 8, ("x",), b"\x81\xa1a\x01", None, False), ["where={}", "where={'a': 1}"]),
        (Terms(2, 8, ("x",), b"\x80", "-n", False), ["order_by=None", "order_by='-n'"]),
        (Terms(2, 8, ("x",), b"\x80", None, True), ["groups=False", "groups=True"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_ranks_that_ask_for_something_else_are_told_both(others: Terms, named: list[str]) -> None:
    TERMS.check("t", 3, TERMS)
    with pytest.raises(InvalidRequest) as error:
        TERMS.check("t", 3, others)
    assert all(part in str(error.value) for part in [*named, "batch 3", "'t'"])
