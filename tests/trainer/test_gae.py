"""Advantages per token, on numpy and torch rows alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantage import gae, normalized, per_token, session_gae

KINDS: list[Callable[[list[float]], Any]] = [
    lambda values: np.array(values, np.float32),
    lambda values: torch.tensor(values, dtype=torch.float32),
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["numpy", "torch"])


def near(expected: list[float]) -> Any:
    return pytest.approx(expected, abs=1e-6, rel=0)


@kinds
def test_ex_4_17_gae(kind: Any) -> None:
    values = kind([0.1, 0.2, 0.3, 0.4])
    found, returns = gae(values, kind([1, 0, 1, 1]), 1.0, gamma=1.0, lam=0.5)
    assert found.tolist() == near([0.4, 0, 0.4, 0.6])
    assert returns.tolist() == near([0.5, 0, 0.7, 1.0])
    assert (type(found), found.dtype) == (type(values), values.dtype)


def test_values_of_a_narrow_dtype_stay_narrow() -> None:
    values = torch.tensor([0.5, 0.25], dtype=torch.bfloat16)
    found, returns = gae(values, [1, 1], 1.0)
    assert found.dtype == returns.dtype == torch.bfloat16
    assert found.tolist() == [0.5, 0.75]


def test_rewards_per_entry_count_at_supervised_ones() -> None:
    values = np.zeros(4, np.float64)
    mask = [0, 1, 0, 1]
    found, _ = gae(values, mask, [1.0, 2.0, 4.0, 8.0], gamma=1.0, lam=0.0)
    assert found.tolist() == [0.0, 7.0, 0.0, 8.0]
    spread, _ = gae(values, mask, np.array([0.0, 0.0, 0.0, 3.0]), lam=0.5)
    assert spread.tolist() == gae(values, mask, 3.0, lam=0.5)[0].tolist()


def test_a_reward_counts_at_the_last_supervised_entry() -> None:
    found, _ = gae(np.zeros(4), [0, 1, 1, 0], 1.0, lam=0.5)
    assert found.tolist() == [0.0, 0.5, 1.0, 0.0]


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=12),
    st.floats(-3, 3),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_unsupervised_entries_are_as_if_they_were_not_there(
    entries: list[tuple[float, bool]], reward: float, gamma: float, lam: float
) -> None:
    entries = [*entries, (0.5, True)]
    values = np.array([v for v, _ in entries])
    mask = np.array([m for _, m in entries])
    found, returns = gae(values, mask, reward, gamma=gamma, lam=lam)
    alone, alone_returns = gae(values[mask], mask[mask], reward, gamma=gamma, lam=lam)
    assert found[mask].tolist() == alone.tolist()
    assert returns[mask].tolist() == alone_returns.tolist()
    assert not found[~mask].any()
    assert not returns[~mask].any()


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.floats(-3, 3), st.floats(0, 1))
def test_gae_is_the_discounted_sum_of_its_errors(
    values: list[float], reward: float, lam: float
) -> None:
    """The closed form of the paper: A_t = sum (gamma lam)^l delta_{t+l}."""
    gamma = 0.9
    size = len(values)
    rewards = [0.0] * (size - 1) + [reward]
    deltas = [
        rewards[t] + gamma * (values[t + 1] if t + 1 < size else 0.0) - values[t]
        for t in range(size)
    ]
    due = [sum((gamma * lam) ** i * d for i, d in enumerate(deltas[t:])) for t in range(size)]
    found, returns = gae(np.array(values), [1] * size, reward, gamma=gamma, lam=lam)
    assert found.tolist() == pytest.approx(due, abs=1e-9)
    assert returns.tolist() == pytest.approx([a + v for a, v in zip(due, values, strict=True)])


@pytest.mark.parametrize(
    ("mask", "reward", "words"),
    [
        ([0, 0], 1.0, "row: it has a reward and no supervised entry"),
        ([0, 0], [0.0, 0.5], "row: it has a reward and no supervised entry"),
        ([1], 1.0, "2 values for 1 entries"),
        ([1, 1], [1.0], "1 rewards for 2 entries"),
        ([1, 1], math.nan, "entry 1 is not finite"),
    ],
)
def test_rows_that_do_not_fit_are_refused(mask: list[int], reward: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gae(np.zeros(2), mask, reward)


def test_a_value_that_is_not_finite_is_refused_where_it_counts() -> None:
    values = np.array([math.inf, 1.0])
    with pytest.raises(ValueError, match="u_0_0: the value or the reward of entry 0"):
        gae(values, [1, 1], 0.0, key="u_0_0")
    assert gae(values, [0, 1], 1.0)[0].tolist() == [0.0, 0.0]


def test_no_supervised_entry_and_no_reward_is_nothing() -> None:
    found, returns = gae(np.ones(3), [0, 0, 0], 0.0)
    assert (found.tolist(), returns.tolist()) == ([0.0] * 3, [0.0] * 3)


@kinds
def test_a_session_is_one_trajectory(kind: Any) -> None:
    first = (kind([0.1, 0.2]), kind([1, 0]), None)
    second = (kind([0.3, 0.4]), kind([1, 1]), 1.0)
    parts = session_gae([first, second], gamma=1.0, lam=0.5)
    assert [a.tolist() for a, _ in parts] == [near([0.4, 0]), near([0.4, 0.6])]
    assert [r.tolist() for _, r in parts] == [near([0.5, 0]), near([0.7, 1.0])]
    assert all(isinstance(a, type(first[0])) for a, _ in parts)


def test_a_session_has_the_reward_of_the_last_that_has_any() -> None:
    one = np.zeros(1)
    parts = session_gae([(one, [1], 5.0), (one, [1], 2.0), (one, [1], None)], lam=0.0)
    assert [a.tolist() for a, _ in parts] == [[0.0], [0.0], [2.0]]


@kinds
def test_normalized_has_no_mean_and_a_deviation_of_one(kind: Any) -> None:
    rows = normalized([kind([1.0, 9.0]), kind([3.0])], [kind([1, 0]), kind([1])])
    assert [row.tolist() for row in rows] == [near([-1.0, 0.0]), near([1.0])]


def test_normalized_without_a_signal_is_exactly_zero() -> None:
    rows = normalized([np.full(7, 0.1)], [np.ones(7)])
    assert rows[0].tolist() == [0.0] * 7
    assert normalized([np.ones(2)], [np.zeros(2)])[0].tolist() == [0.0, 0.0]


@kinds
def test_scenario_9_an_advantage_has_the_length_of_its_labels(kind: Any) -> None:
    """Full layout has five entries and next-token layout four: never one more than the inputs."""
    assert per_token(1.5, kind([0, 0, 0, 1, 1])).tolist() == [0, 0, 0, 1.5, 1.5]
    assert per_token(1.5, kind([0, 0, 1, 1])).tolist() == [0, 0, 1.5, 1.5]


@kinds
def test_xtuner_2095_two_samples_packed_do_not_shift(kind: Any) -> None:
    first = per_token(1.5, kind([0, 0, 1, 0, 1])).tolist()
    second = per_token(-0.5, kind([0, 1, 1, 0, 0, 1, 1])).tolist()
    assert (first + second)[5:] == [0, -0.5, -0.5, 0, 0, -0.5, -0.5]


def test_an_advantage_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be trained on"):
        per_token(math.nan, np.ones(2))
