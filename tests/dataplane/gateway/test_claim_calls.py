"""Claim, Commit, Release and Attend through a gateway: whose rows are whose, and until when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from dataplane.errors import ClaimLost, DeadlineExceeded, InvalidRequest, PlaneLost
from dataplane.gateway.producers import plane_client_id
from dataplane.gateway.server import GatewayServer
from dataplane.protocol.values import tags_from, to_value
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.gateways import Caller, Callers, Serve
from tests.deadline import until
from tests.faults import planes
from tests.faults.planes import Plane

TASK = "train"


@pytest.fixture(scope="module")
def plane(roots: dict[str, Path]) -> Iterator[Plane]:
    """One in this process, so that a test sees who claims there."""
    with planes.in_thread("claim-calls", timeout_s=20, **roots) as plane:
        yield plane


def tags(plane: Plane) -> Any:
    assert plane.server is not None
    assert plane.server.tags is not None
    return plane.server.tags


def held(plane: Plane, partition: str) -> int:
    """Rows that somebody has claimed."""
    task = tags(plane).store.partitions[partition].claims.tasks.get(TASK)
    return 0 if task is None else len(task.held)


def here(plane: Plane, caller: Caller) -> bool:
    """Whether the plane takes the caller for present."""
    return plane_client_id("anyone", caller.client_id) in tags(plane).attached


def put(plane: Plane, partition: str, count: int, first: int = 0) -> None:
    keys = [f"k{i}" for i in range(first, first + count)]
    fields = {"ids": [np.arange(i % 7 + 1) for i in range(first, first + count)]}
    plane.client.kv_batch_put(keys, partition, fields, [{"n": i} for i in range(len(keys))])


def message(caller: Caller, partition: str, count: int = 1, **parts: Any) -> pb.ClaimRequest:
    return pb.ClaimRequest(
        client_id=caller.client_id, partition_id=partition, task=TASK, count=count, **parts
    )


async def claim(caller: Caller, partition: str, count: int = 1, **parts: Any) -> pb.ClaimResponse:
    return await caller.call("Claim", message(caller, partition, count, **parts))


def ending(
    kind: Any, caller: Caller, partition: str, answer: pb.ClaimResponse, **parts: Any
) -> Any:
    given = {
        "request": caller.request(),
        "claim_id": answer.claim_id,
        "keys": [row.key for row in answer.rows],
        **parts,
    }
    return kind(partition_id=partition, task=TASK, **given)


def keys_of(answer: pb.ClaimResponse) -> list[str]:
    return [row.key for row in answer.rows]


async def test_rows_are_claimed_with_all_that_is_listed_of_them(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put(plane, partition, 5)
    plane.client.kv_put("bare", partition, None, {"n": 9})
    answer = await claim(caller, partition, 3, fields=["ids"], where=to_value({"n": {">": 0}}))
    assert keys_of(answer) == ["k1", "k2", "k3"]
    row = answer.rows[1]
    assert (tags_from(row.tags), list(row.fields), dict(row.lengths)) == (
        {"n": 2}, ["ids"], {"ids": 3},
    )  # fmt: skip
    assert list(answer.deliveries) == [1, 1, 1]
    assert answer.claim_id
    assert not answer.end
    assert held(plane, partition) == 3


async def test_commit_finishes_rows_and_release_offers_them_again(
    caller: Caller, callers: Callers, gateway: GatewayServer, plane: Plane, partition: str
) -> None:
    put(plane, partition, 4)
    first, second = await claim(caller, partition, 2), await claim(caller, partition, 2)
    done = await caller.call("Commit", ending(pb.CommitRequest, caller, partition, first))
    await caller.call("Release", ending(pb.ReleaseRequest, caller, partition, second))
    assert done.revision.n
    other = await callers(gateway)
    again = await claim(other, partition, 2)
    assert keys_of(again) == keys_of(second)
    assert list(again.deliveries) == [2, 2]
    plane.client.kv_seal_partition(partition)
    await other.call("Commit", ending(pb.CommitRequest, other, partition, again))
    last = await claim(other, partition, 1)
    assert last.end
    assert not last.rows
    assert (await other.call("Commit", ending(pb.CommitRequest, other, partition, last))).revision.n


async def test_a_commit_that_comes_again_through_another_gateway_has_one_effect(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    put(plane, partition, 3)
    one = await serve()
    caller = await callers(one, client_id="stays")
    answer = await claim(caller, partition, 2)
    asked = ending(pb.CommitRequest, caller, partition, answer)
    done = await caller.call("Commit", asked)
    await one.stop()
    caller = await callers(await serve(), client_id="stays")
    asked.request.retry = True
    assert await caller.call("Commit", asked) == done
    wrong = ending(pb.ReleaseRequest, caller, partition, answer, request=caller.request(9))
    with pytest.raises(ClaimLost) as lost:
        await caller.call("Release", wrong)
    assert lost.value.code is grpc.StatusCode.ABORTED
    assert lost.value.keys == ["k0", "k1"]


async def test_a_claim_waits_and_is_woken(caller: Caller, plane: Plane, partition: str) -> None:
    put(plane, partition, 1)
    task = asyncio.ensure_future(claim(caller, partition, 3))
    await until(lambda: len(tags(plane).claiming) == 1)
    put(plane, partition, 2, first=1)
    assert keys_of(await task) == ["k0", "k1", "k2"]


async def test_the_deadline_of_a_claim_says_why(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put(plane, partition, 1)
    with pytest.raises(DeadlineExceeded, match="got no claim of 3 rows") as late:
        await caller.call("Claim", message(caller, partition, 3), timeout=1.0)
    assert late.value.explanation
    assert held(plane, partition) == 0


async def test_a_claim_whose_caller_has_gone_takes_nothing(
    caller: Caller, callers: Callers, gateway: GatewayServer, plane: Plane, partition: str
) -> None:
    put(plane, partition, 1)
    call = caller.stub.Claim(message(caller, partition, 2), timeout=60)
    await until(lambda: len(tags(plane).claiming) == 1)
    call.cancel()
    await until(lambda: len(tags(plane).claiming) == 0)
    put(plane, partition, 1, first=1)
    assert keys_of(await claim(await callers(gateway), partition, 2)) == ["k0", "k1"]


async def test_what_was_granted_to_who_has_gone_goes_back(
    caller: Caller, plane: Plane, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller leaves between the grant and its answer."""
    from dataplane.gateway.calls import claiming

    put(plane, partition, 2)
    granted, gate = asyncio.Event(), asyncio.Event()

    async def slow(*_: Any) -> Any:
        granted.set()
        await gate.wait()

    monkeypatch.setattr(claiming.Listed, "all", slow)
    call = caller.stub.Claim(message(caller, partition, 2), timeout=60)
    waiting = asyncio.ensure_future(granted.wait())
    await asyncio.wait_for(waiting, 10)
    assert held(plane, partition) == 2
    call.cancel()
    await until(lambda: held(plane, partition) == 0)


