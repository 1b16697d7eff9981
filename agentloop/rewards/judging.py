"""How a producer uses a reward, whoever wrote it: asked with a deadline, checked, closed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from agentloop.rewards.deadline import within
from agentloop.rewards.scores import verdicts
from agentloop.rewards.types import Reward, RewardError
from agentloop.trajectory.state import RolloutState


async def ask(
    reward: Reward, states: Sequence[RolloutState], *, timeout_s: float, name: str = "the judge"
) -> list[dict[str, Any]]:
    """A map with a finite `score` for each state, in order. The states are not changed.

    A trajectory that nobody judges keeps `reward` None: it has no tag `score` and no field
    `reward`. That is no zero: it counts in no mean, and a trainer that needs it refuses the row.

    Raises:
        RewardError: it failed, overran, or said something that is no list of rewards; none of
            the states has a reward. It is the only error: a judge cannot end a producer.
    """
    said = await within(_scored(reward, states), timeout_s, name)
    try:
        return verdicts(said, len(states))
    except RewardError as error:
        raise RewardError(f"{name}: {error}") from error


async def _scored(reward: Reward, states: Sequence[RolloutState]) -> object:
    # A `score` that was written without `async` is understood as well.
    said: Any = reward.score(states)
    return await said if inspect.isawaitable(said) else said


async def close_reward(reward: object) -> None:
    """Give back what the reward holds: processes, connections. Most rewards hold nothing."""
    closing = getattr(reward, "close", None)
    if closing is not None:
        said = closing()
        if inspect.isawaitable(said):
            await said
