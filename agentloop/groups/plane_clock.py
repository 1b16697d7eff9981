"""How long a process was busy with calls of the plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager


class PlaneClock:
    """Adds up the seconds in which at least one call is under way; of one event loop.

    Calls that overlap count once: a hundred sessions that publish at the same time for a second
    are one second. Waits for admission are no calls: a group waits there for room, which says
    nothing about the plane.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._under_way = 0
        self._since = 0.0
        self._total_s = 0.0

    @contextmanager
    def call(self) -> Generator[None]:
        """For as long as a call, or several in a row, are under way."""
        if not self._under_way:
            self._since = self._now()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._total_s += self._now() - self._since

    @property
    def seconds(self) -> float:
        """So far, what is under way included."""
        return self._total_s + (self._now() - self._since if self._under_way else 0.0)


def busiest(before: Mapping[object, float], after: Mapping[object, float]) -> float:
    """The most that any clock went on; one that is new began at 0.

    Example: busiest({"a": 1.0}, {"a": 1.5, "b": 0.7}) == 0.7.
    """
    return max((seconds - before.get(name, 0.0) for name, seconds in after.items()), default=0.0)
