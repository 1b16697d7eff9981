"""One group on a real plane: what its rows are, whatever its sessions do."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import torch

from agentloop.groups.group import Group
from agentloop.groups.invariants import wrong_rows
from agentloop.groups.job import GroupJob
from agentloop.groups.outcome import GroupOutcome
from agentloop.groups.producer import Producer
from agentloop.groups.publish import submit
from agentloop.groups.task import Task
from agentloop.trajectory.state import RolloutState, Status
from dataplane import AsyncClient, StaleWrite
from tests.agentloop.scripts import ScriptedLoop, job
from tests.contract.planes import Plane
from tests.deadline import eventually_async

SAY = [("say", [20, 21])]


class Judge:
    """Scores 1.0, and counts how often each session was judged."""

    def __init__(self) -> None:
        self.judged: list[int] = []

    async def score(self, states: Any) -> list[dict[str, Any]]:
        self.judged += [state.session_id for state in states]
        return [{"score": 1.0} for _ in states]


class Quiet:
    """An engine that is never asked to generate."""

    policy_version = 3

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


def task(loop: ScriptedLoop, **more: Any) -> Task:
    more = {"reward": Judge(), **more}
    return Task("scripted", loop, cast("Any", Quiet()), cast("Any", None), **more)


async def rows(client: AsyncClient, partition: str) -> dict[str, dict[str, Any]]:
    listing = await client.kv_list(partition)
    assert await wrong_rows(client, listing) == []
    return dict(zip(listing.keys, cast("Any", listing.tags), strict=True))


async def run(client: AsyncClient, work: GroupJob, loop: ScriptedLoop, **more: Any) -> GroupOutcome:
    if work.attempt is None:
        await submit(client, work.partition_id, [work], persist=True)
    return await Group(work, task(loop, **more), client).run()


async def test_every_session_is_published_and_then_the_prompt_is_finished(
    client: AsyncClient, partition: str
) -> None:
    outcome = await run(
        client,
        job("q", partition, SAY, [("say", [7]), ("tool", [8]), ("say", [9])]),
        ScriptedLoop(),
    )
    assert outcome.status is Status.COMPLETED
    found = await rows(client, partition)
    assert sorted(found) == ["q", "q_0_0", "q_1_0"]
    prompt, second = found["q"], found["q_1_0"]
    assert (prompt["status"], prompt["n"], prompt["global_steps"]) == ("finished", 2, 5)
    assert second["attempt"] == prompt["attempt"]
    assert [second[name] for name in ("prompt_len", "response_len", "seq_len", "policy_len")] == [
        3,
        3,
        6,
        2,
    ]
    assert (second["score"], second["policy_spans"]) == (1.0, [[3, 2]])
    assert second["group_generate_time_s"] == outcome.group_generate_time_s
    values = await client.kv_batch_get(["q_1_0"], partition, ["input_ids", "labels"], layout="list")
    assert torch.equal(values["input_ids"][0], torch.tensor([1, 2, 3, 7, 8, 9]))
    assert torch.equal(values["labels"][0], torch.tensor([-100, -100, -100, 7, -100, 9]))


async def test_the_prompt_is_terminal_only_after_every_session(
    client: AsyncClient, partition: str
) -> None:
    loop = ScriptedLoop()
    group = asyncio.create_task(run(client, job("q", partition, SAY, [("wait", "g"), *SAY]), loop))
    await client.kv_wait(partition, {"session_id": 0}, timeout=20)
    await loop.at("g").wait()
    assert (await rows(client, partition))["q"]["status"] == "running"
    loop.gate("g").set()
    await group
    assert (await rows(client, partition))["q"]["status"] == "finished"


@pytest.mark.parametrize("policy", ["fail", "drop", "refill"])
async def test_a_failed_session_leaves_its_reason_or_nothing(
    client: AsyncClient, partition: str, policy: Any
) -> None:
    work = job("q", partition, SAY, [("fail", "no such tool")])
    outcome = await run(client, work, ScriptedLoop(), incomplete=policy)
    assert outcome.status is Status.FAILED
    found = await rows(client, partition)
    if policy == "fail":
        assert found["q"]["status"] == "failure"
        assert found["q_0_0"]["status"] == "completed"
        assert "no such tool" in found["q_1_0"]["error_msg"]
    else:
        assert found == {}
    with pytest.raises(StaleWrite):  # a session that comes later than this comes too late
        await client.kv_put("q_1_0", partition, tags={"late": 1}, attempt=1 << 40)


@pytest.mark.parametrize("policy", ["fail", "drop"])
async def test_a_group_that_is_not_worth_training_is_filtered(
    client: AsyncClient, partition: str, policy: Any
) -> None:
    seen: list[float] = []

    def refuse(states: Any) -> bool:
        seen.extend(state.reward["score"] for state in states)
        return False

    outcome = await run(
        client,
        job("q", partition, SAY, SAY),
        ScriptedLoop(),
        is_valid_sample=refuse,
        filtered=policy,
    )
    assert outcome.status is Status.FILTERED
    assert seen == [1.0, 1.0]
    found = await rows(client, partition)
    if policy == "fail":
        assert {k: v["status"] for k, v in found.items()} == {
            "q": "failure", "q_0_0": "filtered", "q_1_0": "filtered"
        }  # fmt: skip
    else:
        assert found == {}


async def test_an_interrupted_group_goes_on_where_it_was(
    client: AsyncClient, partition: str
) -> None:
    """RG-43: who was completed is neither run nor judged again. slime#1440: 3 tokens, then 2."""
    loop, judge = ScriptedLoop(), Judge()
    script = [("say", [20, 21, 22]), ("wait", "g"), ("say", [23, 24])]
    work = job("q", partition, SAY, script)
    await submit(client, partition, [work], persist=False)
    group = Group(work, task(loop, reward=judge), client)
    running = asyncio.create_task(group.run())
    await loop.at("g").wait()
    await client.kv_wait(partition, {"session_id": 0}, timeout=20)
    group.request_abort()
    outcome = await running
    assert outcome.status is Status.ABORTED
    assert [(m.status, m.new_tokens) for m in outcome.members] == [("completed", 2), ("aborted", 3)]
    found = await rows(client, partition)
    assert found["q"]["status"] == "running"
    assert (found["q_1_0"]["status"], found["q_1_0"]["response_len"]) == ("aborted", 3)
    loop.gate("g").set()
    again = GroupJob.of({**work.plain(), "attempt": outcome.attempt})
    outcome = await Group(again, task(loop, reward=judge), client).run()
    assert outcome.status is Status.COMPLETED
    assert [(m.status, m.new_tokens) for m in outcome.members] == [
        ("completed", 0),
        ("completed", 2),
    ]
    assert sorted(loop.runs) == [0, 1, 1]
    assert sorted(judge.judged) == [0, 1]
    found = await rows(client, partition)
    assert found["q"]["status"] == "finished"
    assert found["q_1_0"]["response_len"] == 5
    got = await client.kv_batch_get(["q_1_0"], partition, layout="list")
    assert got["input_ids"][0].tolist() == [1, 2, 3, 20, 21, 22, 23, 24]
    assert got["logprobs"][0].tolist() == [0, 0, 0, *[-0.5] * 5]
    assert got["response_model_steps"][0].tolist() == [3] * 5


