"""Rewards: what judges trajectories. One Protocol, rule functions, checkers, judges, sums of them.

Names are loaded when they are used: a producer needs only the libraries of the rewards it names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentloop.rewards.composition import Part, RoutedReward, WeightedReward
    from agentloop.rewards.functions import FunctionReward
    from agentloop.rewards.http_judge import HttpJudge
    from agentloop.rewards.judging import ask, close_reward
    from agentloop.rewards.make import make_reward
    from agentloop.rewards.math_verify import MathVerifyReward
    from agentloop.rewards.reasoning_gym import ReasoningGymReward
    from agentloop.rewards.scores import score_of, verdict
    from agentloop.rewards.types import Reward, RewardError

__all__ = [
    "FunctionReward",
    "HttpJudge",
    "MathVerifyReward",
    "Part",
    "ReasoningGymReward",
    "Reward",
    "RewardError",
    "RoutedReward",
    "WeightedReward",
    "ask",
    "close_reward",
    "make_reward",
    "score_of",
    "verdict",
]

_WHERE = {
    "FunctionReward": "functions",
    "HttpJudge": "http_judge",
    "MathVerifyReward": "math_verify",
    "Part": "composition",
    "ReasoningGymReward": "reasoning_gym",
    "Reward": "types",
    "RewardError": "types",
    "RoutedReward": "composition",
    "WeightedReward": "composition",
    "ask": "judging",
    "close_reward": "judging",
    "make_reward": "make",
    "score_of": "scores",
    "verdict": "scores",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
