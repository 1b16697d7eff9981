"""What a tag store is asked at a scrape: sizes, lag, ages, its journal. It changes nothing.

Walks in slices, as all that looks at many rows does: the loop is never held. Each partition is read
in one go, so its own numbers are of one moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dataplane.metrics.labels import MAX_PARTITIONS, MAX_TASKS, OTHER, Largest
from dataplane.metrics.reading import Reading
from dataplane.server.partitioning import version_of
from dataplane.server.slices import Slices
from dataplane.tags.rows import CHUNK_BITS, Row

if TYPE_CHECKING:
    from dataplane.server.snapshotting import Snapshots
    from dataplane.server.tag_service import TagService
    from dataplane.tags.partition import Partition

MAX_ROWS_SEEN = 16_384
"""Rows that one scrape looks at for those that are oldest and not consumed."""
STEP = 256
"""Things looked at before others may run."""

TOTALS = {
    "puts_total": "puts",
    "put_rows_total": "rows_put",
    "put_bytes_total": "bytes_put",
    "gets_total": "gets",
    "get_rows_total": "rows_got",
    "clears_total": "clears",
    "cleared_rows_total": "rows_cleared",
    "claims_total": "claims",
    "claimed_rows_total": "rows_claimed",
    "commits_total": "commits",
    "committed_rows_total": "rows_committed",
    "releases_total": "releases",
    "lost_rows_total": "rows_lost",
}


@dataclass(slots=True)
class _Family:
    """All versions of one partition, or all families that are not shown."""

    partitions: int = 0
    rows: int = 0
    payload_bytes: int = 0
    tag_bytes: int = 0
    used_bytes: int = 0
    held_bytes: int = 0
    quota_bytes: int | None = 0
    """None: some of them have no quota."""
    open_groups: int = 0
    oldest_group_at: float | None = None
    oldest_row_at: float | None = None
    tasks: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Lag, claimed rows and leases of each."""

    def add(self, other: _Family) -> None:
        """Sum with another."""
        for name in ("partitions", "rows", "payload_bytes", "tag_bytes", "used_bytes",
                     "held_bytes", "open_groups"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if self.quota_bytes is not None and other.quota_bytes is not None:
            self.quota_bytes += other.quota_bytes
        else:
            self.quota_bytes = None
        self.oldest_group_at = _earlier(self.oldest_group_at, other.oldest_group_at)
        self.oldest_row_at = _earlier(self.oldest_row_at, other.oldest_row_at)
        for task, numbers in other.tasks.items():
            self.tasks[task] = [
                mine + its for mine, its in zip(self.tasks.get(task, (0, 0, 0)), numbers,
                                                strict=True)
            ]  # fmt: skip


class TagStoreReader:
    """Reads one tag store. Of its event loop."""

    def __init__(self, service: TagService, snapshots: Snapshots) -> None:
        self._service = service
        self._snapshots = snapshots
        self._partitions = Largest(MAX_PARTITIONS)
        self._tasks = Largest(MAX_TASKS)

    async def read(self) -> Reading:
        """All that is told of it."""
        reading = Reading()
        self._read_counts(reading)
        self._read_journal(reading)
        await self._read_partitions(reading)
        return reading

    # -- what is counted anyway --------------------------------------------------------------

    def _read_counts(self, reading: Reading) -> None:
        service, store = self._service, self._service.store
        totals = service.totals
        for name, of in TOTALS.items():
            reading.set(name, getattr(totals, of))
        reading.counts("puts_refused_total", (((e,), n) for e, n in totals.refusals.items()))
        reading.set("epoch", store.epoch)
        reading.set("changes_total", store.n)
        reading.set("clients", len(service.attached))
        for reason, waiting in (
            ("rows", service.waiting), ("claims", service.claiming), ("room", service.admission),
            ("partitions", service.births),
        ):  # fmt: skip
            reading.set("waiting_requests", len(waiting), reason)
        reading.set("history_changes", store.history.size)
        reading.set("blocks", len(store.placements))
        reading.set("dead_blocks", service.freeing.unheard)
        reading.set("stores_known", len(service.registering.known))
        reading.set("stores_connected", service.registering.connected)
        reading.set("worst_slice_seconds", service.worst.seconds)

    def _read_journal(self, reading: Reading) -> None:
        journal = self._snapshots.journal
        reading.set("journal_bytes", journal.nbytes)
        reading.set("journal_snapshot_due_bytes", self._snapshots.due_bytes)
        reading.set("journal_unflushed_bytes", journal.unflushed_bytes)
        reading.set("journal_refused_total", journal.refused)
        reading.set("journal_broken", int(journal.is_broken))
        reading.set("snapshot_bytes", journal.snapshot_bytes)
        reading.set("snapshots_failed_total", self._snapshots.failed)
        reading.counts("snapshot_age_seconds", ())
        if journal.snapshot:
            path = Path(journal.folder / f"snapshot-{journal.snapshot:08d}")
            try:
                age_s = self._service.clock() - path.stat().st_mtime
            except OSError:
                return  # one that took its place is being written down
            reading.set("snapshot_age_seconds", max(0.0, age_s))

    # -- partitions --------------------------------------------------------------------------

    async def _read_partitions(self, reading: Reading) -> None:
        store = self._service.store
        slices = Slices(self._service.worst)
        families: dict[str, _Family] = {}
        members: dict[str, list[Partition]] = {}
        for partition in list(store.partitions.values()):
            name = version_of(partition.partition_id)[0]
            families.setdefault(name, _Family()).add(_family_of(partition))
            members.setdefault(name, []).append(partition)
            await slices.breathe()
        for number, group in enumerate(list(store.attempts.values())):
            family = families.get(version_of(group.partition_id)[0])
            if family is not None and group.open:
                family.open_groups += 1
                family.oldest_group_at = _earlier(family.oldest_group_at, group.at)
            if not number % STEP:
                await slices.breathe()
        shown = self._partitions.choose({
            name: family.payload_bytes + family.tag_bytes + family.rows
            for name, family in families.items()
        })  # fmt: skip
        budget = MAX_ROWS_SEEN
        for name in shown:
            for partition in members[name]:
                at, budget = await self._oldest_row_at(partition, budget, slices)
                families[name].oldest_row_at = _earlier(families[name].oldest_row_at, at)
        answers = 0
        for number, requests in enumerate(list(store.requests.values())):
            answers += len(requests.answers)
            if not number % STEP:
                await slices.breathe()
        reading.set("kept_answers", answers)
        told: dict[str, _Family] = {}
        for name, family in families.items():
            told.setdefault(self._partitions.label(name), _Family()).add(family)
        self._tell(reading, told)

    async def _oldest_row_at(
        self, partition: Partition, budget: int, slices: Slices
    ) -> tuple[float | None, int]:
        """When the oldest row last changed that some task has not committed; what is left of the
        rows that may be looked at."""
        claims = partition.claims
        for number, chunk in enumerate(list(partition.slots.chunks)):
            if budget <= 0:
                break
            if chunk is None or not chunk.live:
                continue
            base = number << CHUNK_BITS
            for i, row in enumerate(chunk.rows):
                if type(row) is not Row:
                    continue
                budget -= 1
                consumed = row.tags.get("is_prompt") is True or claims.is_committed_by_all(base + i)
                if not consumed:
                    return self._service.store.moments.made_at(row.revision), budget
                if not budget % STEP:
                    await slices.breathe()
        return None, budget

    def _tell(self, reading: Reading, families: dict[str, _Family]) -> None:
        now = self._service.clock()
        lags: dict[str, float] = {}
        for family in families.values():
            for task, numbers in family.tasks.items():
                lags[task] = lags.get(task, 0) + sum(numbers)
        self._tasks.choose(lags)
        for name in ("partitions", "partition_rows", "partition_quota_bytes", "task_lag_rows",
                     "task_claimed_rows", "task_leases", "partition_payload_bytes",
                     "partition_tag_bytes", "partition_used_bytes", "partition_held_bytes",
                     "partition_open_groups", "partition_oldest_open_group_seconds",
                     "partition_oldest_unconsumed_seconds"):  # fmt: skip
            reading.counts(name, ())
        for name, family in families.items():
            reading.set("partitions", family.partitions, name)
            for what in ("rows", "payload_bytes", "tag_bytes", "used_bytes", "held_bytes",
                         "open_groups"):  # fmt: skip
                reading.set(f"partition_{what}", getattr(family, what), name)
            if family.quota_bytes is not None and name != OTHER:
                reading.set("partition_quota_bytes", family.quota_bytes, name)
            for what, at in (
                ("open_group", family.oldest_group_at), ("unconsumed", family.oldest_row_at),
            ):  # fmt: skip
                if at is not None:
                    reading.set(f"partition_oldest_{what}_seconds", max(0.0, now - at), name)
            tasks: dict[str, list[int]] = {}
            for task, numbers in family.tasks.items():
                label = self._tasks.label(task)
                before = tasks.get(label, [0, 0, 0])
                tasks[label] = [a + b for a, b in zip(before, numbers, strict=True)]
            for task, (lag, claimed, leases) in tasks.items():
                reading.set("task_lag_rows", lag, name, task)
                reading.set("task_claimed_rows", claimed, name, task)
                reading.set("task_leases", leases, name, task)


def _family_of(partition: Partition) -> _Family:
    account, quota = partition.account, partition.quota
    return _Family(
        partitions=1,
        rows=len(partition),
        payload_bytes=partition.payload_bytes,
        tag_bytes=partition.tag_bytes,
        used_bytes=account.used_bytes,
        held_bytes=account.held_bytes,
        quota_bytes=None if quota is None else quota.bytes,
        tasks={
            name: [
                max(0, account.rows - len(task.committed)), len(task.held), len(task.leases),
            ]
            for name, task in partition.claims.tasks.items()
        },
    )  # fmt: skip


def _earlier(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
