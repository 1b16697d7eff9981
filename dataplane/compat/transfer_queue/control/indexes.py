"""Which indexes rows get: each once, for as long as the plane is there.

Owns what the plane keeps of it: up to which index all are given out, reserved in blocks, and which
a partition was given ahead of its rows. What a controller that died had reserved is never used.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from dataplane.client.aio import AsyncClient
from dataplane.errors import PartitionNotFound

from ..names import HIDDEN
from .registry import PartitionRows

NEXT = "indexes"
"""The key, in the hidden partition, that says which indexes no controller has reserved."""
AHEAD = "ahead:"
"""Begins the keys that say which indexes a partition was given ahead of rows."""
BLOCK = 4096
"""Indexes that are reserved at once."""


class Indexes:
    """The indexes of one plane. For one event loop."""

    def __init__(self, plane: AsyncClient, ahead: int) -> None:
        self._plane = plane
        self._ahead = ahead
        """Rows that a new partition is to have; it is given their indexes ahead of them."""
        self._lock = asyncio.Lock()
        self._next = self._end = 0

    async def start(self) -> None:
        """Go on where the controller before this one had reserved to, if there was one."""
        self._next = self._end = await self._reserved()

    @property
    def reserved(self) -> int:
        """The first index that no row has or will have from this controller's block."""
        return self._end

    async def skip_to(self, first: int) -> None:
        """Give out no index below this one from here on, nor one that was reserved before."""
        async with self._lock:
            end = max(self._end, await self._reserved(), first)
            await self._plane.kv_put(NEXT, HIDDEN, tags={"next": end})
            self._next = self._end = end

    async def take(self, rows: PartitionRows, count: int) -> list[int]:
        """Indexes for rows of a partition: first what it was given ahead, ascending."""
        if not count:
            return []
        ahead = rows.ahead[:count]
        if ahead:
            # Shrunk before they are used: should this process die now, they are lost, not doubled.
            rows.ahead = rows.ahead[count:]
            await self._write_ahead(rows)
        return [*ahead, *await self._allocate(count - len(ahead))]

    async def read_ahead(self, partition_id: str) -> range:
        """The indexes that a partition was given ahead and that no row has."""
        if self._ahead < 2:
            return range(0)
        for tags in await self._hidden({"ahead_of": partition_id}):
            return range(*tags["left"])
        return range(0)

    async def give_ahead(self, rows: PartitionRows) -> None:
        """Give a partition indexes ahead of rows, unless it was given some before."""
        # A partition comes to be with a row, though that may be gone again.
        left = self._ahead - max(1, len(rows))
        if left <= 0 or await self._hidden({"ahead_of": rows.partition_id}):
            return
        rows.ahead = await self._allocate(left)
        await self._write_ahead(rows)

    async def take_back(self, partition_id: str) -> None:
        """A partition ends, and with it what it was given ahead."""
        with contextlib.suppress(PartitionNotFound):
            await self._plane.kv_clear([AHEAD + partition_id], HIDDEN)

    async def _allocate(self, count: int) -> range:
        """Indexes that nobody was given, one behind the other."""
        if not count:
            return range(0)
        async with self._lock:
            if self._end - self._next < count:
                # What is left of the block goes on in the next one: blocks of one controller touch.
                end = self._end + max(BLOCK, count)
                await self._plane.kv_put(NEXT, HIDDEN, tags={"next": end})
                self._end = end
            first = self._next
            self._next += count
            return range(first, self._next)

    async def _reserved(self) -> int:
        for tags in await self._hidden({"next": {"exists": True}}):
            return int(tags["next"])
        return 0

    async def _hidden(self, where: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            return (await self._plane.kv_list(HIDDEN, where=where)).tags
        except PartitionNotFound:
            return []

    async def _write_ahead(self, rows: PartitionRows) -> None:
        left = [rows.ahead.start, rows.ahead.stop]
        await self._plane.kv_put(
            AHEAD + rows.partition_id, HIDDEN, tags={"ahead_of": rows.partition_id, "left": left}
        )
