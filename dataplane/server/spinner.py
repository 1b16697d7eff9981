"""Keeps an event loop awake for a moment after a request, where that pays."""

from __future__ import annotations

import asyncio
from time import perf_counter

SPIN_S = 50e-6
MAX_REST = 256
"""Requests after which a loop does not spin once spinning was in vain, at most."""
ALONE_AFTER = 16
"""Requests in a row that make a client the only one that is asking."""


class Spinner:
    """Looks for the next request of a client that asks one after the other.

    Falling asleep and being woken costs several times what a small request does. It looks only
    while one client alone is asking: where several are, requests queue by themselves and the core
    is better left to them. When nothing came while it looked, it looks more and more rarely.
    """

    __slots__ = ("_client", "_found", "_loop", "_pause", "_rest", "_spinning", "_until")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._client: object = None
        self._until = 0.0
        self._spinning = False
        self._found = False
        self._pause = 0
        self._rest = 0

    def served(self, client: object, /) -> None:
        """A request of this client was served just now."""
        if client is not self._client:
            self._client = client
            self._rest = max(self._rest, ALONE_AFTER)
            self._until = 0.0
        elif self._spinning:
            self._found = True
            self._until = perf_counter() + SPIN_S
        elif self._rest:
            self._rest -= 1
        else:
            self._spinning = True
            self._found = False
            self._until = perf_counter() + SPIN_S
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        if perf_counter() < self._until:
            self._loop.call_soon(self._look)
            return
        self._spinning = False
        self._pause = 0 if self._found else min(2 * self._pause + 4, MAX_REST)
        self._rest = self._pause
