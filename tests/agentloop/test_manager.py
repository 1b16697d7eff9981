"""The manager on a real plane: groups by task, and every prompt to its last status."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import pytest

from agentloop.groups.invariants import wrong_rows
from agentloop.groups.job import GroupJob
from agentloop.groups.outcome import GroupOutcome
from agentloop.groups.producer import Producer
from agentloop.production.manager import ManagedTask, RolloutManager
from agentloop.production.seats import Seats
from agentloop.workers.local import LocalWorker
from agentloop.workers.types import Worker, WorkerError, WorkerLost
from dataplane import AsyncClient
from tests.agentloop.scripts import ScriptedLoop, job
from tests.agentloop.test_group import SAY, task

FAIL = [("fail", "no luck")]


class Prompts:
    """Prompts of one task: the scripts of each in turn, the last one for ever."""

    def __init__(self, partition: str, *scripts: Any, name: str = "scripted") -> None:
        self._partition = partition
        self._scripts = scripts
        self._name = name
        self.drawn: list[str] = []

    def __call__(self, global_steps: int) -> tuple[GroupJob, Mapping[str, Any] | None]:
        uid = f"{self._name}-{len(self.drawn)}"
        sessions = self._scripts[min(len(self.drawn), len(self._scripts) - 1)]
        self.drawn.append(uid)
        made = job(uid, self._partition, *sessions)
        return GroupJob.of({**made.plain(), "task": self._name, "global_steps": global_steps}), None


class Mortal:
    """A worker that dies when the test says so; its groups go on unseen, as if it were cut off."""

    def __init__(self, inner: LocalWorker) -> None:
        self._inner = inner
        self._dead = asyncio.Event()
        self.unseen: set[asyncio.Task[GroupOutcome]] = set()

    def die(self) -> None:
        self._dead.set()

    async def run(self, work: GroupJob) -> GroupOutcome:
        running = asyncio.create_task(self._inner.run(work))
        self.unseen.add(running)
        dead = asyncio.create_task(self._dead.wait())
        await asyncio.wait({running, dead}, return_when=asyncio.FIRST_COMPLETED)
        if self._dead.is_set():
            raise WorkerLost("it died")
        dead.cancel()
        return running.result()

    async def pause(self, limit_s: float) -> None:
        await self._inner.pause(limit_s)

    async def resume(self) -> None:
        await self._inner.resume()

    async def update_weights(self, version: int) -> None: ...

    async def plane_time_s(self) -> float:
        if self._dead.is_set():
            raise WorkerLost("it died")
        return await self._inner.plane_time_s()

    async def close(self) -> None:
        if not self._dead.is_set():
            await self._inner.close()


def workers(
    client: AsyncClient, loop: ScriptedLoop, count: int = 1, groups: int = 4, **more: Any
) -> tuple[Seats, list[Mortal]]:
    started: list[Mortal] = []

    async def start() -> Worker:
        tasks = {name: task(loop, **more) for name in ("scripted", "other")}
        started.append(Mortal(LocalWorker(Producer(client, tasks))))
        return started[-1]

    return Seats([start] * count, groups), started


async def manager_of(
    client: AsyncClient, partition: str, seats: Seats, *prompts: Prompts, **more: Any
) -> RolloutManager:
    policy = {name: more.pop(name) for name in ("incomplete", "filtered") if name in more}
    weights = more.pop("weights", [1.0] * len(prompts))
    tasks = [
        ManagedTask(each._name, each, weight=weight, **policy)
        for each, weight in zip(prompts, weights, strict=True)
    ]
    await seats.open()
    return RolloutManager(client, seats, tasks, partition_id=partition, **more)


async def prompts_of(client: AsyncClient, partition: str) -> dict[str, dict[str, Any]]:
    listing = await client.kv_list(partition)
    assert await wrong_rows(client, listing) == []
    rows = zip(listing.keys, cast("Any", listing.tags), strict=True)
    return {key: tags for key, tags in rows if tags.get("is_prompt")}


async def test_a_batch_is_divided_by_weight_and_finished(
    client: AsyncClient, partition: str
) -> None:
    seats, _ = workers(client, ScriptedLoop())
    one, other = Prompts(partition, [SAY, SAY]), Prompts(partition, [SAY], name="other")
    seen: list[str] = []
    manager = await manager_of(
        client, partition, seats, one, other,
        weights=[2.0, 1.0], on_outcome=lambda outcome: seen.append(outcome.uid),
    )  # fmt: skip
    result = await manager.produce(7, 5)
    assert (len(one.drawn), len(other.drawn)) == (5, 2)
    assert sorted(result.groups) == sorted(seen) == sorted(one.drawn + other.drawn)
    assert (result.produced_samples, result.produced_tokens) == (12, 24)
    assert (result.raw_rewards_sum, result.raw_rewards_count) == (12.0, 12)
    assert result.task_results is not None
    assert [r.produced_samples for r in result.task_results.values()] == [2, 10]
    found = await prompts_of(client, partition)
    assert Counter(tags["status"] for tags in found.values()) == {"finished": 7}
    assert {tags["global_steps"] for tags in found.values()} == {5}
    again = await manager.produce(0, 6)
    assert (again.produced_samples, again.raw_rewards_count) == (0, 0)  # counted once
    await manager.close()


async def test_rg_35_groups_that_are_there_already_are_not_produced_again(
    client: AsyncClient, partition: str
) -> None:
    seats, _ = workers(client, ScriptedLoop())
    prompts = Prompts(partition, [SAY])
    manager = await manager_of(client, partition, seats, prompts)
    await manager.produce(1, 1)
    result = await manager.produce(4, 2)
    assert len(prompts.drawn) == 4  # three more
    assert manager.pending == 0
    assert sorted(result.groups) == sorted(prompts.drawn)
    assert result.produced_samples == 3
    assert result.group_gen_count == 4
    await manager.close()


@pytest.mark.parametrize(
    ("policy", "drawn", "statuses"),
    [
        ("fail", 3, {"failure": 1, "finished": 2}),
        ("drop", 3, {"finished": 2}),
        ("refill", 4, {"finished": 3}),
    ],
)
async def test_what_becomes_of_incomplete_groups(
    client: AsyncClient, partition: str, policy: Any, drawn: int, statuses: dict[str, int]
) -> None:
    seats, _ = workers(client, ScriptedLoop(), incomplete=policy)
    prompts = Prompts(partition, [SAY, FAIL], [SAY, SAY])
    manager = await manager_of(client, partition, seats, prompts, incomplete=policy)
    result = await manager.produce(3, 1)
    assert len(prompts.drawn) == drawn
    assert result.failed_samples == 2
    assert len(result.groups) == statuses["finished"]
    found = await prompts_of(client, partition)
    assert Counter(tags["status"] for tags in found.values()) == statuses
    await manager.close()


async def test_prompts_that_are_never_let_in_say_why(client: AsyncClient, partition: str) -> None:
    await client.kv_create_partition(partition, quota={"bytes": 1 << 20})
    seats, _ = workers(client, ScriptedLoop(), declared_bytes=1 << 30, admission_timeout_s=5.0)
    manager = await manager_of(client, partition, seats, Prompts(partition, [SAY]))
    result = await manager.produce(1, 1)
    assert result.failures == {"worker": 1}
    (prompt,) = (await prompts_of(client, partition)).values()
    assert prompt["status"] == "failure"
    assert "QuotaExceeded" in prompt["error_msg"]
    await manager.close()


async def test_prompts_that_always_fail_end_the_round_short(
    client: AsyncClient, partition: str
) -> None:
    seats, _ = workers(client, ScriptedLoop(), incomplete="refill")
    prompts = Prompts(partition, [FAIL])
    manager = await manager_of(
        client, partition, seats, prompts, incomplete="refill", replacements_per_group=3
    )
    result = await manager.produce(2, 1)
    assert (len(prompts.drawn), result.failed_samples, result.groups) == (8, 8, ())
    await manager.close()


async def test_nothing_is_kept_of_prompts_that_failed(client: AsyncClient, partition: str) -> None:
    """NeMo#3923: ten thousand failing prompts leave the manager as small as it was."""
    import sys

    seats, _ = workers(client, ScriptedLoop(), groups=64, incomplete="drop")
    prompts = Prompts(partition, [FAIL])
    manager = await manager_of(
        client, partition, seats, prompts, incomplete="drop", persist_prompts=False
    )
    most = 0

    def look(outcome: GroupOutcome) -> None:
        nonlocal most
        held = [manager._pending, manager._interrupted, manager._window._of_task]
        most = max(most, *map(len, held), sum(map(sys.getsizeof, held)) // 100)

    manager._on_outcome = look
    result = await manager.produce(10_000, 1)
    assert result.failed_samples == 10_000
    assert most <= 200
    assert await prompts_of(client, partition) == {}
    await manager.close()


async def test_a_pause_ends_the_round_and_the_next_one_goes_on(
    client: AsyncClient, partition: str
) -> None:
    loop = ScriptedLoop()
    seats, _ = workers(client, loop)
    prompts = Prompts(partition, [SAY, [("say", [9]), ("wait", "g"), ("say", [9, 9])]], [SAY])
    manager = await manager_of(client, partition, seats, prompts)
    producing = asyncio.create_task(manager.produce(2, 1))
    await loop.at("g").wait()
    await client.kv_wait(partition, {"is_prompt": True, "status": "finished"}, timeout=20)
    pause_s = await manager.pause(limit_s=10)
    result = await producing
    assert (result.leftover_aborted, len(result.groups)) == (1, 1)
    assert result.group_gen_pause_time_s == pytest.approx(pause_s)
    assert (manager.interrupted, manager.pending) == (1, 0)
    loop.gate("g").set()
    await manager.resume()
    result = await manager.produce(2, 2)
    assert len(prompts.drawn) == 2
    assert (len(result.groups), result.produced_samples, result.produced_tokens) == (2, 2, 2)
    found = await prompts_of(client, partition)
    assert {tags["status"] for tags in found.values()} == {"finished"}
    await manager.close()


async def test_no_more_interrupted_groups_go_on_than_a_round_needs(
    client: AsyncClient, partition: str
) -> None:
    loop = ScriptedLoop()
    seats, _ = workers(client, loop)
    prompts = Prompts(partition, [[("wait", "g"), *SAY]])
    manager = await manager_of(client, partition, seats, prompts)
    producing = asyncio.create_task(manager.produce(3, 1))
    await client.kv_wait(partition, {"status": "running"}, count=3, timeout=20)
    await manager.pause(limit_s=10)
    assert (await producing).leftover_aborted == 3
    loop.gate("g").set()
    await manager.resume()
    result = await manager.produce(1, 2)
    assert (len(result.groups), result.leftover_aborted, manager.interrupted) == (1, 2, 2)
    result = await manager.produce(3, 3)
    assert (len(result.groups), manager.interrupted, len(prompts.drawn)) == (3, 0, 3)
    await manager.close()


async def test_a_group_that_others_interrupt_goes_on_without_spinning(
    client: AsyncClient, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.production.manager.NO_PROGRESS_PAUSE_S", 0.2)
    loop = ScriptedLoop()
    seats, _ = workers(client, loop)
    prompts = Prompts(partition, [[("stops", 2), *SAY]])
    manager = await manager_of(client, partition, seats, prompts)
    began = asyncio.get_running_loop().time()
    result = await manager.produce(1, 1)
    assert asyncio.get_running_loop().time() - began >= 0.4
    assert (len(result.groups), loop.runs, prompts.drawn) == (1, [0, 0, 0], ["scripted-0"])
    await manager.close()


@pytest.mark.parametrize("when", ["before it begins", "while it runs", "after it ended"])
async def test_a_prompt_whose_worker_died_is_begun_anew_or_known(
    client: AsyncClient, partition: str, when: str
) -> None:
    loop = ScriptedLoop()
    seats, started = workers(client, loop)
    prompts = Prompts(partition, [SAY, [("wait", "g"), *SAY]])
    manager = await manager_of(client, partition, seats, prompts)
    if when == "before it begins":
        started[0].die()
    producing = asyncio.create_task(manager.produce(1, 1))
    if when == "while it runs":
        await loop.at("g").wait()
        started[0].die()
    if when == "after it ended":
        loop.gate("g").set()
        inner = started[0]._inner
        ended = asyncio.Event()
        run = inner.run

        async def told_too_late(work: GroupJob) -> GroupOutcome:
            outcome = await run(work)
            started[0].die()
            ended.set()
            await asyncio.Event().wait()
            return outcome

        inner.run = told_too_late  # type: ignore[method-assign]
        await ended.wait()
    loop.gate("g").set()
    result = await producing
    assert len(result.groups) == 1
    runs = {"before it begins": 2, "while it runs": 4, "after it ended": 2}
    # A worker that was cut off may go on: whatever it still publishes is refused.
    for cut_off in started[0].unseen:
        if when != "after it ended":
            with pytest.raises((WorkerError, asyncio.CancelledError)):
                outcome = await cut_off
                raise WorkerError(f"{outcome.status}")
        cut_off.cancel()
    found = await prompts_of(client, partition)
    assert [tags["status"] for tags in found.values()] == ["finished"]
    assert len(loop.runs) in (runs[when], 4)
    assert seats.restarts == 1
    await manager.close()


async def test_the_begin_of_a_dead_worker_that_comes_late_takes_no_prompt_away(
    client: AsyncClient, partition: str
) -> None:
    loop = ScriptedLoop()
    seats, started = workers(client, loop)
    prompts = Prompts(partition, [[("wait", "g"), *SAY]])
    manager = await manager_of(client, partition, seats, prompts)
    producing = asyncio.create_task(manager.produce(1, 1))
    await loop.at("g").wait()
    first = (await prompts_of(client, partition))["scripted-0"]["attempt"]
    started[0].die()
    where = {"is_prompt": True, "attempt": {">": first}, "status": "running"}
    await client.kv_wait(partition, where, timeout=20)
    late = await client.begin_group("scripted-0", partition, n=1)
    loop.gate("g").set()
    result = await producing
    assert result.groups == ("scripted-0",)
    found = (await prompts_of(client, partition))["scripted-0"]
    assert found["status"] == "finished"
    assert found["attempt"] > late
    await manager.close()


async def test_a_prompt_that_kills_its_workers_is_given_up(
    client: AsyncClient, partition: str
) -> None:
    seats, started = workers(client, ScriptedLoop())
    prompts = Prompts(partition, [[("wait", "never")]])
    manager = await manager_of(client, partition, seats, prompts, reissues=1)

    async def kill_all() -> None:
        while True:
            for worker in started:
                if worker.unseen:
                    worker.die()
            await asyncio.sleep(0)

    killing = asyncio.create_task(kill_all())
    result = await manager.produce(1, 1)
    killing.cancel()
    assert result.failures == {"worker": 1}
    found = await prompts_of(client, partition)
    assert [(t["status"], "2 workers died" in t["error_msg"]) for t in found.values()] == [
        ("failure", True)
    ]
    await manager.close()


async def test_prompts_of_a_manager_that_is_gone_are_taken_over(
    client: AsyncClient, partition: str
) -> None:
    loop = ScriptedLoop()
    seats, _ = workers(client, loop)
    prompts = Prompts(partition, [[("wait", "g"), *SAY]])
    first = await manager_of(client, partition, seats, prompts)
    producing = asyncio.create_task(first.produce(2, 1))
    await loop.at("g").wait()
    await client.kv_wait(partition, {"status": "running"}, count=2, timeout=20)
    before = await prompts_of(client, partition)
    producing.cancel()  # it dies; what it had begun stays as it is
    await asyncio.wait({producing})
    seats, _ = workers(client, loop)
    second = await manager_of(client, partition, seats, Prompts(partition, [SAY], name="scripted"))
    assert await second.recover(9) == 2
    loop.gate("g").set()  # its workers were cut off, and go on
    result = await second.produce(2, 9)
    assert sorted(result.groups) == ["scripted-0", "scripted-1"]
    after = await prompts_of(client, partition)
    assert {tags["status"] for tags in after.values()} == {"finished"}
    assert all(after[uid]["attempt"] > before[uid]["attempt"] for uid in before)
    await second.close()


def test_tasks_have_names_of_their_own() -> None:
    seats = Seats([cast("Any", None)], 1)
    tasks = [ManagedTask("a", cast("Any", None)), ManagedTask("a", cast("Any", None))]
    with pytest.raises(ValueError, match="one name"):
        RolloutManager(cast("Any", None), seats, tasks)
    with pytest.raises(ValueError, match="needs a task"):
        RolloutManager(cast("Any", None), seats, [])
