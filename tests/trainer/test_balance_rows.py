"""For callers that divide batches by rows: filler rows, equal counts, and what is logged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import PlanError
from trainer.plan import balance_rows, pad_to_multiple, seqlen_metrics
from trainer.plan.cost import row_cost

V3 = [10, 200, 30, 150, 90, 60, 120, 40]


def tokens(parts: list[list[int]]) -> list[int]:
    return sorted(sum(V3[i] for i in part) for part in parts)


def test_v3_workloads() -> None:
    assert [row_cost(n) for n in V3] == [
        245860, 4955200, 738180, 3708900, 2219940, 1478160, 2963520, 984640,
    ]  # fmt: skip


def test_v3_parts_of_equal_count() -> None:
    two = balance_rows(V3, 2)
    assert sorted(two) == [[0, 1, 4, 7], [2, 3, 5, 6]]
    assert tokens(two) == [340, 360]
    four = balance_rows(V3, 4)
    assert sorted(four) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert tokens(four) == [150, 160, 180, 210]


def test_v3_what_is_logged() -> None:
    assert seqlen_metrics(V3, balance_rows(V3, 2)) == {
        "global_seqlen/min": 310,
        "global_seqlen/max": 390,
        "global_seqlen/minmax_diff": 80,
        "global_seqlen/balanced_min": 340,
        "global_seqlen/balanced_max": 360,
        "global_seqlen/mean": 350.0,
    }
    assert set(seqlen_metrics([], [[], []]).values()) == {0}


@pytest.mark.parametrize(
    ("rows", "divisors", "missing"),
    [(45, (4, 32), 19), (45, (4, 24, 32), 51), (64, (4, 32), 0), (0, (4,), 0)],
)
def test_v5_padding_count(rows: int, divisors: tuple[int, ...], missing: int) -> None:
    assert pad_to_multiple(rows, *divisors) == missing


def test_scenario_8_ten_rows_on_four_ranks_in_mini_batches_of_six() -> None:
    assert pad_to_multiple(10, 4, 6) == 2


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(PlanError, match="multiple of"):
        pad_to_multiple(3, 0)
    with pytest.raises(PlanError, match="9 rows do not divide into 4 parts"):
        balance_rows([1] * 9, 4)
    with pytest.raises(PlanError, match="0 parts"):
        balance_rows([1] * 9, 0)


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=60), st.integers(1, 6))
def test_parts_hold_every_row_once_in_equal_counts(lengths: list[int], parts: int) -> None:
    padded = lengths + [1] * pad_to_multiple(len(lengths), parts)
    found = balance_rows(padded, parts)
    assert sorted(i for part in found for i in part) == list(range(len(padded)))
    assert {len(part) for part in found} == {len(padded) // parts}
    sums = [sum(row_cost(padded[i]) for i in part) for part in found]
    assert max(sums) - min(sums) <= row_cost(max(padded))
