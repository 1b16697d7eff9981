"""PutTags through a gateway: merged, atomic, one effect however often it is asked."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

from dataplane.errors import (
    AlreadyWritten,
    InvalidRequest,
    KeyNotFound,
    OutcomeUnknown,
    PlaneLost,
    StaleWrite,
)
from dataplane.protocol.values import tags_from, tags_to, to_value
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.gateways import Caller, Callers, Serve
from tests.faults.planes import Plane


def message(
    caller: Caller, partition: str, tags: dict[str, dict[str, Any]], **parts: Any
) -> pb.PutTagsRequest:
    given = {"request": caller.request(), **parts} if "request" not in parts else parts
    return pb.PutTagsRequest(
        partition_id=partition, keys=list(tags), tags=map(tags_to, tags.values()), **given
    )


def rows(plane: Plane, partition: str) -> dict[str, Any]:
    listing = plane.client.kv_list(partition)
    return dict(zip(listing.keys, listing.tags, strict=True))


async def test_tags_are_merged_into_those_that_rows_have(
    caller: Caller, plane: Plane, partition: str
) -> None:
    plane.client.kv_put("a", partition, {"x": np.arange(3)}, {"n": 1, "status": "new"})
    tags = {"a": {"status": "old", "list": [1, None, {"y": 2.5}]}, "b": {"n": 2}}
    answer = await caller.call("PutTags", message(caller, partition, tags))
    merged = {"n": 1, "status": "old", "list": [1, None, {"y": 2.5}]}
    assert rows(plane, partition) == {"a": merged, "b": {"n": 2}}
    assert (answer.revision.epoch, answer.revision.n) == plane.client.kv_list(partition).revision
    assert not answer.tags
    asked = message(caller, partition, {"a": {"n": 3}}, return_tags=True)
    answer = await caller.call("PutTags", asked)
    assert [tags_from(each) for each in answer.tags] == [{**merged, "n": 3}]
    assert list(answer.fields) == ["x"]


async def test_the_same_request_has_one_effect_through_every_gateway(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    one = await serve()
    caller = await callers(one, client_id="the same")
    asked = message(caller, partition, {"a": {"n": 1}}, return_tags=True)
    first = await caller.call("PutTags", asked)
    plane.client.kv_put("a", partition, None, {"n": 2})
    asked.request.retry = True
    assert await caller.call("PutTags", asked) == first
    await one.stop()
    caller = await callers(await serve(), client_id="the same")
    assert await caller.call("PutTags", asked) == first
    assert rows(plane, partition) == {"a": {"n": 2}}
    # Once it is settled nobody remembers it, and it has no other effect either.
    later = message(caller, partition, {"b": {}}, request=caller.request(5))
    await caller.call("PutTags", later)
    with pytest.raises(OutcomeUnknown) as unknown:
        await caller.call("PutTags", asked)
    assert unknown.value.request_id == "the same/1"
    assert "request the same/1" in str(unknown.value)
    assert rows(plane, partition) == {"a": {"n": 2}, "b": {}}


async def test_clients_of_one_name_and_other_numbers_do_not_meet(
    callers: Callers, serve: Serve, plane: Plane, partition: str
) -> None:
    gateway = await serve()
    one, two = [await callers(gateway) for _ in range(2)]
    for caller in (one, two):
        asked = message(caller, partition, {caller.client_id: {"n": 1}}, request=caller.request(1))
        await caller.call("PutTags", asked)
    assert set(rows(plane, partition)) == {one.client_id, two.client_id}


async def test_a_retry_does_not_bring_back_what_was_cleared_since(
    caller: Caller, plane: Plane, partition: str
) -> None:
    plane.client.kv_put("a", partition, None, {"n": 1})
    seen = plane.client.kv_list(partition).revision
    plane.client.kv_clear(["a"], partition)
    asked = message(caller, partition, {"a": {"n": 2}}, request=caller.request(retry=True))
    asked.request.seen.epoch, asked.request.seen.n = seen
    with pytest.raises(StaleWrite) as stale:
        await caller.call("PutTags", asked)
    assert stale.value.code is grpc.StatusCode.ABORTED
    assert stale.value.keys == ["a"]
    assert rows(plane, partition) == {}


async def test_modes_ask_for_rows_that_are_or_are_not_there(
    caller: Caller, plane: Plane, partition: str
) -> None:
    plane.client.kv_put("a", partition, None, {})
    both = {"a": {"n": 1}, "b": {"n": 1}}
    with pytest.raises(KeyNotFound) as missing:
        await caller.call("PutTags", message(caller, partition, both, mode=pb.PUT_MODE_MUST_EXIST))
    assert (missing.value.code, missing.value.keys) == (grpc.StatusCode.NOT_FOUND, ["b"])
    with pytest.raises(AlreadyWritten) as there:
        await caller.call("PutTags", message(caller, partition, both, mode=pb.PUT_MODE_IF_ABSENT))
    assert (there.value.code, there.value.keys) == (grpc.StatusCode.ALREADY_EXISTS, ["a"])
    assert rows(plane, partition) == {"a": {}}


async def test_what_is_malformed_changes_nothing(
    caller: Caller, plane: Plane, partition: str
) -> None:
    def wrong(**parts: Any) -> pb.PutTagsRequest:
        asked = message(caller, partition, {"a": {"n": 1}, "b": {"n": 2}})
        asked.MergeFrom(pb.PutTagsRequest(**parts))
        return asked

    cases = [
        (wrong(keys=["a"], tags=[pb.Tags()]), "each key once"),
        (wrong(keys=["c"]), "3 keys and 2 tags"),
        (message(caller, partition, {}), "1 to 65536 keys"),
        (wrong(keys=["c\n"], tags=[pb.Tags()]), "key"),
        (wrong(keys=["c"], tags=[pb.Tags(values={"x": to_value(b"x")})]), "tag"),
        (wrong(keys=["c"], tags=[pb.Tags(values={"x": to_value(np.ones(2))})]), "tag"),
        (wrong(keys=["c"], tags=[pb.Tags(values={"x": pb.Value()})]), "says nothing"),
        (wrong(keys=["c"], tags=[tags_to({"x": "y" * 70_000})]), "bytes"),
        (wrong(keys=["c"], tags=[tags_to({"dataplane.lost": "y"})]), "dataplane"),
        (wrong(mode=17), "mode is 17"),
        (wrong(attempt=-1), "attempt"),
        (wrong(request=pb.Request(settled=1 << 40)), "number"),
        (wrong(request=pb.Request(plane_id="another")), "another"),
    ]
    for asked, says in cases:
        kinds = PlaneLost if says == "another" else InvalidRequest
        with pytest.raises(kinds, match=says):
            await caller.call("PutTags", asked)
    assert partition not in plane.client.kv_list_partitions()


async def test_a_put_for_an_attempt_is_taken_while_it_is_open(
    caller: Caller, plane: Plane, partition: str
) -> None:
    attempt = plane.client.begin_group("u", partition, n=1)
    await caller.call("PutTags", message(caller, partition, {"u_0_0": {}}, attempt=attempt))
    plane.client.end_group(attempt, "finished")
    with pytest.raises(StaleWrite) as stale:
        await caller.call("PutTags", message(caller, partition, {"u_1_0": {}}, attempt=attempt))
    assert stale.value.attempt == attempt