async def test_a_claim_without_room_in_one_answer_is_refused_and_given_back(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    put(plane, partition, 2)
    plane.client.kv_batch_put(["k0", "k1"], partition, None, [{"x": "x" * 40_000}] * 2)
    caller = await callers(await serve(max_message_bytes=64 << 10, chunk_bytes=4 << 10))
    with pytest.raises(InvalidRequest, match="claim fewer at a time"):
        await claim(caller, partition, 2)
    await until(lambda: held(plane, partition) == 0)
    assert len((await claim(caller, partition, 1)).rows) == 1


async def test_the_members_of_a_group_share_a_batch(
    callers: Callers, gateway: GatewayServer, plane: Plane, partition: str
) -> None:
    put(plane, partition, 4)
    ranks = [await callers(gateway) for _ in range(3)]
    asked = [pb.Replica(dp_rank=rank, dp_size=2, batch_index=0) for rank in (0, 0, 1)]
    got = [
        keys_of(await claim(caller, partition, 4, replica=replica))
        for caller, replica in zip(ranks, asked, strict=True)
    ]
    assert got[0] == got[1]
    assert len(got[0]) == 2
    assert sorted(got[0] + got[2]) == ["k0", "k1", "k2", "k3"]


async def test_a_client_that_has_gone_is_followed_by_another(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    """Its leases run from `absence_s` after its last call on, and then its rows are others'."""
    put(plane, partition, 2)
    gateway = await serve(absence_s=3600.0)
    now = [0.0]
    gateway.producers._clock = lambda: now[0]
    caller, other = await callers(gateway), await callers(gateway)
    first = await claim(caller, partition, 2, lease_s=0.1)
    waiting = asyncio.ensure_future(claim(other, partition, 2))
    await until(lambda: len(tags(plane).claiming) == 1)
    now[0] = 3599.0
    assert gateway.producers.close_absent() == 0
    assert here(plane, caller)
    assert not waiting.done()
    now[0] = 3600.0
    assert gateway.producers.close_absent() == 1
    second = await waiting
    assert keys_of(second) == keys_of(first)
    assert list(second.deliveries) == [2, 2]
    assert not here(plane, caller)
    with pytest.raises(ClaimLost):
        await caller.call("Commit", ending(pb.CommitRequest, caller, partition, first))


async def test_who_attends_is_here(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    put(plane, partition, 1)
    gateway = await serve(absence_s=0.4)  # so it beats every 0.1 s
    now = [0.0]
    gateway.producers._clock = lambda: now[0]
    caller = await callers(gateway)
    beats = caller.stub.Attend(pb.AttendRequest(client_id=caller.client_id), timeout=60)
    await beats.read()
    assert here(plane, caller)
    await claim(caller, partition, 1, lease_s=0.1)
    now[0] = 1000.0
    assert gateway.producers.close_absent() == 0
    for _ in range(3):
        await beats.read()
    assert here(plane, caller)
    assert held(plane, partition) == 1
    beats.cancel()
    await until(lambda: all(not one.used for one in gateway.producers._producers.values()))
    now[0] = 2000.0
    assert gateway.producers.close_absent() == 1
    await until(lambda: held(plane, partition) == 0)


async def test_attendance_ends_with_its_deadline(caller: Caller) -> None:
    call = caller.stub.Attend(pb.AttendRequest(client_id=caller.client_id), timeout=0.5)
    assert [answer async for answer in call]
    assert await call.code() is grpc.StatusCode.OK


async def test_a_claim_of_another_plane_is_refused(caller: Caller, partition: str) -> None:
    with pytest.raises(PlaneLost) as lost:
        await claim(caller, partition, 1, plane_id="another")
    assert lost.value.code is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("client_id", ["", "x" * 65, "a\nb", "\u00e9"])
async def test_who_claims_has_a_name(caller: Caller, partition: str, client_id: str) -> None:
    asked = message(caller, partition)
    asked.client_id = client_id
    with pytest.raises(InvalidRequest, match="client_id"):
        await caller.call("Claim", asked)


async def test_a_try_that_abandons_another_gets_what_that_was_granted(
    caller: Caller, plane: Plane, partition: str
) -> None:
    """The answer of the first may have been lost on its way, and its rows with it."""
    put(plane, partition, 4)
    lost = await claim(caller, partition, 2, number=1)
    again = await claim(caller, partition, 2, number=2, abandoned=[1])
    assert keys_of(again) == keys_of(lost)
    assert held(plane, partition) == 2
    with pytest.raises(ClaimLost):
        await caller.call("Commit", ending(pb.CommitRequest, caller, partition, lost))
    await caller.call("Commit", ending(pb.CommitRequest, caller, partition, again))
    rest = await claim(caller, partition, 2, number=3)
    assert keys_of(rest) == ["k2", "k3"]


async def test_a_try_that_comes_twice_is_answered_the_same(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put(plane, partition, 4)
    one, other = [await claim(caller, partition, 2, number=7) for _ in range(2)]
    assert (one.claim_id, keys_of(one)) == (other.claim_id, keys_of(other))
    assert held(plane, partition) == 2


@pytest.mark.parametrize("numbers", [{"number": -1}, {"number": 2, "abandoned": [0]}])
async def test_what_is_no_number_of_a_claim_is_refused(
    caller: Caller, plane: Plane, partition: str, numbers: dict[str, Any]
) -> None:
    put(plane, partition, 1)
    with pytest.raises(InvalidRequest, match="from 1 on"):
        await claim(caller, partition, 1, **numbers)
    many = list(range(1, 1026))
    with pytest.raises(InvalidRequest, match="1025 abandoned"):
        await claim(caller, partition, 1, number=2000, abandoned=many)
