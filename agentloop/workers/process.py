"""A worker in a child process, which ends with this one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from agentloop.groups.job import GroupJob
from agentloop.groups.outcome import GroupOutcome
from agentloop.processes.calls import CallFailed
from agentloop.processes.child import Child, ChildDied
from agentloop.workers.types import WorkerError, WorkerLost

END_S = 10.0
"""How long a child may take to close what it holds when it is asked to."""


class ProcessWorker:
    """A child process that runs groups."""

    def __init__(self, child: Child) -> None:
        self._child = child

    @classmethod
    async def start(
        cls, config: Mapping[str, Any], *, start_timeout_s: float = 120.0
    ) -> ProcessWorker:
        """A child that has joined the plane and made its engines.

        Raises:
            WorkerError: it could not start; it is ended.
        """
        worker = cls(await Child.spawn("agentloop.workers.child"))
        try:
            async with asyncio.timeout(start_timeout_s):
                await worker._ask("start", dict(config))
        except BaseException as error:
            await worker.kill()
            if isinstance(error, TimeoutError):
                raise WorkerError(f"it did not start within {start_timeout_s:g} s") from error
            if isinstance(error, WorkerLost):
                raise WorkerError(f"it ended while it started: {error}") from error
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child.alive

    async def run(self, job: GroupJob) -> GroupOutcome:
        return GroupOutcome.of(await self._ask("run", job.plain()))

    async def pause(self, limit_s: float) -> None:
        await self._ask("pause", limit_s)

    async def resume(self) -> None:
        await self._ask("resume")

    async def update_weights(self, version: int) -> None:
        await self._ask("update_weights", version)

    async def plane_time_s(self) -> float:
        return float(await self._ask("plane_time_s"))

    async def close(self) -> None:
        """End the child: by asking, and by force when it does not."""
        try:
            async with asyncio.timeout(END_S):
                await self._ask("close")
        except (TimeoutError, WorkerLost, WorkerError):
            self._child.kill()
        await self._child.close()

    async def kill(self) -> None:
        """End the child at once."""
        self._child.kill()
        await self._child.close()

    async def _ask(self, verb: str, body: Any = None) -> Any:
        try:
            return await self._child.call(verb, body)
        except ChildDied as error:
            raise WorkerLost(f"worker process {self.pid}: {error}") from None
        except CallFailed as error:
            raise WorkerError(str(error)) from None