async def test_without_partial_rollout_it_begins_anew(client: AsyncClient, partition: str) -> None:
    loop = ScriptedLoop()
    work = job("q", partition, [("say", [20, 21, 22]), ("wait", "g"), ("say", [23])])
    await submit(client, partition, [work], persist=False)
    group = Group(work, task(loop, partial_rollout=False), client)
    running = asyncio.create_task(group.run())
    await loop.at("g").wait()
    group.request_abort()
    outcome = await running
    loop.gate("g").set()
    again = GroupJob.of({**work.plain(), "attempt": outcome.attempt})
    outcome = await Group(again, task(loop, partial_rollout=False), client).run()
    assert [m.new_tokens for m in outcome.members] == [4]
    assert (await rows(client, partition))["q_0_0"]["response_len"] == 4


async def test_a_session_that_ignores_the_pause_is_left_behind(
    client: AsyncClient, partition: str
) -> None:
    """xtuner#1827: 3 of 8 sessions run, one ignores even being cancelled."""
    loop = ScriptedLoop()
    running = [[("say", [9]), ("wait", "g")]] * 2
    work = job("q", partition, *[SAY] * 5, *running, [("say", [9]), ("ignore", "never")])
    producer = Producer(client, {"scripted": task(loop)})
    await submit(client, partition, [work], persist=False)
    group = asyncio.create_task(producer.run(work))
    await asyncio.gather(loop.at("g").wait(), loop.at("never").wait())
    await client.kv_wait(partition, {"status": "completed"}, count=5, timeout=20)
    began = asyncio.get_running_loop().time()
    await producer.pause(0.5)
    assert asyncio.get_running_loop().time() - began < 15
    outcome = await group
    assert outcome.status is Status.ABORTED
    late = [t["status"] for k, t in (await rows(client, partition)).items() if k == "q_7_0"]
    assert late == ["aborted"]
    loop.gate("never").set()  # now it comes, with a completed trajectory
    await asyncio.sleep(0)
    for _ in range(20):
        await client.status()
    found = await rows(client, partition)
    assert [found[f"q_{i}_0"]["status"] for i in range(8)] == ["completed"] * 5 + ["aborted"] * 3
    assert found["q"]["status"] == "running"
    # A pause that is still on: what comes now ends at once.
    other = job("r", partition, [("wait", "g")])
    await submit(client, partition, [other], persist=False)
    assert (await producer.run(other)).status is Status.ABORTED
    await producer.resume()


