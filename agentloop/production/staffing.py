"""From settings to the workers of a run."""

from __future__ import annotations

from agentloop.assembly import assemble
from agentloop.config import WorkerConfig, WorkersConfig
from agentloop.groups.plane_clock import PlaneClock
from agentloop.production.seats import Seats, StartWorker
from agentloop.workers.local import LocalWorker
from agentloop.workers.process import ProcessWorker
from agentloop.workers.types import Worker


def make_seats(kind: WorkersConfig, worker: WorkerConfig, clock: PlaneClock) -> Seats:
    """The workers of a run; `clock` is that of this process, for those that run in it."""
    if kind.plane is not None:
        # Nothing is left in their settings by which they could reach it otherwise.
        worker = worker.model_copy(update={"plane": kind.plane, "ray_address": None})
    plain = worker.model_dump(mode="json")

    async def local() -> Worker:
        assembled = await assemble(worker, clock)
        return LocalWorker(assembled.producer, on_close=assembled.close)

    async def process() -> Worker:
        return await ProcessWorker.start(plain, start_timeout_s=kind.start_timeout_s)

    async def ray_actor() -> Worker:
        from agentloop.workers.ray import RayWorker

        return await RayWorker.start(
            plain, groups=kind.groups, num_cpus=kind.num_cpus, num_gpus=kind.num_gpus
        )

    start: StartWorker = {"local": local, "process": process, "ray": ray_actor}[kind.kind]
    return Seats([start] * kind.count, kind.groups)
