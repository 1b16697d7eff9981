"""Several rewards as one, chosen by the data source, and made from configuration."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.datasets.data_source import source_name, source_weights
from agentloop.rewards import (
    FunctionReward,
    HttpJudge,
    MathVerifyReward,
    Part,
    ReasoningGymReward,
    RewardError,
    RoutedReward,
    WeightedReward,
    make_reward,
)
from agentloop.trajectory.state import RolloutState
from tests.agentloop.judged import judged


class Fixed:
    """A judge that gives what it is told, and counts."""

    def __init__(self, said: Any) -> None:
        self.said = said
        self.asked: list[list[str | None]] = []
        self.closed = 0

    async def score(self, states: Sequence[RolloutState]) -> list[dict[str, Any]]:
        self.asked.append([state.response for state in states])
        await asyncio.sleep(0)
        if isinstance(self.said, BaseException):
            raise self.said
        return [dict(self.said) if isinstance(self.said, dict) else self.said for _ in states]

    async def close(self) -> None:
        self.closed += 1


def half(state: RolloutState) -> float:
    return 0.5


def count(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completions))] * len(completions)


async def test_a_weighted_sum_keeps_every_part_under_its_name() -> None:
    accuracy, form = Fixed({"score": 1.0, "answer": "4"}), Fixed(0.5)
    reward = WeightedReward({"accuracy": Part(accuracy), "form": Part(form, weight=0.2)})
    assert (
        await reward.score([judged("a"), judged("b")])
        == [{"score": 1.1, "accuracy": {"score": 1.0, "answer": "4"}, "form": {"score": 0.5}}] * 2
    )
    assert accuracy.asked == form.asked == [["a", "b"]]


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=5))
def test_the_sum_is_of_weight_times_score(parts: list[tuple[float, float]]) -> None:
    reward = WeightedReward({f"p{i}": Part(Fixed(s), w) for i, (w, s) in enumerate(parts)})
    (said,) = asyncio.run(reward.score([judged("a")]))
    assert said["score"] == math.fsum(w * s for w, s in parts)
    assert [said[f"p{i}"]["score"] for i in range(len(parts))] == [s for _, s in parts]


async def test_every_part_that_fails_without_a_default_is_named() -> None:
    reward = WeightedReward(
        {
            "good": Part(Fixed(1.0)),
            "bad": Part(Fixed(ValueError("broken"))),
            "wild": Part(Fixed(math.nan)),
        }
    )
    with pytest.raises(RewardError) as caught:
        await reward.score([judged("a")])
    assert "bad raised ValueError: broken" in str(caught.value)
    assert "wild: reward 0 of 1: a score is a finite number; got nan" in str(caught.value)
    assert "good" not in str(caught.value)


async def test_a_declared_default_stands_in_and_says_why() -> None:
    reward = WeightedReward(
        {
            "good": Part(Fixed(1.0)),
            "bad": Part(Fixed(ValueError("broken")), weight=2.0, default=-0.5),
        }
    )
    (said,) = await reward.score([judged("a")])
    assert said["score"] == 0.0
    assert said["bad"] == {"score": -0.5, "error": "bad raised ValueError: broken"}


async def test_a_part_that_hangs_takes_no_longer_than_its_time() -> None:
    class Hangs(Fixed):
        async def score(self, states: Sequence[RolloutState]) -> list[dict[str, Any]]:
            await asyncio.Event().wait()
            return []

    reward = WeightedReward(
        {"good": Part(Fixed(1.0)), "slow": Part(Hangs(0), timeout_s=0.05, default=0.0)}
    )
    (said,) = await asyncio.wait_for(reward.score([judged("a")]), 10)
    assert said["score"] == 1.0
    assert "did not answer within 0.05 s" in said["slow"]["error"]


async def test_parts_are_judged_at_the_same_time() -> None:
    both = asyncio.Barrier(2)

    class Meets(Fixed):
        async def score(self, states: Sequence[RolloutState]) -> list[dict[str, Any]]:
            await both.wait()
            return [{"score": 1.0}]

    reward = WeightedReward({"a": Part(Meets(0)), "b": Part(Meets(0))})
    (said,) = await asyncio.wait_for(reward.score([judged("x")]), 10)
    assert said["score"] == 2.0


async def test_a_sum_that_overflows_is_no_score() -> None:
    reward = WeightedReward({"a": Part(Fixed(1e308), weight=10.0)})
    with pytest.raises(RewardError, match="weighted sum of a is inf"):
        await reward.score([judged("a")])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "at least one part"), ({"score": Part(Fixed(1))}, "cannot have the name 'score'"),
        ({"": Part(Fixed(1))}, "cannot have the name"),
        ({"a": Part(Fixed(1), weight=math.nan)}, "finite"),
        ({"a": Part(Fixed(1), default=math.inf)}, "finite"),
    ],
)  # fmt: skip
def test_wrong_parts_are_refused_when_they_are_declared(parts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightedReward(parts)


# -- data sources ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "weights", "name"),
    [
        (None, {}, None), ("gsm8k", {"gsm8k": 1.0}, "gsm8k"), ({}, {}, None),
        ({"math": 0.3, "style": 0.7}, {"math": 0.3, "style": 0.7}, "style"),
        ({"a": 1, "b": 1}, {"a": 1.0, "b": 1.0}, "a"), ({"a": None, "b": 0.1}, {"b": 0.1}, "b"),
    ],
)  # fmt: skip
def test_the_largest_weight_names_the_source(source: Any, weights: Any, name: Any) -> None:
    assert source_weights(source) == weights
    assert source_name(source) == name


@pytest.mark.parametrize("source", [3, ["a"], {"a": "1"}, {"a": math.nan}, {1: 1.0}, {"a": True}])
def test_what_is_no_data_source_is_refused(source: Any) -> None:
    with pytest.raises(ValueError, match="data source"):
        source_weights(source)


async def test_each_trajectory_goes_to_the_judge_of_its_source() -> None:
    math_judge, code = Fixed({"score": 1.0}), Fixed(0.25)
    reward = RoutedReward({"math": math_judge, "code": code})
    said = await reward.score(
        [
            judged("1", data_source="code"),
            judged("2", data_source="math"),
            judged("3", data_source="code"),
        ]
    )
    assert said == [
        {"score": 0.25, "code": {"score": 0.25}},
        {"score": 1.0, "math": {"score": 1.0}},
        {"score": 0.25, "code": {"score": 0.25}},
    ]
    assert (math_judge.asked, code.asked) == ([["2"]], [["1", "3"]])


async def test_a_source_of_several_judges_sums_by_weight() -> None:
    unused = Fixed(9.0)
    reward = RoutedReward({"math": Fixed(1.0), "style": Fixed(0.5), "other": unused})
    source = {"math": 0.7, "style": 0.4, "other": 0.0, "gone": None}
    (said,) = await reward.score([judged("1", data_source=source)])
    assert said == {"score": pytest.approx(0.9), "math": {"score": 1.0}, "style": {"score": 0.5}}
    assert unused.asked == []


async def test_the_default_judges_what_names_no_judge() -> None:
    reward = RoutedReward({"math": Fixed(1.0), "rest": Fixed(0.5)}, default="rest")
    said = await reward.score(
        [
            judged("1"),
            judged("2", data_source="poems"),
            judged("3", data_source={"math": 2, "poems": 3}),
        ]
    )
    assert [one["score"] for one in said] == [0.5, 0.5, 3.5]


async def test_the_row_wins_over_the_name_of_the_state() -> None:
    reward = RoutedReward({"math": Fixed(1.0), "code": Fixed(0.5)})
    state = judged("1", data_source={"math": 1.0})
    state.data_source = "code"
    assert (await reward.score([state]))[0]["score"] == 1.0
    state.row = {}
    assert (await reward.score([state]))[0]["score"] == 0.5


async def test_a_source_without_a_judge_is_named() -> None:
    with pytest.raises(RewardError, match="no judge for the data source poems; there are math"):
        await RoutedReward({"math": Fixed(1.0)}).score([judged("1", data_source="poems")])
    with pytest.raises(RewardError, match="data source 'a' has the weight 'x'"):
        await RoutedReward({"a": Fixed(1.0)}).score([judged("1", data_source={"a": "x"})])


async def test_closing_reaches_every_part() -> None:
    first, second = Fixed(1.0), Fixed(1.0)
    await WeightedReward({"a": Part(RoutedReward({"x": first})), "b": Part(second)}).close()
    assert (first.closed, second.closed) == (1, 1)


# -- configuration ---------------------------------------------------------------------------


async def test_a_reward_is_made_from_plain_data() -> None:
    reward = make_reward(
        {
            "kind": "weighted",
            "parts": {
                "half": {"reward": {"kind": "function", "function": f"{__name__}:half"}},
                "by_source": {
                    "weight": 2,
                    "default": 0.0,
                    "reward": {
                        "kind": "routed",
                        "default": "n",
                        "judges": {"n": {"kind": "function", "function": f"{__name__}:count"}},
                    },
                },
            },
        }
    )
    (said,) = await reward.score([judged("a")])
    assert said == {
        "score": 2.5,
        "half": {"score": 0.5},
        "by_source": {"score": 1.0, "n": {"score": 1.0}},
    }


MATH = {"kind": "math_verify"}


def test_every_kind_of_reward_can_be_made() -> None:
    made = {
        "function": ({"function": f"{__name__}:half", "timeout_s": 1}, FunctionReward),
        "math_verify": ({"columns": ["answer"], "processes": 1}, MathVerifyReward),
        "reasoning_gym": ({"answer_tag": None}, ReasoningGymReward),
        "http": ({"url": "http://localhost:1/judge", "tries": 2}, HttpJudge),
    }
    for kind, (settings, expected) in made.items():
        assert type(make_reward({"kind": kind, **settings})) is expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no reward of kind None; there are function, .*routed"),
        ({"kind": "magic"}, "no reward of kind 'magic'"),
        ({"kind": "http"}, "needs the setting url"),
        ({"kind": "math_verify", "timeout": 3}, "no setting 'timeout'; it has columns"),
        ({"kind": "function", "function": "no.where:f"}, "cannot be imported"),
        ({"kind": "weighted"}, "has the setting 'parts'"),
        ({"kind": "weighted", "parts": {"a": {"weight": 1}}}, "'a' of .* names no reward"),
        ({"kind": "weighted", "parts": {"a": {"reward": {"kind": "magic"}}}}, "'magic'"),
        ({"kind": "weighted", "parts": {"a": {"reward": MATH, "wait": 1}}}, "'wait'"),
        ({"kind": "routed"}, "a map was due"),
        ({"kind": "routed", "judges": {"a": MATH}, "default": "b"}, "default judge 'b'"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_says_what_is_wrong(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_reward(config)
