"""What a worker process does, whoever started it: takes plain data and gives plain data."""

from __future__ import annotations

import os
from typing import Any

from agentloop.assembly import Assembled, assemble, settle_memory
from agentloop.config import WorkerConfig
from agentloop.groups.job import GroupJob


class Body:
    """A producer that has joined the plane, once it is started."""

    def __init__(self) -> None:
        self._assembled: Assembled | None = None

    async def start(self, config: dict[str, Any]) -> int:
        """Join the plane and make the engines; the process's id."""
        self._assembled = await assemble(WorkerConfig.model_validate(config))
        settle_memory()
        return os.getpid()

    async def run(self, job: dict[str, Any]) -> dict[str, Any]:
        return (await self._ready().producer.run(GroupJob.of(job))).plain()

    async def pause(self, limit_s: float) -> None:
        await self._ready().producer.pause(limit_s)

    async def resume(self, _: None = None) -> None:
        await self._ready().producer.resume()

    async def update_weights(self, version: int) -> None:
        await self._ready().producer.update_weights(version)

    async def plane_time_s(self, _: None = None) -> float:
        return self._ready().producer.clock.seconds

    async def close(self, _: None = None) -> None:
        if self._assembled is not None:
            await self._assembled.close()

    def _ready(self) -> Assembled:
        if self._assembled is None:
            raise RuntimeError("the worker was not started")
        return self._assembled
