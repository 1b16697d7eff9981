"""Views of a partition: conditions that somebody follows, each evaluated once per change. Pure.

Equal conditions share one view. A view is found by one equality that its predicate demands: a
change costs the same however many keys there are and however many views look for other values.
Nothing is decided here: who waits or claims looks at a view, or subscribes to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from dataplane.tags.groups import Group
from dataplane.tags.query import Predicate
from dataplane.tags.rows import CHUNK_BITS, CHUNK_ROWS, Chunk, Row
from dataplane.tags.views.moment import Moment
from dataplane.tags.views.view import Condition, View, condition_of, produced
from dataplane.types import Scalar, TagValue

if TYPE_CHECKING:
    from dataplane.tags.partition import Partition

__all__ = ["Condition", "View", "Views", "condition_of", "produced"]

MAX_IDLE = 16
"""Views that nobody uses and that are kept up to date for the next one who asks the same."""
SCAN_STEP = 256
"""Rows looked at in one step of a scan."""

_OFFSET: Final = CHUNK_ROWS - 1
_ABSENT: Final = object()
_UNHASHABLE: Final = (list, dict)


class Views:
    """All views of one partition."""

    def __init__(self, partition: Partition) -> None:
        self.active = False
        """Whether there is any view that has to hear of changes."""
        self._of = ref(partition)
        """Weak: a partition that is dropped goes at once, with all of its rows. Servers freeze
        what survives, so nothing else would ever free a circle of it."""
        self._views: dict[Condition, View] = {}
        self._idle: dict[View, None] = {}
        """Those that nobody uses, the one used last at the end."""
        self._found_by: dict[str, dict[Scalar, dict[View, None]]] = {}
        """Views by the tag and the value of their term."""
        self._others: dict[View, None] = {}
        """Views without one: they look at every change."""
        self._grouped: dict[View, None] = {}
        self._stirred: dict[View, int] = {}

    def __len__(self) -> int:
        return len(self._views)

    @property
    def _partition(self) -> Partition:
        partition = self._of()
        assert partition is not None
        return partition

    # -- coming and going --------------------------------------------------------------------

    def open(self, condition: Condition, predicate: Predicate) -> View:
        """The view of a condition, for one more user. Whoever needs it complete scans it."""
        view = self._views.get(condition)
        if view is None:
            view = View(condition, predicate, self._partition.revision)
            self._views[condition] = view
            self._enter(view)
        self._idle.pop(view, None)
        view.users += 1
        return view

    def close(self, view: View) -> None:
        """A user needs the view no longer."""
        view.users -= 1
        if view.users:
            return
        if view.counting:
            self._idle[view] = None
        else:
            self._leave(view)  # as good as new: there is nothing to keep
        while len(self._idle) > MAX_IDLE:
            self._leave(next(iter(self._idle)))

    def _enter(self, view: View) -> None:
        self.active = True
        view.term = self._best(view.predicate.terms)
        if view.term is None:
            self._others[view] = None
        else:
            tag, value = view.term
            self._found_by.setdefault(tag, {}).setdefault(value, {})[view] = None
        if view.condition.grouped:
            self._grouped[view] = None

    def _best(self, terms: Sequence[tuple[str, Scalar]]) -> tuple[str, Scalar] | None:
        """The term that the fewest views are found by: what all of them ask for tells least."""

        def crowd(term: tuple[str, Scalar]) -> tuple[int, int]:
            by_value = self._found_by.get(term[0], {})
            return len(by_value.get(term[1], ())), -len(by_value)

        return min(terms, key=crowd, default=None)

    def _leave(self, view: View) -> None:
        self._idle.pop(view, None)
        self._stirred.pop(view, None)
        self._grouped.pop(view, None)
        del self._views[view.condition]
        self.active = bool(self._views)
        if view.term is None:
            del self._others[view]
            return
        tag, value = view.term
        by_value = self._found_by[tag]
        del by_value[value][view]
        if not by_value[value]:
            del by_value[value]
        if not by_value:
            del self._found_by[tag]

    # -- scanning ----------------------------------------------------------------------------

    def scan(self, view: View) -> Iterator[None]:
        """Make a view complete, step by step. Several scans of one view do no harm."""
        if view.complete:
            return
        view.counting = True
        slots, match = self._partition.slots, view.predicate.match
        # Chunks that are added meanwhile hold rows that came as changes.
        for number in range(len(slots.chunks)):
            for start in range(0, CHUNK_ROWS, SCAN_STEP):
                chunk = slots.chunks[number]
                if chunk is None or not chunk.live or start >= len(chunk.rows):
                    break
                base = (number << CHUNK_BITS) + start
                # Most rows of a partition are none of a view's: the first look is a short one.
                for place, slot in enumerate(chunk.rows[start : start + SCAN_STEP], base):
                    if type(slot) is Row and match(slot.tags):
                        view.find(place, slot)
                yield
                if view.complete or self._views.get(view.condition) is not view:
                    return
        view.complete = True

    # -- changes -----------------------------------------------------------------------------

    def changed(self, position: int, old: Row | None, new: Row | None, revision: int) -> None:
        """A slot holds another row than before, or none any more."""
        for view in self._others:
            self._update(view, position, old, new, revision)
        for tag, by_value in self._found_by.items():
            now = None if new is None else _views_of(by_value, tag, new.tags)
            was = None if old is None else _views_of(by_value, tag, old.tags)
            if now is not None:
                for view in now:
                    self._update(view, position, old, new, revision)
            if was is not None and was is not now:
                for view in was:
                    self._update(view, position, old, new, revision)
        if self._grouped and old is not None and new is not None:
            left = old.account
            if left is not new.account and type(left) is Group:
                # It may have become whole by letting go of a row that no view found.
                for view in self._grouped:
                    self._touch(view, revision)

    def cleared(self, rows: Sequence[Row], positions: Iterable[int], revision: int) -> None:
        """Rows are gone, all at one revision: as `changed` of each of them, but a view takes a
        whole chunk at once. The groups of the rows have let go of them already."""
        chunks: dict[int, dict[int, Row]] = {}
        for position, row in zip(positions, rows, strict=True):
            chunks.setdefault(position >> CHUNK_BITS, {})[position & _OFFSET] = row
        for number, gone in chunks.items():
            for view in self._others:
                self._discard(view, number, gone, gone.values(), revision)
            for tag, by_value in self._found_by.items():
                likely: dict[Scalar, list[Row]] = {}
                for row in gone.values():
                    value: Any = row.tags.get(tag, _ABSENT)
                    if value.__class__ not in _UNHASHABLE and value in by_value:
                        likely.setdefault(value, []).append(row)
                for value, some in likely.items():
                    for view in by_value[value]:
                        self._discard(view, number, gone, some, revision)

    def _discard(
        self,
        view: View,
        number: int,
        gone: Mapping[int, Row],
        likely: Iterable[Row],
        revision: int,
    ) -> None:
        if (view.counting or view.touched != revision) and view.discard(number, gone, likely):
            self._touch(view, revision)

    def _update(
        self, view: View, position: int, old: Row | None, new: Row | None, revision: int
    ) -> None:
        # A view that does not count has nothing more to learn of a revision that concerns it.
        if (view.counting or view.touched != revision) and view.update(position, old, new):
            self._touch(view, revision)

    def _touch(self, view: View, revision: int) -> None:
        view.touched = revision
        self._stirred.setdefault(view, revision)

    def group_changed(self, group: Group) -> None:
        """A group took another status, or other rows than before belong to it."""
        for view in self._grouped:
            if view.settle(group) or not view.complete:
                self._touch(view, self._partition.revision)

    def take_stirred(self) -> dict[View, int]:
        """The views that changes concerned since this was asked last, with the first revision
        that did."""
        stirred, self._stirred = self._stirred, {}
        return stirred

    # -- reading -----------------------------------------------------------------------------

    def moment(self, view: View) -> Moment:
        """The rows of a complete view as they are now, for good: of whole groups, if it is about
        those."""
        chunks = self._partition.slots.chunks
        parts: list[tuple[Chunk, Collection[int] | None]] = []
        for number, offsets in sorted(view.hold().items()):
            chunk = chunks[number]
            assert chunk is not None
            chunk.frozen = True
            parts.append((chunk, offsets))
        if not view.condition.grouped:
            return Moment(self._partition.revision, parts)
        whole: set[object] = set(view.whole)
        return Moment(self._partition.revision, parts, lambda row: row.account in whole)


def _views_of(
    by_value: Mapping[Scalar, dict[View, None]], tag: str, tags: Mapping[str, TagValue]
) -> dict[View, None] | None:
    value: Any = tags.get(tag, _ABSENT)
    return None if value.__class__ in _UNHASHABLE else by_value.get(value)
