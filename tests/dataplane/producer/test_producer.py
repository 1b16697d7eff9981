"""A producer at a real gateway: what it puts is in the plane, what it reads is what is there."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dataplane.errors import AlreadyWritten, ClaimLost, DeadlineExceeded, KeyNotFound, StaleWrite
from dataplane.gateway.server import GatewayServer
from dataplane.producer import AsyncProducer, Trajectory
from tests.dataplane.producer.conftest import address_of


def trajectory(uid: str, session_id: int = 0, **parts: object) -> Trajectory:
    """Three prompt tokens and two that were generated."""
    return Trajectory.from_response(
        uid, [1, 2, 3], [4, 5], [-0.5, -0.25], session_id=session_id, version=3, reward=1.0, **parts
    )


async def test_rows_come_back_bit_for_bit(producer: AsyncProducer, partition: str) -> None:
    ids = np.arange(7, dtype=np.int64)
    meta = await producer.kv_put(
        "a", partition, {"input_ids": ids, "score": np.float32(2.5)}, {"status": "finished"}
    )
    assert meta.revision is not None
    assert meta.fields == ["input_ids", "score"]
    rows = await producer.kv_batch_get(["a"], partition)
    assert rows.keys == ["a"]
    assert np.array_equal(rows["input_ids"][0], ids)
    assert rows["input_ids"][0].dtype == np.int64
    listing = await producer.kv_list(partition, where={"status": "finished"})
    assert (listing.keys, listing.tags) == (["a"], [{"status": "finished"}])
    assert listing.lengths[0]["input_ids"] == 7


async def test_a_batch_larger_than_many_chunks_is_one_put(
    producer: AsyncProducer, partition: str
) -> None:
    keys = [f"k{i}" for i in range(50)]
    rows = [np.full(20_000 + i, i, np.float32) for i in range(50)]
    meta = await producer.kv_batch_put(keys, partition, {"logprobs": rows}, return_tags=True)
    got = await producer.kv_batch_get(keys[::-1], partition, ["logprobs"])
    assert all(np.array_equal(a, b) for a, b in zip(got["logprobs"], rows[::-1], strict=True))
    assert got.revision >= meta.revision


async def test_modes_and_their_errors(producer: AsyncProducer, partition: str) -> None:
    await producer.kv_put("a", partition, tags={"n": 1}, if_absent=True)
    with pytest.raises(AlreadyWritten) as caught:
        await producer.kv_put("a", partition, tags={"n": 2}, if_absent=True)
    assert caught.value.keys == ["a"]
    with pytest.raises(KeyNotFound):
        await producer.kv_put("b", partition, tags={"n": 2}, must_exist=True)
    assert await producer.kv_clear(["a", "nobody"], partition) == 1


async def test_trajectories_that_are_wrong_go_to_quarantine(
    producer: AsyncProducer, partition: str
) -> None:
    wrong = Trajectory.from_response("u", [1, 2], [3], [0.5], session_id=1, version=3, reward=0.0)
    put = await producer.put_trajectories([trajectory("u"), wrong], partition)
    assert put.revision is not None
    assert [result.accepted for result in put.results] == [True, False]
    assert "logprobs" in (put.refused[0].reason or "")
    listing = await producer.kv_list(partition)
    assert listing.keys == ["u_0_0"]
    assert listing.tags[0]["policy_len"] == 2
    assert (await producer.kv_list(put.refused[0].quarantine or "")).keys == [put.refused[0].key]


async def test_a_group_is_whole_for_those_who_wait(producer: AsyncProducer, partition: str) -> None:
    waiting = asyncio.create_task(producer.kv_wait(partition, {}, count=1, group_by="uid"))
    async with producer.group("u", partition, n=2, declared_bytes=1 << 20) as attempt:
        for session in range(2):
            await producer.put_trajectory(trajectory("u", session), partition, attempt=attempt)
    assert sorted((await waiting).keys) == ["u_0_0", "u_1_0"]
    with pytest.raises(StaleWrite):
        await producer.put_trajectory(trajectory("u", 2), partition, attempt=attempt)


async def test_a_group_whose_block_raises_is_a_failure(
    producer: AsyncProducer, partition: str
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with producer.group("u", partition, n=2, declared_bytes=1 << 20):
            raise ZeroDivisionError
    assert (await producer.kv_list(partition)).tags[0]["status"] == "failure"


async def test_prompts_are_claimed_and_committed(producer: AsyncProducer, partition: str) -> None:
    await producer.kv_batch_put(["p0", "p1"], partition, tags=[{"is_prompt": True}] * 2)
    claim = await producer.kv_claim(partition, "rollout", count=2)
    assert sorted(claim.keys) == ["p0", "p1"]
    await producer.kv_clear(["p1"], partition)
    with pytest.raises(ClaimLost) as caught:
        await producer.kv_commit(claim)
    rest = claim.without(caught.value.keys)
    assert rest.keys == ["p0"]
    await producer.kv_commit(rest)
    with pytest.raises(DeadlineExceeded):
        await producer.kv_claim(partition, "rollout", count=1, timeout=0.3)


async def test_a_watch_tells_what_changes(producer: AsyncProducer, partition: str) -> None:
    meta = await producer.kv_put("first", partition, tags={"n": 0})
    changes = producer.kv_watch(partition, since=meta.revision)
    told = asyncio.create_task(anext(changes))
    await producer.kv_put("a", partition, tags={"n": 1})
    change = await told
    assert change.rows.keys == ["a"]
    await producer.kv_clear(["a"], partition)
    change = await anext(changes)
    assert change.cleared == ["a"]
    await changes.aclose()


async def test_a_watch_in_which_nothing_happens_ends(
    producer: AsyncProducer, partition: str
) -> None:
    with pytest.raises(DeadlineExceeded):
        async for _ in producer.kv_watch(partition, timeout=0.3):
            pass


async def test_what_is_submitted_is_gathered_and_answered_each(
    producer: AsyncProducer, partition: str
) -> None:
    await producer.put_trajectory(trajectory("u", 7), partition)
    told = [await producer.submit(trajectory("u", i), partition, if_absent=True) for i in range(20)]
    await producer.flush()
    with pytest.raises(AlreadyWritten):
        told[7].result()
    assert all(told[i].result().accepted for i in range(20) if i != 7)
    assert len(await producer.kv_list(partition)) == 20


async def test_the_end_of_a_group_waits_for_what_was_submitted(
    producer: AsyncProducer, partition: str
) -> None:
    attempt = await producer.begin_group("u", partition, n=1, declared_bytes=1 << 20)
    told = await producer.submit(trajectory("u"), partition, attempt=attempt)
    await producer.end_group(attempt, "finished")
    assert told.result().accepted


async def test_a_trajectory_of_five_megabytes_is_accepted(
    producer: AsyncProducer, partition: str
) -> None:
    """More than gRPC takes where nobody said otherwise."""
    response = np.full(600_000, 100_000)
    it = Trajectory.from_response("u", [1], response, np.full(600_000, -0.5, np.float32))
    assert it.to_message().ByteSize() > 5_000_000
    assert (await producer.put_trajectory(it, partition)).accepted
    rows = await producer.kv_batch_get(["u_0_0"], partition, ["input_ids"])
    assert np.array_equal(rows["input_ids"][0][1:], response)


async def test_explain_and_outcome(producer: AsyncProducer, partition: str) -> None:
    await producer.kv_put("a", partition, tags={"status": "running"})
    why = await producer.explain(partition, {"status": "finished"})
    assert (why.matching, why.total) == (0, 1)
    outcome = await producer.request_outcome(f"{producer.client_id}/999")
    assert outcome["applied"] is False


async def test_two_producers_are_two_clients(gateway: GatewayServer, partition: str) -> None:
    async with AsyncProducer(address_of(gateway)) as a, AsyncProducer(address_of(gateway)) as b:
        await asyncio.gather(
            a.kv_put("a", partition, tags={"n": 1}), b.kv_put("b", partition, tags={"n": 1})
        )
        assert sorted((await a.kv_list(partition)).keys) == ["a", "b"]
        assert a.plane_id == b.plane_id
