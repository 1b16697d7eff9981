"""What a watch tells of history: runs of whole revisions, as small as they can be. Pure.

Of a row only its last state is kept. A key that changed at revision 3 and again at 7 can therefore
be told only as it was at 7, and with it everything from 3 to 7 that other keys did; so those
revisions are told together, in one span, and what lies before or after them in others.

Example: a put of a and b, then of c, then of b again, then of d, are two spans: the first three
puts (rows a, b, c), then the last (d).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from dataplane.tags.history import Change
from dataplane.tags.partition import Partition
from dataplane.tags.rows import SHARDS, KeyIndex, Row, Slot, Tombstone

STEP_KEYS = 256
"""Keys looked at in one step."""


class Seen:
    """Stands for a key that was asked for before."""


SEEN: Final = Seen()

Lookup: TypeAlias = Callable[[str], "Slot | Seen"]
"""What the slot of a key holds at the moment that is told of, None where nothing is known of it;
SEEN if this is not the first time that it is asked for the key."""


class Span(NamedTuple):
    """The net effect of a run of whole revisions, each key once, in the order of their first change
    in it."""

    revision: int
    """The last of them."""
    rows: list[Row]
    """Rows that were written and are there."""
    cleared: list[str]
    """Keys that are gone."""


def spans(changes: Iterable[Change], look: Lookup) -> Iterator[Span | None]:
    """The smallest spans that tell of these changes, which are in the order of their revisions.

    All looks are into one moment, which lies after the changes. Yields None after a step that
    ended no span.
    """
    rows: list[Row] = []
    cleared: list[str] = []
    end = steps = 0
    for change in changes:
        if change.n > end:
            if rows or cleared:
                yield Span(end, rows, cleared)
                rows, cleared = [], []
            end = change.n
        for key in change.keys:
            slot = look(key)
            if slot is not SEEN:  # all changes of a key are told in one span
                if type(slot) is Row:
                    rows.append(slot)
                    end = max(end, slot.revision)
                else:
                    cleared.append(key)
                    if type(slot) is Tombstone:
                        end = max(end, slot.revision)
            steps += 1
            if not steps % STEP_KEYS:
                yield None
    if rows or cleared:
        yield Span(end, rows, cleared)


def first_spans(changes: Iterable[Change], look: Lookup, limit: int) -> tuple[list[Span], bool]:
    """The spans among the first changes, of which at most `limit` keys are looked at; and whether
    those are all. Nothing comes back if the first span is larger than that.
    """
    taken: list[Change] = []
    following: Change | None = None
    count = 0
    for change in changes:
        count += len(change.keys)
        if count > limit:
            following = change
            break
        taken.append(change)
    found = [span for span in spans(taken, look) if span is not None]
    if following is None:
        return found, True
    if found and found[-1].revision >= following.n:
        found.pop()  # more belongs to it
    return found, False


class Present:
    """The keys of a partition as they are, for a look that is over before anything changes."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._seen: set[str] = set()

    def look(self, key: str) -> Slot | Seen:
        """What the slot of a key holds."""
        if key in self._seen:
            return SEEN
        self._seen.add(key)
        position = self._partition.index.get(key)
        return None if position is None else self._partition.slots.at(position)


class Latest:
    """What became of the keys that changed in a partition, as of one moment.

    For more of them than can be looked at in one go: it is filled in steps, from the rows of a cut
    and from the pages of history up to that cut, and empties as it is looked into.
    """

    def __init__(self) -> None:
        self._slots: list[Row | Tombstone] = []
        self._index = KeyIndex()

    def look(self, key: str) -> Slot | Seen:
        """What the slot of a key held."""
        place = self._index.shards[hash(key) & (SHARDS - 1)].pop(key, None)
        return SEEN if place is None else self._slots[place]

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Rows that were there. All of them come before `add_gone`."""
        for row in rows:
            self._index.set(row.key, len(self._slots))
            self._slots.append(row)

    def add_gone(self, pages: Iterable[Sequence[Change]], after: int) -> Iterator[None]:
        """Keys that changed after a revision and were not there, step by step. Pages come newest
        first, and their changes oldest first."""
        steps = 0
        for page in pages:
            for change in reversed(page):
                if change.n <= after:
                    return
                tombstone = Tombstone(change.n)
                for key in change.keys:
                    if self._index.get(key) is None:
                        self._index.set(key, len(self._slots))
                        self._slots.append(tombstone)
                    steps += 1
                    if not steps % STEP_KEYS:
                        yield
