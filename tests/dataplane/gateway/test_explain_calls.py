"""Explain, GetOutcome and Describe through a gateway: the caller's own, and what it may see."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from dataplane.errors import DeadlineExceeded, InvalidRequest, OutcomeUnknown, PlaneLost
from dataplane.protocol.values import from_value, tags_from, tags_to, to_value
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.gateways import Caller, Callers, Serve
from tests.dataplane.gateway.guarded import add_token
from tests.faults.planes import Plane


def put_tags(caller: Caller, partition: str, key: str = "a", **parts: Any) -> pb.PutTagsRequest:
    given = {"request": caller.request(), **parts}
    return pb.PutTagsRequest(
        partition_id=partition, keys=[key], tags=[tags_to({"n": 1})], return_tags=True, **given
    )


async def outcome(caller: Caller, number: int, **parts: Any) -> Any:
    given = {"client_id": caller.client_id, **parts}
    answer = await caller.call("GetOutcome", pb.GetOutcomeRequest(number=number, **given))
    return from_value(pb.Value(map_value=answer.outcome))


# -- Explain ---------------------------------------------------------------------------------


async def test_an_explanation_says_what_fails_and_who_holds_it_up(
    caller: Caller, plane: Plane, partition: str
) -> None:
    plane.client.kv_put("a", partition, {"x": np.arange(3)}, {"status": "done"})
    plane.client.kv_put("b", partition, None, {"status": "running"})
    asked = pb.ExplainRequest(
        partition_id=partition, where=to_value({"status": "done"}), fields=["x"], count=2
    )
    answer = await caller.call("Explain", asked)
    told = plane.client.explain(partition, {"status": "done"}, fields=["x"], count=2)
    assert (answer.matching, answer.total) == (1, 2) == (told.matching, told.total)
    assert dict(answer.failing) == told.failing
    assert "running" in answer.text
    assert [tags_from(one)["key"] for one in answer.stuck] == [one["key"] for one in told.stuck]
    assert tags_from(answer.holders[0])["partition_id"] == partition
    whole = await caller.call("Explain", pb.ExplainRequest())
    assert whole.total >= 2
    with pytest.raises(InvalidRequest, match="about one partition"):
        await caller.call("Explain", pb.ExplainRequest(count=1))


async def test_nothing_is_said_of_partitions_that_the_caller_may_not_see(
    serve: Serve, callers: Callers, plane: Plane, partition: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.json"
    mine, absent, secret = [f"{partition}.{name}" for name in ("mine", "mine2", "secret")]
    token = add_token(path, "some", "producer", partition=f"{partition}.mine*")
    caller = await callers(await serve(token_file=path), token=token.text)
    plane.client.kv_put("a", mine, None, {})
    plane.client.kv_batch_put(["b", "c"], secret, None, [{}, {}])
    plane.client.begin_group("u", secret, n=2)
    whole = await caller.call("Explain", pb.ExplainRequest())
    assert whole.total == 1
    assert "1 partition with 1 row" in whole.text
    of_absent = await caller.call("Explain", pb.ExplainRequest(partition_id=absent))
    assert mine in of_absent.text
    for answer in (whole, of_absent):
        assert secret not in str(answer)
    # Inside a plane, who waits for a partition that is not there is told which ones are.
    for rpc, asked in (
        ("Wait", pb.WaitRequest(partition_id=absent, count=1)),
        (
            "Claim",
            pb.ClaimRequest(client_id="c", partition_id=absent, task="t", count=1),
        ),
    ):
        with pytest.raises(DeadlineExceeded) as late:
            await caller.call(rpc, asked, timeout=1.0)
        assert "there is no partition" in (late.value.explanation or "")
        for said in (str(late.value), late.value.explanation or ""):
            assert "there are" not in said
            assert secret not in said


# -- GetOutcome ------------------------------------------------------------------------------


async def test_an_outcome_says_what_was_answered(
    caller: Caller, plane: Plane, partition: str
) -> None:
    put = await caller.call("PutTags", put_tags(caller, partition))
    told = await outcome(caller, 1)
    assert (told["applied"], told["verb"]) == (True, "put")
    assert told["answer"][0] == [put.revision.epoch, put.revision.n]
    begun = pb.BeginGroupRequest(request=caller.request(), uid="u", partition_id=partition, n=1)
    begun.request.settled = 0
    attempt = (await caller.call("BeginGroup", begun)).attempt
    assert await outcome(caller, 2) == {
        "applied": True, "verb": "begin_group", "answer": attempt,
    }  # fmt: skip


async def test_what_had_no_effect_never_will_have_one(
    caller: Caller, plane: Plane, partition: str
) -> None:
    first = put_tags(caller, partition)
    first.request.settled = 0
    await caller.call("PutTags", first)
    assert await outcome(caller, 2) == {"applied": False, "verb": None, "answer": None}
    late = put_tags(
        caller, partition, "b", request=pb.Request(client_id=caller.client_id, number=2)
    )
    with pytest.raises(InvalidRequest, match="had no effect"):
        await caller.call("PutTags", late)
    assert plane.client.kv_list(partition).keys == ["a"]


async def test_nobody_is_told_what_became_of_anothers_effects(
    serve: Serve, callers: Callers, plane: Plane, partition: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.json"
    tokens = [add_token(path, name, "admin") for name in ("one", "two")]
    gateway = await serve(token_file=path)
    one, two = [await callers(gateway, token=token.text, client_id="c") for token in tokens]
    await one.call("PutTags", put_tags(one, partition))
    assert (await outcome(one, 1))["applied"]
    with pytest.raises(OutcomeUnknown) as unknown:
        await outcome(two, 1)
    assert unknown.value.request_id == "c/1"
    assert "request c/1" in str(unknown.value)
    # Nor by the name that another's client has inside.
    inside = next(iter(gateway.producers._producers))
    with pytest.raises(OutcomeUnknown):
        await outcome(two, 1, client_id=inside)


async def test_an_outcome_is_asked_for_by_a_name_and_a_number(caller: Caller) -> None:
    for number, parts in ((0, {}), (-1, {}), (1, {"client_id": ""})):
        with pytest.raises(InvalidRequest):
            await outcome(caller, number, **parts)
    with pytest.raises(PlaneLost):
        await outcome(caller, 1, plane_id="another")


# -- Describe --------------------------------------------------------------------------------


async def test_a_gateway_says_what_it_serves_and_to_whom(
    serve: Serve, callers: Callers, plane: Plane, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.json"
    token = add_token(path, "rollout-7", "reader", partition="nothing")
    gateway = await serve(token_file=path, max_put_bytes=1 << 20, resume_s=12.0, absence_s=34.0)
    caller = await callers(gateway, token=token.text)
    told = await caller.call("Describe", pb.DescribeRequest())
    assert told.plane_id == plane.joined.plane_id
    assert told.revision.epoch == plane.client.kv_list(_any(plane)).revision.epoch
    assert told.version == version("rl-dataplane")
    assert told.principal == "rollout-7"
    limits = told.limits
    assert (limits.max_put_bytes, limits.resume_s, limits.absence_s) == (1 << 20, 12.0, 34.0)
    config = gateway.config
    assert limits.max_message_bytes == config.max_message_bytes
    assert limits.max_get_bytes == config.max_get_bytes
    assert limits.chunk_bytes == config.chunk_bytes
    assert (limits.max_rows, limits.max_page_size) == (65_536, config.max_page_size)


def _any(plane: Plane) -> str:
    plane.client.kv_put("a", "any", None, {})
    return "any"


async def test_another_plane_is_not_asked(caller: Caller, partition: str) -> None:
    asked = put_tags(caller, partition)
    asked.request.plane_id = "another"
    with pytest.raises(PlaneLost) as lost:
        await caller.call("PutTags", asked)
    assert lost.value.code is grpc.StatusCode.FAILED_PRECONDITION
