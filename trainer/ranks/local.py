"""The one rank of a run without others, in a thread of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.plan import Topology
from trainer.ranks.outcome import Outcome
from trainer.ranks.seat import Seat
from trainer.ranks.stages import Stage
from trainer.ranks.types import RankSettings


class LocalRank:
    """A rank that shares this process. It cannot be lost without it, and not be killed."""

    rank = 0

    def __init__(self) -> None:
        # One thread for all calls: torch keeps some of its state by thread.
        self._thread = ThreadPoolExecutor(1, "rank")
        self._seat = Seat()

    async def open(
        self, settings: RankSettings, topology: Topology, stages: Sequence[Stage], meeting: object
    ) -> Outcome:
        return await self._call(self._seat.open, settings, topology, stages, self.rank, None)

    async def meet(self, world_size: int) -> tuple[str, int]:
        raise ValueError(f"a local rank is alone, and not one of {world_size}")

    async def ask(self, verb: str, *arguments: Any, **named: Any) -> Outcome:
        return await self._call(self._seat.ask, verb, *arguments, **named)

    def share(self, value: object) -> object:
        return value

    async def end(self) -> None:
        """Wait for what it does, since a thread cannot be ended, and begin nothing more."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        self._seat.leave()

    async def _call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        future = self._thread.submit(function, *arguments, **named)
        return await asyncio.wrap_future(future)
