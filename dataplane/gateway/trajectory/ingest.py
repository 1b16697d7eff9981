"""Trajectories of producers outside, checked and laid out as the rows that trainers read. Pure.

Owns what is believed of a typed trajectory and what becomes of it: the same key, fields and tags
that our own agent loops write of it. What is wrong with one says what, where and at which index
first; whoever calls decides what happens to it.

Letters: P prompt tokens, R response tokens (tool and environment tokens included), N = P + R.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

from dataplane.codec.tags import pack_tags
from dataplane.errors import InvalidRequest
from dataplane.fields import PROMPT_TAGS, RESERVED, TRAJECTORY_TAGS
from dataplane.gateway.trajectory.sequences import IngestRules, sequence
from dataplane.protocol.values import from_value, tags_from
from dataplane.tags.keys import check_name
from dataplane.v1 import dataplane_pb2 as pb

LOGPROB_KINDS: Final = ("raw", "processed", "recomputed")

_STATUSES: Final[dict[int, str]] = {
    pb.TRAJECTORY_STATUS_UNSPECIFIED: "completed",
    pb.TRAJECTORY_STATUS_COMPLETED: "completed",
    pb.TRAJECTORY_STATUS_FAILED: "failed",
    pb.TRAJECTORY_STATUS_ABORTED: "aborted",
}
_FINISH_REASONS: Final[dict[int, str | None]] = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
    pb.FINISH_REASON_ABORT: "abort",
}
_IDS_SOURCES: Final[dict[int, str | None]] = {
    pb.IDS_SOURCE_UNSPECIFIED: None,
    pb.IDS_SOURCE_ENGINE: "engine",
    pb.IDS_SOURCE_RETOKENIZED: "retokenized",
}
_OURS: Final = frozenset(TRAJECTORY_TAGS) | frozenset(PROMPT_TAGS)

Row: TypeAlias = tuple[dict[str, Any], dict[str, Any]]
"""Fields and tags of one trajectory; no fields where only tags are kept."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A trajectory that is not what it should be."""

    index: int
    """Which of those that were sent."""
    key: str
    """The key that it would have; "" where its parts make none."""
    reason: str


@dataclass(frozen=True, slots=True)
class Ingested:
    """Trajectories as one batch of rows that a single put takes, and those that are none."""

    keys: list[str] = field(default_factory=list[str])
    indices: list[int] = field(default_factory=list[int])
    """Which of those that were sent each row is."""
    fields: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """By name a value per key: arrays of numpy, or Python values of object fields. Empty where
    all rows have tags alone."""
    tags: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    refused: list[Refused] = field(default_factory=list[Refused])

    def check_whole(self) -> None:
        """InvalidRequest, naming the first few that were refused, if any was."""
        if not self.refused:
            return
        shown = "; ".join(
            f"trajectories[{one.index}]: {one.reason:.300}" for one in self.refused[:5]
        )
        more = len(self.refused) - 5
        raise InvalidRequest(shown + (f"; and {more} more" if more > 0 else ""))


def ingest(
    trajectories: Sequence[pb.Trajectory], rules: IngestRules, *, attempt: int = 0
) -> Ingested:
    """The rows of trajectories, and the reasons of those that have none.

    Rows are what our own agent loops write of the same trajectories: index i belongs to token i,
    labels and log-probs are full length. A failed one, and an interrupted one without a token,
    leave tags alone; whatever else a failed one brings is not kept. With an attempt every row
    names it.

    Raises:
        InvalidRequest: those that are right do not all have the same fields, as the rows of one
            atomic put have; names the first two that differ.
    """
    found = Ingested()
    rows: list[dict[str, Any]] = []
    first: dict[str, int] = {}
    for i, message in enumerate(trajectories):
        key = ""
        try:
            key = key_of(message)
            if key in first:
                raise InvalidRequest(f"it has the key of trajectories[{first[key]}], {key!r:.80}")
            fields, tags = _row(message, rules, attempt)
        except InvalidRequest as error:
            found.refused.append(Refused(i, key, error.message))
            continue
        first[key] = i
        found.keys.append(key)
        found.indices.append(i)
        found.tags.append(tags)
        rows.append(fields)
    if rows:
        _check_alike(found.indices, rows)
        found.fields.update({name: [row[name] for row in rows] for name in rows[0]})
    return found


def key_of(message: pb.Trajectory) -> str:
    """The key of a trajectory's row. InvalidRequest if its uid or its numbers make none."""
    uid, session_id, index = message.uid, message.session_id, message.index
    if not uid or not uid.isprintable():
        raise InvalidRequest(f"uid is {uid!r:.80}: a name of printable characters is due")
    for name, number in (("session_id", session_id), ("index", index)):
        if number < 0:
            raise InvalidRequest(f"{name} is {number}: they count from 0")
    return check_name(f"{uid}_{session_id}_{index}", "key")


