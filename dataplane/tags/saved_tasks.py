"""Tasks as a checkpoint keeps them: what each did with every row, who holds what, what it drew.

Pure. What a task did with a row goes with the row; the rest is plain maps and lists, in which rows
are named by key. Positions are those of one life of a partition and are never saved.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from dataplane.errors import InvalidRequest
from dataplane.tags.claims.leases import MAX_LEASE_S, Closed, Granted, Lease
from dataplane.tags.claims.shares import Batch, Share, Terms
from dataplane.tags.claims.tasks import Task
from dataplane.tags.keys import check_name
from dataplane.tags.partition import Partition
from dataplane.tags.rows import CHUNK_BITS, Row

COMMITTED: Final = -1
"""What a task did with a row that it has committed; otherwise how often it was offered the row."""

About = dict[str, Any]
"""A task as JSON can carry it."""


class SavedTask:
    """A task at one moment; cheap to make, read in pieces."""

    def __init__(self, task: Task) -> None:
        self.name = task.name
        self._committed = task.committed.by_chunk()
        self._offered = task.offered.copy()
        self.about: About = {
            "task": task.name,
            "last_id": task.last_id,
            "leases": [_about_lease(lease) for lease in task.leases.values()],
            "closed": [
                [claim_id, closed.n, dict(closed.lost), closed.committed]
                for claim_id, closed in task.closed.items()
            ],
            "batches": [
                _about_batch(index, batch.terms, batch.shares)
                for index, batch in task.batches.items()
                if batch.shares is not None
            ],
            "forgotten": task.forgotten,
        }

    def of_rows(self, number: int, offsets: Iterable[int]) -> bytes:
        """What it did with the rows of a chunk that are in these slots, as int32."""
        base, committed, offered = (
            number << CHUNK_BITS,
            self._committed.get(number, 0),
            self._offered,
        )
        return array(
            "i",
            [COMMITTED if committed >> at & 1 else offered.get(base + at, 0) for at in offsets],
        ).tobytes()


def _about_lease(lease: Lease) -> About:
    return {
        **_about_granted(lease.granted),
        "held": list(lease.rows),
        "lost": dict(lease.lost),
        "done": sorted(lease.done),
        "holders": {client_id: sorted(numbers) for client_id, numbers in lease.holders.items()},
        "lease_s": lease.lease_s,
        "grouped": lease.grouped,
        "at": lease.at,
        "share": None if lease.share is None else list(lease.share),
    }


def _about_granted(granted: Granted) -> About:
    rows = zip(granted.rows, granted.deliveries, strict=True)
    return {
        "claim_id": granted.claim_id,
        "revision": granted.revision,
        "rows": [[row.key, deliveries] for row, deliveries in rows],
    }


def _about_batch(index: int, terms: Terms, shares: Sequence[Share]) -> About:
    return {
        "index": index,
        "terms": [
            terms.dp_size, terms.count, list(terms.fields), terms.where.hex(), terms.order_by,
            terms.groups,
        ],
        "shares": [{**_about_granted(of.granted), "asked": of.asked} for of in shares],
    }  # fmt: skip


# -- back ------------------------------------------------------------------------------------


def restore_rows(partition: Partition, name: str, first: int, did: Sequence[int]) -> None:
    """Note what a task did with rows that follow each other from position `first` on."""
    task = partition.claims.task(check_name(name, "task name"))
    for position, what in enumerate(did, first):
        if what == COMMITTED:
            task.committed.add(position)
        elif what > 0:
            task.offered[position] = what


def restore_task(partition: Partition, about: Mapping[str, Any]) -> None:
    """Give a task what it held, after its rows; whoever held it is away.

    InvalidRequest if it is no task that was saved, or names rows that are not there.
    """
    try:
        task = partition.claims.task(check_name(about["task"], "task name"))
        task.last_id = max(task.last_id, _number(about["last_id"]))
        task.forgotten = int(about["forgotten"])
        for lease in about["leases"]:
            _restore_lease(partition, task, lease)
        for claim_id, n, lost, committed in about["closed"]:
            task.closed[_number(claim_id)] = Closed(_number(n), _reasons(lost), bool(committed))
        for batch in about["batches"]:
            _restore_batch(partition, task, batch)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InvalidRequest(
            f"a task of {partition.partition_id!r} is malformed: {error}"
        ) from None


def _restore_lease(partition: Partition, task: Task, about: Mapping[str, Any]) -> None:
    granted = _granted(partition, about)
    lease_s = float(about["lease_s"])
    if not 0 < lease_s <= MAX_LEASE_S:
        raise InvalidRequest(f"claim {granted.claim_id} has no term of {lease_s} s")
    at = float(about["at"])
    if not math.isfinite(at):
        raise InvalidRequest(f"claim {granted.claim_id} was granted at no time: {at}")
    lease = Lease(granted, lease_s, grouped=bool(about["grouped"]), at=at)
    held = set(map(str, about["held"]))
    lease.rows = {key: position for key, position in lease.rows.items() if key in held}
    lease.lost = _reasons(about["lost"])
    lease.done = set(map(str, about["done"]))
    if about["share"] is not None:
        index, rank = about["share"]
        lease.share = _number(index), _number(rank)
    task.leases[lease.claim_id] = lease
    for position in lease.rows.values():
        if task.has(position):
            raise InvalidRequest(f"claim {granted.claim_id} holds what is held or committed")
        task.held[position] = lease
        task.offered.setdefault(position, 1)
    for client_id, numbers in about["holders"].items():
        for number in numbers:
            # Since when is for who has the clock of leases (server/claiming.py).
            partition.claims.holders.join(lease, str(client_id), _number(number), 0.0)


def _restore_batch(partition: Partition, task: Task, about: Mapping[str, Any]) -> None:
    dp_size, count, fields, where, order_by, groups = about["terms"]
    terms = Terms(
        _number(dp_size), _number(count), tuple(map(str, fields)), bytes.fromhex(where),
        None if order_by is None else str(order_by), bool(groups),
    )  # fmt: skip
    batch = Batch(terms)
    if len(about["shares"]) not in (0, dp_size):
        raise InvalidRequest(f"a batch of {len(about['shares'])} shares for {dp_size} ranks")
    batch.shares = []
    for of in about["shares"]:
        share = Share(_granted(partition, of))
        share.asked = bool(of["asked"])
        batch.shares.append(share)
    index = _number(about["index"])
    task.batches[index] = batch
    task.settle_batch(index)


def _granted(partition: Partition, about: Mapping[str, Any]) -> Granted:
    """What a claim was answered with, less the rows that are gone."""
    rows: list[Row] = []
    positions: list[int] = []
    deliveries: list[int] = []
    for key, count in about["rows"]:
        position = partition.index.get(key)
        row = None if position is None else partition.slots.at(position)
        if position is not None and type(row) is Row:
            rows.append(row)
            positions.append(position)
            deliveries.append(_number(count))
    claim_id = _number(about["claim_id"])
    return Granted(claim_id, rows, positions, deliveries, _number(about["revision"]))


def _reasons(lost: Mapping[str, str]) -> dict[str, str]:
    return {str(key): str(reason) for key, reason in lost.items()}


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise InvalidRequest(f"{value!r:.80} is not the number of something")
    return value
