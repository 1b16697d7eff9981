"""Workers that die, that cannot be started, and that refuse what the others have."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from agentloop.groups.job import GroupJob
from agentloop.groups.outcome import GroupOutcome
from agentloop.production import seats as module
from agentloop.production.seats import NoWorkers, Seats
from agentloop.workers.types import WorkerError, WorkerLost
from tests.deadline import until


class Told:
    """A worker that remembers what it was told, and fails as it is told."""

    def __init__(self, fails: dict[str, Exception] | None = None) -> None:
        self.fails = fails or {}
        self.heard: list[Any] = []

    def _do(self, verb: str, *what: Any) -> None:
        self.heard.append((verb, *what))
        if verb in self.fails:
            raise self.fails[verb]

    async def run(self, job: GroupJob) -> GroupOutcome:
        self._do("run", job.uid)
        return GroupOutcome.superseded(job.uid, job.task)

    async def pause(self, limit_s: float) -> None:
        self._do("pause", limit_s)

    async def resume(self) -> None:
        self._do("resume")

    async def update_weights(self, version: int) -> None:
        self._do("update_weights", version)

    async def plane_time_s(self) -> float:
        self._do("plane_time_s")
        return 0.5

    async def close(self) -> None:
        self._do("close")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_PAUSE_S", (0.0, 0.0, 0.0))


def job(uid: str) -> GroupJob:
    return GroupJob(uid, "p", "t", 1, 1, [])


def seats_of(workers: list[Told | Exception], groups_each: int = 2) -> Seats:
    left = iter(workers)

    async def start() -> Told:
        worker = next(left)
        if isinstance(worker, Exception):
            raise worker
        return worker

    return Seats([start], groups_each)


async def test_a_new_worker_has_the_weights_and_the_pause_of_the_others_before_it_runs() -> None:
    dead, fresh = Told({"run": WorkerLost("it died")}), Told()
    seats = seats_of([dead, fresh])
    await seats.open()
    await seats.update_weights(7)
    await seats.pause(1.0)
    with pytest.raises(WorkerLost):
        await seats.run(job("a"))
    await seats.run(job("b"))
    assert fresh.heard == [("update_weights", 7), ("pause", 0.0), ("run", "b")]
    assert dead.heard[-1] == ("close",)
    assert seats.restarts == 1
    await seats.close()


async def test_a_worker_that_refuses_the_weights_is_closed_and_not_used() -> None:
    dead = Told({"run": WorkerLost("it died")})
    refuses, fresh = Told({"update_weights": WorkerError("they do not fit")}), Told()
    seats = seats_of([dead, refuses, fresh])
    await seats.open()
    await seats.update_weights(7)
    with pytest.raises(WorkerLost):
        await seats.run(job("a"))
    await seats.run(job("b"))
    assert refuses.heard == [("update_weights", 7), ("close",)]
    assert ("run", "b") in fresh.heard
    await seats.close()


async def test_without_a_worker_nobody_waits() -> None:
    nobody: list[Told | Exception] = [WorkerError("no room")] * 9
    with pytest.raises(NoWorkers, match="no worker could be started"):
        await seats_of(nobody).open()
    seats = seats_of([Told({"run": WorkerLost("it died")}), *nobody])
    await seats.open()
    waiting = [asyncio.create_task(seats.run(job(str(i)))) for i in range(4)]
    done, _ = await asyncio.wait(waiting, timeout=20)
    assert {type(task.exception()) for task in done} == {WorkerLost, NoWorkers}
    assert len(done) == 4
    await seats.close()


async def test_groups_wait_for_room() -> None:
    gate = asyncio.Event()
    running = 0

    class Slow(Told):
        async def run(self, job: GroupJob) -> GroupOutcome:
            nonlocal running
            running += 1
            await gate.wait()
            return await super().run(job)

    seats = seats_of([Slow()], groups_each=2)
    await seats.open()
    assert seats.capacity == 2
    tasks = [asyncio.create_task(seats.run(job(str(i)))) for i in range(3)]
    await until(lambda: running == 2)
    assert running == 2
    gate.set()
    assert len(await asyncio.gather(*tasks)) == 3
    assert running == 3
    await seats.close()


def test_seats_need_a_worker_with_room() -> None:
    for starts, groups in (([], 1), ([cast("Any", None)], 0)):
        with pytest.raises(ValueError, match="at least one group"):
            Seats(starts, groups)
