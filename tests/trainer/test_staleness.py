"""Staleness arithmetic, expiry and order, with the worked numbers of the specification."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.rows import trajectory
from trainer.select import (
    Expiry,
    expiry,
    fresh_policy_len,
    is_stale,
    most_stale_first,
    off_policy_metrics,
    seq_staleness,
    span,
    stale_threshold,
    staleness,
)
from trainer.trajectory import Trajectory


@pytest.mark.parametrize(
    ("most", "interval", "threshold"), [(0, 1, 1), (0, 4, 4), (1, 4, 8), (3, 1, 4)]
)
def test_thresholds_are_whole_periods(most: int, interval: int, threshold: int) -> None:
    assert stale_threshold(most, interval) == threshold


@pytest.mark.parametrize(("most", "interval"), [(-1, 1), (0, 0)])
def test_thresholds_of_nothing_are_refused(most: int, interval: int) -> None:
    with pytest.raises(ValueError, match="max_staleness"):
        stale_threshold(most, interval)


def test_synchronous_training_is_never_stale() -> None:
    assert [staleness(t - 1, t) for t in (1, 2, 50)] == [0, 0, 0]


def test_ex_7_1_the_oldest_token_decides() -> None:
    steps = ((1, 3), (3, 1))
    assert [seq_staleness(trajectory(min_global_steps=m), 5) for m, _ in steps] == [3, 1]
    assert seq_staleness(trajectory(), 5) == 0


def test_ex_7_1_a_member_expires_at_the_threshold() -> None:
    at = {m: trajectory(min_global_steps=m) for m in (2, 3)}
    assert expiry([at[3]], 5, 2, retryable=True) == Expiry((), False)
    assert expiry([at[2]], 5, 2, retryable=True) == Expiry(("u_0_0",), False)


def member(session: int, step: int, **more: object) -> Trajectory:
    return trajectory(session=session, min_global_steps=step, **more)


def test_ex_7_4_a_group_that_may_be_retried_keeps_its_fresh_members() -> None:
    old, fresh = member(0, 2), member(1, 4)
    assert expiry([old, fresh], 5, 2, retryable=True) == Expiry((old.key,), False)


def test_ex_7_4_rg_39_a_group_that_may_not_is_dropped_whole_and_says_so() -> None:
    old, fresh = member(0, 2), member(1, 4)
    assert expiry([old, fresh], 5, 2, retryable=False) == Expiry((old.key, fresh.key), True)
    assert expiry([fresh], 5, 2, retryable=False) == Expiry((), False)


def test_a_member_that_expired_before_stays_expired() -> None:
    assert expiry([member(0, 4, status="expired")], 5, 9, retryable=True).expired == ("u_0_0",)


def test_ex_7_5_the_most_stale_go_first_and_ties_as_they_came() -> None:
    assert most_stale_first([1, 5, 3]) == [1, 2, 0]
    assert most_stale_first([3, 8, 3, 3]) == [1, 0, 2, 3]


@pytest.mark.parametrize(
    ("most", "step", "expired"), [(0, 8, False), (0, 9, True), (1, 12, False), (1, 13, True)]
)
def test_ex_7_6_a_model_expires_for_future_steps(most: int, step: int, expired: bool) -> None:
    assert is_stale(4, step, stale_threshold(most, 4)) is expired


@pytest.mark.parametrize(
    ("step", "threshold", "count"), [(5, 4, 2), (5, 8, 4), (9, 4, 0), (6, 4, 2), (5, None, 4)]
)
def test_rg_26_fresh_tokens_are_counted_without_a_value(
    step: int, threshold: int | None, count: int
) -> None:
    """The row of EX-7.2: labels of tokens 0 0 . 4 4 in versions."""
    row = trajectory(prompt=2, response=5, policy_len=4, policy_spans=[[0, 2], [4, 2]])
    assert fresh_policy_len(row, step, threshold) == count


def test_ex_7_3_without_a_prompt_the_first_token_is_no_label() -> None:
    """Labels [3, 4], versions [0, 4]: shifted, only the second is left."""
    row = trajectory(prompt=0, response=2, policy_len=1, policy_spans=[[0, 1], [4, 1]])
    assert [fresh_policy_len(row, 5, t) for t in (4, 8, None)] == [1, 1, 1]
    row = trajectory(prompt=0, response=2, policy_len=1, policy_spans=[[4, 2]])
    assert [fresh_policy_len(row, t, 4) for t in (5, 9)] == [1, 0]


def test_ex_7_3_a_member_with_no_fresh_token_expires() -> None:
    row = trajectory(prompt=2, response=2, policy_len=1, policy_spans=[[0, 1]], min_global_steps=0)
    assert expiry([row], 5, 8, token_threshold=4, retryable=True).expired == ("u_0_0",)
    assert expiry([row], 5, 8, token_threshold=None, retryable=True).expired == ()
    silent = trajectory(policy_len=0, min_global_steps=0)
    assert expiry([silent], 5, 8, token_threshold=4, retryable=True).expired == ()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=6),
    st.booleans(),
    st.integers(10, 20),
    st.integers(0, 5),
    st.integers(1, 12),
)
def test_counting_spans_equals_masking_labels(
    spans: list[tuple[int, int]], with_prompt: bool, step: int, later: int, threshold: int
) -> None:
    """Against the rule itself, token by token: supervised, fresh, and an entry of labels[1:]."""
    tokens = [version for version, count in spans for _ in range(count)]
    length = int(with_prompt)
    kept = [not is_stale(version, step, threshold) for version in tokens]
    row = trajectory(
        prompt=length,
        response=len(tokens),
        policy_len=max(len(tokens) - (not with_prompt), 0),
        policy_spans=[list(s) for s in spans],
    )
    masked = ([False] * length + kept)[1:]
    assert fresh_policy_len(row, step, threshold) == sum(masked)
    assert fresh_policy_len(row, step + later, threshold) <= sum(masked)


@pytest.mark.parametrize(("step", "expected"), [(10, 8), (11, 9)])
def test_v6_span_counts_the_present_step(step: int, expected: int) -> None:
    assert span(3, step) == expected


def test_v12_off_policy_metrics() -> None:
    rows = [
        trajectory(min_global_steps=7, max_global_steps=9),
        trajectory(session=1, min_global_steps=9, max_global_steps=9),
        trajectory(session=2, min_global_steps=0, max_global_steps=0, is_padding=True),
        trajectory(session=3),
    ]
    assert off_policy_metrics(rows, 10) == {
        "training/off_policy/span/mean": 2.0,
        "training/off_policy/span/max": 3,
        "training/off_policy/span/min": 1,
        "training/off_policy/staleness/mean": 0.0,
        "training/off_policy/staleness/max": 0,
        "training/off_policy/staleness/min": 0,
        "training/off_policy/worst/mean": 1.0,
        "training/off_policy/worst/max": 2,
        "training/off_policy/worst/min": 0,
    }
    assert off_policy_metrics(rows[2:], 10) == {}
