"""What records of claims did to a partition's tasks, done again. Pure.

Nobody waits in a replay, so there are no queues: rows are granted by the names that were written
down, and every client that holds something counts as away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from dataplane.tags.claims.leases import ABANDONED, RELEASED, Closed, Granted, Lease
from dataplane.tags.claims.shares import Batch, Share, Terms
from dataplane.tags.claims.tasks import Task
from dataplane.tags.partition import Partition
from dataplane.tags.rows import Row

AWAY_SINCE = 0.0
"""On the clock of leases, which begins with the start that comes after the replay."""


def claim(partition: Partition, name: str, body: Sequence[Any], at: float) -> int:
    """Grant what was granted; the highest number of a claim among it."""
    task = partition.claims.task(name)
    if len(body) == 4:
        claim_id, client_id, number, lease_s = body
        _join(partition, task, claim_id, client_id, number, lease_s)
        return task.last_id
    client_id, lease_s, grouped, grants, index, terms = body
    batch: Batch | None = None
    if terms is not None:
        batch = task.batches[index] = Batch(_terms(terms))
        batch.shares = []
    parts = [
        (_granted(partition, task, claim_id, keys), number, rank)
        for claim_id, number, rank, keys in grants
    ]
    for granted, number, rank in parts:
        lease = Lease(granted, lease_s, grouped=grouped, at=at)
        if rank is not None:
            lease.share = index, rank
            if batch is not None:
                cast("list[Share]", batch.shares).append(Share(granted))
            else:
                _draw_again(task, index, rank, granted)
        if granted.rows:
            task.hold(lease, client_id, number, AWAY_SINCE)
        else:
            task.remember(lease, Closed(granted.revision, {}, committed=True))
    if index is not None:
        task.settle_batch(index)
    return task.last_id


def commit(partition: Partition, name: str, claim_id: int, keys: Sequence[str]) -> int:
    """Finish rows of a claim; the revision of that moment."""
    task = partition.claims.tasks[name]
    lease = task.leases[claim_id]
    task.commit(lease, keys)
    task.settle(lease, partition.revision)
    return partition.revision


def release(partition: Partition, name: str, claim_id: int, keys: Sequence[str], why: str) -> int:
    """Give rows of a claim back: those that were named, or all that are left of one that ended."""
    task = partition.claims.tasks[name]
    lease = task.leases[claim_id]
    task.give_back(lease, keys, delivered=why != ABANDONED)
    if why == RELEASED:
        task.settle(lease, partition.revision)
    else:
        task.end(lease, None)
    return partition.revision


def leave(partition: Partition, name: str, claim_id: int, client_id: str, number: int) -> None:
    """A request does not hold a claim any more, and others do."""
    lease = partition.claims.tasks[name].leases[claim_id]
    partition.claims.holders.leave_to_others(lease, client_id, number)


def _join(
    partition: Partition, task: Task, claim_id: int, client_id: str, number: int, lease_s: float
) -> None:
    lease = task.leases[claim_id]
    share = _share(task, *cast("tuple[int, int]", lease.share))
    lease.granted = share.granted = share.granted.left(partition.slots)
    share.asked = True
    partition.claims.holders.join_share(lease, client_id, number, AWAY_SINCE, lease_s)


def _draw_again(task: Task, index: int, rank: int, granted: Granted) -> None:
    share = _share(task, index, rank)
    task.closed.pop(share.granted.claim_id, None)
    share.granted = granted
    share.asked = True


def _share(task: Task, index: int, rank: int) -> Share:
    return cast("list[Share]", task.batches[index].shares)[rank]


def _granted(partition: Partition, task: Task, claim_id: int, keys: Sequence[str]) -> Granted:
    positions = [cast("int", partition.index.get(key)) for key in keys]
    rows = [partition.slots.at(position) for position in positions]
    if not all(type(row) is Row for row in rows) or any(map(task.has, positions)):
        raise ValueError(f"claim {claim_id} is of rows that are gone, held or committed")
    task.last_id = claim_id
    deliveries = [task.offered.get(position, 0) + 1 for position in positions]
    return Granted(claim_id, cast("list[Row]", rows), positions, deliveries, partition.revision)


def _terms(terms: Sequence[Any]) -> Terms:
    dp_size, count, fields, where, order_by, groups = terms
    return Terms(dp_size, count, tuple(fields), where, order_by, groups)
