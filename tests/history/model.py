"""A partition as it should be: the changes that clients asked for, made one after the other. Pure.

A model of its own: it shares nothing with the store that it is compared with.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tests.history.record import Begin, Clear, End, Fields, Get, List, Op, Put, Seal, Tags, has
from tests.history.words import Broken, tell


class Row(NamedTuple):
    """A row of the model."""

    fields: Fields
    tags: Tags
    life: int
    """Revision at which its key came to be: another one after a clear."""
    revision: int
    """Its last change."""
    attempt: int | None
    """The group that it belongs to."""


@dataclass(slots=True)
class State:
    """One partition from one revision on, until the next of its changes."""

    revision: int
    rows: dict[str, Row]
    open: dict[int, str]
    """Open attempts, and their uids."""
    uids: dict[int, str]
    """The uid of every attempt there was."""
    finished: frozenset[int] = frozenset()
    """Attempts that ended as finished."""
    sealed: bool = False

    def after(self, revision: int) -> State:
        """The same, to be changed by a revision."""
        return replace(self, revision=revision, rows=self.rows.copy(), open=self.open.copy())

    def group(self, attempt: int) -> dict[str, Row]:
        """The rows of a group."""
        return {key: row for key, row in self.rows.items() if row.attempt == attempt}


class Removal(NamedTuple):
    """Rows that a revision removed."""

    revision: int
    begin: int
    """When the call that removed them began."""
    keys: frozenset[str]


@dataclass(slots=True)
class Replay:
    """The model while changes are made in order."""

    states: dict[str, list[State]] = field(default_factory=dict[str, list[State]])
    removals: dict[str, list[Removal]] = field(default_factory=dict[str, list[Removal]])
    changed: dict[int, int] = field(default_factory=dict[int, int])
    """How many keys each revision changed."""

    def now(self, partition: str) -> State:
        states = self.states.get(partition)
        return states[-1] if states else State(0, {}, {}, {})

    def at(self, partition: str, revision: int) -> State | None:
        """The partition as it was at a revision; None before its first change."""
        states = self.states.get(partition, [])
        place = bisect_right(states, revision, key=lambda state: state.revision)
        return states[place - 1] if place else None

    def moments(self, partition: str, first: int, last: int) -> Sequence[State | None]:
        """The partition as it was at each moment between two revisions, both included."""
        states = self.states.get(partition, [])
        place = bisect_right(states, first, key=lambda state: state.revision)
        found: list[State | None] = [states[place - 1] if place else None]
        while place < len(states) and states[place].revision <= last:
            found.append(states[place])
            place += 1
        return found

    def apply(self, op: Op, n: int) -> None:
        """Make one change. Raises what is wrong with it."""
        before = self.now(op.partition)
        state = before.after(n)
        removed: Iterable[str] = ()
        if isinstance(op, Put):
            self._put(op, before, state)
        elif isinstance(op, Clear):
            removed = self._clear(op, before, state)
        elif isinstance(op, Begin):
            removed = self._begin(op, before, state)
        elif isinstance(op, End):
            self._end(op, state)
        else:
            assert isinstance(op, Seal)
            state.sealed = True
        self.states.setdefault(op.partition, []).append(state)
        before_and_after = before.rows.keys() | state.rows.keys()
        self.changed[n] = sum(
            before.rows.get(key) is not state.rows.get(key) for key in before_and_after
        )
        if removed:
            removal = Removal(n, op.begin, frozenset(removed))
            self.removals.setdefault(op.partition, []).append(removal)

    def _put(self, op: Put, before: State, state: State) -> None:
        n = state.revision
        if op.attempt is not None and op.attempt not in state.open:
            raise Broken("attempt", f"{tell(op)} at {n}: attempt {op.attempt} was closed")
        present = [key for key in op.keys if key in before.rows]
        if op.must_exist and len(present) < len(op.keys):
            raise Broken("condition", f"{tell(op)} at {n}: must_exist, but only {present} did")
        if op.if_absent and present:
            raise Broken("condition", f"{tell(op)} at {n}: if_absent, but {present} were there")
        if op.begun is not None:
            for removal in self.removals.get(op.partition, ()):
                late = removal.keys.intersection(op.keys)
                if late and removal.begin > op.begun:
                    raise Broken(
                        "late",
                        f"{tell(op)} at {n} had begun by {op.begun}, and the clear of "
                        f"{sorted(late)} at {removal.revision} was asked for at {removal.begin}",
                    )
        for i, key in enumerate(op.keys):
            row = state.rows.get(key) or Row({}, {}, n, n, None)
            fields = {**row.fields, **op.fields[i]} if op.fields is not None else row.fields
            tags = {**row.tags, **op.tags[i]} if op.tags is not None else row.tags
            attempt = row.attempt
            if op.attempt is not None and key != state.uids[op.attempt]:
                attempt = op.attempt
            state.rows[key] = Row(fields, tags, row.life, n, attempt)
        if op.merged is not None:
            merged = [state.rows[key].tags for key in op.keys]
            if merged != op.merged:
                raise Broken("effect", f"{tell(op)} at {n} made {merged}, and was told otherwise")

    def _clear(self, op: Clear, before: State, state: State) -> Iterable[str]:
        n = state.revision
        removed = removed_by(op, before)
        retired = retired_by(op, before)
        if not removed and not retired:
            raise Broken("order", f"{tell(op)} at {n}: there was nothing to clear")
        if op.ok and op.removed != len(removed):
            raise Broken("effect", f"{tell(op)} at {n}: there were {removed} to remove")
        for key in removed:
            del state.rows[key]
        for attempt in retired:
            del state.open[attempt]
        return removed

    def _begin(self, op: Begin, before: State, state: State) -> Iterable[str]:
        n = state.revision
        removed = [
            key
            for key, row in before.rows.items()
            if row.attempt is not None and before.uids[row.attempt] == op.uid
        ]
        for key in removed:
            del state.rows[key]
        state.open = {attempt: uid for attempt, uid in before.open.items() if uid != op.uid}
        state.open[n] = op.uid
        state.uids = {**before.uids, n: op.uid}
        row = state.rows.get(op.uid) or Row({}, {}, n, n, None)
        tags: Tags = {"is_prompt": True, "status": "running", "uid": op.uid, "n": op.n}
        tags["attempt"] = n
        state.rows[op.uid] = row._replace(tags={**row.tags, **tags}, revision=n)
        return removed

    def _end(self, op: End, state: State) -> None:
        n = state.revision
        if op.attempt not in state.open:
            raise Broken("attempt", f"{tell(op)} at {n}: the attempt was closed")
        uid = state.open.pop(op.attempt)
        if op.status == "finished":
            state.finished |= {op.attempt}
        row = state.rows.get(uid)
        if row is not None:
            state.rows[uid] = row._replace(tags={**row.tags, "status": op.status}, revision=n)


def removed_by(op: Clear, state: State) -> list[str]:
    """The rows that a clear removes."""
    if op.keys is not None:
        return [key for key in dict.fromkeys(op.keys) if key in state.rows]
    return [key for key, row in state.rows.items() if has(row.tags, op.where)]


def retired_by(op: Clear, state: State) -> list[int]:
    """The attempts that a clear closes."""
    if not op.retire:
        return []
    removed = removed_by(op, state)
    named = set(removed if op.keys is None else op.keys)
    of_rows = {state.rows[key].attempt for key in removed}
    return [a for a, uid in state.open.items() if uid in named or a in of_rows]


class Found(NamedTuple):
    """What a get finds."""

    rows: list[tuple[str, Fields]]
    missing: frozenset[str]
    """Keys that are not there."""
    lacking: frozenset[str]
    """Keys that are there and lack a field."""
    absent: frozenset[str]
    """The fields that these lack."""


def read_by(op: Get, state: State) -> Found:
    """What a get finds in a partition."""
    there = [key for key in op.keys if key in state.rows]
    names = op.fields
    if names is None:
        names = sorted({name for key in there for name in state.rows[key].fields})
    lacks = {key: set(names).difference(state.rows[key].fields) for key in there}
    rows = [
        (key, {name: state.rows[key].fields[name] for name in names})
        for key in there
        if not lacks[key]
    ]
    lacking = frozenset(key for key in there if lacks[key])
    absent = frozenset(name for key in lacking for name in lacks[key])
    return Found(rows, frozenset(op.keys).difference(there), lacking, absent)


def listed_by(op: List, state: State) -> dict[str, tuple[Tags, frozenset[str]]]:
    """What a listing finds in a partition."""
    return {
        key: (row.tags, frozenset(row.fields))
        for key, row in state.rows.items()
        if has(row.tags, op.where)
    }
