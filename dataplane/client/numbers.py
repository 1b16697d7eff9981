"""Numbers of one client's requests. No I/O; imports nothing that producers outside have not."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

MAX_UNKNOWN: Final = 64
"""Requests of unknown outcome that a client keeps to be asked for."""
UNKNOWN_FOR: Final = 16_384
"""Requests for which one is kept: what is answered after it is remembered as long as it is."""


class RequestNumbers:
    """Numbers of the requests of one client, and up to which all of them are settled."""

    def __init__(self, last: int = 0, unsettled: Iterable[int] = ()) -> None:
        """`last`: the highest number that may have been used before; `unsettled`: those of them
        that will be asked again."""
        self._lock = threading.Lock()
        self._last = last
        self._open: set[int] = set(unsettled)
        self._unknown: dict[int, None] = {}
        """Requests whose outcome may still be asked for, the oldest first."""

    def begin(self) -> tuple[int, int]:
        """A new number, and the highest below which none is open."""
        with self._lock:
            number = self._last = self._last + 1
            settled = self._settled(number)
            self._open.add(number)
        return number, settled

    def settled(self, number: int) -> int:
        """The same for a number that is open, now that it is asked again."""
        with self._lock:
            return min(self._settled(number), number - 1)

    def end(self, number: int) -> None:
        """The request's outcome is known to its caller, or given up."""
        with self._lock:
            self._open.discard(number)

    def keep(self, number: int) -> None:
        """Nobody knows the request's outcome, which may be asked for: the store is to remember it
        until it is `told`, or for so many requests to come."""
        with self._lock:
            self._unknown[number] = None

    def told(self, number: int) -> None:
        """The outcome of a kept request is known now."""
        with self._lock:
            self._unknown.pop(number, None)

    def _settled(self, number: int) -> int:
        settled = (min(self._open) if self._open else number) - 1
        if self._unknown:
            oldest = next(iter(self._unknown))
            if len(self._unknown) > MAX_UNKNOWN or number - oldest > UNKNOWN_FOR:
                del self._unknown[oldest]
            settled = min([settled, *(unknown - 1 for unknown in self._unknown)])
        return settled


class ClaimNumbers:
    """Numbers of one client's claims, apart from its other requests: a claim may wait for minutes,
    and what is asked meanwhile would count as unsettled for as long."""

    def __init__(self, last: int = 0) -> None:
        """`last`: the highest number that an earlier client of the same id may have used."""
        self._lock = threading.Lock()
        self._last = last
        self._abandoned: set[int] = set()

    def begin(self) -> tuple[int, list[int]]:
        """A new number, and those whose callers gave up before they were answered."""
        with self._lock:
            self._last += 1
            return self._last, sorted(self._abandoned)

    def abandon(self, number: int) -> None:
        """The caller waits no longer; something may have been granted all the same."""
        with self._lock:
            self._abandoned.add(number)

    def told(self, numbers: list[int]) -> None:
        """The tag store knows that these were given up."""
        with self._lock:
            self._abandoned.difference_update(numbers)
