"""Traces, and the stage that a client is at, through a gateway."""

from __future__ import annotations

from typing import Any

from dataplane.client.tracing import STAGE_S
from dataplane.errors import InternalError
from dataplane.lineage.rows import Trace
from dataplane.outside.reach import Reach, Steps
from dataplane.outside.rows import check_partition, check_text
from dataplane.protocol.traces import trace_from
from dataplane.tags.lineage.question import MAX_LIMIT, Question
from dataplane.v1 import dataplane_pb2 as pb


def trace(
    reach: Reach,
    partition_id: str | None = None,
    *,
    uid: str | None = None,
    key: str | None = None,
    since: int = 0,
    limit: int | None = None,
    timeout: float | None = None,
) -> Steps[Trace]:
    """What happened."""
    seconds = reach.seconds(timeout)
    Question.checked(partition_id, uid, key, since, MAX_LIMIT if limit is None else limit)
    if partition_id is not None:
        check_partition(partition_id)
    for name, text in (("a uid", uid), ("a key", key)):
        if text is not None:
            check_text(text, name)
    message = pb.TraceRequest(
        partition_id=partition_id, uid=uid, key=key, since=since, limit=limit,
        client_id=reach.client_id,
    )  # fmt: skip
    answers: Any = yield lambda transport: transport.collect("Trace", message, seconds)
    if not answers or not answers[0].HasField("summary"):
        raise InternalError("the gateway answered with rows of a trace, and no summary of it")
    rows = (row for answer in answers for row in answer.rows)
    return trace_from(answers[0].summary, rows, uid, key)


def enter_stage(reach: Reach, stage: str) -> Steps[None]:
    """Be at a stage from now on; at none with an empty name."""
    reach.stage = stage
    seconds = min(STAGE_S, reach.config.timeout_s)
    message = pb.EnterStageRequest(client_id=reach.client_id, plane_id=reach.plane_id, stage=stage)
    yield lambda transport: transport.ask("EnterStage", message, seconds)
