"""Which revision was made when, roughly, for as long as the plane runs. Pure.

A moment is kept every so often; when there are too many, every second one goes and they are kept
half as often. What is asked for is answered on the safe side.
"""

from __future__ import annotations

from bisect import bisect_right

MAX_MOMENTS = 4096
FIRST_STEP_S = 0.5


class Moments:
    """Pairs of a revision and its time, both growing."""

    __slots__ = ("_at", "_last", "_n", "_step_s")

    def __init__(self) -> None:
        self._n: list[int] = []
        self._at: list[float] = []
        self._last = float("-inf")
        self._step_s = FIRST_STEP_S

    def note(self, n: int, at: float) -> None:
        """Revision n was made at a time. Cheap enough for every change."""
        if at - self._last < self._step_s:
            return
        self._last = at
        self._n.append(n)
        self._at.append(at)
        if len(self._n) > MAX_MOMENTS:
            del self._n[1::2]
            del self._at[1::2]
            self._step_s *= 2

    def made_at(self, n: int) -> float | None:
        """When revision n was made, or a step before; None if that is longer ago than is known."""
        i = bisect_right(self._n, n) - 1
        return self._at[i] if i >= 0 else None

    def revision_at(self, at: float) -> int:
        """A revision that was made by this time, at most a step older than the last such; 0 if none
        is known."""
        i = bisect_right(self._at, at) - 1
        return self._n[i] if i >= 0 else 0
