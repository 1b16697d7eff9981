"""How a batch is divided between tasks, and which names tasks may have."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.production.split import check_names, split_by_weight


@pytest.mark.parametrize(
    ("weights", "batch", "counts"),
    [
        ([1, 2, 0], 7, [2, 5, 0]),
        ([1, 1, 1], 8, [3, 3, 2]),
        ([0.5, 0.3, 0.2], 10, [5, 3, 2]),
        ([2, 1], 3, [2, 1]),
    ],
)
def test_ex_7_7_a_batch_is_divided_by_weight(
    weights: list[float], batch: int, counts: list[int]
) -> None:
    assert split_by_weight(batch, weights) == counts


def test_shares_are_exact_where_binary_fractions_are_not() -> None:
    # Thirds of each: a tie, which in binary the first task would lose.
    assert split_by_weight(4, [0.1, 0.4, 0.7]) == [1, 1, 2]
    assert split_by_weight(6, [0.1, 0.7, 0.1]) == [1, 5, 0]
    assert split_by_weight(10, [0.1, 0.2, 0.3, 0.4]) == [1, 2, 3, 4]
    assert split_by_weight(3, [0.1, 0.1, 0.1, 0.1]) == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("batch", "weights", "said"),
    [
        (4, [], "no task"),
        (-1, [1.0], "a batch of -1"),
        (4, [0.0, 0.0], "weights of all 2 tasks are 0"),
        (4, [1.0, -1.0], "weight -1.0"),
        (4, [float("nan")], "weight nan"),
        (4, [float("inf"), 1.0], "weight inf"),
    ],
)
def test_what_cannot_be_divided_is_an_error(batch: int, weights: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        split_by_weight(batch, weights)


@given(
    st.integers(0, 500),
    st.lists(st.integers(0, 50) | st.floats(0, 10, allow_subnormal=False), min_size=1, max_size=6),
)
def test_nothing_is_lost_and_no_task_is_a_prompt_off(batch: int, weights: list[float]) -> None:
    if not sum(weights):
        return
    counts = split_by_weight(batch, weights)
    assert sum(counts) == batch
    total = sum(Fraction(str(weight)) for weight in weights)
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - batch * Fraction(str(weight)) / total) < 1
        if not weight:
            assert count == 0


def test_rg_36_an_evaluation_may_not_have_the_name_of_a_task_that_is_trained() -> None:
    with pytest.raises(ValueError, match="'math' has the name of a task that is trained"):
        check_names(["math", "code"], ["val", "math"])
    check_names(["math", "code"], ["val-math"])


@pytest.mark.parametrize(
    ("train", "evaluations", "said"),
    [
        ([], [], "there is no task"),
        (["a", "b", "a"], [], "task 'a' is named twice"),
        (["a"], ["v", "v"], "evaluation 'v' is named twice"),
        (["a", ""], [], "a task has no name"),
    ],
)
def test_tasks_have_names_of_their_own(train: list[str], evaluations: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_names(train, evaluations)
