"""The producers of a training run, as a trainer drives them: from settings to counts and times."""

from agentloop.rollouts.describe import describe
from agentloop.rollouts.open import open_rollouts
from agentloop.rollouts.rollouts import AgentRollouts

__all__ = ["AgentRollouts", "describe", "open_rollouts"]
