"""A worker in a child process, which ends with this one."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping
from typing import Any

from agentloop.groups.job import GroupJob
from agentloop.production.accounting import GroupOutcome
from agentloop.workers.calls import CallFailed, Calls, Disconnected
from agentloop.workers.types import WorkerError, WorkerLost

END_S = 10.0
"""How long a child may take to end when it is asked to."""


class ProcessWorker:
    """A child process that runs groups."""

    def __init__(self, process: asyncio.subprocess.Process, calls: Calls) -> None:
        self._process = process
        self._calls = calls

    @classmethod
    async def start(
        cls, config: Mapping[str, Any], *, start_timeout_s: float = 120.0
    ) -> ProcessWorker:
        """A child that has joined the plane and made its engines.

        Raises:
            WorkerError: it could not start; it is ended.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "agentloop.workers.child", str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        finally:
            theirs.close()
        worker = cls(process, await Calls.over(ours, {}))
        try:
            async with asyncio.timeout(start_timeout_s):
                await worker._ask("start", dict(config))
        except BaseException as error:
            await worker.kill()
            if isinstance(error, (TimeoutError, WorkerLost)):
                raise WorkerError(
                    f"the worker did not start within {start_timeout_s:g} s"
                    if isinstance(error, TimeoutError)
                    else "the worker ended while it started; its own output says why"
                ) from error
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def run(self, job: GroupJob) -> GroupOutcome:
        return GroupOutcome.of(await self._ask("run", job.plain()))

    async def pause(self, limit_s: float) -> None:
        await self._ask("pause", limit_s)

    async def resume(self) -> None:
        await self._ask("resume")

    async def update_weights(self, version: int) -> None:
        await self._ask("update_weights", version)

    async def close(self) -> None:
        """End the child: by asking, and by force when it does not."""
        try:
            async with asyncio.timeout(END_S):
                await self._ask("close")
                await self._calls.close()
                await self._process.wait()
        except (TimeoutError, WorkerLost, WorkerError):
            await self.kill()

    async def kill(self) -> None:
        """End the child at once."""
        if self._process.returncode is None:
            self._process.kill()
        await self._calls.close()
        await self._process.wait()

    async def _ask(self, verb: str, body: Any = None) -> Any:
        try:
            return await self._calls.ask(verb, body)
        except Disconnected as error:
            raise WorkerLost(f"worker process {self.pid}: {error}") from None
        except CallFailed as error:
            raise WorkerError(str(error)) from None
