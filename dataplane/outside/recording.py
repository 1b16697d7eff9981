"""What a report tells of a plane, through a gateway: for who may operate the whole plane."""

from __future__ import annotations

from typing import Any

from dataplane.errors import InternalError, InvalidRequest
from dataplane.outside.reach import Reach, Steps
from dataplane.report.record import PlaneRecord, PlaneSamples, from_json
from dataplane.v1 import dataplane_pb2 as pb


def samples(reach: Reach, *, timeout: float | None = None) -> Steps[PlaneSamples]:
    """The plane's sizes over time."""
    return (yield from _record(reach, timeout, samples_only=True)).samples


def record(reach: Reach, *, timeout: float | None = None) -> Steps[PlaneRecord]:
    """What a report tells of the plane, of now."""
    return (yield from _record(reach, timeout, samples_only=False))


def _record(reach: Reach, timeout: float | None, *, samples_only: bool) -> Steps[PlaneRecord]:
    seconds = reach.seconds(timeout)
    message = pb.GetRecordRequest(samples_only=samples_only)
    answers: Any = yield lambda transport: transport.collect("GetRecord", message, seconds)
    try:
        return from_json(b"".join(answer.json for answer in answers).decode())
    except (UnicodeDecodeError, InvalidRequest) as error:
        raise InternalError(f"the gateway answered with no record of a plane: {error}") from error
