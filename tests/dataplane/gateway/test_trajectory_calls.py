"""PutTrajectories through a gateway: rows that trainers read, and a quarantine for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from dataplane.errors import AlreadyWritten, InvalidRequest, PermissionDenied, StaleWrite
from dataplane.gateway.access.token_disk import change_records
from dataplane.gateway.access.token_records import grant_record, limits_record, token_record
from dataplane.gateway.access.tokens import new_token
from dataplane.gateway.producers import plane_client_id
from dataplane.gateway.server import GatewayServer
from dataplane.protocol.values import to_value
from dataplane.types import Quota
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.gateways import Caller, Callers, Serve
from tests.dataplane.gateway.trajectories import right
from tests.faults.planes import Plane


def message(
    caller: Caller, partition: str, *trajectories: pb.Trajectory, **parts: Any
) -> pb.PutTrajectoriesRequest:
    given = {"request": caller.request(), **parts} if "request" not in parts else parts
    return pb.PutTrajectoriesRequest(partition_id=partition, trajectories=trajectories, **given)


def wrong(**values: Any) -> pb.Trajectory:
    return right(logprobs=[0, 0, float("nan"), -0.25, 0, -1], **values)


def rows(plane: Plane, partition: str) -> dict[str, Any]:
    listing = plane.client.kv_list(partition)
    return dict(zip(listing.keys, listing.tags, strict=True))


async def test_a_trajectory_becomes_the_row_that_trainers_read(
    caller: Caller, plane: Plane, partition: str
) -> None:
    chat = [{"role": "user", "content": "h\u00e9"}, {"role": "assistant", "content": "yes"}]
    sent = [
        right(session_id=0, messages=to_value(chat), extra=to_value({"x": np.arange(3)})),
        right(
            session_id=1, messages=to_value(chat[:1]), extra=to_value({"y": None}), reward=0.5,
            input_ids=[1, 2, 3], labels=[-100, -100, 3], logprobs=[0, 0, -2], policy_spans=None,
        ),
    ]  # fmt: skip
    sent[1].policy_spans.add(version=3, start=0, end=1)
    answer = await caller.call("PutTrajectories", message(caller, partition, *sent))
    assert [(one.key, one.quarantine, one.reason) for one in answer.results] == [
        ("u_0_0", "", ""), ("u_1_0", "", ""),
    ]  # fmt: skip
    tags = rows(plane, partition)
    assert set(tags) == {"u_0_0", "u_1_0"}
    assert tags["u_0_0"]["score"] == 1.0
    assert tags["u_1_0"]["seq_len"] == 3
    assert (answer.revision.epoch, answer.revision.n) == plane.client.kv_list(partition).revision
    got = plane.client.kv_batch_get(["u_0_0", "u_1_0"], partition, layout="list").fields
    assert [row.tolist() for row in got["input_ids"]] == [[10, 11, 20, 21, 90, 22], [1, 2, 3]]
    assert str(got["input_ids"][0].dtype) == "torch.int64"
    assert [row.tolist() for row in got["labels"]][1] == [-100, -100, 3]
    assert str(got["logprobs"][0].dtype) == "torch.float32"
    assert got["response_model_steps"][0].tolist() == [7, 7, 7, 8]
    assert got["messages"] == [chat, chat[:1]]
    assert got["reward"] == [{"score": 1.0}, {"score": 0.5}]
    assert got["extra"][0]["x"].tolist() == [0, 1, 2]
    assert got["extra"][1] == {"y": None}


async def test_those_that_are_wrong_go_to_quarantine_with_the_reason(
    caller: Caller, gateway: GatewayServer, plane: Plane, partition: str
) -> None:
    sent = [wrong(uid="bad"), right(uid="good"), right(uid="", session_id=3)]
    asked = message(caller, partition, *sent)
    answer = await caller.call("PutTrajectories", asked)
    bad, good, nameless = answer.results
    quarantine = f"quarantine.{partition}"
    me = plane_client_id("anyone", caller.client_id)
    assert (good.key, good.quarantine, good.reason) == ("good_0_0", "", "")
    assert (bad.key, bad.quarantine) == (f"{me}/1/0", quarantine)
    assert "logprobs[2]" in bad.reason
    assert (nameless.key, nameless.quarantine) == (f"{me}/1/2", quarantine)
    assert list(rows(plane, partition)) == ["good_0_0"]
    kept = rows(plane, quarantine)
    assert kept[bad.key]["reason"] == bad.reason
    assert kept[bad.key]["principal"] == "anyone"
    sent_back = plane.client.kv_batch_get([bad.key], quarantine).fields["trajectory"][0]
    assert sent_back["uid"] == "bad"
    about = plane.client.kv_list_partitions()[quarantine]
    config = gateway.config
    assert about["quota"] == {"bytes": config.quarantine_bytes, "rows": config.quarantine_rows}
    # The same request again, through whichever gateway: no further row of either kind.
    asked.request.retry = True
    assert await caller.call("PutTrajectories", asked) == answer
    assert set(rows(plane, quarantine)) == set(kept)


async def test_the_same_request_is_one_put_across_a_restart(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    one = await serve()
    caller = await callers(one, client_id="rollout")
    asked = message(caller, partition, right(), wrong(uid="bad"))
    answer = await caller.call("PutTrajectories", asked)
    plane.client.kv_clear(["u_0_0"], partition)
    await one.stop()
    caller = await callers(await serve(), client_id="rollout")
    asked.request.retry = True
    assert await caller.call("PutTrajectories", asked) == answer
    assert rows(plane, partition) == {}
    assert len(rows(plane, f"quarantine.{partition}")) == 1


async def test_all_or_nothing_is_nothing_where_one_is_wrong(
    caller: Caller, plane: Plane, partition: str
) -> None:
    asked = message(caller, partition, right(uid="good"), wrong(uid="bad"), all_or_nothing=True)
    with pytest.raises(InvalidRequest, match=r"trajectories\[1\]: logprobs\[2\]"):
        await caller.call("PutTrajectories", asked)
    assert not {partition, f"quarantine.{partition}"} & set(plane.client.kv_list_partitions())


async def test_where_none_is_right_nothing_is_put(
    caller: Caller, plane: Plane, partition: str
) -> None:
    answer = await caller.call("PutTrajectories", message(caller, partition, wrong()))
    assert not answer.HasField("revision")
    assert answer.results[0].quarantine
    assert partition not in plane.client.kv_list_partitions()


async def test_a_full_quarantine_keeps_what_it_has_and_reasons_are_told_all_the_same(
    serve: Serve, callers: Callers, plane: Plane, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataplane.gateway.calls import trajectories

    monkeypatch.setattr(trajectories, "QUARANTINE_S", 0.3)
    caller = await callers(await serve(quarantine_rows=1))
    await caller.call("PutTrajectories", message(caller, partition, wrong()))
    answer = await caller.call(
        "PutTrajectories", message(caller, partition, right(), wrong(uid="v"))
    )
    good, bad = answer.results
    assert good.key == "u_0_0"
    assert (bad.key, bad.quarantine) == ("", "")
    assert "logprobs[2]" in bad.reason
    assert "could not be kept in quarantine: QuotaExceeded" in bad.reason
    assert len(rows(plane, f"quarantine.{partition}")) == 1


async def test_an_operators_quota_of_a_quarantine_stays(
    caller: Caller, plane: Plane, partition: str
) -> None:
    quarantine = f"quarantine.{partition}"
    plane.client.kv_create_partition(quarantine, quota=Quota(rows=5))
    await caller.call("PutTrajectories", message(caller, partition, wrong()))
    assert plane.client.kv_list_partitions()[quarantine]["quota"] == {"rows": 5}


async def test_modes_and_attempts_are_those_of_puts(
    caller: Caller, plane: Plane, partition: str
) -> None:
    attempt = plane.client.begin_group("u", partition, n=1)
    await caller.call("PutTrajectories", message(caller, partition, right(), attempt=attempt))
    assert rows(plane, partition)["u_0_0"]["attempt"] == attempt
    again = message(caller, partition, right(), mode=pb.PUT_MODE_IF_ABSENT)
    with pytest.raises(AlreadyWritten) as there:
        await caller.call("PutTrajectories", again)
    assert there.value.code is grpc.StatusCode.ALREADY_EXISTS
    plane.client.end_group(attempt, "finished")
    late = message(caller, partition, right(session_id=1), wrong(session_id=2), attempt=attempt)
    with pytest.raises(StaleWrite):
        await caller.call("PutTrajectories", late)
    assert f"quarantine.{partition}" not in plane.client.kv_list_partitions()


async def test_failed_ones_leave_tags_alone(caller: Caller, plane: Plane, partition: str) -> None:
    failed = pb.Trajectory(uid="u", status=pb.TRAJECTORY_STATUS_FAILED, error="no answer")
    answer = await caller.call("PutTrajectories", message(caller, partition, failed))
    assert answer.revision.n
    assert rows(plane, partition)["u_0_0"]["error_msg"] == "no answer"
    assert plane.client.kv_list(partition).fields == [()]


async def test_fields_that_a_grant_does_not_name_are_not_written(
    serve: Serve, callers: Callers, plane: Plane, partition: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.json"
    token = new_token()
    grant = grant_record(
        partition=partition, roles=("producer",), verbs=(),
        fields=("input_ids", "labels", "response_model_steps", "reward"),
    )  # fmt: skip
    record = token_record(
        token_id=token.id, sha256=token.sha256, principal="narrow", created_s=1.0,
        expires_s=None, grants=(grant,), limits=limits_record(),
    )  # fmt: skip
    change_records(path, lambda records: (records.with_token(record), None))
    caller = await callers(await serve(token_file=path), token=token.text)
    with pytest.raises(PermissionDenied, match="logprobs"):
        await caller.call("PutTrajectories", message(caller, partition, right()))
    assert partition not in plane.client.kv_list_partitions()
    await caller.call("PutTrajectories", message(caller, partition, right(logprobs=None)))
    assert list(rows(plane, partition)) == ["u_0_0"]


async def test_a_request_without_a_trajectory_is_refused(caller: Caller, partition: str) -> None:
    with pytest.raises(InvalidRequest, match="1 to 65536 trajectories"):
        await caller.call("PutTrajectories", message(caller, partition))


async def test_many_are_checked_beside_other_calls_and_come_whole(
    caller: Caller, plane: Plane, partition: str
) -> None:
    """A request that is checked in a thread is the same put."""
    sent = [right(uid=f"u{i}") for i in range(1500)]
    asked = message(caller, partition, *sent)
    assert asked.ByteSize() > 64 << 10
    answer = await caller.call("PutTrajectories", asked)
    assert [one.key for one in answer.results] == [f"u{i}_0_0" for i in range(1500)]
    assert len(rows(plane, partition)) == 1500
