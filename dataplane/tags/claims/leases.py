"""Leases: rows that a task has handed out, to whom, and until when. Pure.

A lease belongs to clients. Its term runs only while none of them has a connection, and on a clock
that leaves out the time in which the store did not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dataplane.errors import ClaimLost, InvalidRequest, quote
from dataplane.tags.groups import Group
from dataplane.tags.rows import Row, Slots

MAX_STEP_S = 0.25
"""What one tick of the clock counts at most."""
MIN_LEASE_S, MAX_LEASE_S = 0.1, 86_400.0

IMPLICIT = 0
"""Stands for a request's number where a client holds a share that nobody has asked for yet."""

CLEARED, RELEASED, COMMITTED = "cleared", "released", "committed"
ABANDONED = "abandoned"
"""Why rows went back that never reached anybody."""


class LeaseClock:
    """Seconds during which the store ran, as far as it was told."""

    __slots__ = ("_last", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._last: float | None = None

    def tick(self, time_s: float) -> None:
        """Go on, by the time since the last tick but never by a leap."""
        if self._last is not None:
            self.now += min(max(time_s - self._last, 0.0), MAX_STEP_S)
        self._last = time_s

    def at(self, time_s: float) -> float:
        """What it shows at a time between two ticks; it stands still while it is paused."""
        if self._last is not None:
            self.tick(time_s)
        return self.now

    def pause(self) -> None:
        """Nobody looks at the clock until the next tick."""
        self._last = None


class Granted(NamedTuple):
    """What a claim was answered with; the same for every repetition of its request."""

    claim_id: int
    """0 where nothing was granted."""
    rows: list[Row]
    """As they were when they were granted."""
    positions: list[int]
    deliveries: list[int]
    """How often each has been offered to the task, this time included."""
    revision: int
    end: bool = False
    """Nothing is left to claim, and nothing can come."""

    def left(self, slots: Slots) -> Granted:
        """The same with those of its rows that are still there."""
        left = [i for i, at in enumerate(self.positions) if type(slots.at(at)) is Row]
        if len(left) == len(self.positions):
            return self
        return self._replace(
            rows=[self.rows[i] for i in left],
            positions=[self.positions[i] for i in left],
            deliveries=[self.deliveries[i] for i in left],
        )


class Closed(NamedTuple):
    """How a lease ended, for those who end it once more."""

    n: int
    """Revision at which it was answered."""
    lost: Mapping[str, str]
    """Its keys that it never committed, and why."""
    committed: bool
    """Whether it committed any, or there were none to commit."""

    def check(self, keys: Sequence[str], *, commit: bool) -> Mapping[str, str]:
        """Which of these keys did not end so, and how they did."""
        how = {key: self.lost.get(key, COMMITTED) for key in keys}
        wanted = COMMITTED if commit else RELEASED
        return {key: reason for key, reason in how.items() if reason != wanted}


class Lease:
    """Rows of one claim."""

    __slots__ = ("at", "done", "granted", "grouped", "holders", "lease_s", "lost", "rows", "share")

    def __init__(self, granted: Granted, lease_s: float, *, grouped: bool, at: float) -> None:
        self.granted = granted
        self.rows = {
            row.key: position for row, position in zip(granted.rows, granted.positions, strict=True)
        }
        """Position of each row that is held, by key."""
        self.lost: dict[str, str] = {}
        """Keys that it holds no more without having committed them, and why."""
        self.done: set[str] = set()
        """Keys that it has committed."""
        self.holders: dict[str, set[int]] = {}
        """The clients, and the numbers of their requests."""
        self.lease_s = lease_s
        self.grouped = grouped
        self.at = at
        """When it was granted, in seconds of the store's clock."""
        self.share: tuple[int, int] | None = None
        """Of which batch and rank it is the share."""

    @property
    def claim_id(self) -> int:
        """Tells it from every other lease of the plane."""
        return self.granted.claim_id

    def expires_at(self, away: Mapping[str, float]) -> float | None:
        """When its term is over; None while any of its clients is there."""
        since = 0.0
        for client_id in self.holders:
            left = away.get(client_id)
            if left is None:
                return None
            since = max(since, left)
        return since + self.lease_s

    def chosen(
        self,
        keys: Sequence[str],
        partition_id: str,
        task: str,
        slots: Slots,
        *,
        commit: bool,
    ) -> list[str]:
        """The rows that a commit or a release is about. ClaimLost names all that it holds no more;
        InvalidRequest those that it never held, or that would be left of a group."""
        lost: dict[str, str] = {}
        strange: list[str] = []
        for key in keys:
            if key in self.rows:
                continue
            if key in self.lost:
                lost[key] = self.lost[key]
            elif key not in self.done:
                strange.append(key)
            elif not commit:
                lost[key] = COMMITTED
        if strange:
            raise InvalidRequest(
                f"claim {self.claim_id} of task {task!r} never held {quote(strange)}"
            )
        if lost:
            raise claim_lost(partition_id, task, self.claim_id, lost)
        chosen = [key for key in keys if key in self.rows]
        if self.grouped and len(chosen) < len(self.rows):
            self._check_whole(chosen, slots)
        return chosen

    def _check_whole(self, chosen: Iterable[str], slots: Slots) -> None:
        group_of = {key: _group_of(slots.at(position)) for key, position in self.rows.items()}
        groups = {group_of[key] for key in chosen} - {None}
        left = set(group_of).difference(chosen)
        torn = sorted(key for key in left if group_of[key] in groups)
        if torn:
            raise InvalidRequest(
                f"claim {self.claim_id} is of whole groups, and {quote(torn)} would be left of "
                "theirs: name all rows of a group or none"
            )


def _group_of(row: object) -> Group | None:
    account = row.account if type(row) is Row else None
    return account if type(account) is Group else None


class Holders:
    """Which clients hold which leases of a partition, and since when they are away."""

    def __init__(self) -> None:
        self.away: dict[str, float] = {}
        """Since when clients that hold something have had no connection, on the clock of leases."""
        self.leases: dict[str, dict[Lease, None]] = {}
        """What each client holds, oldest first."""

    def __contains__(self, client_id: object) -> bool:
        return client_id in self.leases

    def attached(self, client_id: str) -> None:
        """A client has a connection."""
        self.away.pop(client_id, None)

    def detached(self, client_id: str, lease_now: float) -> bool:
        """A client has no connection any more; whether the terms of any leases run now."""
        if client_id in self.leases:
            self.away.setdefault(client_id, lease_now)
        return client_id in self.leases

    def begin_anew(self, lease_now: float) -> None:
        """The terms of all who are away begin now."""
        self.away = dict.fromkeys(self.away, lease_now)

    def of(self, client_id: str) -> list[Lease]:
        """What a client holds, oldest first."""
        return list(self.leases.get(client_id, ()))

    def join(self, lease: Lease, client_id: str, number: int, away_since: float | None) -> None:
        """One more request holds the lease."""
        lease.holders.setdefault(client_id, set()).add(number)
        self.leases.setdefault(client_id, {})[lease] = None
        if away_since is not None:
            self.away.setdefault(client_id, away_since)

    def join_share(
        self, lease: Lease, client_id: str, number: int, away_since: float | None, lease_s: float
    ) -> None:
        """A request has got a rank's share: nobody holds that without having asked any more."""
        lease.lease_s = max(lease.lease_s, lease_s)
        self.join(lease, client_id, number, away_since)
        for holder in [c for c, numbers in lease.holders.items() if IMPLICIT in numbers]:
            self.leave(lease, holder, IMPLICIT)

    def leave_to_others(self, lease: Lease, client_id: str, number: int) -> None:
        """A request does not hold it any more, and it goes on: others hold it, or it is a share,
        which stays its rank's as it was before anybody had asked for it."""
        if len(lease.holders) == 1 and len(lease.holders[client_id]) == 1:
            self.join(lease, client_id, IMPLICIT, None)
        self.leave(lease, client_id, number)

    def leave(self, lease: Lease, client_id: str, number: int) -> None:
        """A request does not hold it any more."""
        numbers = lease.holders[client_id]
        numbers.discard(number)
        if not numbers:
            del lease.holders[client_id]
            self._forget(lease, client_id)

    def end(self, lease: Lease) -> None:
        """Nobody holds it any more."""
        for client_id in lease.holders:
            self._forget(lease, client_id)

    def _forget(self, lease: Lease, client_id: str) -> None:
        leases = self.leases[client_id]
        del leases[lease]
        if not leases:
            del self.leases[client_id]
            self.away.pop(client_id, None)

    def expired(self, lease_now: float) -> Iterator[Lease]:
        """The leases whose term is over, oldest client first; they may end meanwhile."""
        for client_id in list(self.away):
            for lease in self.of(client_id):
                at = lease.expires_at(self.away)
                if client_id in lease.holders and at is not None and at <= lease_now:
                    yield lease


def claim_lost(
    partition_id: str, task: str, claim_id: int, lost: Mapping[str, str] | None
) -> ClaimLost:
    """The error of a claim that does not hold these keys, with the reasons; None where nothing is
    known of the claim."""
    if lost is None:
        text = (
            f"task {task!r} of partition {partition_id!r} has no claim {claim_id} (any more): its "
            "lease ended and its rows were offered again, or it was ended before; claim again"
        )
        return ClaimLost(text, partition_id=partition_id, keys=[], task=task)
    reasons = " or ".join(sorted(set(lost.values())))
    text = (
        f"claim {claim_id} of task {task!r} does not hold {quote(lost)} of partition "
        f"{partition_id!r} any more ({reasons}); nothing was changed: claim.without(error.keys) is "
        "what is left of it"
    )
    return ClaimLost(text, partition_id=partition_id, keys=list(lost), task=task)
