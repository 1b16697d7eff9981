"""What changed, from a floor on: one bounded history of the whole tag store. Pure.

Listings since a revision, watches and the judging of late writes all read it. It forgets by
number of changed keys and by age, and says how far back it reaches (`floor`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
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


class History:
    """Changes newest last; `floor` is the last revision that it no longer covers."""

    def __init__(self, max_changes: int = 1_000_000, max_age_s: float = 600.0) -> None:
        self.max_changes = max_changes
        self.max_age_s = max_age_s
        self.floor = 0
        self.size = 0
        """Changed keys held, a key counted once per change."""
        self._all: deque[Change] = deque()
        self._of: dict[str, deque[Change]] = {}

    def append(self, change: Change) -> None:
        self._all.append(change)
        of = self._of.get(change.partition_id)
        if of is None:
            of = self._of[change.partition_id] = deque()
        of.append(change)
        self.size += len(change.keys)

    def since(self, partition_id: str, n: int) -> Iterator[Change]:
        """Changes of the partition after revision n, newest first. n is not below the floor."""
        for change in reversed(self._of.get(partition_id, ())):
            if change.n <= n:
                return
            yield change

    def covers(self, n: int) -> bool:
        """Whether every change after revision n is still here."""
        return n >= self.floor

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
        of.popleft()
        if not of:
            del self._of[oldest.partition_id]
        self.size -= len(oldest.keys)
        self.floor = oldest.n
        return oldest
