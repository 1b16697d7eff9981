"""Agent loops: they run sessions against a model and publish trajectories to the data plane.

Subclass `AgentLoop` and write `run`; or take `SingleTurnLoop`, `ToolAgentLoop` or `EnvLoop`. Uses
only the public names of `dataplane`, and knows nothing of `trainer`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentloop.engines import make_engine
    from agentloop.engines.types import Completion, Engine, Request, Sampling
    from agentloop.envs.loop import EnvLoop
    from agentloop.groups.job import GroupJob
    from agentloop.groups.producer import Producer
    from agentloop.groups.task import Task
    from agentloop.loops.loop import AgentLoop, Session
    from agentloop.loops.single_turn import SingleTurnLoop
    from agentloop.loops.tool_agent import ToolAgentLoop
    from agentloop.production.manager import ManagedTask, RolloutManager
    from agentloop.production.seats import Seats
    from agentloop.rewards.types import Reward
    from agentloop.trajectory.state import RolloutState, Status

_HOME = {
    "AgentLoop": "loops.loop",
    "Completion": "engines.types",
    "Engine": "engines.types",
    "EnvLoop": "envs.loop",
    "GroupJob": "groups.job",
    "ManagedTask": "production.manager",
    "Producer": "groups.producer",
    "Request": "engines.types",
    "Reward": "rewards.types",
    "RolloutManager": "production.manager",
    "RolloutState": "trajectory.state",
    "Sampling": "engines.types",
    "Seats": "production.seats",
    "Session": "loops.loop",
    "SingleTurnLoop": "loops.single_turn",
    "Status": "trajectory.state",
    "Task": "groups.task",
    "ToolAgentLoop": "loops.tool_agent",
    "make_engine": "engines",
}
"""Where each public name lives. Names load on first use: who sends trajectories needs no torch."""

__all__ = [
    "AgentLoop",
    "Completion",
    "Engine",
    "EnvLoop",
    "GroupJob",
    "ManagedTask",
    "Producer",
    "Request",
    "Reward",
    "RolloutManager",
    "RolloutState",
    "Sampling",
    "Seats",
    "Session",
    "SingleTurnLoop",
    "Status",
    "Task",
    "ToolAgentLoop",
    "make_engine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'agentloop' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"agentloop.{_HOME[name]}"), name)
    globals()[name] = value
    return value
