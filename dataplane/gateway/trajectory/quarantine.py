"""Where trajectories go that are refused: a partition beside the one they were meant for. Pure.

Owns its name and its rows. A row is for people to look at: the reason and who
sent it are tags, and what was sent is one object field, so that a trajectory of any shape fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from dataplane.errors import InvalidRequest
from dataplane.gateway.trajectory.ingest import Refused
from dataplane.protocol.values import from_value, tags_from
from dataplane.tags.keys import check_name
from dataplane.v1 import dataplane_pb2 as pb

PREFIX: Final = "quarantine."
FIELD: Final = "trajectory"
"""The one field of a row: a map of what was sent, or its bytes where that is no value."""
MAX_REASON: Final = 2000
MAX_NAME: Final = 200
"""Characters that a tag keeps of what somebody outside chose."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Rows for one put, which overwrites: the same request makes the same rows."""

    partition_id: str
    keys: list[str]
    fields: dict[str, list[Any]]
    tags: list[dict[str, Any]]


def quarantine_of(partition_id: str) -> str:
    """The name of a partition's quarantine. InvalidRequest if that would be too long."""
    return check_name(PREFIX + partition_id, "partition")


def quarantined(
    refused: Sequence[Refused],
    trajectories: Sequence[pb.Trajectory],
    *,
    partition_id: str,
    principal: str,
    client: str,
    number: int,
    received_at_s: float,
) -> Quarantined:
    """The rows of the trajectories that were refused.

    Args:
        trajectories: all that were sent; `Refused.index` counts them.
        partition_id: where they were meant to go.
        client: the plane's name of who sent them; with `number`, the request's, it makes the keys.
        received_at_s: seconds since 1970.
    """
    return Quarantined(
        quarantine_of(partition_id),
        [f"{client}/{number}/{one.index}" for one in refused],
        {FIELD: [sent(trajectories[one.index]) for one in refused]},
        [
            {
                "reason": _cut(one.reason, MAX_REASON),
                "partition_id": partition_id,
                "key": _cut(one.key, MAX_NAME),
                "uid": _cut(trajectories[one.index].uid, MAX_NAME),
                "principal": _cut(principal, MAX_NAME),
                "client_id": client,
                "number": number,
                "position": one.index,
                "received_at_s": received_at_s,
            }
            for one in refused
        ],
    )


def sent(message: pb.Trajectory) -> dict[str, Any] | bytes:
    """What a trajectory says, by the names of the protocol; what it does not say is left out.

    Its bytes, from which `Trajectory` parses again, where a part of it is no value.
    """
    try:
        return {its.name: _value(its, value) for its, value in message.ListFields()}
    except InvalidRequest:
        return message.SerializeToString()


def _value(its: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, pb.Tags):
        return tags_from(value)
    if isinstance(value, pb.Value):
        return from_value(value)
    if its.name == "policy_spans":
        return [[span.version, span.start, span.end] for span in value]
    if its.name == "logprobs":
        return np.array(value, np.float32)
    if its.name in ("input_ids", "labels"):
        return np.array(value, np.int64)
    if its.enum_type is not None:
        known = its.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 3] + "..."