def _check_alike(indices: list[int], rows: list[dict[str, Any]]) -> None:
    names = rows[0].keys()
    for i, row in zip(indices, rows, strict=True):
        if row.keys() != names:
            odd = ", ".join(sorted(row.keys() ^ names))
            raise InvalidRequest(
                "the trajectories of one call become visible together and have the same fields: "
                f"trajectories[{indices[0]}] and trajectories[{i}] differ in {odd}, which one of "
                "them has not (a failed one has no fields); put them in calls of their own"
            )


def _row(message: pb.Trajectory, rules: IngestRules, attempt: int) -> Row:
    status = _STATUSES.get(message.status)
    if status is None:
        raise InvalidRequest(f"status is {message.status}, which is none that is known")
    if status == "failed" and not message.error:
        raise InvalidRequest("error is empty: a failed trajectory says why")
    tags = _identity(message, status)
    fields: dict[str, Any] = {}
    if status != "failed":
        if message.HasField("reward"):
            tags["score"] = _finite("reward", message.reward)
        if status == "completed" or _has_tokens(message):
            fields, of_tokens = sequence(message, rules)
            tags |= of_tokens
            _add_provenance(message, tags)
            _add_objects(message, fields, tags)
            if "score" in tags:
                fields["reward"] = {"score": tags["score"]}
    if attempt:
        tags["attempt"] = attempt
    _add_further(message, tags)
    pack_tags(tags)  # so that one row's tags cannot end the put of all
    return fields, tags


def _identity(message: pb.Trajectory, status: str) -> dict[str, Any]:
    """The tags that every row has; what is not known is left out."""
    if message.finish_reason not in _FINISH_REASONS:
        raise InvalidRequest(
            f"finish_reason is {message.finish_reason}, which is none that is known"
        )
    tags: dict[str, Any] = {
        "uid": message.uid,
        "session_id": message.session_id,
        "index": message.index,
        "status": status,
    }
    if message.task_name:
        tags["task_name"] = message.task_name
    if message.data_source:
        tags["data_source"] = message.data_source
    if message.error:
        tags["error_msg"] = message.error
    finish_reason = _FINISH_REASONS[message.finish_reason]
    if finish_reason is not None:
        tags["finish_reason"] = finish_reason
    if message.HasField("global_steps"):
        if message.global_steps < 0:
            raise InvalidRequest(f"global_steps is {message.global_steps}: steps count from 0")
        tags["global_steps"] = message.global_steps
    return tags


def _has_tokens(message: pb.Trajectory) -> bool:
    return bool(message.input_ids or message.labels or message.logprobs or message.policy_spans)


def _add_provenance(message: pb.Trajectory, tags: dict[str, Any]) -> None:
    if message.num_turns < 0:
        raise InvalidRequest(f"num_turns is {message.num_turns}: turns count from 0")
    tags["num_turns"] = message.num_turns
    if message.ids_source not in _IDS_SOURCES:
        raise InvalidRequest(f"ids_source is {message.ids_source}, which is none that is known")
    ids_source = _IDS_SOURCES[message.ids_source]
    if ids_source is not None:
        tags["ids_source"] = ids_source
    kind = message.logprob_kind
    if kind and kind not in LOGPROB_KINDS:
        raise InvalidRequest(f"logprob_kind is {kind!r:.80}, none of {', '.join(LOGPROB_KINDS)}")
    if kind and message.logprobs:
        tags["logprob_kind"] = kind


def _add_objects(message: pb.Trajectory, fields: dict[str, Any], tags: dict[str, Any]) -> None:
    """The fields that are kept as they are; an empty one is as good as none."""
    if message.HasField("messages"):
        messages = cast("list[object]", _value("messages", message.messages, list, "a list"))
        for i, one in enumerate(messages):
            _check_kind(f"messages[{i}]", one, dict, "a map")
        if messages:
            fields["messages"] = messages
    if message.HasField("extra"):
        extra = cast("dict[str, Any]", _value("extra", message.extra, dict, "a map"))
        if extra:
            fields["extra"] = extra
        seconds = extra.get("group_generate_time_s")
        if seconds is not None:
            name = "extra['group_generate_time_s']"
            if type(seconds) is not int:
                _check_kind(name, seconds, float, "seconds")
            tags["group_generate_time_s"] = _finite(name, seconds)


def _add_further(message: pb.Trajectory, tags: dict[str, Any]) -> None:
    """A producer's own tags: beside ours, never in their place."""
    if not message.HasField("tags"):
        return
    for name in message.tags.values:
        if name in _OURS or name.startswith(RESERVED):
            raise InvalidRequest(
                f"tags[{name!r:.80}] is a name that is kept for the plane and its trainers"
            )
    tags |= tags_from(message.tags)


def _value(name: str, message: pb.Value, kind: type, due: str) -> Any:
    try:
        value = from_value(message)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error.message}") from None
    _check_kind(name, value, kind, due)
    return value


def _check_kind(name: str, value: object, kind: type, due: str) -> None:
    if type(value) is not kind:
        raise InvalidRequest(f"{name} is a {type(value).__name__}, where {due} is due")


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value}: a finite number is due")
    return value
