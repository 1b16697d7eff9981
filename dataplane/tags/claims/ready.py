"""Numbers in the order of their keys: what a queue has ready. Pure.

A heap that may be asked for its least entry and told to forget any other at once. Entries are
forgotten lazily, and so that nothing ever goes through all of them: they lie in small heaps, runs,
of which one more heap knows the least entry each.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any

RUN = 512
"""Entries of a run at most: no single step costs more than going through one."""

SHARD_BITS = 10

Key = tuple[Any, ...]


class _Run:
    __slots__ = ("entries", "live")

    def __init__(self) -> None:
        self.entries: list[Key] = []
        """A heap of (*key, number, which run)."""
        self.live = 0
        """Entries that were not taken out or replaced since."""


class Ready:
    """Distinct numbers, each with a key; the least key comes first, equal keys by number.

    Keys are tuples of one length that can be compared.
    """

    __slots__ = ("_entries", "_last", "_len", "_runs", "_tops")

    def __init__(self) -> None:
        self._entries: dict[int, dict[int, Key]] = {}
        """By number, in shards: one dictionary would stall the loop whenever it grows."""
        self._len = 0
        self._runs: dict[int, _Run] = {0: _Run()}
        """The newest one takes new entries. The least entry of each run is live."""
        self._tops: list[Key] = []
        """A heap with the least entry of each run, and some that are so no more."""
        self._last = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, number: int) -> bool:
        shard = self._entries.get(number >> SHARD_BITS)
        return shard is not None and number in shard

    def put(self, number: int, key: Key) -> None:
        """Add a number, or give it another key."""
        shard = self._entries.get(number >> SHARD_BITS)
        if shard is None:
            shard = self._entries[number >> SHARD_BITS] = {}
        old = shard.get(number)
        run = self._runs[self._last]
        if len(run.entries) >= RUN:
            self._last += 1
            run = self._runs[self._last] = _Run()
        entry = shard[number] = (*key, number, self._last)
        heappush(run.entries, entry)
        run.live += 1
        if run.entries[0] is entry:
            self._head(entry)
        if old is None:
            self._len += 1
        else:
            self._forget(old)

    def discard(self, number: int) -> None:
        """Take a number out, if it is there."""
        shard = self._entries.get(number >> SHARD_BITS)
        if shard is None:
            return
        entry = shard.pop(number, None)
        if entry is not None:
            if not shard:
                del self._entries[number >> SHARD_BITS]
            self._len -= 1
            self._forget(entry)

    def pop(self) -> int:
        """Take out the number with the least key. There is one."""
        while True:
            entry = self._tops[0]
            run = self._runs.get(entry[-1])
            if run is not None and run.entries and run.entries[0] is entry:
                break
            heappop(self._tops)
        number: int = entry[-2]
        self.discard(number)
        return number

    def _is_live(self, entry: Key) -> bool:
        shard = self._entries.get(entry[-2] >> SHARD_BITS)
        return shard is not None and shard.get(entry[-2]) is entry

    def _forget(self, entry: Key) -> None:
        """An entry is live no more."""
        which: int = entry[-1]
        run = self._runs[which]
        run.live -= 1
        if run.entries[0] is entry:
            self._trim(run)
        if which == self._last:
            if not run.live:
                run.entries.clear()
        elif not run.live:
            del self._runs[which]
        elif 4 * run.live < len(run.entries):
            del self._runs[which]
            for other in filter(self._is_live, run.entries):
                self._move(other)

    def _move(self, entry: Key) -> None:
        """An entry's run is gone: it goes to the newest one."""
        number: int = entry[-2]
        del self._entries[number >> SHARD_BITS][number]
        self._len -= 1
        self.put(number, entry[:-2])

    def _trim(self, run: _Run) -> None:
        """Let the least entry of a run be a live one."""
        heap = run.entries
        heappop(heap)
        while heap and not self._is_live(heap[0]):
            heappop(heap)
        if heap:
            self._head(heap[0])

    def _head(self, entry: Key) -> None:
        heappush(self._tops, entry)
        if len(self._tops) > 2 * len(self._runs) + RUN:
            self._tops = [run.entries[0] for run in self._runs.values() if run.entries]
            heapify(self._tops)
