"""How long requests take, by verb: plain numbers, counted where requests are answered.

Owns what a server pays for metrics: one entry in a dict when a request comes, and when it is
answered two look-ups and three additions. All else is read when somebody asks (tag_store.py,
value_store.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container
from time import perf_counter
from typing import Final

BOUNDS_S: Final = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 1.0, 5.0,
    30.0, 120.0, 600.0,
)  # fmt: skip
"""Upper bounds of buckets: a small put takes tens of microseconds, a wait minutes."""
UNKNOWN: Final = "unknown"
"""Stands for all verbs that a server does not have: whoever calls may make up any number."""

Begun = dict[int, tuple[str, float]]
"""Requests of one connection that are not answered, by number: verb, and when it came, on the clock
of `perf_counter`."""


class Histogram:
    """How many durations were at most so long, and their sum."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """By bucket; the last is for what is longer than all bounds."""
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def copy(self) -> Histogram:
        """The same at this moment."""
        other = Histogram()
        other.counts, other.sum_s = self.counts.copy(), self.sum_s
        return other


class Meter:
    """What the connections of one server measure. Of one event loop."""

    def __init__(self, verbs: Container[str], more: Container[str] = ()) -> None:
        """`verbs`: those that the server has, now or later, and `more`; all others are one."""
        self._verbs, self._more = verbs, more
        self.durations: dict[str, Histogram] = {}
        self.failures: dict[tuple[str, str], int] = {}
        """By verb and class of the error."""
        self.abandoned: dict[str, int] = {}
        """Requests whose connection ended before they were answered."""

    def end(self, begun: Begun, number: int) -> None:
        """A request is answered."""
        entry = begun.pop(number, None)
        if entry is None:
            return
        verb, came = entry
        histogram = self.durations.get(verb)
        if histogram is None:
            histogram = self.durations.setdefault(self.label(verb), Histogram())
        # As `Histogram.add`, whose call would be a good part of the cost.
        seconds = perf_counter() - came
        histogram.counts[bisect_left(BOUNDS_S, seconds)] += 1
        histogram.sum_s += seconds

    def fail(self, begun: Begun, number: int, error: BaseException) -> None:
        """It is answered with an error."""
        entry = begun.get(number)
        if entry is not None:
            key = self.label(entry[0]), type(error).__name__
            self.failures[key] = self.failures.get(key, 0) + 1
            self.end(begun, number)

    def abandon(self, begun: Begun) -> None:
        """The connection ended: these are never answered."""
        for verb, _ in begun.values():
            label = self.label(verb)
            self.abandoned[label] = self.abandoned.get(label, 0) + 1
        begun.clear()

    def label(self, verb: str) -> str:
        """The verb, if the server has it."""
        return verb if verb in self._verbs or verb in self._more else UNKNOWN
