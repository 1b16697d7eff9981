"""The manager: prompts to workers, and every prompt to a last status.

It holds prompts and their outcomes, never a token of a response. What a consumer sees of its work
is in the plane: the prompts' rows from `pending` to `finished` or `failure`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, cast

from agentloop.groups.job import GroupJob
from agentloop.groups.outcome import GroupOutcome
from agentloop.groups.plane_clock import PlaneClock, busiest
from agentloop.groups.publish import submit
from agentloop.groups.task import Policy
from agentloop.production.accounting import ProduceResult, Window
from agentloop.production.prompt_rows import PromptRows
from agentloop.production.seats import Seats
from agentloop.production.split import split_by_weight
from agentloop.trajectory.state import Status
from agentloop.workers.types import WorkerError, WorkerLost
from dataplane import AsyncClient

_log = logging.getLogger(__name__)

_INTERRUPTED: Final = (Status.ABORTED, Status.EXPIRED)

NO_PROGRESS_PAUSE_S: Final = 1.0
"""How long a group that was interrupted waits when it got nowhere and nobody asked for it."""

OnOutcome: TypeAlias = Callable[[GroupOutcome], None]
"""Told of each outcome as it comes: progress bars, metrics."""


@dataclass(slots=True)
class ManagedTask:
    """One task of a manager."""

    name: str
    draw: Callable[[int], tuple[GroupJob, Mapping[str, Any] | None]]
    """The next prompt for a trainer step, and what its trajectories share. Endless."""
    weight: float = 1.0
    incomplete: Policy = "fail"
    filtered: Policy = "fail"


@dataclass(slots=True)
class _Round:
    """What one call of `produce` is about."""

    targets: dict[str, int]
    """Groups that each task is to have finished."""
    finished: dict[str, int]
    taken: list[GroupOutcome]
    """The groups that are finished."""
    pending: dict[str, int] = field(default_factory=dict[str, int])
    replacements: int = 0
    """How many more prompts may be drawn in place of groups that were dropped."""

    def missing(self, task: str) -> int:
        """How many more groups of a task are to be begun."""
        return self.targets[task] - self.finished[task] - self.pending.get(task, 0)

    def next_task(self) -> str | None:
        """The task that lacks most."""
        task = max(self.targets, key=self.missing)
        return task if self.missing(task) > 0 else None


class RolloutManager:
    """Produces groups of several tasks on several workers. One call of `produce` at a time."""

    def __init__(
        self,
        client: AsyncClient,
        seats: Seats,
        tasks: Sequence[ManagedTask],
        *,
        partition_id: str = "train",
        persist_prompts: bool = True,
        reissues: int = 2,
        replacements_per_group: int = 4,
        on_outcome: OnOutcome | None = None,
        clock: PlaneClock | None = None,
    ) -> None:
        """`reissues`: how often a prompt is given to another worker after one died over it, before
        its group counts as incomplete. `replacements_per_group`: how many prompts may be drawn in
        place of each group that was dropped for another, before a round is left short. `clock`:
        this process's, which counts the plane's calls."""
        if not tasks:
            raise ValueError("a manager needs a task")
        self._client = client
        self._seats = seats
        self._tasks = {task.name: task for task in tasks}
        if len(self._tasks) != len(tasks):
            raise ValueError(f"two tasks have one name: {[task.name for task in tasks]}")
        self._partition_id = partition_id
        self._rows = PromptRows(client, partition_id)
        self._clock = clock or PlaneClock()
        self._persist = persist_prompts
        self._reissues = reissues
        self._replacements_per_group = replacements_per_group
        self._on_outcome = on_outcome
        self._window = Window(self._tasks)
        self._producing = asyncio.Lock()
        self._pending: dict[str, GroupJob] = {}
        """Jobs that are with workers, by uid. Nothing is kept of a group that has ended."""
        self._interrupted: dict[str, deque[GroupJob]] = {name: deque() for name in self._tasks}
        """By task: groups that are to be gone on with before a new prompt is drawn."""
        self._paused = False
        self._pause_s = 0.0

    # -- producing ---------------------------------------------------------------------------

    async def produce(self, batch_size: int, global_steps: int) -> ProduceResult:
        """Have `batch_size` finished groups in the partition, those that are there included.

        Groups that were interrupted come first, then new prompts, the tasks by their weights.
        Fewer are there in the end when groups failed whose policy is not to be replaced, or
        after a pause. Nothing is under way when it returns.
        """
        async with self._producing:
            began, plane_began = time.monotonic(), await self._plane_times()
            with self._clock.call():
                round_ = await self._round(batch_size)
            running: set[asyncio.Task[GroupOutcome]] = set()
            try:
                while True:
                    await self._begin(round_, running, global_steps)
                    if not running:
                        break
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for group in done:
                        self._record(round_, group.result())
            finally:
                for group in running:
                    group.cancel()
            took_s = time.monotonic() - began
            plane_time_s = busiest(plane_began, await self._plane_times())
            return replace(self._close_window(round_, took_s), plane_time_s=plane_time_s)

    async def pause(self, limit_s: float = 30.0) -> float:
        """Interrupt everything under way; seconds it took. `produce` returns with what there is."""
        began = time.monotonic()
        self._paused = True
        await self._seats.pause(limit_s)
        took = time.monotonic() - began
        self._pause_s += took
        return took

    async def resume(self) -> None:
        """Let groups run again."""
        await self._seats.resume()
        self._paused = False

    async def update_weights(self, version: int) -> None:
        """Generate with weights that lie in the plane as this version."""
        await self._seats.update_weights(version)

    async def close(self) -> None:
        await self._seats.close()

    async def recover(self, global_steps: int) -> int:
        """Take over prompts that an earlier manager left without a last status; how many.

        Those whose dataset row is stored are begun anew before any new prompt, and nothing that
        its workers may still publish is taken. The others get the last status of their policy.
        """
        listing = await self._rows.listing({"status": {"in": ["pending", "running"]}})
        taken_over = 0
        if listing is None:
            return 0
        for key, tags, names in zip(listing.keys, listing.tags, listing.fields, strict=True):
            if tags["task_name"] not in self._tasks or not await self._rows.reclaim(key, tags):
                continue
            taken_over += 1
            if "extra" in names:
                rows = await self._client.kv_batch_get(
                    [key], self._partition_id, ["messages", "extra"], layout="list"
                )
                fields = {name: column[0] for name, column in rows.fields.items()}
                job = GroupJob.of_prompt(self._partition_id, tags, fields, global_steps)
                self._interrupted[job.task].append(job)
            else:
                lost = GroupJob(
                    key, self._partition_id, str(tags["task_name"]), cast("int", tags["n"]), 0, []
                )
                await self._give_up(lost, "its manager ended, and its prompt was not stored")
        return taken_over

    @property
    def pending(self) -> int:
        """Groups that are with workers now."""
        return len(self._pending)

    @property
    def interrupted(self) -> int:
        """Groups that wait to be gone on with."""
        return sum(map(len, self._interrupted.values()))

    async def _round(self, batch_size: int) -> _Round:
        counts = split_by_weight(batch_size, [task.weight for task in self._tasks.values()])
        targets = dict(zip(self._tasks, counts, strict=True))
        # What is left from before is part of this batch.
        taken = [group for group in await self._rows.finished() if group.task in self._tasks]
        counts_of = Counter(group.task for group in taken)
        finished = {name: counts_of[name] for name in self._tasks}
        return _Round(
            targets, finished, taken, replacements=batch_size * self._replacements_per_group
        )

    async def _begin(
        self, round_: _Round, running: set[asyncio.Task[GroupOutcome]], global_steps: int
    ) -> None:
        """Begin as many groups as are missing and as there is room for."""
        if self._paused:
            return
        room = self._seats.capacity - len(running)
        known: list[GroupJob] = []
        new: list[GroupJob] = []
        shared: dict[str, Mapping[str, Any]] = {}
        while room > len(known) + len(new) and (name := round_.next_task()) is not None:
            round_.pending[name] = round_.pending.get(name, 0) + 1
            if self._interrupted[name]:
                job = self._interrupted[name].popleft()
                known.append(replace(job, global_steps=global_steps))
                continue
            job, sharing = self._tasks[name].draw(global_steps)
            new.append(job)
            if sharing is not None:
                shared[job.uid] = sharing
        if new:
            with self._clock.call():
                await submit(
                    self._client, self._partition_id, new, persist=self._persist, shared=shared
                )
        for job in [*known, *new]:
            running.add(asyncio.create_task(self._carry(job)))

    async def _carry(self, job: GroupJob) -> GroupOutcome:
        """Have a group run, on another worker if need be, until it has an outcome."""
        self._pending[job.uid] = job
        try:
            while True:
                try:
                    outcome = await self._seats.run(job)
                except WorkerLost as error:
                    known = await self._after_loss(job)
                    if known is not None:
                        return known
                    job = replace(job, attempt=None, tries=job.tries + 1)
                    if job.tries > self._reissues:
                        return await self._give_up(job, f"{job.tries} workers died: {error}")
                    _log.warning("group %s: %s; it is begun anew", job.uid, error)
                    continue
                except WorkerError as error:
                    return await self._give_up(job, str(error))
                if outcome.status is Status.ARCHIVED and 0 < job.tries <= self._reissues:
                    # The begin of a worker that died may arrive after the one that took its place.
                    known = await self._after_loss(job)
                    if known is None:
                        job = replace(job, attempt=None, tries=job.tries + 1)
                        continue
                    return known
                if outcome.status in _INTERRUPTED:
                    self._interrupted[job.task].append(replace(job, attempt=outcome.attempt))
                    if not self._paused and not any(m.new_tokens for m in outcome.members):
                        # Somebody else stopped the engine: to go on at once would be to spin.
                        await asyncio.sleep(NO_PROGRESS_PAUSE_S)
                return outcome
        finally:
            self._pending.pop(job.uid, None)

    async def _after_loss(self, job: GroupJob) -> GroupOutcome | None:
        """What became of a group whose worker died; None if it is to be begun anew."""
        with self._clock.call():
            prompts = await self._rows.prompts({"uid": job.uid})
            if prompts and await self._rows.reclaim(job.uid, prompts[0]):
                return None
            return await self._rows.outcome(job.uid, job.task)

    async def _give_up(self, job: GroupJob, reason: str) -> GroupOutcome:
        """The group could not be run: its prompt gets its last status by the task's policy."""
        _log.warning("group %s of task %s failed: %s", job.uid, job.task, reason)
        keep = self._tasks[job.task].incomplete == "fail"
        with self._clock.call():
            await self._rows.give_up(job.uid, reason, keep=keep)
        return GroupOutcome.failed(job.uid, job.task, job.n, reason)

    # -- accounting --------------------------------------------------------------------------

    async def _plane_times(self) -> dict[object, float]:
        """Seconds so far that each process of this production was busy with the plane."""
        return {"manager": self._clock.seconds, **await self._seats.plane_times()}

    def _record(self, round_: _Round, outcome: GroupOutcome) -> None:
        self._window.record(outcome)
        if self._on_outcome is not None:
            self._on_outcome(outcome)
        task = self._tasks[outcome.task]
        round_.pending[outcome.task] -= 1
        if outcome.status is Status.COMPLETED:
            round_.finished[outcome.task] += 1
            round_.taken.append(outcome)
            return
        if outcome.status in _INTERRUPTED:
            if outcome.error_msg is not None:
                _log.warning("group %s: %s", outcome.uid, outcome.error_msg)
                self._window.cancel(outcome.uid, outcome.task)
            return  # it is gone on with, in this round or after the pause
        if outcome.status is Status.ARCHIVED:
            round_.targets[outcome.task] -= 1  # somebody else has it: it is not this round's
            return
        policy = task.filtered if outcome.status is Status.FILTERED else task.incomplete
        if policy == "refill" and round_.replacements > 0:
            round_.replacements -= 1
        else:
            round_.targets[outcome.task] -= 1

    def _close_window(self, round_: _Round, took_s: float) -> ProduceResult:
        pause_s, self._pause_s = self._pause_s, 0.0
        return self._window.close(
            taken=round_.taken,
            leftover=[
                (name, Status.ABORTED) for name, jobs in self._interrupted.items() for _ in jobs
            ],
            pause_s=pause_s,
            produce_time_s=took_s,
            batch_sizes=round_.targets,
        )
