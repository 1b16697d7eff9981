"""One node's value store: segments of shared memory and the blocks in them. It keeps no key.

Owns the files and the block table; the sockets are the server's. Allocation is immediate where
there is room; otherwise requests wait in order while room is made: a new segment (backed in a
thread, never on the loop), empty segments of the wrong size given back, mostly dead blocks
repacked, and at last only patience until the request's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dataplane.errors import DataplaneError, QuotaExceeded
from dataplane.values.blocks import BlockTable, Extent, segment_size_for
from dataplane.values.budget import Budget
from dataplane.values.extents import PAGE, round_up
from dataplane.values.segments import Segment, create

log = logging.getLogger("dataplane.values")


class _Request:
    __slots__ = ("future", "nbytes", "owner", "timer")

    def __init__(self, nbytes: int, owner: Hashable, future: asyncio.Future[Extent]) -> None:
        self.nbytes = nbytes
        self.owner = owner
        self.future = future
        self.timer: asyncio.TimerHandle | None = None


class ValueStore:
    def __init__(
        self, folder: Path, budget: Budget, *, plane_id: str, store_id: str, nonce: bytes
    ) -> None:
        self.folder = folder
        self.budget = budget
        self.plane_id = plane_id
        self.store_id = store_id
        self.nonce = nonce
        self.blocks = BlockTable()
        self.segments: dict[int, Segment] = {}
        self.repack: Callable[[], Awaitable[bool]] | None = None
        """Tries to free room by copying live rows out of mostly dead blocks; whether it did."""
        self._next_segment = 1
        self._refused = ""
        """Why the last segment that was wanted could not be made."""
        self._requests: deque[_Request] = deque()
        self._server: asyncio.Task[None] | None = None
        self._freed = asyncio.Event()
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="segments")

    async def start(self) -> None:
        """Make the first segment, so that the first put finds memory that is backed."""
        await self._make_segment(min(self.budget.segment_bytes, self.budget.capacity_bytes))

    def close(self) -> None:
        """Give back every segment. Readers that map them keep their pages."""
        self._maker.shutdown(wait=True)
        for segment in self.segments.values():
            segment.unlink()
            segment.close()
        self.segments.clear()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    # -- room --------------------------------------------------------------------------------

    def allocate(
        self, nbytes: int, owner: Hashable, timeout_s: float
    ) -> Extent | asyncio.Future[Extent]:
        """Room for a block, at once or as a future that ends in it or in QuotaExceeded.

        With a timeout of 0 what is not there at once is refused at once.
        """
        if not self._requests:
            extent = self.blocks.allocate(nbytes, owner)
            if extent is not None:
                return extent
        if PAGE + round_up(nbytes) > self.budget.capacity_bytes:
            raise QuotaExceeded(
                f"a put of {nbytes} bytes is larger than the whole value store "
                f"({self.budget.capacity_bytes} bytes): split it, or raise capacity_bytes or the "
                f"size of the mount at {self.folder.parent}",
                used_bytes=self.blocks.used_bytes,
                limit_bytes=self.budget.capacity_bytes,
            )
        if not timeout_s:
            raise self._no_room(nbytes, timeout_s)
        loop = asyncio.get_running_loop()
        request = _Request(nbytes, owner, loop.create_future())
        request.timer = loop.call_later(timeout_s, self._give_up, request, timeout_s)
        self._requests.append(request)
        if self._server is None:
            self._server = loop.create_task(self._serve())
        return request.future

    def _give_up(self, request: _Request, waited_s: float) -> None:
        if not request.future.done():
            request.future.set_exception(self._no_room(request.nbytes, waited_s))
            self._freed.set()

    def _no_room(self, nbytes: int, waited_s: float) -> QuotaExceeded:
        used, limit = self.blocks.used_bytes, self.budget.capacity_bytes
        return QuotaExceeded(
            f"no room for {nbytes} bytes came free within {waited_s:g} s: {used} of {limit} bytes "
            "are in use; clear rows that were consumed, or raise capacity_bytes" + self._refused,
            used_bytes=used,
            limit_bytes=limit,
        )

    async def _serve(self) -> None:
        """Satisfy waiting requests in order."""
        try:
            while self._requests:
                request = self._requests[0]
                if request.future.done():
                    self._requests.popleft()
                    continue
                extent = self.blocks.allocate(request.nbytes, request.owner)
                if extent is not None:
                    self._requests.popleft()
                    if request.timer is not None:
                        request.timer.cancel()
                    request.future.set_result(extent)
                    continue
                self._freed.clear()
                if await self._make_room(request.nbytes):
                    continue
                await self._freed.wait()
        finally:
            self._server = None

    async def _make_room(self, nbytes: int) -> bool:
        """Whether something was done after which an allocation may succeed."""
        needed = PAGE + round_up(nbytes)
        for segment_id in self.blocks.empty_segments():
            if self._left() >= needed:
                break
            self._give_back(segment_id)
        left = self._left()
        if left >= needed:
            size = min(segment_size_for(nbytes, self.budget.segment_bytes), left)
            try:
                await self._make_segment(max(size, needed))
                self._refused = ""
                return True
            except DataplaneError as error:
                # The mount is fuller than its free space said; live with the segments there are.
                log.warning("no new segment: %s", error)
                self._refused = f"; no new segment could be made: {error}"
        return self.repack is not None and await self.repack()

    def _left(self) -> int:
        return self.budget.capacity_bytes - self.blocks.segment_bytes

    async def _make_segment(self, size: int) -> None:
        segment_id = self._next_segment
        self._next_segment += 1
        size = size // PAGE * PAGE
        loop = asyncio.get_running_loop()
        segment = await loop.run_in_executor(
            self._maker,
            lambda: create(
                self.folder,
                segment_id,
                size,
                plane_id=self.plane_id,
                store_id=self.store_id,
                nonce=self.nonce,
            ),
        )
        self.segments[segment_id] = segment
        self.blocks.add_segment(segment_id, segment.size)

    def _give_back(self, segment_id: int) -> None:
        self.blocks.remove_segment(segment_id)
        segment = self.segments.pop(segment_id)
        segment.unlink()
        segment.close()

    def freed(self) -> None:
        """Something was freed: unlink retired segments that are empty, wake who waits for room."""
        for segment_id in self.blocks.segments_to_unlink():
            self._give_back(segment_id)
        self._freed.set()

    # -- blocks ------------------------------------------------------------------------------

    def memory(self, extent: Extent) -> memoryview:
        """The bytes of a block."""
        return self.segments[extent.segment].view[extent.offset : extent.offset + extent.nbytes]

    def kill(self, blocks: Iterable[int]) -> None:
        """The tag store says that these blocks are dead. May be repeated."""
        self.blocks.kill(blocks)
        self.freed()

    def abort(self, block: int, owner: Hashable = None) -> None:
        """A block that will not be published."""
        self.blocks.abort(block, owner)
        self.freed()

    def unpin(self, handle: int, owner: Hashable) -> None:
        """A reader let go."""
        self.blocks.unpin(handle, owner)
        if self._requests or self.blocks.segments_to_unlink():
            self.freed()

    def drop(self, owner: Hashable, *, stopped: bool) -> None:
        """A client is gone, with all that it held."""
        retired = self.blocks.drop_owner(owner, trusted_stopped=stopped)
        for segment_id in retired:
            # Whoever still maps it keeps its pages; nobody new gets to see it.
            self.segments[segment_id].unlink()
        self.freed()

    def counts(self) -> dict[str, Any]:
        """Sizes for `status`."""
        return {
            "pid": os.getpid(),
            "capacity_bytes": self.budget.capacity_bytes,
            "segment_bytes": self.blocks.segment_bytes,
            "segments": len(self.segments),
            "used_bytes": self.blocks.used_bytes,
            "blocks": len(self.blocks),
            "waiting": len(self._requests),
            **{f"blocks_{k}" if k != "pins" else k: v for k, v in self.blocks.counts().items()},
        }
