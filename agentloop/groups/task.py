"""A task as a worker runs it: the loop, the engine, the judge, and what becomes of bad groups."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from agentloop.engines.types import Engine, Sampling
from agentloop.groups.job import GroupJob
from agentloop.loops.chat import ChatTokenizer
from agentloop.loops.loop import AgentLoop
from agentloop.rewards.types import Reward
from agentloop.trajectory.state import RolloutState

Policy: TypeAlias = Literal["fail", "drop", "refill"]
"""What becomes of a group that is not to be trained. `fail`: it ends as `failure` and its rows stay
until somebody clears them. `drop`: its rows are cleared. `refill`: they are cleared, and another
prompt is taken in its place."""

IsValid: TypeAlias = Callable[[Sequence[RolloutState]], bool]
"""Whether a completed group, judged and canonical, is worth training."""


@dataclass(slots=True)
class Task:
    """One task of a worker."""

    name: str
    loop: AgentLoop
    engine: Engine
    tokenizer: ChatTokenizer
    sampling: Sampling = field(default_factory=Sampling)
    reward: Reward | None = None
    is_valid_sample: IsValid | None = None
    incomplete: Policy = "fail"
    """Of groups in which a session failed."""
    filtered: Policy = "fail"
    """Of groups that `is_valid_sample` refused."""
    declared_bytes: int | None = None
    """Room that a group asks for when it begins; None where no quota asks for it."""
    session_timeout_s: float = 1800.0
    turn_timeout_s: float = 600.0
    admission_timeout_s: float = 600.0
    """How long a group waits for room before it begins."""
    partial_rollout: bool = True
    """Whether an interrupted response is gone on with, rather than begun anew."""
    evaluates: bool = False

    def sampling_of(self, job: GroupJob, session_id: int) -> Sampling:
        """How one session of a group samples.

        Where the task has a seed, the session's own follows from it, the trainer step, the prompt's
        uid and the session: no two draw the same noise, and a run that is resumed draws it again.
        """
        sampling = replace(self.sampling, temperature=0.0) if job.greedy else self.sampling
        if sampling.seed is None:
            return sampling
        told = f"{sampling.seed}:{job.global_steps}:{job.uid}:{session_id}".encode()
        digest = hashlib.blake2b(told, digest_size=4).digest()
        # 31 bits: some servers take no larger seed.
        return replace(sampling, seed=int.from_bytes(digest, "big") >> 1)
