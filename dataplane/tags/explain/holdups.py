"""What holds things up: groups and rows that are not as they should be, the oldest first. Pure.

Of ever so many only the few oldest are kept, and of rows one for each status that they stand in.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, TypeAlias

from dataplane.tags.accounts import Producer
from dataplane.tags.explain.clients import Clients
from dataplane.tags.explain.foremost import Foremost
from dataplane.tags.explain.wording import quoted, shown
from dataplane.tags.groups import FINISHED, RUNNING, Group
from dataplane.tags.history import History
from dataplane.tags.partition import Partition
from dataplane.tags.rows import Row
from dataplane.types import TagValue

SHOWN = 10
"""Holdups that are told."""
MAX_STATUSES = 64
"""Statuses that are told apart."""
STEP = 256

UNFINISHED = ("pending", "running")
"""Statuses of a prompt from which more is to come."""
STATUS = "status"
LONG_AGO = float("-inf")


class Failure(NamedTuple):
    """How many rows of a group fail, and the first of them."""

    rows: int
    failed: int
    key: str
    requirement: str


class Holdup(NamedTuple):
    """One thing that holds others up, as a program and as a person reads it."""

    entry: dict[str, TagValue]
    text: str


class StalledRows:
    """Rows in one status that hold things up."""

    __slots__ = ("count", "oldest", "status")

    def __init__(self, status: str, row: Row) -> None:
        self.status = status
        self.count = 0
        self.oldest = row

    def add(self, row: Row) -> None:
        """One more of them."""
        self.count += 1
        if row.revision < self.oldest.revision:
            self.oldest = row


_Placed: TypeAlias = tuple[Partition, Group | StalledRows]


class Holdups:
    """Gathers what holds things up in one partition, or in several."""

    def __init__(self, clients: Clients, history: History, now: float) -> None:
        self._clients = clients
        self._history = history
        self.now = now
        self._oldest: Foremost[_Placed] = Foremost(SHOWN)
        self._failures: dict[Group, Failure] = {}
        self._stalled: dict[str, StalledRows] = {}

    def add_group(self, partition: Partition, group: Group, failure: Failure | None = None) -> None:
        """A group holds things up: it has not finished, or rows of it fail."""
        if failure is not None:
            self._failures[group] = failure
        self._keep(group.at, group.since, partition, group)

    def add_row(self, row: Row, status: str) -> None:
        """A row holds things up that stands in this status."""
        stalled = self._stalled.get(status)
        if stalled is None:
            if len(self._stalled) >= MAX_STATUSES:
                status = "in one of many other statuses"
            stalled = self._stalled.setdefault(status, StalledRows(status, row))
        stalled.add(row)

    def settle_rows(self, partition: Partition) -> None:
        """All rows of a partition were added."""
        for stalled in self._stalled.values():
            at, _ = self._changed(partition, stalled.oldest)
            self._keep(at, stalled.oldest.revision, partition, stalled)
        self._stalled = {}

    def _keep(
        self, at: float, revision: int, partition: Partition, item: Group | StalledRows
    ) -> None:
        newest = self._oldest.offer((-at, -revision), (partition, item))
        if newest is not None and type(newest[1]) is Group:
            self._failures.pop(newest[1], None)

    @property
    def left_out(self) -> int:
        """Groups, and statuses of rows, that are not among those told."""
        return self._oldest.left_out

    def _changed(self, partition: Partition, row: Row) -> tuple[float, str | None]:
        """When a row was changed last, and by whom. Where history does not reach back so far: when
        it was changed at the latest, and None."""
        change = self._history.made(partition.partition_id, row.revision)
        if change is not None:
            return change.at, change.by
        at = self._history.floor_at
        return LONG_AGO if at is None else at, None

    # -- telling -----------------------------------------------------------------------------

    def tell(self, *, by_partition: bool = False) -> Generator[None, None, list[Holdup]]:
        """The oldest ones, step by step; with `by_partition` each says where it is."""
        told: list[Holdup] = []
        for partition, item in self._oldest.in_order():
            if type(item) is Group:
                sessions = yield from _sessions(partition, item)
                entry, text = self._tell_group(item, sessions)
            else:
                assert isinstance(item, StalledRows)
                entry, text = self._tell_rows(partition, item)
            if by_partition:
                entry["partition_id"] = partition.partition_id
                text = f"in {quoted(partition.partition_id)}: {text}"
            told.append(Holdup(entry, text))
            yield
        return told

    def _tell_group(self, group: Group, sessions: int) -> Holdup:
        age_s = max(0.0, self.now - group.at)
        producer = group.producer.client_id
        entry: dict[str, TagValue] = {
            "key": group.uid, "status": group.status, "age_s": round(age_s, 3),
            "producer": self._clients.label(producer), "client_id": producer,
            "alive": self._clients.is_alive(producer), "sessions": sessions, "n": group.n,
        }  # fmt: skip
        name = quoted(group.uid)
        have = f"{sessions} of {group.n} sessions"
        if group.open:
            text = f"{name}: running for {age_s:.1f} s, {have}"
        elif group.status == RUNNING:
            text = f"{name} began {age_s:.1f} s ago and was retired with {have}"
        elif group.status != FINISHED:
            text = f"{name} ended as {quoted(group.status)} {age_s:.1f} s ago with {have}"
        else:
            text = f"{name} finished {age_s:.1f} s ago with {have}"
            failure = self._failures.get(group)
            if failure is not None:
                text += (
                    f", but {failure.failed} of {failure.rows} rows {_fail(failure.failed)}: "
                    f"{quoted(failure.key)} first ({failure.requirement})"
                )
                entry["failing_key"] = failure.key
                entry["requirement"] = failure.requirement
        who = f"producer {self._clients.called(producer)}: {self._clients.state(producer)}"
        return Holdup(entry, f"{text}, {who}")

    def _tell_rows(self, partition: Partition, stalled: StalledRows) -> Holdup:
        row = stalled.oldest
        at, by = self._changed(partition, row)
        age_s = None if at == LONG_AGO else max(0.0, self.now - at)
        if by is not None:
            age = f"unchanged for {age_s:.1f} s"
            writer, wrote = by, "last written"
        else:
            age = "unchanged for longer than is remembered"
            if age_s is not None:
                age = f"unchanged for more than {age_s:.1f} s"
            writer, wrote = _owner(row), "put"
        entry: dict[str, TagValue] = {
            "key": row.key, "status": stalled.status,
            "age_s": None if age_s is None else round(age_s, 3),
            "producer": self._clients.label(writer), "client_id": writer,
            "alive": self._clients.is_alive(writer), "count": stalled.count,
        }  # fmt: skip
        name = quoted(row.key)
        if stalled.count == 1:
            text = f"{name}: {stalled.status}, {age}"
        else:
            text = f"{stalled.count} rows: {stalled.status}, the oldest {name}, {age}"
        who = f"{wrote} by {self._clients.called(writer)}: {self._clients.state(writer)}"
        return Holdup(entry, f"{text}, {who}")


def status_of(row: Row) -> str:
    """The status that a row stands in, as it is told."""
    status = row.tags.get(STATUS)
    if isinstance(status, str) and status.isidentifier() and len(status) <= 40:
        return status
    return "no status" if status is None else f"status {shown(status)}"


def _fail(count: int) -> str:
    return "fails" if count == 1 else "fail"


def _owner(row: Row) -> str:
    """The client that put a row."""
    account = row.account.producer if type(row.account) is Group else row.account
    return account.client_id if type(account) is Producer else ""


def _sessions(partition: Partition, group: Group) -> Generator[None, None, int]:
    """How many sessions have come: as its rows say, or its rows where they do not."""
    sessions: set[TagValue] = set()
    rows = 0
    for step, position in enumerate(list(group.positions), 1):
        row = partition.slots.at(position)
        if type(row) is Row:
            rows += 1
            session = row.tags.get("session_id")
            if session is not None:
                sessions.add(repr(session))
        if not step % STEP:
            yield
    return len(sessions) or rows