async def test_a_group_that_somebody_else_began_anew_is_left_to_him(
    client: AsyncClient, partition: str
) -> None:
    loop = ScriptedLoop()
    work = job("q", partition, [("wait", "g"), *SAY])
    await submit(client, partition, [work], persist=False)
    group = asyncio.create_task(Group(work, task(loop), client).run())
    await loop.at("g").wait()
    attempt = await client.begin_group("q", partition, n=1)
    loop.gate("g").set()
    with pytest.raises(StaleWrite):
        await group
    found = await rows(client, partition)
    assert list(found) == ["q"]
    assert (found["q"]["attempt"], found["q"]["status"]) == (attempt, "running")


async def test_what_the_partition_cannot_hold_fails_its_session_only(
    client: AsyncClient, partition: str
) -> None:
    await client.kv_put("other", partition, {"labels": torch.zeros(3)}, {"is_prompt": False})
    work = job("q", partition, SAY)
    await submit(client, partition, [work], persist=False)
    outcome = await Group(work, task(ScriptedLoop()), client).run()
    assert outcome.status is Status.FAILED
    listing = await client.kv_list(partition, where={"uid": "q"})
    found = dict(zip(listing.keys, cast("Any", listing.tags), strict=True))
    assert found["q"]["status"] == "failure"
    assert "labels" in found["q_0_0"]["error_msg"]


async def test_trajectories_that_a_second_run_does_not_return_go(
    client: AsyncClient, partition: str
) -> None:
    loop = ScriptedLoop()
    three = job("q", partition, [("say", [20]), ("split", 3)], [("wait", "g"), *SAY])
    await submit(client, partition, [three], persist=False)
    group = Group(three, task(loop), client)
    running = asyncio.create_task(group.run())
    await client.kv_wait(partition, {"index": 2}, timeout=20)
    group.request_abort()
    outcome = await running
    # The three were of one session; mark it as interrupted, to be run again, with one in the end.
    for index in range(3):
        await client.kv_put(
            f"q_0_{index}", partition, tags={"status": "aborted"}, attempt=outcome.attempt
        )
    loop.gate("g").set()
    one = job("q", partition, [("say", [20])], SAY, attempt=outcome.attempt)
    outcome = await Group(one, task(loop), client).run()
    assert outcome.status is Status.COMPLETED
    assert sorted(await rows(client, partition)) == ["q", "q_0_0", "q_1_0"]


async def test_a_group_that_waits_for_room_is_interrupted_too(
    client: AsyncClient, partition: str
) -> None:
    await client.kv_create_partition(partition, quota={"bytes": 1 << 20})
    first = await client.begin_group("p", partition, n=1, declared_bytes=1 << 20)
    loop = ScriptedLoop()
    work = job("q", partition, SAY)
    group = Group(work, task(loop, declared_bytes=1 << 19), client)
    running = asyncio.create_task(group.run())

    async def waits() -> int:
        return (await client.status())["waiting"]["room"]

    await eventually_async(waits, "the group waits for room", within_s=20)
    assert not running.done()
    group.request_abort()
    outcome = await asyncio.wait_for(running, 20)
    assert (outcome.status, outcome.attempt) == (Status.ABORTED, None)
    await client.end_group(first, "failure")


async def test_what_a_group_shares_stays_until_the_group_is_cleared(
    plane: Plane, client: AsyncClient, partition: str
) -> None:
    """xtuner#2064: two keys share one stored image; one of them is cleared."""
    before = plane.used_bytes()
    work = job("q", partition, SAY, SAY, shared=True)
    image = {"pixel_values": torch.arange(12.0).reshape(3, 4)}
    await submit(client, partition, [work], persist=True, shared={"q": image})
    await client.begin_group("q", partition, n=2)  # a worker that died over it
    await Group(work, task(ScriptedLoop()), client).run()
    found = await rows(client, partition)
    assert [found[key]["shared"] for key in ("q_0_0", "q_1_0")] == ["q", "q"]
    await client.kv_clear(["q_0_0"], partition)
    where = found["q_1_0"]["shared"]
    got = await client.kv_batch_get([where], partition, ["multi_modal_inputs"], layout="list")
    assert torch.equal(got["multi_modal_inputs"][0]["pixel_values"], image["pixel_values"])
    await client.kv_clear(None, partition, where={"uid": "q"}, retire=True)
    plane.settle()
    assert plane.used_bytes() <= before  # other tests of this module leave rows, and free some


def test_jobs_are_plain_data() -> None:
    import msgpack

    work = job("q", "p", SAY, attempt=7, tries=1)
    assert GroupJob.of(msgpack.unpackb(msgpack.packb(work.plain()))).plain() == work.plain()
    assert GroupJob.of({**work.plain(), "of a newer version": 1}) == work
    states: list[RolloutState] = work.states()
    assert [state.session_id for state in states] == [0]
    states[0].messages[0]["content"] = "changed"
    assert work.messages[0]["content"] == "go"
