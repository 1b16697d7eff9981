"""A worker in a Ray actor, for groups that run on other nodes than the manager."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, cast

import ray as untyped_ray
from ray.exceptions import RayActorError, RayTaskError

from agentloop.groups.job import GroupJob
from agentloop.groups.outcome import GroupOutcome
from agentloop.workers.body import Body
from agentloop.workers.types import WorkerError, WorkerLost

ray = cast("Any", untyped_ray)  # its types are partial


class RayWorker:
    """An actor that runs groups."""

    def __init__(self, actor: Any, pid: int) -> None:
        self._actor = actor
        self.pid = pid

    @classmethod
    async def start(
        cls,
        config: Mapping[str, Any],
        *,
        groups: int,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
    ) -> RayWorker:
        """An actor that has joined the plane and made its engines; `groups` run in it at once.

        Raises:
            WorkerError: it could not start.
            WorkerLost: its process ended while it started.
        """
        # Calls that interrupt what runs must not wait behind it.
        actor = (
            ray.remote(Body)
            .options(num_cpus=num_cpus, num_gpus=num_gpus, max_concurrency=groups + 8)
            .remote()
        )
        pid = await _asked(actor.start.remote(dict(config)))
        return cls(actor, pid)

    async def run(self, job: GroupJob) -> GroupOutcome:
        return GroupOutcome.of(await _asked(self._actor.run.remote(job.plain())))

    async def pause(self, limit_s: float) -> None:
        await _asked(self._actor.pause.remote(limit_s))

    async def resume(self) -> None:
        await _asked(self._actor.resume.remote())

    async def update_weights(self, version: int) -> None:
        await _asked(self._actor.update_weights.remote(version))

    async def plane_time_s(self) -> float:
        return float(await _asked(self._actor.plane_time_s.remote()))

    async def close(self) -> None:
        try:
            await _asked(self._actor.close.remote())
        except (WorkerLost, WorkerError):
            pass
        ray.kill(self._actor)


async def _asked(answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except RayActorError as error:
        raise WorkerLost(f"a worker's actor is gone: {error}") from None
    except RayTaskError as error:
        cause = cast("Exception", error.cause)
        raise WorkerError(f"{type(cause).__name__}: {cause}") from None
