"""Which revision was made when: on the safe side of the truth, and bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dataplane.tags.moments import FIRST_STEP_S, MAX_MOMENTS, Moments


def test_nothing_is_known_before_the_first_change() -> None:
    moments = Moments()
    assert moments.revision_at(1e9) == 0
    assert moments.made_at(5) is None


def test_changes_within_a_step_share_a_moment() -> None:
    moments = Moments()
    for n, at in ((1, 10.0), (2, 10.2), (3, 10.6), (4, 11.0), (5, 11.2)):
        moments.note(n, at)
    assert [moments.made_at(n) for n in (1, 2, 3, 4, 5, 99)] == [10.0, 10.0, 10.6, 10.6, 11.2, 11.2]
    assert [moments.revision_at(at) for at in (9.9, 10.0, 10.5, 10.6, 11.1, 11.2, 50)] == [
        0, 1, 1, 3, 3, 5, 5,
    ]  # fmt: skip


@given(st.lists(st.floats(0, 3), min_size=1, max_size=300), st.integers(0, 400))
def test_what_is_told_is_never_too_new(steps: list[float], asked: int) -> None:
    moments, at = Moments(), 1000.0
    made: list[float] = []
    for n, step in enumerate(steps, 1):
        at += step
        made.append(at)
        moments.note(n, at)
    time = 1000.0 + asked
    told = moments.revision_at(time)
    assert told == 0 or made[told - 1] <= time
    last = sum(1 for each in made if each <= time)
    if last:  # and at most a step too old
        assert made[last - 1] - made[told - 1] < FIRST_STEP_S
    for n, truth in enumerate(made, 1):
        assert truth - FIRST_STEP_S < (moments.made_at(n) or 0.0) <= truth


def test_a_long_life_is_remembered_coarsely() -> None:
    moments = Moments()
    for n in range(1, 40 * MAX_MOMENTS):
        moments.note(n, float(n))
    assert len(moments._n) <= MAX_MOMENTS
    for n in (1, 1000, 20 * MAX_MOMENTS, 40 * MAX_MOMENTS - 1):
        told = moments.revision_at(float(n))
        assert 0 < told <= n
        assert n - told <= 2 * moments._step_s
