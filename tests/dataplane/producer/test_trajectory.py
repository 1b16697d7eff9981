"""Trajectories as messages: what they say, and what no message can carry."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.errors import InvalidRequest
from dataplane.gateway.trajectory.ingest import IngestRules, ingest
from dataplane.producer.trajectory import Trajectory, alike
from dataplane.protocol.values import from_value, tags_from
from dataplane.v1 import dataplane_pb2 as pb


def test_every_part_of_it_travels() -> None:
    it = Trajectory(
        "u", 2, 3, input_ids=np.array([1, 2, 3]), labels=[-100, 2, 3],
        logprobs=np.array([0, -0.5, -0.25], np.float32), prompt_len=1,
        policy_spans=[(4, 0, 1), (5, 1, 2)], reward=np.float64(0.5), finish_reason="length",
        status="aborted", error="cut", num_turns=2, global_steps=0, task_name="sums",
        data_source="made", ids_source="retokenized", logprob_kind="raw", tags={"seed": 7},
        messages=[{"role": "user", "content": "hi"}], extra={"x": [1, None]},
    )  # fmt: skip
    message = it.to_message()
    assert {field.name for field, _ in message.ListFields()} == {
        field.name for field in pb.Trajectory.DESCRIPTOR.fields
    }
    assert list(message.input_ids) == [1, 2, 3]
    assert list(message.labels) == [-100, 2, 3]
    assert list(message.logprobs) == [0, -0.5, -0.25]
    assert [(one.version, one.start, one.end) for one in message.policy_spans] == [
        (4, 0, 1), (5, 1, 2),
    ]  # fmt: skip
    assert message.HasField("global_steps")
    assert message.finish_reason == pb.FINISH_REASON_LENGTH
    assert message.status == pb.TRAJECTORY_STATUS_ABORTED
    assert message.ids_source == pb.IDS_SOURCE_RETOKENIZED
    assert tags_from(message.tags) == {"seed": 7}
    assert from_value(message.messages) == [{"role": "user", "content": "hi"}]
    assert from_value(message.extra) == {"x": [1, None]}
    assert it.key == "u_2_3"


def test_what_is_not_known_is_not_said() -> None:
    message = Trajectory("u").to_message()
    assert {field.name for field, _ in message.ListFields()} == {"uid", "status"}
    assert not message.HasField("reward")


def test_a_response_is_supervised_and_its_prompt_is_not() -> None:
    it = Trajectory.from_response("u", np.array([7, 8]), [9, 10, 11], [-1, -2, -3], version=6)
    found = ingest([it.to_message()], IngestRules())
    assert not found.refused
    assert found.fields["labels"][0].tolist() == [-100, -100, 9, 10, 11]
    assert found.fields["logprobs"][0].tolist() == [0, 0, -1, -2, -3]
    assert found.tags[0]["policy_spans"] == [[6, 3]]
    assert found.tags[0]["num_turns"] == 1


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"input_ids": [1 << 40]}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": np.zeros((2, 2), np.int64)}, "input_ids"),
        ({"logprobs": ["x"]}, "logprobs"),
        ({"session_id": "one"}, "session_id"),
        ({"reward": "good"}, "reward"),
        ({"status": "done"}, "status"),
        ({"finish_reason": "eos"}, "finish_reason"),
        ({"policy_spans": [(1, 2)]}, "policy_spans"),
        ({"tags": {"x": object()}}, "tags"),
        ({"extra": {"x": 1 << 70}}, "extra"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_what_no_message_can_carry_is_named(parts: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Trajectory("u", **parts).to_message()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "parts",
    [
        {}, {"logprobs": [-0.5]}, {"version": 1}, {"reward": 0.0}, {"messages": [{"role": "x"}]},
        {"messages": []}, {"extra": {"a": 1}}, {"extra": {}},
    ],
    ids=str,
)  # fmt: skip
def test_alike_tells_what_fields_a_row_will_have(parts: dict[str, object]) -> None:
    """Those that are alike go into one put, in which all rows have the same fields."""
    messages = [
        Trajectory.from_response("u", [1], [2], session_id=i, **chosen).to_message()  # type: ignore[arg-type]
        for i, chosen in enumerate(({}, parts))
    ]
    failed = Trajectory("u", 9, status="failed", error="no").to_message()
    fields = [set(ingest([one], IngestRules()).fields) for one in (*messages, failed)]
    for a, of_a in zip((*messages, failed), fields, strict=True):
        for b, of_b in zip((*messages, failed), fields, strict=True):
            assert (alike(a) == alike(b)) == (of_a == of_b)
