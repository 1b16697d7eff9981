"""Whether calls that were refused had a cause for it at some moment of their time. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from dataplane.errors import (
    AlreadyWritten,
    DataplaneError,
    FieldNotFound,
    KeyNotFound,
    PartitionNotFound,
    StaleWrite,
)
from tests.history.model import Replay, Row, State, read_by
from tests.history.record import Claim, Clear, End, Get, History, List, Op, Put, Seal, Settle
from tests.history.words import Broken, tell, tell_error

GET_TRIES = 3
"""A get that meets changed rows so often gives up."""


class Judge:
    """Whether refused calls had a cause."""

    def __init__(
        self,
        history: History,
        replay: Replay,
        floors: Mapping[Op, int],
        ceilings: Mapping[Op, int],
    ) -> None:
        self._kept = history.kept
        self._first = history.first
        self._replay = replay
        self._floors = floors
        self._ceilings = ceilings

    def refusal(self, op: Op) -> None:
        """Raise if a refused call had no cause for it."""
        if isinstance(op, Claim | Settle):
            return  # by those who know of claims
        error = op.error
        assert error is not None
        if not self._has_cause(op, error):
            raise Broken(
                "refusal",
                f"{tell(op)}: no cause for {tell_error(error)} from revision {self._floors[op]} to "
                f"{self._ceilings[op]}",
            )

    def _has_cause(self, op: Op, error: DataplaneError) -> bool:
        if isinstance(error, PartitionNotFound):
            return isinstance(op, Clear | Get | List | Seal) and any(
                s is None for s in self._moments(op)
            )
        if isinstance(op, Put):
            return self._put_has_cause(op, error)
        if isinstance(op, Get):
            return self._get_has_cause(op, error)
        if isinstance(op, End) and isinstance(error, StaleWrite):
            return error.attempt == op.attempt and self._was_closed(op, op.attempt)
        return False

    def _put_has_cause(self, op: Put, error: DataplaneError) -> bool:
        if isinstance(error, StaleWrite) and error.attempt is not None:
            return error.attempt == op.attempt and self._was_closed(op, error.attempt)
        if isinstance(error, StaleWrite):
            return self._was_cleared(op, error)
        if isinstance(error, KeyNotFound):
            return op.must_exist and any(
                set(error.keys) == {key for key in op.keys if key not in rows}
                for rows in self._rows(op)
            )
        if isinstance(error, AlreadyWritten):
            return op.if_absent and any(
                set(error.keys) == {key for key in op.keys if key in rows}
                for rows in self._rows(op)
            )
        return False

    def _was_cleared(self, op: Put, error: StaleWrite) -> bool:
        """Whether the keys that a put is refused for were cleared after it began."""
        # Asked again, it is judged from what its client had seen.
        since = min(self._floors[op], op.seen) if op.broken else self._floors[op]
        if error.cleared_at is None:
            return self._was_forgotten(op, since)
        cleared = {
            removal.revision: removal.keys.intersection(op.keys)
            for removal in self._replay.removals.get(op.partition, ())
            if since < removal.revision <= self._ceilings[op]
        }
        named = set(error.keys)
        return (
            bool(named)
            and named <= set().union(*cleared.values())
            and not named.isdisjoint(cleared.get(error.cleared_at, ()))
        )

    def _was_forgotten(self, op: Put, since: int) -> bool:
        """Whether so much changed since a put began that it cannot be judged any more."""
        if self._kept is None:
            return False
        changed = sum(
            count for n, count in self._replay.changed.items() if since < n <= self._ceilings[op]
        )
        # What changed before the history is not known.
        return since < self._first or changed >= self._kept

    def _get_has_cause(self, op: Get, error: DataplaneError) -> bool:
        for state in self._moments(op):
            found = read_by(op, state or State(0, {}, {}, {}))
            if isinstance(error, KeyNotFound) and not op.drop:
                if found.missing and found.missing == frozenset(error.keys):
                    return True
            elif isinstance(error, FieldNotFound) and not op.drop:
                told = frozenset(error.keys), frozenset(error.fields)
                if not found.missing and error.keys and told == (found.lacking, found.absent):
                    return True
        return isinstance(error, KeyNotFound) and self._was_overtaken(op, set(error.keys))

    def _was_overtaken(self, op: Get, named: set[str]) -> bool:
        """Whether rows changed under a get so often that it gave up."""
        states = self._moments(op)
        changed: list[set[str]] = []
        for older, newer in pairwise(states):
            before = older.rows if older is not None else {}
            after = newer.rows if newer is not None else {}
            keys = {key for key in op.keys if before.get(key) is not after.get(key)}
            if keys:
                changed.append(keys)
        # A connection that breaks costs it a try too.
        tries = max(1, GET_TRIES - op.broken)
        return len(changed) >= tries and bool(named) and named <= set().union(*changed)

    def _was_closed(self, op: Op, attempt: int) -> bool:
        return any(state is None or attempt not in state.open for state in self._moments(op))

    def _moments(self, op: Op) -> Sequence[State | None]:
        return self._replay.moments(op.partition, self._floors[op], self._ceilings[op])

    def _rows(self, op: Op) -> Iterator[Mapping[str, Row]]:
        for state in self._moments(op):
            yield {} if state is None else state.rows
