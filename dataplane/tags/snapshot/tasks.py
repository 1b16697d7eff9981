"""The tasks of a partition as a snapshot has them: what is committed, offered, held and batched.

Pure. Rows are named by their slots. Where a claim was granted a row as it was then, and the slot
has another by now, the old one is written besides (rows.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

from dataplane.tags.claims.leases import Closed, Granted, Lease
from dataplane.tags.claims.marks import Marks
from dataplane.tags.claims.shares import Batch, Share, Terms
from dataplane.tags.claims.tasks import Task
from dataplane.tags.partition import Partition
from dataplane.tags.replay.claims import AWAY_SINCE
from dataplane.tags.rows import CHUNK_ROWS, Row
from dataplane.tags.snapshot.format import BATCH, CLOSED, HOLDERS, LEASE, SETTLED, TASK, Part
from dataplane.tags.snapshot.rows import OldRows

PIECE_OFFERED = 1 << 20
"""Rows in one part of which it says how often they were offered."""
MARK_BYTES = CHUNK_ROWS // 8


def task_parts(partition: Partition, old: OldRows) -> Iterator[Part]:
    """All that claims of the partition are about."""
    for task in partition.claims.tasks.values():
        yield from _task_parts(partition, task, old)
    claims = partition.claims
    by_id = {id(lease): (t.name, i) for t in claims.tasks.values() for i, lease in t.leases.items()}
    for client_id, leases in claims.holders.leases.items():
        away = client_id in claims.holders.away
        yield [HOLDERS, client_id, away, [by_id[id(lease)] for lease in leases]]


def _task_parts(partition: Partition, task: Task, old: OldRows) -> Iterator[Part]:
    marks = task.committed.by_chunk()
    packed = b"".join(bits.to_bytes(MARK_BYTES, "little") for bits in marks.values())
    yield [
        TASK, task.name, task.last_id, task.forgotten, array("q", marks).tobytes(), packed,
        array("q", task.offered).tobytes(), array("q", task.offered.values()).tobytes(),
    ]  # fmt: skip
    for claim_id, closed in task.closed.items():
        yield [CLOSED, task.name, claim_id, closed.n, dict(closed.lost), closed.committed]
    for lease in task.leases.values():
        granted = _granted(partition, lease.granted, old)
        yield from old.parts()
        holders = [[client_id, sorted(numbers)] for client_id, numbers in lease.holders.items()]
        yield [
            LEASE, task.name, granted, lease.rows, lease.lost, sorted(lease.done), holders,
            lease.lease_s, lease.grouped, lease.at, lease.share,
        ]  # fmt: skip
    for index, batch in task.batches.items():
        if batch.shares is None:
            continue  # somebody waits for it: nothing that lasts
        yield [BATCH, task.name, index, astuple(batch.terms)]
        for share in batch.shares:
            granted = _granted(partition, share.granted, old)
            yield from old.parts()
            yield [BATCH, task.name, index, None, granted, share.asked]
    yield [SETTLED, task.name, list(task.settled), list(task.single)]


def _granted(partition: Partition, granted: Granted, old: OldRows) -> list[Any]:
    at = partition.slots.at
    changed = [
        [i, old.number(row)]
        for i, (row, position) in enumerate(zip(granted.rows, granted.positions, strict=True))
        if at(position) is not row
    ]
    return [
        granted.claim_id, array("q", granted.positions).tobytes(),
        array("q", granted.deliveries).tobytes(), granted.revision, granted.end, changed,
    ]  # fmt: skip


class TaskReader:
    """Gives a partition its tasks, after its rows and its history's tombstones."""

    def __init__(self, partition: Partition, old_rows: Sequence[Row]) -> None:
        self._partition = partition
        self._old_rows = old_rows
        self.kinds = {
            TASK: self._task, CLOSED: self._closed, LEASE: self._lease, BATCH: self._batch,
            SETTLED: self._settled, HOLDERS: self._holders,
        }  # fmt: skip

    def _of(self, name: str) -> Task:
        return self._partition.claims.tasks[name]

    def _task(
        self,
        name: str,
        last_id: int,
        forgotten: int,
        chunks: bytes,
        marks: bytes,
        positions: bytes,
        counts: bytes,
    ) -> None:
        task = self._partition.claims.task(name)
        task.last_id = last_id
        task.forgotten = forgotten
        parts = (
            int.from_bytes(marks[at : at + MARK_BYTES], "little")
            for at in range(0, len(marks), MARK_BYTES)
        )
        task.committed = Marks.of(dict(zip(_unpacked(chunks), parts, strict=True)))
        task.offered = dict(zip(_unpacked(positions), _unpacked(counts), strict=True))

    def _closed(self, name: str, claim_id: int, n: int, lost: Any, committed: bool) -> None:
        self._of(name).closed[claim_id] = Closed(n, lost, committed)

    def _lease(
        self,
        name: str,
        granted: list[Any],
        rows: dict[str, int],
        lost: dict[str, str],
        done: list[str],
        holders: list[Any],
        lease_s: float,
        grouped: bool,
        at: float,
        share: list[int] | None,
    ) -> None:
        task = self._of(name)
        lease = Lease(self._granted(granted), lease_s, grouped=grouped, at=at)
        lease.rows = rows
        lease.lost = lost
        lease.done = set(done)
        lease.holders = {client_id: set(numbers) for client_id, numbers in holders}
        if share is not None:
            index, rank = share
            lease.share = index, rank
        task.leases[lease.claim_id] = lease
        task.held.update(dict.fromkeys(rows.values(), lease))

    def _batch(
        self,
        name: str,
        index: int,
        terms: list[Any] | None,
        granted: Any = None,
        asked: bool = False,
    ) -> None:
        batches = self._of(name).batches
        if terms is not None:
            dp_size, count, fields, where, order_by, groups = terms
            batch = batches[index] = Batch(
                Terms(dp_size, count, tuple(fields), where, order_by, groups)
            )
            batch.shares = []
            return
        share = Share(self._granted(granted))
        share.asked = asked
        shares = batches[index].shares
        assert shares is not None
        shares.append(share)

    def _settled(self, name: str, batches: list[int], single: list[int]) -> None:
        task = self._of(name)
        task.settled.update(dict.fromkeys(batches))
        task.single.extend(single)

    def _holders(self, client_id: str, away: bool, leases: list[Any]) -> None:
        holders = self._partition.claims.holders
        holders.leases[client_id] = {
            self._of(name).leases[claim_id]: None for name, claim_id in leases
        }
        if away:
            holders.away[client_id] = AWAY_SINCE

    def _granted(self, packed: list[Any]) -> Granted:
        claim_id, positions, deliveries, revision, end, changed = packed
        places = _unpacked(positions)
        at = self._partition.slots.at
        rows: list[Any] = list(map(at, places))
        for i, number in changed:
            rows[i] = self._old_rows[number]
        if any(type(row) is not Row for row in rows):
            raise ValueError(f"claim {claim_id} was granted a row that is not there")
        return Granted(claim_id, rows, places, _unpacked(deliveries), revision, end)


def _unpacked(packed: bytes) -> list[int]:
    numbers = array("q")
    numbers.frombytes(packed)
    return numbers.tolist()
