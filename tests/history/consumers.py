"""Whether claims, commits and releases are those of one correct plane. Pure.

Claims make no revision: each is of the revision that it was answered with. How often a row was
delivered to a task orders its claims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from dataplane.errors import ClaimLost, DeadlineExceeded
from tests.history.model import Replay, Row, State
from tests.history.record import Away, Claim, History, Op, Settle, has
from tests.history.words import Broken, revision_of, tell, tell_error


class Delivery(NamedTuple):
    """A row of a claim."""

    claim: Claim
    number: int
    """How often the task had been offered it, this time included."""


class Consumers:
    """Whether claims, commits and releases are those of one correct plane."""

    def __init__(
        self,
        history: History,
        replay: Replay,
        floors: Mapping[Op, int],
        ceilings: Mapping[Op, int],
    ) -> None:
        self._replay = replay
        self._floors = floors
        self._ceilings = ceilings
        self._away: dict[str, list[Away]] = {}
        for away in history.away:
            self._away.setdefault(away.client, []).append(away)
        self._claims = [op for op in history.ops if isinstance(op, Claim)]
        self._settles: dict[Claim, list[Settle]] = {}
        for op in history.ops:
            if isinstance(op, Settle):
                self._settles.setdefault(op.claim, []).append(op)
        self._lives: dict[Claim, dict[str, int]] = {}
        """Which life of its key each row of a claim is."""
        self._given: dict[tuple[str, str, str, int], list[Delivery]] = {}
        """Deliveries of each row: of partition, task, key and life."""

    def check(self) -> None:
        """Raise what is wrong."""
        for op in self._claims:
            if op.ok:
                self._check_offer(op)
        for row, deliveries in self._given.items():
            self._check_deliveries(row, sorted(deliveries, key=lambda given: given.number))
        for settles in self._settles.values():
            for op in settles:
                if op.ok:
                    self._check_settled(op)
                elif op.refused:
                    self._check_lost(op)
        for op in self._claims:
            if op.refused:
                self._check_waited(op)
            elif op.ok and op.last:
                self._check_last(op)

    def _check_offer(self, op: Claim) -> None:
        n = revision_of(op)
        state = self._replay.at(op.partition, n)
        assert state is not None
        lives = self._lives[op] = dict[str, int]()
        last = 0
        for key, tags, number in op.rows:
            row = state.rows.get(key)
            if row is None or not matches(op, row) or row.tags != tags or key in lives:
                raise Broken("offer", f"{tell(op)} got {key} {tags}, and at {n} it was {row}")
            if row.revision < last:
                raise Broken("offer", f"{tell(op)} got {key} of {row.revision} after one of {last}")
            last = row.revision
            lives[key] = row.life
            row_id = (op.partition, op.task, key, row.life)
            self._given.setdefault(row_id, []).append(Delivery(op, number))
        if op.grouped:
            self._check_whole(op, state)
        got = {row.attempt for key, row in state.rows.items() if key in lives}
        short = (len(got) if op.grouped else len(op.rows)) != op.count
        if (short and not state.sealed) or (not op.rows and not op.last):
            raise Broken("offer", f"{tell(op)} got {len(op.rows)} rows at {n}")

    def _check_whole(self, op: Claim, state: State) -> None:
        """Groups that ended as finished, with all of their rows side by side."""
        keys = [key for key, _, _ in op.rows]
        for attempt in {state.rows[key].attempt for key in keys}:
            of_group = [key for key in keys if state.rows[key].attempt == attempt]
            if (
                attempt not in state.finished
                or set(of_group) != set(state.group(attempt))
                or keys.index(of_group[-1]) - keys.index(of_group[0]) >= len(of_group)
            ):
                raise Broken("offer", f"{tell(op)} got {keys}: no whole group at {state.revision}")

    def _check_deliveries(
        self, row: tuple[str, str, str, int], deliveries: Sequence[Delivery]
    ) -> None:
        partition, task, key, life = row
        unsure = sum(
            op.end is None and (op.partition, op.task) == (partition, task) for op in self._claims
        )
        numbers = [given.number for given in deliveries]
        if numbers[0] < 1 or numbers[-1] > len(numbers) + unsure:
            raise Broken("offer", f"{key} of {life} was delivered to {task} {numbers} times")
        for (older, number), (newer, _) in pairwise(deliveries):
            both = f"{tell(older)} and {tell(newer)} both got {key} of {life}"
            if any(op.ok for op in self._ends(older, key, commit=True)):
                raise Broken("commit", f"{both}, and the first committed it")
            assert older.end is not None
            assert newer.end is not None
            if numbers.count(number) > 1 or newer.end < older.begin:
                raise Broken("holding", f"{both}, as numbers {numbers}")
            releases = self._ends(older, key, commit=False)
            if not (
                any(op.begin < newer.end and not op.refused for op in releases)
                or self._may_have_expired(older, newer.end)
            ):
                raise Broken("holding", f"{both}, and the first had not let go")

    def _ends(self, claim: Claim, key: str, *, commit: bool) -> list[Settle]:
        """The commits, or releases, of a row of a claim."""
        settles = self._settles.get(claim, ())
        return [op for op in settles if op.commit == commit and key in op.keys]

    def _may_have_expired(self, claim: Claim, by: int) -> bool:
        """Whether the lease of a claim can have ended before that."""
        return any(
            away.begin < by
            and away.seconds >= claim.lease_s
            and (away.end is None or away.end > claim.begin)
            for away in self._away.get(claim.client, ())
        )

    def _check_settled(self, op: Settle) -> None:
        n = revision_of(op)
        state = self._replay.at(op.partition, n)
        assert state is not None
        lives = self._lives[op.claim]
        for key in op.keys:
            row = state.rows.get(key)
            if row is None or row.life != lives[key]:
                raise Broken("commit", f"{tell(op)}: {key} of {lives[key]} was gone at {n}")

    def _check_lost(self, op: Settle) -> None:
        assert op.end is not None
        error = op.error
        if not isinstance(error, ClaimLost):
            raise Broken("refusal", f"{tell(op)}: no cause for {tell_error(error)}")
        named = set(error.keys)
        if named == set(op.keys) and self._may_have_expired(op.claim, op.end):
            return
        lives = self._lives[op.claim]
        for state in self._replay.moments(op.partition, self._floors[op], self._ceilings[op]):
            rows = {} if state is None else state.rows
            gone = {k for k in op.keys if k not in rows or rows[k].life != lives[k]}
            if gone == named:
                return
        raise Broken("loss", f"{tell(op)}: {error.keys} were not lost, or more than they")

    def _check_waited(self, op: Claim) -> None:
        if not isinstance(op.error, DeadlineExceeded):
            raise Broken("refusal", f"{tell(op)}: no cause for {tell_error(op.error)}")
        if op.alone:
            raise Broken("starving", f"{tell(op)} was alone, and waited in vain")

    def _check_last(self, op: Claim) -> None:
        assert op.end is not None
        state = self._replay.at(op.partition, revision_of(op))
        assert state is not None
        taken = {key for key, _, _ in op.rows}
        for key, row in state.rows.items():
            if key in taken or not matches(op, row):
                continue
            given = self._given.get((op.partition, op.task, key, row.life), ())
            done = any(
                settle.begin < op.end and not settle.refused
                for claim, _ in given
                for settle in self._ends(claim, key, commit=True)
            )
            if not done and not any(claim.client == op.client for claim, _ in given):
                raise Broken("starving", f"{tell(op)} was the last, and {key} was never committed")


def matches(op: Claim, row: Row) -> bool:
    """Whether a row is one that was asked for."""
    return has(row.tags, op.where) and set(op.fields) <= set(row.fields)
