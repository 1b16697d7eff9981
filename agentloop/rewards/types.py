"""What judges a trajectory. Owns the seam to rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from agentloop.trajectory.state import RolloutState


class RewardError(Exception):
    """A judge could not judge."""


class Reward(Protocol):
    """Scores trajectories. Stateless, or safe for many coroutines of one event loop."""

    async def score(self, states: Sequence[RolloutState]) -> list[dict[str, Any]]:
        """For each state, in order, a map with a finite `score` and what else there is to say.

        States of one call are the trajectories of sessions that are judged together; a session's
        conversation is in `dialogue`, its last answer in `response`, the dataset's row in `row`.

        Raises:
            RewardError: it could not judge; none of the states has a reward.
        """
        ...
