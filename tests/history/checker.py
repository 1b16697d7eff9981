"""Decides whether a recorded history is legal: whether one correct plane could have told all that.

Pure. Every change of a plane has a revision of its own, so what clients were told gives the order
of the changes. The checker makes the changes again in that order on a model of its own, and
compares every answer with the model as it was at the answer's revision. A revision that nobody was
told of must be the effect of a call whose outcome nobody knows: all ways to assign those are
tried. Refusals carry no revision: each must have had its cause at some moment of its call.

What is found is named by its rule:

    order      changes have revisions of their own, all are accounted for, and they agree with time
    effect     a change did what it was told that it did: rows counted, tags merged
    read       a get or listing is the rows of one moment, whole, with their own values
    late       a put that began before a clear brings back no row that was cleared
    condition  must_exist and if_absent hold at the put's revision
    refusal    a call is refused for a cause that it had, and only then
    attempt    nothing is put for, or ended of, an attempt that is closed
    offer      a claimed row is there and matches, is told as it is, and comes in order
    holding    a row is held by at most one consumer of a task, until it lets go or its lease ends
    commit     a row is committed once, as what was claimed, and not offered to its task again
    loss       ClaimLost names exactly what was cleared or whose lease had ended
    starving   who claims alone is answered, with every row that is left
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tests.history.consumers import Consumers
from tests.history.model import Replay, listed_by, read_by, removed_by, retired_by
from tests.history.record import Begin, Clear, End, Get, History, List, Op, Put, Seal
from tests.history.refusals import Judge
from tests.history.words import Broken, Illegal, revision_of, tell

LATEST = 1 << 62


def check(history: History) -> Illegal | None:
    """What is wrong with a history; None if it is legal."""
    try:
        return Search(history).run()
    except Broken as broken:
        return broken.illegal


class Failure(NamedTuple):
    """Why one way to account for all changes fails, and how far it goes."""

    changes: int
    illegal: Illegal


class Search:
    """Tries the ways in which calls of unknown outcome may have had their effects."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._ops = history.ops
        self._floors: dict[Op, int] = {}
        """The plane's revision is this or a later one when the call is made."""
        self._ceilings: dict[Op, int] = {}
        """And this or an earlier one when its outcome is known."""
        self._known: dict[int, Op] = {}
        """Changes by the revision that they were told to have made."""
        self._maybe: list[Op] = []
        """Calls that may have made a change, once."""
        self._reads: dict[int, list[Op]] = {}
        """Answers to be compared with the model, by their revision."""

    def run(self) -> Illegal | None:
        self._sort()
        self._follow_time()
        found = self._extend({})
        return None if found is None else found.illegal

    def _sort(self) -> None:
        told: dict[int, Op] = {}
        for op in self._ops:
            if isinstance(op, Put | Begin | End | Clear | Seal) and not op.refused:
                if not op.ok:
                    self._maybe.append(op)
                elif isinstance(op, Clear) and not op.removed:
                    # Whether it closed an attempt it was not told.
                    self._reads.setdefault(revision_of(op), []).append(op)
                    if op.retire:
                        self._maybe.append(op)
                else:
                    n = revision_of(op)
                    if n in told:
                        raise Broken("order", f"{tell(told[n])} and {tell(op)} both made {n}")
                    if n <= self._history.first:
                        raise Broken("order", f"{tell(op)} is from before the history")
                    told[n] = op
            elif op.ok:
                self._reads.setdefault(revision_of(op), []).append(op)
        self._known = told

    def _follow_time(self) -> None:
        """What was known when a call was made is not later than it."""
        moments = sorted(
            [(op.begin, False, op) for op in self._ops]
            + [(op.end, True, op) for op in self._ops if op.end is not None],
            key=lambda moment: moment[:2],
        )
        plane = self._history.first
        of: dict[str, int] = {}
        """What was heard of each partition."""
        floor_of: dict[Op, int] = {}
        for _, ends, op in moments:
            if not ends:
                self._floors[op] = plane
                floor_of[op] = of.get(op.partition, 0)
            elif op.ok:
                n = revision_of(op)
                changes = self._known.get(n) is op
                if (n <= self._floors[op]) if changes else (n < floor_of[op]):
                    floor = self._floors[op] if changes else floor_of[op]
                    raise Broken(
                        "order",
                        f"{tell(op)} is of revision {n}, and {floor} was known before it was asked",
                    )
                plane = max(plane, n)
                of[op.partition] = max(of.get(op.partition, 0), n)
        ceiling = LATEST if self._history.last is None else self._history.last
        for _, ends, op in reversed(moments):
            if ends:
                self._ceilings[op] = ceiling
                if op.ok and revision_of(op) > ceiling:
                    raise Broken("order", f"{tell(op)} is of a revision that came after it")
            else:
                n = op.revision
                if n is not None and self._known.get(n) is op:
                    ceiling = min(ceiling, n - 1)

    def _extend(self, taken: Mapping[int, Op]) -> Failure | None:
        """What is wrong whatever else happened, given which calls made which revisions."""
        replay = Replay()
        try:
            gap = self._replay(replay, taken)
            if gap is None:
                self._leaf(replay, taken)
                return None
        except Broken as broken:
            return Failure(len(replay.changed), broken.illegal)
        furthest = Failure(0, Illegal("order", f"revision {gap} is the effect of no call"))
        for op in self._maybe:
            if op in taken.values() or self._floors[op] >= gap:
                continue
            if op.ok and revision_of(op) != gap:
                continue
            found = self._extend({**taken, gap: op})
            if found is None:
                return None
            furthest = max(furthest, found, key=lambda found: found.changes)
        return furthest

    def _replay(self, replay: Replay, taken: Mapping[int, Op]) -> int | None:
        """Make the changes up to the first revision that is nobody's yet; None if there is none."""
        last = self._history.last
        if last is None:
            last = max(self._known, default=self._history.first)
        for n in range(self._history.first + 1, last + 1):
            op = self._known.get(n) or taken.get(n)
            if op is None:
                return n
            replay.apply(op, n)
            for read in self._reads.get(n, ()):
                self._check_read(read, replay, taken)
        return None

    def _leaf(self, replay: Replay, taken: Mapping[int, Op]) -> None:
        for n, reads in self._reads.items():
            for read in reads:
                state = replay.at(read.partition, n)
                if state is None or state.revision != n:
                    raise Broken("order", f"{tell(read)}: {n} is no revision of its partition")
        judge = Judge(self._history, replay, self._floors, self._ceilings)
        for op in self._ops:
            if op.refused:
                judge.refusal(op)
        Consumers(self._history, replay, self._floors, self._ceilings).check()

    def _check_read(self, op: Op, replay: Replay, taken: Mapping[int, Op]) -> None:
        state = replay.now(op.partition)
        n = revision_of(op)
        if isinstance(op, Get):
            found = read_by(op, state)
            if (found.missing or found.lacking) and not op.drop:
                raise Broken("read", f"{tell(op)} at {n}: {found} was not there")
            if op.rows != found.rows:
                raise Broken("read", f"{tell(op)} is {op.rows}, and at {n} it was {found.rows}")
        elif isinstance(op, List):
            rows = listed_by(op, state)
            if op.rows != rows:
                raise Broken("read", f"{tell(op)} is {op.rows}, and at {n} it was {rows}")
        elif isinstance(op, Clear) and op not in taken.values():
            there = removed_by(op, state) or retired_by(op, state)
            if there:
                raise Broken("effect", f"{tell(op)} at {n} left {there}")
