"""Verbs of consumers, through a gateway: rows are claimed, and committed or released."""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.client.put import list_of
from dataplane.client.tags import Where, plain_where
from dataplane.client.wait import GROUP_BY
from dataplane.errors import ClaimLost, DeadlineExceeded, InvalidRequest
from dataplane.outside.listing import meta_of
from dataplane.outside.reach import Reach, Steps, with_margin
from dataplane.outside.rows import check_partition, check_text, where_of
from dataplane.outside.watching import explained
from dataplane.producer.transport import Transport
from dataplane.tags.claims.wants import Want
from dataplane.telemetry.verbs import spanned
from dataplane.types import Claim, Revision
from dataplane.v1 import dataplane_pb2 as pb


@spanned("kv_claim")
def kv_claim(
    reach: Reach,
    partition_id: str,
    task: str,
    *,
    count: int,
    fields: Sequence[str] = (),
    where: Where | None = None,
    order_by: str | None = None,
    groups: bool = False,
    lease_s: float = 30.0,
    replica: tuple[int, int, int] | None = None,
    timeout: float | None = None,
) -> Steps[Claim]:
    """Rows for this client, held until they are committed or released."""
    seconds = with_margin(reach.wait_s(timeout))
    check_partition(partition_id)
    if isinstance(fields, str):
        raise InvalidRequest(f"fields is a list of field names; give [{fields!r:.80}] for one")
    names = list_of(fields, "fields")
    rank = replica if replica is None else list_of(replica, "replica")
    Want.parse(
        partition_id, task, count, names, plain_where(where), order_by, groups, lease_s, rank
    )
    for name in (*names, order_by or ""):
        check_text(name, "the name")
    message = pb.ClaimRequest(
        partition_id=partition_id,
        task=task,
        count=count,
        fields=names,
        order_by=order_by or "",
        groups=groups,
        lease_s=lease_s,
    )
    if rank is not None:
        message.replica.dp_rank, message.replica.dp_size, message.replica.batch_index = rank
    if where is not None:
        message.where.CopyFrom(where_of(where))

    async def ask(transport: Transport) -> pb.ClaimResponse:
        return await transport.claim(message, seconds)

    try:
        answer = yield ask
    except DeadlineExceeded as late:
        raise (
            yield from explained(
                f"task {task!r} got no claim of partition {partition_id!r} in time",
                late,
                seconds,
                pb.ExplainRequest(
                    partition_id=partition_id, where=message.where if where is not None else None,
                    fields=names, task=task, group_by=GROUP_BY if groups else None, count=count,
                ),
            )
        ) from None  # fmt: skip
    meta = meta_of(partition_id, reach.see(answer.revision), answer.rows)
    if meta.keys:
        reach.attend()
    return Claim(task, answer.claim_id, meta, list(answer.deliveries), answer.end)


@spanned("kv_commit")
def kv_commit(reach: Reach, claim: Claim, *, timeout: float | None = None) -> Steps[Revision]:
    """Finish a claim."""
    return (yield from _end(reach, "Commit", pb.CommitRequest(), claim, timeout))


@spanned("kv_release")
def kv_release(reach: Reach, claim: Claim, *, timeout: float | None = None) -> Steps[Revision]:
    """Give a claim's rows back."""
    return (yield from _end(reach, "Release", pb.ReleaseRequest(), claim, timeout))


def _end(
    reach: Reach,
    rpc: str,
    message: pb.CommitRequest | pb.ReleaseRequest,
    claim: Claim,
    timeout: float | None,
) -> Steps[Revision]:
    seconds = reach.seconds(timeout)
    if not isinstance(claim, Claim):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
        raise InvalidRequest(f"a claim is what kv_claim returned, not {type(claim).__name__}")
    if not claim.claim_id:
        return reach.seen  # the last claim of a partition holds nothing
    message.partition_id, message.task = claim.partition_id, claim.task
    message.claim_id = claim.claim_id
    message.keys.extend(claim.keys)
    try:
        answer = yield lambda transport: transport.effect(rpc, message, seconds)
    except ClaimLost as error:
        error.keys = error.keys or list(claim.keys)
        raise
    return reach.see(answer.revision)
