"""A plane's sizes over time: a look each second, a bounded number of points whatever the time.

    samples  []  -> {interval_s, times_s, columns, lags, waits}, see report/record.py

A look costs as much with a million keys as with none. When there are too many points, two become
one; whoever waits at a look is counted as having waited since the look before it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from dataplane.errors import InvalidRequest
from dataplane.server.connection import Connection, Verb
from dataplane.wire.frames import Body

if TYPE_CHECKING:
    from dataplane.server.tag_service import TagService

MAX_POINTS: Final = 2_000
MAX_LAGS: Final = 24
"""Tasks whose lag is followed, those that came first."""
MAX_LOOKED_AT: Final = 256
"""Waiting requests that are looked at in one second: which of many do not differ much."""
MAX_WAITS: Final = 512
TOLD_WAITS: Final = 40
MAX_WHAT: Final = 120

GAUGES: Final = (
    "keys", "used_bytes", "tag_bytes", "held_bytes", "waiting_rows", "waiting_claims",
    "waiting_room", "open_groups",
)  # fmt: skip
"""What goes up and down."""
COUNTERS: Final = (
    "puts", "rows_put", "bytes_put", "gets", "rows_got", "rows_committed", "rows_cleared",
)  # fmt: skip
"""What only grows."""

Task = tuple[str, str]


class Point:
    """What was seen at one look, or at several that became one."""

    __slots__ = ("counters", "gauges", "lags", "time_s")

    def __init__(
        self, time_s: float, gauges: list[int], counters: list[int], lags: dict[Task, int]
    ) -> None:
        self.time_s = time_s
        self.gauges = gauges
        self.counters = counters
        self.lags = lags

    def take_in(self, later: Point) -> None:
        """Become one with a later point: peaks stay."""
        self.time_s = later.time_s
        self.gauges = list(map(max, self.gauges, later.gauges))
        self.counters = later.counters
        for task, lag in later.lags.items():
            self.lags[task] = max(lag, self.lags.get(task, 0))


class Points:
    """Points in order, at most `limit` of them: each tells of `looks` looks. Pure."""

    def __init__(self, limit: int = MAX_POINTS) -> None:
        self._limit = limit
        self.looks = 1
        self._taken = 0
        """Looks that the last point tells of."""
        self.points: list[Point] = []

    def add(self, point: Point) -> None:
        """One more look."""
        if self.points and self._taken < self.looks:
            self.points[-1].take_in(point)
            self._taken += 1
            return
        if len(self.points) >= self._limit:
            self._halve()
        self.points.append(point)
        self._taken = 1

    def _halve(self) -> None:
        kept: list[Point] = []
        for number, point in enumerate(self.points):
            if number % 2:
                kept[-1].take_in(point)
            else:
                kept.append(point)
        self.points = kept
        self.looks *= 2


class Sampling:
    """Looks at the tag store each second, and tells what was seen."""

    def __init__(self, service: TagService) -> None:
        self._service = service
        self._points = Points()
        self._lags: dict[Task, None] = {}
        self._waits: dict[tuple[str, str, str, str], float] = {}
        self._last_s: float | None = None
        self.verbs: dict[str, Verb] = {"samples": self._samples}

    def look(self, now: float) -> None:
        """One look, at this time."""
        service, store = self._service, self._service.store
        accounts = [partition.account for partition in store.partitions.values()]
        gauges = [
            sum(map(len, store.partitions.values())),
            sum(account.used_bytes for account in accounts),
            sum(account.tag_bytes for account in accounts),
            sum(account.held_bytes for account in accounts),
            len(service.waiting),
            len(service.claiming),
            len(service.admission),
            len(store.attempts),
        ]
        totals = service.totals
        counters = [getattr(totals, name) for name in COUNTERS]
        self._points.add(Point(now, gauges, counters, self._lag()))
        # After a pause of the process nobody is known to have waited all of it.
        since = 1.0 if self._last_s is None else min(max(now - self._last_s, 0.0), 5.0)
        self._last_s = now
        self._note_waits(since)

    def _lag(self) -> dict[Task, int]:
        """Rows that each task has not committed."""
        lags: dict[Task, int] = {}
        for partition in self._service.store.partitions.values():
            for name, task in partition.claims.tasks.items():
                key = partition.partition_id, name
                if key not in self._lags:
                    if len(self._lags) >= MAX_LAGS:
                        continue
                    self._lags[key] = None
                lags[key] = max(0, len(partition) - len(task.committed))
        return lags

    def _note_waits(self, since_s: float) -> None:
        service, looked_at = self._service, 0
        for client_id, waited in service.waiting.waiting():
            if waited.kind == "changes":
                continue  # who watches has nothing better to do
            self._waited("rows", client_id, waited.partition_id, _said(waited.where), since_s)
            if (looked_at := looked_at + 1) >= MAX_LOOKED_AT:
                break
        for looked_at, (client_id, want, *_) in enumerate(service.claiming.waiting()):
            if looked_at >= MAX_LOOKED_AT:
                break
            self._waited("claim", client_id, want.partition_id, want.task[:MAX_WHAT], since_s)
        for looked_at, (partition_id, client_id, *_) in enumerate(service.admission.entries()):
            if looked_at >= MAX_LOOKED_AT:
                break
            self._waited("room", client_id, partition_id, "", since_s)

    def _waited(
        self, kind: str, client_id: str, partition_id: str, what: str, since_s: float
    ) -> None:
        label = self._service.labels.get(client_id) or client_id
        key = kind, label, partition_id, what
        if key not in self._waits and len(self._waits) >= MAX_WAITS:
            del self._waits[min(self._waits, key=self._waits.__getitem__)]
        self._waits[key] = self._waits.get(key, 0.0) + since_s

    def _samples(self, connection: Connection, number: int, body: Body) -> None:
        if body != []:
            raise InvalidRequest("samples takes nothing")
        connection.reply(number, self.told())

    def told(self) -> dict[str, Any]:
        """What was seen, as it is answered."""
        points = self._points.points
        columns: dict[str, list[int]] = {}
        for at, name in enumerate(GAUGES):
            columns[name] = [point.gauges[at] for point in points]
        for at, name in enumerate(COUNTERS):
            columns[name] = [point.counters[at] for point in points]
        longest = sorted(self._waits.items(), key=lambda item: -item[1])[:TOLD_WAITS]
        return {
            "interval_s": float(self._points.looks),
            "times_s": [point.time_s for point in points],
            "columns": columns,
            "lags": [
                [partition_id, task, [point.lags.get((partition_id, task)) for point in points]]
                for partition_id, task in self._lags
            ],
            "waits": [[*key, round(waited_s, 3)] for key, waited_s in longest],
        }


def _said(where: Body) -> str:
    """A predicate in few words."""
    return json.dumps(where, ensure_ascii=False, default=str)[:MAX_WHAT] if where else ""
