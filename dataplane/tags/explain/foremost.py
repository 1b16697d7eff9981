"""The foremost few of ever so many, kept as they come. Pure."""

from __future__ import annotations

from heapq import heappush, heappushpop
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Foremost(Generic[Item]):
    """Keeps the items with the largest keys; among equals those that came first."""

    def __init__(self, limit: int) -> None:
        self.count = 0
        """Items that were offered."""
        self._limit = limit
        self._heap: list[tuple[Any, int, Item]] = []

    def offer(self, key: Any, item: Item) -> Item | None:
        """Keep it if it is among the foremost; what is dropped for it, or itself."""
        self.count += 1
        entry = (key, -self.count, item)
        if len(self._heap) < self._limit:
            heappush(self._heap, entry)
            return None
        return heappushpop(self._heap, entry)[2]

    @property
    def left_out(self) -> int:
        """How many were offered and are not kept."""
        return self.count - len(self._heap)

    def in_order(self) -> list[Item]:
        """The items, largest key first."""
        return [item for _, _, item in sorted(self._heap, reverse=True)]
