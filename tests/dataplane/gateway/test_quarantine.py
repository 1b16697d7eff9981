"""What is refused lies in a partition of its own, with who sent it and why it was refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from dataplane import InvalidRequest
from dataplane.codec.encode import encode_batch
from dataplane.codec.tags import pack_tags_many
from dataplane.gateway.trajectory.ingest import IngestRules, Refused, ingest
from dataplane.gateway.trajectory.quarantine import FIELD, quarantine_of, quarantined, sent
from dataplane.protocol.values import tags_to, to_value
from dataplane.tags.keys import check_keys
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.test_ingest import any_messages
from tests.dataplane.gateway.trajectories import right

WHO: dict[str, Any] = {
    "partition_id": "train", "principal": "team", "client": "c0ffee", "number": 7,
    "received_at_s": 1.5,
}  # fmt: skip


def test_the_rows_of_what_was_refused() -> None:
    messages = [right(), right(uid="\x07", labels=[]), right(index=1, reward=None, labels=[])]
    refused = ingest(messages, IngestRules()).refused
    rows = quarantined(refused, messages, **WHO)
    assert rows.partition_id == "quarantine.train"
    assert rows.keys == ["c0ffee/7/1", "c0ffee/7/2"]
    assert rows.tags[1] == {
        "reason": "labels has 0 entries for 6 tokens", "partition_id": "train", "key": "u_0_1",
        "uid": "u", "principal": "team", "client_id": "c0ffee", "number": 7, "position": 2,
        "received_at_s": 1.5,
    }  # fmt: skip
    assert (rows.tags[0]["key"], rows.tags[0]["uid"]) == ("", "\x07")
    assert quarantined(refused, messages, **WHO).keys == rows.keys
    assert list(rows.fields) == [FIELD]
    kept = rows.fields[FIELD][1]
    assert kept["input_ids"].tolist() == [10, 11, 20, 21, 90, 22]
    assert kept["logprobs"].dtype == np.float32
    assert kept["policy_spans"] == [[7, 0, 3], [8, 3, 4]]
    assert kept["finish_reason"] == "FINISH_REASON_STOP"
    assert not {"labels", "reward"} & set(kept)


def test_what_is_no_value_is_kept_as_its_bytes() -> None:
    message = right(messages=pb.Value())
    kept = sent(message)
    assert isinstance(kept, bytes)
    assert pb.Trajectory.FromString(kept) == message


def test_values_and_unknown_numbers_are_kept_as_they_are() -> None:
    kept = sent(
        right(tags=tags_to({"a": [1]}), extra=to_value({"b": b"c"}), status=9, global_steps=3)
    )
    assert isinstance(kept, dict)
    assert (kept["tags"], kept["extra"], kept["status"]) == ({"a": [1]}, {"b": b"c"}, 9)
    assert kept["global_steps"] == 3


def test_what_somebody_else_chose_is_cut_to_what_a_tag_may_be() -> None:
    message = right(uid="u" * 100_000)
    row = quarantined([Refused(0, "k" * 100_000, "r" * 100_000)], [message], **WHO)
    assert max(len(str(value)) for value in row.tags[0].values()) <= 2000
    assert row.tags[0]["reason"].endswith("r...")
    pack_tags_many(row.tags)


def test_its_name_is_that_of_a_partition() -> None:
    assert quarantine_of("train") == "quarantine.train"
    with pytest.raises(InvalidRequest, match="at most 1024"):
        quarantine_of("x" * 1020)


@given(any_messages())
def test_any_message_is_a_row_that_a_put_takes(message: pb.Trajectory) -> None:
    row = quarantined([Refused(0, "", "any")], [message], **WHO)
    check_keys(row.keys)
    pack_tags_many(row.tags)
    assert encode_batch(row.keys, row.fields).rows == 1
