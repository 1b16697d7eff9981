"""What an operator asks, through a gateway. It changes nothing.

Arguments, results and errors are those of `dataplane.Client`. Where the caller may not operate,
clients other than its own have no id and no label, and producers are counted together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataplane.client.inspecting import KEYS_AT_ONCE
from dataplane.client.put import as_keys
from dataplane.client.tags import Where
from dataplane.errors import InternalError, InvalidRequest
from dataplane.inspection import (
    ClaimReport,
    KeyReport,
    PartitionStats,
    StoreReport,
    Tally,
    TaskReport,
    Waiter,
)
from dataplane.outside.reach import Reach, Steps
from dataplane.outside.rows import check_partition, revision_to, where_of
from dataplane.protocol.reports import (
    claims_from,
    key_from,
    revision_from,
    stats_from,
    stores_from,
    tally_from,
    task_from,
    waiter_from,
)
from dataplane.tags.keys import check_keys
from dataplane.types import Revision
from dataplane.v1 import dataplane_pb2 as pb


def inspect(
    reach: Reach, keys: Sequence[str], partition_id: str, *, timeout: float | None = None
) -> Steps[list[KeyReport | None]]:
    """What the plane knows of each key."""
    seconds = reach.seconds(timeout)
    names = as_keys(keys)
    check_partition(partition_id)
    if names:
        check_keys(names, unique=False)
    found: list[KeyReport | None] = []
    while len(found) < len(names):
        some = names[len(found) : len(found) + KEYS_AT_ONCE]
        message = pb.InspectRequest(partition_id=partition_id, keys=some, client_id=reach.client_id)
        answer: pb.InspectResponse = yield lambda transport, m=message: transport.ask(
            "Inspect", m, seconds
        )
        if not answer.looked_at:
            raise InternalError("the gateway looked at none of the keys that it was asked for")
        rows = {row.key: key_from(row) for row in answer.rows}
        found += [rows.get(name) for name in some[: answer.looked_at]]
    return found


def tally(
    reach: Reach,
    partition_id: str,
    *,
    where: Where | None = None,
    until: Revision | None = None,
    timeout: float | None = None,
) -> Steps[Tally]:
    """How much matches."""
    seconds = reach.seconds(timeout)
    check_partition(partition_id)
    message = pb.TallyRequest(partition_id=partition_id)
    if where is not None:
        message.where.CopyFrom(where_of(where))
    if until is not None:
        message.until.CopyFrom(revision_to(until, "until"))
    answer = yield lambda transport: transport.ask("Tally", message, seconds)
    return tally_from(partition_id, answer)


def stats(
    reach: Reach, partition_id: str, *, timeout: float | None = None
) -> Steps[PartitionStats]:
    """What a partition is made of."""
    seconds = reach.seconds(timeout)
    check_partition(partition_id)
    message = pb.GetStatsRequest(partition_id=partition_id, client_id=reach.client_id)
    answer = yield lambda transport: transport.ask("GetStats", message, seconds)
    return stats_from(partition_id, answer)


def claims(
    reach: Reach, partition_id: str | None = None, *, timeout: float | None = None
) -> Steps[list[ClaimReport]]:
    """What is claimed."""
    answers = yield from _claims_and_tasks(reach, partition_id, timeout)
    return claims_from(claim for answer in answers for claim in answer.claims)


def tasks(
    reach: Reach, partition_id: str | None = None, *, timeout: float | None = None
) -> Steps[list[TaskReport]]:
    """How far each task has come."""
    answers = yield from _claims_and_tasks(reach, partition_id, timeout)
    return [task_from(task) for answer in answers for task in answer.tasks]


def _claims_and_tasks(
    reach: Reach, partition_id: str | None, timeout: float | None
) -> Steps[list[pb.ListClaimsResponse]]:
    seconds = reach.seconds(timeout)
    if partition_id is not None:
        check_partition(partition_id)
    message = pb.ListClaimsRequest(partition_id=partition_id or "", client_id=reach.client_id)
    return (yield lambda transport: transport.collect("ListClaims", message, seconds))


def waiters(reach: Reach, *, timeout: float | None = None) -> Steps[list[Waiter]]:
    """Every request that waits, the longest first."""
    seconds = reach.seconds(timeout)
    message = pb.ListWaitersRequest(client_id=reach.client_id)
    answers: Any = yield lambda transport: transport.collect("ListWaiters", message, seconds)
    return [waiter_from(waiter) for answer in answers for waiter in answer.waiters]


def holdings(reach: Reach, *, timeout: float | None = None) -> Steps[list[StoreReport]]:
    """What every value store has in use, and who holds it."""
    seconds = reach.seconds(timeout)
    message = pb.ListHoldingsRequest(client_id=reach.client_id)
    answers: Any = yield lambda transport: transport.collect("ListHoldings", message, seconds)
    return stores_from(answer.store for answer in answers)


def revision_before(
    reach: Reach, age_s: float, *, timeout: float | None = None
) -> Steps[Revision | None]:
    """The last revision that is known to be so many seconds old."""
    seconds = reach.seconds(timeout)
    if isinstance(age_s, bool) or not isinstance(age_s, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
        raise InvalidRequest(f"an age is seconds, not {age_s!r:.80}")
    try:
        message = pb.FindRevisionRequest(age_s=age_s)
    except (OverflowError, ValueError):
        raise InvalidRequest(f"an age is seconds, not {age_s!r:.80}") from None
    answer = yield lambda transport: transport.ask("FindRevision", message, seconds)
    return revision_from(answer.revision) if answer.HasField("revision") else None
