"""How many prompts may begin, fresh and after a restart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import PlanError
from trainer.select import admission_capacity, warm_up_shortfall


def test_scenario_10_a_fresh_run() -> None:
    assert admission_capacity(max_staleness=2, version=0, batch_size=8, accepted=0) == 24


def test_scenario_10_a_recovered_run() -> None:
    assert admission_capacity(max_staleness=2, version=50, batch_size=8, accepted=400) == 24


def test_areal_1345_a_counter_that_was_not_restored_does_not_admit_the_past_again() -> None:
    assert admission_capacity(max_staleness=2, version=50, batch_size=8, accepted=0) == 24


def test_nothing_more_begins_when_all_was_admitted() -> None:
    assert admission_capacity(max_staleness=2, version=1, batch_size=8, accepted=32) == 0
    assert admission_capacity(max_staleness=0, version=0, batch_size=8, accepted=11) == 0


@pytest.mark.parametrize("name", ["max_staleness", "version", "batch_size", "accepted"])
def test_numbers_below_their_least_are_refused(name: str) -> None:
    numbers = {"max_staleness": 0, "version": 0, "batch_size": 1, "accepted": 0} | {name: -1}
    with pytest.raises(ValueError, match=name):
        admission_capacity(**numbers)


@given(st.integers(0, 5), st.integers(0, 100), st.integers(1, 64), st.integers(0, 10_000))
def test_no_admission_makes_a_prompt_too_old(
    most: int, version: int, batch: int, accepted: int
) -> None:
    """The last prompt admitted is trained within max_staleness batches after the next one."""
    capacity = admission_capacity(
        max_staleness=most, version=version, batch_size=batch, accepted=accepted
    )
    assert 0 <= capacity <= (most + 1) * batch
    if capacity:
        assert accepted + capacity <= (version + most + 1) * batch


def test_scenario_10_warm_up_submits_what_was_not_restored() -> None:
    assert warm_up_shortfall(1, 8, restored=5) == 3


@pytest.mark.parametrize(
    ("batches", "batch", "restored", "expected"),
    [(1.5, 64, 40, 56), (1.0, 64, 64, 0), (1.0, 64, 99, 0), (0.29, 100, 0, 29), (0, 8, 0, 0)],
)
def test_v9_warm_up(batches: float, batch: int, restored: int, expected: int) -> None:
    assert warm_up_shortfall(batches, batch, restored=restored) == expected


def test_v9_what_is_missing_must_be_whole_generation_batches() -> None:
    with pytest.raises(PlanError, match=r"24 prompts are missing.*batches of 64"):
        warm_up_shortfall(1.5, 64, restored=40, gen_batch_size=64)
    assert warm_up_shortfall(1.5, 64, gen_batch_size=64) == 64
