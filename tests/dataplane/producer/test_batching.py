"""Trajectories that are submitted one by one: what goes together, when, and who is told what."""

from __future__ import annotations

import asyncio

import pytest

from dataplane.errors import AlreadyWritten, InvalidRequest, PlaneLost, QuotaExceeded
from dataplane.producer.batching import Batcher, BatchPolicy
from dataplane.producer.puts import Put
from dataplane.producer.trajectory import TrajectoriesPut, Trajectory, TrajectoryResult
from dataplane.v1 import dataplane_pb2 as pb

LATER = 60.0
ANY = pb.PUT_MODE_UNSPECIFIED


def message(uid: str, session_id: int = 0, size: int = 2, **parts: object) -> pb.Trajectory:
    return Trajectory.from_response(
        uid, [1], list(range(size)), session_id=session_id, **parts
    ).to_message()


class Sent:
    """What a batcher sends; it waits there until it is let go."""

    def __init__(self) -> None:
        self.puts: list[list[str]] = []
        self.go = asyncio.Event()
        self.go.set()
        self.taken: set[str] = set()
        self.error: Exception | None = None

    async def __call__(self, put: Put) -> TrajectoriesPut:
        assert isinstance(put.message, pb.PutTrajectoriesRequest)
        keys = [f"{one.uid}_{one.session_id}_{one.index}" for one in put.message.trajectories]
        self.puts.append(keys)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        there = sorted(self.taken & set(keys))
        if there:
            raise AlreadyWritten("there", partition_id="p", keys=there)
        return TrajectoriesPut(None, [TrajectoryResult(key) for key in keys])


@pytest.fixture
def sent() -> Sent:
    return Sent()


async def test_a_batch_goes_when_it_has_so_many(sent: Sent) -> None:
    batcher = Batcher(sent, BatchPolicy(max_rows=3, max_delay_s=LATER))
    told = [await batcher.submit(message("u", i), "p", 0, ANY) for i in range(3)]
    await asyncio.gather(*told)
    assert sent.puts == [["u_0_0", "u_1_0", "u_2_0"]]
    assert [one.result().key for one in told] == sent.puts[0]


async def test_a_batch_goes_before_it_is_too_large(sent: Sent) -> None:
    size = message("u", 0, 100).ByteSize()
    batcher = Batcher(sent, BatchPolicy(max_bytes=size * 2 + 10, max_delay_s=LATER))
    for i in range(5):
        await batcher.submit(message("u", i, 100), "p", 0, ANY)
    await batcher.flush()
    assert [len(put) for put in sent.puts] == [2, 2, 1]


async def test_a_batch_goes_when_the_first_has_waited_long_enough(sent: Sent) -> None:
    batcher = Batcher(sent, BatchPolicy(max_delay_s=0.001))
    told = await batcher.submit(message("u"), "p", 0, ANY)
    assert (await told).key == "u_0_0"


async def test_what_does_not_belong_together_does_not_go_together(sent: Sent) -> None:
    batcher = Batcher(sent, BatchPolicy(max_delay_s=LATER))
    await batcher.submit(message("u"), "p", 0, ANY)
    await batcher.submit(message("u", 1), "another", 0, ANY)
    await batcher.submit(message("u", 2), "p", 5, ANY)
    await batcher.submit(message("u", 3), "p", 0, pb.PUT_MODE_IF_ABSENT)
    await batcher.submit(message("u", 4, reward=1.0), "p", 0, ANY)
    await batcher.submit(message("u", 5, messages=[{"role": "user"}]), "p", 0, ANY)
    failed = Trajectory("u", 6, status="failed", error="no").to_message()
    await batcher.submit(failed, "p", 0, ANY)
    await batcher.submit(message("u"), "p", 0, ANY)  # again the same key
    await batcher.flush()
    assert sorted(sent.puts) == [[f"u_{i}_0"] for i in (0, 0, 1, 2, 3, 4, 5, 6)]


async def test_one_that_is_refused_does_not_keep_the_others_out(sent: Sent) -> None:
    sent.taken = {"u_1_0", "u_3_0"}
    batcher = Batcher(sent, BatchPolicy(max_rows=5, max_delay_s=LATER))
    told = [await batcher.submit(message("u", i), "p", 0, ANY) for i in range(5)]
    await asyncio.wait(told)
    assert [type(one.exception()) for one in told] == [
        type(None), AlreadyWritten, type(None), AlreadyWritten, type(None),
    ]  # fmt: skip
    assert sent.puts[-1] == ["u_0_0", "u_2_0", "u_4_0"]


async def test_what_concerns_all_is_told_to_all(sent: Sent) -> None:
    sent.error = QuotaExceeded("full", used_bytes=1, limit_bytes=1)
    batcher = Batcher(sent, BatchPolicy(max_rows=3, max_delay_s=LATER))
    told = [await batcher.submit(message("u", i), "p", 0, ANY) for i in range(3)]
    await asyncio.wait(told)
    assert all(isinstance(one.exception(), QuotaExceeded) for one in told)
    assert len(sent.puts) == 1


async def test_who_is_faster_than_the_gateway_waits(sent: Sent) -> None:
    size = message("u", 1).ByteSize()
    policy = BatchPolicy(max_bytes=size, max_pending_bytes=3 * size, max_delay_s=LATER)
    sent.go.clear()
    batcher = Batcher(sent, policy)
    for i in (1, 2, 3):
        await batcher.submit(message("u", i), "p", 0, ANY)
    fourth = asyncio.create_task(batcher.submit(message("u", 4), "p", 0, ANY))
    await asyncio.wait({fourth}, timeout=0.05)
    assert not fourth.done()
    sent.go.set()
    told = await fourth
    await batcher.flush()
    assert told.result().key == "u_4_0"


async def test_one_larger_than_all_the_room_goes_alone(sent: Sent) -> None:
    policy = BatchPolicy(max_bytes=10, max_pending_bytes=10, max_delay_s=LATER)
    batcher = Batcher(sent, policy)
    for i in range(2):
        await batcher.submit(message("u", i, 1000), "p", 0, ANY)
    await batcher.flush()
    assert [len(put) for put in sent.puts] == [1, 1]


async def test_the_end_answers_what_is_there_and_takes_nothing_more(sent: Sent) -> None:
    batcher = Batcher(sent, BatchPolicy(max_delay_s=LATER))
    told = await batcher.submit(message("u"), "p", 0, ANY)
    await batcher.close()
    assert told.result().key == "u_0_0"
    with pytest.raises(PlaneLost, match="closed"):
        await batcher.submit(message("u"), "p", 0, ANY)


def test_a_policy_that_cannot_be_is_refused() -> None:
    for wrong in (
        {"max_rows": 0},
        {"max_bytes": 0},
        {"max_delay_s": -1.0},
        {"max_pending_bytes": 1},
    ):
        with pytest.raises(InvalidRequest):
            BatchPolicy(**wrong)  # type: ignore[arg-type]
