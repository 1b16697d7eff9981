"""What counts as a reward, and how a producer asks for one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentloop.rewards import RewardError, ask, close_reward, score_of, verdict
from agentloop.rewards.scores import verdicts
from agentloop.trajectory.state import RolloutState
from tests.agentloop.judged import judged


@pytest.mark.parametrize(
    ("said", "score"),
    [
        (1, 1.0), (True, 1.0), (0.25, 0.25), (np.float32(0.5), 0.5), (np.int64(3), 3.0),
        (np.array(2.0), 2.0), (torch.tensor(0.5), 0.5), (torch.tensor([4]), 4.0),
        (Fraction(1, 4), 0.25),
    ],
)  # fmt: skip
def test_numbers_of_every_kind_are_scores(said: object, score: float) -> None:
    got = verdict(said)
    assert got == {"score": score}
    assert type(got["score"]) is float


@pytest.mark.parametrize(
    "said",
    [
        None, "1.0", b"1", math.nan, math.inf, -math.inf, 1j, [], [1.0], {}, {"reward": 1.0},
        10**400,
        {"score": None}, {"score": math.nan}, {"score": "1"}, {"score": 1.0, 7: "x"}, object(),
        np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), torch.tensor(math.nan),
    ],
)  # fmt: skip
def test_what_has_no_finite_score_is_no_reward(said: object) -> None:
    with pytest.raises(RewardError):
        verdict(said)


def test_a_map_keeps_what_else_was_said() -> None:
    assert verdict({"score": 2, "why": ["x"], "n": None}) == {"score": 2.0, "why": ["x"], "n": None}


@given(st.one_of(st.none(), st.floats(), st.integers(), st.text(max_size=3), st.booleans()))
def test_a_score_is_finite_or_not_there(value: object) -> None:
    score = score_of({"score": value})
    assert score is None or math.isfinite(score)
    if isinstance(value, float):
        assert (score is not None) == math.isfinite(value)
    elif isinstance(value, int) and abs(value) < 10**300:
        assert score == float(value)
    elif not isinstance(value, int):
        assert score is None


def test_rg_14_a_reward_without_a_finite_score_is_never_published_as_a_score() -> None:
    """No zero stands in for it: the row has no score at all, and the trainer decides."""
    assert score_of(None) is None
    assert score_of({}) is None
    assert score_of({"score": None, "why": "no idea"}) is None
    assert score_of({"score": float("nan")}) is None
    assert score_of({"score": 0}) == 0.0


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([1.0], "2 rewards were due.*got 1"), ([1.0, 2.0, 3.0], "got 3"), (None, "got NoneType"),
        ("12", "got str"), ({"score": 1.0}, "got dict"), ([1.0, math.nan], "reward 1 of 2.*nan"),
        ([None, 1.0], "reward 0 of 2"), (7, "got int"),
    ],
)  # fmt: skip
def test_a_wrong_list_of_rewards_says_what_is_wrong(said: object, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        verdicts(said, 2)


def test_arrays_are_lists_of_rewards() -> None:
    due = [{"score": 0.5}, {"score": 1.0}]
    assert verdicts(np.array([0.5, 1.0]), 2) == due
    assert verdicts(torch.tensor([0.5, 1.0]), 2) == due
    assert verdicts((x for x in (0.5, 1)), 2) == due


class Said:
    """A reward that does what it is told."""

    def __init__(self, act: Any) -> None:
        self.act = act
        self.closed = 0

    async def score(self, states: Sequence[RolloutState]) -> list[dict[str, Any]]:
        return await self.act() if asyncio.iscoroutinefunction(self.act) else self.act()

    async def close(self) -> None:
        self.closed += 1


def _raises(error: BaseException) -> Any:
    def act() -> Any:
        raise error

    return act


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    "error",
    [ValueError("broken"), SystemExit(3), asyncio.CancelledError(), RecursionError(), Unprintable(),
     StopIteration(1), ExceptionGroup("g", [ValueError("a")])],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
async def test_a_judge_that_raises_anything_only_leaves_no_reward(error: BaseException) -> None:
    state = judged("4")
    with pytest.raises(RewardError, match="rules"):
        await ask(Said(_raises(error)), [state], timeout_s=5, name="rules")
    assert state.reward is None


async def test_a_judge_that_hangs_is_left_at_its_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"within 0\.05 s"):
        await ask(Said(asyncio.Event().wait), [judged("4")], timeout_s=0.05)
    assert time.monotonic() - began < 5


async def test_a_judge_that_ignores_cancelling_is_left_all_the_same() -> None:
    done = asyncio.Event()
    cancelled = asyncio.Event()

    async def stubborn() -> Any:
        while not done.is_set():
            try:
                await done.wait()
            except asyncio.CancelledError:
                cancelled.set()
        raise ValueError("nobody asks any more")

    with pytest.raises(RewardError, match="did not answer"):
        await ask(Said(stubborn), [judged("4")], timeout_s=0.05)
    await asyncio.wait_for(cancelled.wait(), 5)
    done.set()
    await asyncio.sleep(0)


async def test_cancelling_who_asks_cancels_the_judge() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def waits() -> Any:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    asking = asyncio.create_task(ask(Said(waits), [judged("4")], timeout_s=60))
    await began.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.wait_for(ended.wait(), 5)


async def test_what_a_judge_says_is_checked_whoever_wrote_it() -> None:
    with pytest.raises(RewardError, match=r"mine: .*1 rewards? were due"):
        await ask(Said(list), [judged("4")], timeout_s=5, name="mine")
    with pytest.raises(RewardError, match="nan"):
        await ask(Said(lambda: [{"score": math.nan}]), [judged("4")], timeout_s=5)
    assert await ask(Said(lambda: [0.5]), [judged("4")], timeout_s=5) == [{"score": 0.5}]


async def test_a_score_method_without_async_is_understood() -> None:
    class Plain:
        def score(self, states: Sequence[RolloutState]) -> list[float]:
            return [1.0 for _ in states]

    assert await ask(Plain(), [judged("4")], timeout_s=5) == [{"score": 1.0}]  # type: ignore[arg-type]


async def test_closing_reaches_rewards_that_hold_something() -> None:
    holds = Said(list)
    await close_reward(holds)
    await close_reward(object())
    assert holds.closed == 1
