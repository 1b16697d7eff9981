"""What runs in a worker: every group it was given, at once, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import dataplane
from agentloop.engines.types import Engine
from agentloop.engines.weights import load_weights
from agentloop.groups.group import Group
from agentloop.groups.job import GroupJob
from agentloop.groups.outcome import GroupOutcome
from agentloop.groups.plane_clock import PlaneClock
from agentloop.groups.task import Task
from agentloop.rewards.judging import close_reward
from dataplane import AsyncClient, Client, StaleWrite

PUBLISHED_AT_ONCE = 8
"""Encoding a trajectory is the longest thing that this loop does at a stretch. Sessions that end
together take turns, so that those that wait for the engine are not held up."""


class Producer:
    """Runs groups of the tasks that it has, and stops and starts all of them together."""

    def __init__(
        self,
        client: AsyncClient,
        tasks: Mapping[str, Task],
        *,
        connect: Callable[[], Client] = dataplane.connect,
        clock: PlaneClock | None = None,
    ) -> None:
        """`connect` makes the client that weights are read with: they are looked at in place.
        `clock` is the process's, if others in it count with it too."""
        self._client = client
        self._connect = connect
        self.clock = clock or PlaneClock()
        self._reader: Client | None = None
        self._tasks = dict(tasks)
        self._groups: dict[str, tuple[Group, asyncio.Task[GroupOutcome]]] = {}
        """By uid."""
        self._publishing = asyncio.Semaphore(PUBLISHED_AT_ONCE)
        self._paused = False

    async def run(self, job: GroupJob) -> GroupOutcome:
        """Run a group to its end, or until it is interrupted."""
        task = self._tasks.get(job.task)
        if task is None:
            raise ValueError(f"task {job.task!r} is none of {sorted(self._tasks)}")
        if job.uid in self._groups:
            raise ValueError(f"group {job.uid!r} is under way already")
        group = Group(job, task, self._client, self._publishing, self.clock)
        if self._paused:
            group.request_abort()
        running = asyncio.create_task(group.run())
        self._groups[job.uid] = group, running
        try:
            return await running
        except StaleWrite:
            return GroupOutcome.superseded(job.uid, job.task)
        finally:
            running.cancel()
            del self._groups[job.uid]

    async def pause(self, limit_s: float) -> None:
        """Interrupt all groups: each ends with what it has, within the limit."""
        self._paused = True
        groups = list(self._groups.values())
        for group, _ in groups:
            group.request_abort()
        # An engine that does not answer must not hold up the pause: what it runs is given up.
        pausing = [asyncio.create_task(engine.pause()) for engine in self._engines()]
        running = [run for _, run in groups]
        if pausing or running:
            _, late = await asyncio.wait([*pausing, *running], timeout=limit_s)
            for pause in late.intersection(pausing):
                pause.cancel()
        await asyncio.gather(*(group.give_up() for group, run in groups if not run.done()))

    async def resume(self) -> None:
        """Take groups again."""
        self._paused = False
        for engine in self._engines():
            await engine.resume()

    async def update_weights(self, version: int) -> None:
        """Generate with the weights of this version, which lie in the plane.

        Raises:
            WeightsError: they are not there, or do not fit; every engine that has not taken them
                has what it had.
        """
        if self._reader is None:
            self._reader = await asyncio.to_thread(self._connect)
        for engine in self._engines():
            await load_weights(engine, self._reader, version)

    async def close(self) -> None:
        """End what is under way, and the engines."""
        running = [run for _, run in self._groups.values()]
        for run in running:
            run.cancel()
        if running:
            await asyncio.wait(running)
        for engine in self._engines():
            await engine.close()
        for task in self._tasks.values():
            await close_reward(task.reward)
        if self._reader is not None:
            await asyncio.to_thread(self._reader.close)

    def _engines(self) -> list[Engine]:
        return list({id(task.engine): task.engine for task in self._tasks.values()}.values())
