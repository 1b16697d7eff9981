"""BeginGroup and EndGroup through a gateway: attempts, room, and whose group it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from dataplane.errors import InvalidRequest, PermissionDenied, QuotaExceeded, StaleWrite
from dataplane.gateway.server import GatewayServer
from dataplane.types import Quota
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.gateways import Caller, Callers, Serve
from tests.dataplane.gateway.guarded import add_token
from tests.deadline import until
from tests.faults.planes import Plane

MiB = 1 << 20


def begin(caller: Caller, partition: str, uid: str = "u", **parts: Any) -> pb.BeginGroupRequest:
    given = {"request": caller.request(), "n": 2, **parts}
    return pb.BeginGroupRequest(partition_id=partition, uid=uid, **given)


def end(caller: Caller, partition: str, attempt: int, **parts: Any) -> pb.EndGroupRequest:
    given = {"request": caller.request(), "status": "finished", **parts}
    return pb.EndGroupRequest(partition_id=partition, attempt=attempt, **given)


def prompt(plane: Plane, partition: str, uid: str = "u") -> Any:
    listing = plane.client.kv_list(partition)
    return dict(zip(listing.keys, listing.tags, strict=True))[uid]


async def test_a_group_begins_and_ends_and_its_prompt_says_so(
    caller: Caller, plane: Plane, partition: str
) -> None:
    begun = await caller.call("BeginGroup", begin(caller, partition))
    assert prompt(plane, partition)["status"] == "running"
    assert prompt(plane, partition)["attempt"] == begun.attempt
    ended = await caller.call("EndGroup", end(caller, partition, begun.attempt))
    assert prompt(plane, partition)["status"] == "finished"
    assert ended.revision.n == plane.client.kv_list(partition).revision.n
    with pytest.raises(StaleWrite) as stale:
        await caller.call("EndGroup", end(caller, partition, begun.attempt))
    assert stale.value.code is grpc.StatusCode.ABORTED


async def test_a_later_attempt_closes_the_older_one_and_takes_its_rows(
    caller: Caller, plane: Plane, partition: str
) -> None:
    first = await caller.call("BeginGroup", begin(caller, partition))
    plane.client.kv_put(
        "u_0_0", partition, None, {"uid": "u", "session_id": 0}, attempt=first.attempt
    )
    second = await caller.call("BeginGroup", begin(caller, partition))
    assert plane.client.kv_list(partition).keys == ["u"]
    with pytest.raises(StaleWrite):
        await caller.call("EndGroup", end(caller, partition, first.attempt))
    await caller.call("EndGroup", end(caller, partition, second.attempt, status="failure"))
    assert prompt(plane, partition)["status"] == "failure"


async def test_the_same_request_begins_one_group_through_every_gateway(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    one = await serve()
    caller = await callers(one, client_id="grouper")
    asked = begin(caller, partition)
    first = await caller.call("BeginGroup", asked)
    await one.stop()
    caller.numbers = iter(())  # type: ignore[assignment]
    again = await callers(await serve(), client_id="grouper")
    asked.request.retry = True
    assert await again.call("BeginGroup", asked) == first
    closing = end(again, partition, first.attempt, request=again.request(2))
    ended = await again.call("EndGroup", closing)
    closing.request.retry = True
    assert await again.call("EndGroup", closing) == ended


async def test_a_group_waits_for_room_and_is_woken(
    caller: Caller, plane: Plane, partition: str
) -> None:
    plane.client.kv_create_partition(partition, quota=Quota(bytes=3 * MiB))
    first = await caller.call("BeginGroup", begin(caller, partition, declared_bytes=2 * MiB))
    with pytest.raises(QuotaExceeded) as full:
        await caller.call(
            "BeginGroup", begin(caller, partition, "v", declared_bytes=2 * MiB), timeout=1.0
        )
    assert full.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert full.value.limit_bytes == 3 * MiB
    asked = begin(caller, partition, "w", declared_bytes=2 * MiB)
    waiting = asyncio.ensure_future(caller.call("BeginGroup", asked))
    await until(lambda: plane.client.kv_list_partitions()[partition]["waiting"] == 1)
    ended = end(caller, partition, first.attempt)
    ended.request.settled = asked.request.settled  # that one is not answered yet
    await caller.call("EndGroup", ended)
    plane.client.kv_clear(["u"], partition, retire=True)
    assert (await waiting).attempt > first.attempt


async def test_a_group_is_not_ended_by_who_names_another_partition(
    serve: Serve, callers: Callers, plane: Plane, partition: str, tmp_path: Path
) -> None:
    """The attempt alone names a group inside; outside, who may do what is said by partitions."""
    path = tmp_path / "tokens.json"
    token = add_token(path, "mine", "producer", partition=f"{partition}.mine")
    gateway = await serve(token_file=path)
    caller = await callers(gateway, token=token.text)
    mine, theirs = f"{partition}.mine", f"{partition}.theirs"
    attempt = plane.client.begin_group("u", theirs, n=1)
    own = await caller.call("BeginGroup", begin(caller, mine))
    with pytest.raises(PermissionDenied):
        await caller.call("EndGroup", end(caller, theirs, attempt))
    with pytest.raises(StaleWrite) as other:
        await caller.call("EndGroup", end(caller, mine, attempt))
    with pytest.raises(StaleWrite) as none:
        await caller.call("EndGroup", end(caller, mine, 999_999))
    assert str(other.value).replace(str(attempt), "999999") == str(none.value)
    assert prompt(plane, theirs)["status"] == "running"
    await caller.call("EndGroup", end(caller, mine, own.attempt))
    # Nor is anything said of it to who would put to it.
    tags = pb.PutTagsRequest(
        request=caller.request(), partition_id=mine, keys=["x"], tags=[pb.Tags()], attempt=attempt
    )
    with pytest.raises(StaleWrite) as put:
        await caller.call("PutTags", tags)
    assert theirs not in str(put.value)
    tags.request.CopyFrom(caller.request())
    tags.attempt = 999_999
    with pytest.raises(StaleWrite) as put_none:
        await caller.call("PutTags", tags)
    assert str(put.value).replace(str(attempt), "999999") == str(put_none.value)
    assert put.value.keys == put_none.value.keys


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"n": 0}, "n"),
        ({"declared_bytes": -1}, "declared_bytes is 0 or more"),
        ({"uid": ""}, "key"),
        ({"uid": "a/../b"}, "key"),
    ],
)
async def test_a_group_that_makes_no_sense_is_refused(
    caller: Caller, plane: Plane, partition: str, parts: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        await caller.call("BeginGroup", begin(caller, f"{partition}", **parts))
    assert partition not in plane.client.kv_list_partitions()


async def test_a_status_that_is_none_is_refused(
    caller: Caller, gateway: GatewayServer, plane: Plane, partition: str
) -> None:
    begun = await caller.call("BeginGroup", begin(caller, partition))
    for status in ("", "running", "x" * 300):
        with pytest.raises(InvalidRequest, match="status"):
            await caller.call("EndGroup", end(caller, partition, begun.attempt, status=status))
    for attempt in (0, -1):
        with pytest.raises(InvalidRequest, match="attempt"):
            await caller.call("EndGroup", end(caller, partition, attempt))
