"""Slices of CPU time: a long walk gives way to every other client twice a millisecond."""

from __future__ import annotations

import asyncio
import time

SLICE_S = 0.0005
"""CPU time that a walk takes before it lets others run."""


class WorstSlice:
    """The most CPU time that one slice took, for `status`."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0


class Slices:
    """The slices of one walk: call `breathe` after each small step."""

    def __init__(self, worst: WorstSlice) -> None:
        self._worst = worst
        self._started = time.thread_time()

    async def breathe(self) -> None:
        """Let others run, if this slice is used up."""
        took = time.thread_time() - self._started
        if took >= SLICE_S:
            if took > self._worst.seconds:
                self._worst.seconds = took
            await asyncio.sleep(0)
            self._started = time.thread_time()
