"""What a manager asks of a worker, wherever it runs. Owns the seam to worker processes."""

from __future__ import annotations

from typing import Protocol

from agentloop.groups.job import GroupJob
from agentloop.groups.outcome import GroupOutcome


class WorkerLost(Exception):
    """The worker's process is gone. What it was running is as far as it came."""


class WorkerError(Exception):
    """The worker is alive and could not do what it was asked; says why."""


class Worker(Protocol):
    """Runs groups in a process of its own, or in this one.

    All calls raise WorkerLost when the process is gone, also those that wait for an answer.
    """

    async def run(self, job: GroupJob) -> GroupOutcome:
        """Run a group to its end, or until it is interrupted. WorkerError if it cannot be run."""
        ...

    async def pause(self, limit_s: float) -> None:
        """Interrupt all groups; their `run` returns what they have. Returns within the limit and
        a grace for what does not stop."""
        ...

    async def resume(self) -> None: ...

    async def update_weights(self, version: int) -> None:
        """Generate with the weights of this version, which lie in the plane."""
        ...

    async def plane_time_s(self) -> float:
        """Seconds so far in which at least one call of the plane was under way in its process."""
        ...

    async def close(self) -> None: ...
