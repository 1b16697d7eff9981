"""One view: which rows of a partition match a condition, known after every change. Pure.

A view counts from its scan on; until then it only knows when something of its concern changed,
which is all that a watch needs. The scan goes in steps, and changes may come between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, Protocol

from dataplane.fields import LOST
from dataplane.tags.groups import FINISHED, Group
from dataplane.tags.layers import Layers
from dataplane.tags.query import Predicate
from dataplane.tags.rows import CHUNK_BITS, CHUNK_ROWS, Row
from dataplane.types import Scalar

_OFFSET: Final = CHUNK_ROWS - 1


class Condition(NamedTuple):
    """What a row has to be like; equal conditions are one view."""

    canonical: bytes
    """Its tags: a predicate in canonical spelling."""
    fields: frozenset[str]
    """Fields that all have to be produced."""
    grouped: bool
    """Whether it is about whole groups; rows that belong to none do not count then."""
    lost: bool = False
    """Whether rows count that are lost."""


def condition_of(
    predicate: Predicate, fields: frozenset[str], *, grouped: bool, lost: bool | None = None
) -> Condition:
    """The condition that a request describes. Rows that are lost count if it is about them, in
    that it names their tag, unless it is said here."""
    if lost is None:
        lost = predicate.names(LOST)
    return Condition(predicate.canonical, fields, grouped, lost)


class Subscriber(Protocol):
    """Somebody who follows a view row by row."""

    def gained(self, position: int, row: Row, /) -> None:
        """The row matches now: newly, or still after a change, and then it is another Row."""
        ...

    def lost(self, position: int, row: Row, /) -> None:
        """The row does not match any more; it is given as it was."""
        ...

    def whole(self, group: Group, /) -> None:
        """The group has ended as finished, and every row of it matches: newly, or still, with
        other rows than before."""
        ...

    def broken(self, group: Group, /) -> None:
        """The group was whole and is not any more."""
        ...


def produced(layers: Layers, fields: frozenset[str]) -> bool:
    """Whether a row of these layers has all of the fields."""
    if len(layers) == 2:
        return fields <= layers[0].template.name_set
    have = set[str]()
    for k in range(0, len(layers), 2):
        have |= layers[k].template.name_set
    return fields <= have


class View:
    """The rows of one partition that match one condition."""

    def __init__(self, condition: Condition, predicate: Predicate, revision: int) -> None:
        self.condition = condition
        self.predicate = predicate
        self.users = 0
        self.subscribers: list[Subscriber] = []
        self.count = 0
        """Rows that match."""
        self.matching: dict[int, set[int]] = {}
        """Which ones: by number of the chunk, their places in it. Only a view changes it."""
        self.groups: dict[Group, int] = {}
        """Matching rows of each group, where groups count."""
        self.whole: dict[Group, None] = {}
        """Whole groups in the order in which they became whole."""
        self.counting = False
        """Whether changes are counted: a scan has begun."""
        self.complete = False
        """Whether the scan is done, so that all of the above is true."""
        self.touched = revision
        """The last revision that may have changed a matching row, or may have made one match or
        not match. What was before the view was made may have."""
        self.term: tuple[str, Scalar] | None = None
        """The equality under which it is found."""
        self._held: set[int] = set()
        """Chunks whose places a Moment holds too."""

    @property
    def size(self) -> int:
        """How much there is to wait for: matching rows, or whole groups."""
        return len(self.whole) if self.condition.grouped else self.count

    def matches(self, row: Row) -> bool:
        """Whether a row is as the condition says."""
        tags = row.tags
        if not self.predicate.match(tags):
            return False
        _, fields, grouped, lost = self.condition
        if LOST in tags and not lost:
            return False
        if fields and not produced(row.layers, fields):
            return False
        if not grouped:
            return True
        group = row.account
        return type(group) is Group and row.key != group.uid

    def update(self, position: int, old: Row | None, new: Row | None) -> bool:
        """Take in what became of a slot; whether it concerns this view."""
        matches = new is not None and self.matches(new)
        matched = False
        if self.counting:
            offsets = self.matching.get(position >> CHUNK_BITS)
            matched = offsets is not None and position & _OFFSET in offsets
            if matches:
                assert new is not None
                self._take(position, new, old if matched else None)
            elif matched:
                assert old is not None
                self._drop(position, old)
        if matches or matched:
            return True
        # What the scan has not come to yet matched all the same.
        return not self.complete and old is not None and self.matches(old)

    def find(self, position: int, row: Row) -> None:
        """Take in a row that the scan came to; it may be here already."""
        offsets = self.matching.get(position >> CHUNK_BITS)
        if (offsets is None or position & _OFFSET not in offsets) and self.matches(row):
            self._take(position, row, None)

    def _take(self, position: int, row: Row, before: Row | None) -> None:
        """The row matches; `before` is the row that matched in its place."""
        if before is None:
            self._places(position >> CHUNK_BITS).add(position & _OFFSET)
            self.count += 1
        for subscriber in self.subscribers:
            subscriber.gained(position, row)
        if self.condition.grouped:
            left = None if before is None else before.account
            if left is not row.account:
                self._count(left, -1)
                self._count(row.account, 1)

    def _drop(self, position: int, row: Row) -> None:
        number = position >> CHUNK_BITS
        offsets = self._places(number)
        offsets.discard(position & _OFFSET)
        if not offsets:
            del self.matching[number]
        self.count -= 1
        for subscriber in self.subscribers:
            subscriber.lost(position, row)
        if self.condition.grouped:
            self._count(row.account, -1)

    def discard(self, number: int, gone: Mapping[int, Row], likely: Iterable[Row]) -> bool:
        """Take in that rows of a chunk are gone, given by their places in it; whether any of them
        concerns this view. Only those that are `likely` may match."""
        # What the scan has not come to yet matched all the same.
        concerned = not self.complete and any(map(self.matches, likely))
        offsets = self.matching.get(number)
        matched = None if offsets is None else offsets.intersection(gone)
        if not matched:
            return concerned
        left = self._places(number)
        left -= matched
        if not left:
            del self.matching[number]
        self.count -= len(matched)
        base = number << CHUNK_BITS
        for subscriber in self.subscribers:
            for offset in matched:
                subscriber.lost(base + offset, gone[offset])
        if self.condition.grouped:
            groups = Counter(gone[offset].account for offset in matched)
            for group, count in groups.items():
                assert type(group) is Group
                self._change_count(group, -count)
            for group in groups:
                assert type(group) is Group
                self.settle(group)
        return True

    def _places(self, number: int) -> set[int]:
        """The places in a chunk, to be changed."""
        offsets = self.matching.get(number)
        if offsets is None:
            offsets = self.matching[number] = set()
        elif number in self._held:
            offsets = self.matching[number] = offsets.copy()
        self._held.discard(number)
        return offsets

    def _count(self, group: object, by: int) -> None:
        if type(group) is Group:
            self._change_count(group, by)
            self.settle(group)

    def _change_count(self, group: Group, by: int) -> None:
        count = self.groups.get(group, 0) + by
        if count:
            self.groups[group] = count
        else:
            del self.groups[group]

    def settle(self, group: Group) -> bool:
        """Look whether the group is whole; whether that is news."""
        rows = len(group.positions)
        whole = group.status == FINISHED and 0 < rows == self.groups.get(group, 0)
        was = group in self.whole
        if whole:
            self.whole[group] = None
            # Told again where it stays whole: other rows than before may belong to it.
            for subscriber in self.subscribers:
                subscriber.whole(group)
        elif was:
            del self.whole[group]
            for subscriber in self.subscribers:
                subscriber.broken(group)
        return whole != was

    def hold(self) -> dict[int, set[int]]:
        """The matching places as they are now, for good."""
        self._held = set(self.matching)
        return self.matching.copy()
