"""A worker in this process: for one event loop's worth of sessions, and for tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from agentloop.groups.job import GroupJob
from agentloop.groups.outcome import GroupOutcome
from agentloop.groups.producer import Producer
from agentloop.workers.types import WorkerError


class LocalWorker:
    """A producer of this event loop as a worker."""

    def __init__(
        self, producer: Producer, *, on_close: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`on_close` is called instead of the producer's own `close`, and does that too."""
        self._producer = producer
        self._on_close = on_close or producer.close

    async def run(self, job: GroupJob) -> GroupOutcome:
        try:
            return await self._producer.run(job)
        except Exception as error:
            raise WorkerError(f"{type(error).__name__}: {error}") from error

    async def pause(self, limit_s: float) -> None:
        await self._producer.pause(limit_s)

    async def resume(self) -> None:
        await self._producer.resume()

    async def update_weights(self, version: int) -> None:
        await self._producer.update_weights(version)

    async def plane_time_s(self) -> float:
        return self._producer.clock.seconds

    async def close(self) -> None:
        await self._on_close()
