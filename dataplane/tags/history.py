"""What changed, from a floor on: one bounded history of the whole tag store. Pure.

Listings since a revision, watches and the judging of late writes all read it. It forgets by
number of changed keys and by age, and says how far back it reaches (`floor`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


class Chain(Collection[Item], Generic[Item]):
    """Many lists as one collection, without copying them: a clear can have a million keys."""

    def __init__(self, parts: Sequence[Sequence[Item]]) -> None:
        self.parts = parts
        self._len = sum(map(len, parts))

    def __iter__(self) -> Iterator[Item]:
        return chain.from_iterable(self.parts)

    def __len__(self) -> int:
        return self._len

    def __contains__(self, item: object) -> bool:
        return any(item in part for part in self.parts)


class Change(NamedTuple):
    """The keys that one revision wrote or cleared in one partition."""

    n: int
    at: float
    """Seconds, of the clock that the store is told."""
    partition_id: str
    keys: Collection[str]
    positions: Collection[int] | None
    """Slots that a clear emptied, in step with `keys`; None for a write."""
    by: str = ""
    """The client that made the change; empty where the store made it itself."""


PAGE_CHANGES = 128

_n_of = attrgetter("n")


def _last_n(page: list[Change]) -> int:
    return page[-1].n


class _Log:
    """The changes of one partition, in pages: a reader that walks in slices keeps the pages, and
    need not copy a million changes to be safe from those that come and go meanwhile."""

    __slots__ = ("pages", "start")

    def __init__(self) -> None:
        self.pages: deque[list[Change]] = deque()
        self.start = 0
        """Where the oldest change is in the first page; those before it have expired."""

    def append(self, change: Change) -> None:
        if not self.pages or len(self.pages[-1]) == PAGE_CHANGES:
            self.pages.append([])
        self.pages[-1].append(change)

    def drop_oldest(self) -> None:
        self.start += 1
        if self.start == len(self.pages[0]):
            self.pages.popleft()
            self.start = 0


class History:
    """Changes newest last; `floor` is the last revision that it no longer covers."""

    def __init__(self, max_changes: int = 1_000_000, max_age_s: float = 600.0) -> None:
        self.max_changes = max_changes
        self.max_age_s = max_age_s
        self.floor = 0
        self.floor_at: float | None = None
        """When that revision was made, where it was made under this history's eyes."""
        self.size = 0
        """Changed keys held, a key counted once per change."""
        self._all: deque[Change] = deque()
        self._of: dict[str, _Log] = {}
        self._forgotten: dict[str, int] = {}

    def begin(self, partition_id: str) -> None:
        """A partition of this name is made. There may have been one before that is forgotten."""
        self._forgotten.setdefault(partition_id, self.floor)

    def forget(self, partition_id: str) -> None:
        """There is no partition of this name, nor any change of one: nothing is kept of it."""
        self._forgotten.pop(partition_id, None)

    def __iter__(self) -> Iterator[Change]:
        """All that it holds, oldest first."""
        return iter(self._all)

    @property
    def forgotten(self) -> Mapping[str, int]:
        """The last change of each partition that is not here any more. One that was quiet for
        longer than history reaches has missed nothing."""
        return self._forgotten

    def reach(self, floor: int, floor_at: float | None, forgotten: Mapping[str, int]) -> None:
        """Say how far back a history reaches whose changes came from elsewhere."""
        self.floor, self.floor_at = floor, floor_at
        self._forgotten = dict(forgotten)

    def append(self, change: Change) -> None:
        self._all.append(change)
        of = self._of.get(change.partition_id)
        if of is None:
            of = self._of[change.partition_id] = _Log()
        of.append(change)
        self.size += len(change.keys)

    def since(self, partition_id: str, n: int) -> Iterator[Change]:
        """Changes of the partition after revision n, newest first. n is not below the floor."""
        for page in self.pages_since(partition_id, n):
            for change in reversed(page):
                if change.n <= n:
                    return
                yield change

    def pages_since(self, partition_id: str, n: int) -> list[list[Change]]:
        """The same in pages, newest page first, oldest change of a page first. What happens to
        the history later does not show in them; changes up to n may."""
        of = self._of.get(partition_id)
        if of is None:
            return []
        pages: list[list[Change]] = []
        for page in reversed(of.pages):
            if page[-1].n <= n:
                break
            pages.append(page)
        if len(pages) == len(of.pages):
            pages[-1] = pages[-1][of.start :]
        if pages:
            pages[0] = pages[0].copy()  # the one that still grows
        return pages

    def made(self, partition_id: str, n: int) -> Change | None:
        """The change that made revision n of a partition; None where it is not (any more) here."""
        of = self._of.get(partition_id)
        if of is None:
            return None
        number = bisect_left(of.pages, n, key=_last_n)
        if number == len(of.pages):
            return None
        page = of.pages[number]
        at = bisect_left(page, n, 0 if number else of.start, key=_n_of)
        return page[at] if at < len(page) and page[at].n == n else None

    def covers(self, partition_id: str, n: int) -> bool:
        """Whether every change of the partition after revision n is still here."""
        return n >= self._forgotten.get(partition_id, 0)

    def expired(self, now: float) -> Change | None:
        """The oldest change, taken out because it is beyond the bounds; None if none is."""
        if not self._all:
            return None
        oldest = self._all[0]
        # The newest change always stays: a single one may be larger than the bound.
        if len(self._all) == 1 or (
            self.size <= self.max_changes and now - oldest.at <= self.max_age_s
        ):
            return None
        self._all.popleft()
        of = self._of[oldest.partition_id]
        of.drop_oldest()
        if not of.pages:
            del self._of[oldest.partition_id]
        self.size -= len(oldest.keys)
        self.floor = self._forgotten[oldest.partition_id] = oldest.n
        self.floor_at = oldest.at
        return oldest
