"""Keeps an event loop awake for a moment after each request, where that pays."""

from __future__ import annotations

import asyncio
from time import perf_counter

SPIN_S = 50e-6
MAX_REST = 256
"""Requests after which a loop does not spin once spinning was in vain, at most."""


class Spinner:
    """Keeps a loop awake for a moment after each request: the next one is often on its way.

    Falling asleep and being woken costs several times what a small request does. When nothing
    came while it looked, it looks more and more rarely.
    """

    __slots__ = ("_loop", "_pause", "_rest", "_served", "_spinning", "_until")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = 0.0
        self._spinning = False
        self._served = False
        self._pause = 0
        self._rest = 0

    def served(self) -> None:
        """A request was served just now."""
        if self._spinning:
            self._served = True
            self._until = perf_counter() + SPIN_S
        elif self._rest:
            self._rest -= 1
        else:
            self._spinning = True
            self._served = False
            self._until = perf_counter() + SPIN_S
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        if perf_counter() < self._until:
            self._loop.call_soon(self._look)
            return
        self._spinning = False
        self._pause = 0 if self._served else min(2 * self._pause + 4, MAX_REST)
        self._rest = self._pause
