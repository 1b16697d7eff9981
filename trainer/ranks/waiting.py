"""How long a training thread stood still for the plane, while other threads called it."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

Span = tuple[float, float]


class PlaneTime:
    """Calls of the plane and waits for their results, each as a stretch of time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the calls, which several threads make
        self._calls: list[Span] = []
        self._waits: list[Span] = []

    @contextmanager
    def call(self) -> Generator[None]:
        """Around a call of the plane, in any thread."""
        began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._calls.append((began, time.monotonic()))

    @contextmanager
    def wait(self) -> Generator[None]:
        """Around what the training thread waits for."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waits.append((began, time.monotonic()))

    def seconds(self) -> float:
        """Time of waits in which a call was under way; what else they waited for does not count."""
        with self._lock:
            calls = list(self._calls)
        return overlap(self._waits, calls)


def overlap(waits: list[Span], calls: list[Span]) -> float:
    """How long at least one of each was under way.

    Example: waits (0, 4), (6, 8) and calls (1, 2), (1, 3), (7, 9) overlap for 3 seconds.
    """
    marks = [(at, kind, step) for kind, spans in enumerate((waits, calls))
             for span in spans for at, step in zip(span, (1, -1), strict=True)]  # fmt: skip
    open_now = [0, 0]
    total = last = 0.0
    for at, kind, step in sorted(marks):
        if open_now[0] and open_now[1]:
            total += at - last
        open_now[kind] += step
        last = at
    return total
