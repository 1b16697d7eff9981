"""Verbs about groups, and what became of requests, through a gateway."""

from __future__ import annotations

from typing import Any

from dataplane.errors import InvalidRequest, StaleWrite
from dataplane.outside.partitions import kv_list_partitions
from dataplane.outside.reach import Reach, Steps, with_margin
from dataplane.outside.rows import check_partition, check_text
from dataplane.outside.watching import kv_list
from dataplane.producer.transport import Transport
from dataplane.protocol.values import from_value
from dataplane.tags.groups import check_begin
from dataplane.telemetry.verbs import spanned
from dataplane.types import Revision
from dataplane.v1 import dataplane_pb2 as pb
from dataplane.wire.messages import is_attempt


@spanned("begin_group")
def begin_group(
    reach: Reach,
    uid: str,
    partition_id: str,
    *,
    n: int,
    declared_bytes: int | None = None,
    timeout: float | None = None,
) -> Steps[int]:
    """Begin the sessions of one prompt; the attempt. To declare 0 bytes is to declare nothing."""
    seconds = with_margin(reach.seconds(timeout))
    check_text(uid, "a uid")
    check_partition(partition_id)
    check_begin(n, declared_bytes)
    message = pb.BeginGroupRequest(
        uid=uid, partition_id=partition_id, n=n, declared_bytes=declared_bytes or 0
    )
    answer = yield lambda transport: transport.effect("BeginGroup", message, seconds)
    reach.note_attempt(answer.attempt, partition_id)
    return answer.attempt


@spanned("end_group")
def end_group(
    reach: Reach, attempt: int, status: str, *, timeout: float | None = None
) -> Steps[Revision]:
    """End a group. Outside its partition is named too: a client that has neither begun it nor put
    rows of it looks for it first; StaleWrite if no row is left of it."""
    seconds = reach.seconds(timeout)
    if not is_attempt(attempt):
        raise InvalidRequest(f"an attempt is what begin_group answered, not {attempt!r:.80}")
    check_text(status, "the status at which a group ends")
    partition_id = reach.partition_of(attempt)
    if partition_id is None:
        partition_id = yield from _partition_with(reach, attempt, seconds)
    message = pb.EndGroupRequest(partition_id=partition_id, attempt=attempt, status=status)
    answer = yield lambda transport: transport.effect("EndGroup", message, seconds)
    reach.forget_attempt(attempt)
    return reach.see(answer.revision)


def _partition_with(reach: Reach, attempt: int, seconds: float) -> Steps[str]:
    """The partition in which the prompt of an attempt lies."""
    partitions = yield from kv_list_partitions(reach, timeout=seconds)
    for partition_id in (name for name, about in partitions.items() if about["groups"]):
        found = yield from kv_list(
            reach, partition_id, where={"attempt": attempt}, columns=[], limit=1, timeout=seconds
        )
        if len(found):
            return partition_id
    raise StaleWrite(
        f"attempt {attempt} is not open in any partition that this client may see: its group "
        "ended, began anew or was retired; begin the group again if it is wanted",
        keys=[],
        attempt=attempt,
    )


def request_outcome(
    reach: Reach, request_id: str, *, timeout: float | None = None
) -> Steps[dict[str, Any]]:
    """What became of a request of this client whose answer was lost."""
    seconds = reach.seconds(timeout)
    client_id, _, number = request_id.rpartition("/") if type(request_id) is str else ("", "", "")
    if not client_id or not number.isdecimal() or len(number) > 19:
        raise InvalidRequest(
            f"a request id is what OutcomeUnknown names, client/number, not {request_id!r:.80}"
        )
    message = pb.GetOutcomeRequest(client_id=client_id, number=min(int(number), (1 << 63) - 1))
    answer = yield lambda transport: transport.ask("GetOutcome", message, seconds)
    if client_id == reach.client_id:
        yield lambda transport: _told(transport, int(number))
    return {name: from_value(value) for name, value in answer.outcome.entries.items()}


async def _told(transport: Transport, number: int) -> None:
    transport.numbers.told(number)
