"""One node's value store: segments of shared memory and the blocks in them. It keeps no key.

Owns the files, the block table and who waits for room; the sockets are the server's. Allocation is
immediate where there is room; otherwise requests wait in order while room is made: a new segment
(backed in a thread, never on the loop), empty segments of the wrong size given back, mostly dead
blocks repacked, and at last only patience until the request's deadline.

Room that groups declared is held for them (holds.py). What may draw on it waits for nobody, and if
even so there is no room, in a queue of its own, which is served before the one of plain puts and of
groups that begin. Room that comes free goes to those queues before it goes to who comes just then.

A store that starts where an earlier incarnation was killed goes on with its nonce and above its ids
(incarnation.py), and has its blocks once the tag store has said which of them live (recovery.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dataplane.errors import DataplaneError, InvalidRequest, QuotaExceeded
from dataplane.values.blocks import BlockTable, Extent, segment_size_for
from dataplane.values.budget import Budget, mount_of
from dataplane.values.extents import PAGE, round_up
from dataplane.values.holds import Draw, Holds
from dataplane.values.incarnation import Ids, find_earlier, forget, ids_of_new_incarnation, note
from dataplane.values.recovery import Live, Recovery
from dataplane.values.segments import Segment, create

log = logging.getLogger("dataplane.values")

LARGEST_DRAW_SHARE = 8
"""Draws up to this part of a segment find what is held for them at once, however it is used; as
much of every segment may be left that no hold is granted on."""
MAX_MOVED_FOR = 4
"""Draws that wait, for which what is held is moved out of the way each time room comes free."""


class _Request:
    """Who waits: for a block, drawn on a hold or not, or (without an owner) for a hold."""

    __slots__ = ("attempt", "draw", "future", "nbytes", "owner", "timer")

    def __init__(
        self,
        nbytes: int,
        future: asyncio.Future[Any],
        *,
        owner: Hashable = None,
        draw: Draw | None = None,
        attempt: int | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.owner = owner
        self.draw: Draw | None = draw
        self.attempt = attempt
        self.future = future
        self.timer: asyncio.TimerHandle | None = None
        """None: it does not wait for others, only for what the store itself is doing."""

    def settle(self, result: Any = None, error: DataplaneError | None = None) -> None:
        """It has what it waited for, or never will."""
        if self.timer is not None:
            self.timer.cancel()
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class ValueStore:
    def __init__(
        self,
        folder: Path,
        budget: Budget,
        *,
        plane_id: str,
        store_id: str,
        nonce: bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.budget = budget
        self.plane_id = plane_id
        self.store_id = store_id
        self.nonce = nonce
        """What clients know this store by: an earlier incarnation's, once `start` has found one."""
        self._clock = clock
        self.blocks = BlockTable(clock=time.monotonic)
        self.holds = Holds(self.blocks, budget.segment_bytes // LARGEST_DRAW_SHARE)
        self.segments: dict[int, Segment] = {}
        self.repack: Callable[[], Awaitable[bool]] | None = None
        """Tries to free room by copying live rows out of mostly dead blocks; whether it did."""
        self.evacuate: Callable[[], Awaitable[bool]] | None = None
        """Tries to free a segment that takes no new block, by copying what lives in it."""
        self.bytes_in = 0
        """Bytes of the blocks that were put here since the process started."""
        self.bytes_out = 0
        """Bytes that were sent to readers of other nodes."""
        self._next_segment = 1
        self._refused = ""
        """Why the last segment that was wanted could not be made."""
        self._requests: deque[_Request] = deque()
        self._draws: deque[_Request] = deque()
        self._impatient: list[_Request] = []
        """Those in either queue that leave it when the store can do no more for them."""
        self._wanted: dict[int, _Request] = {}
        """Holds that are waited for, by attempt."""
        self._server: asyncio.Task[None] | None = None
        self._stuck = False
        """Whether the first who waits can only be helped by others."""
        self._freed = asyncio.Event()
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="segments")

        self.recovery = Recovery(
            folder, self.blocks, self.segments, self._maker,
            plane_id=plane_id, store_id=store_id, kill=self.kill, freed=self.freed,
        )  # fmt: skip

    async def start(self) -> None:
        """Find what an earlier incarnation left, and make the first segment, so that the first put
        finds memory that is backed.

        Where there are old segments it may be that no new one can be made: room comes when theirs
        goes. What lives in them is not here before `reconcile`, and until then nothing is unlinked.

        Raises:
            QuotaExceeded: there is no room for the first segment, and nothing that will give any.
            InternalError: the folder cannot be used, or the process is out of descriptors.
        """
        loop = asyncio.get_running_loop()
        names = {"plane_id": self.plane_id, "store_id": self.store_id}
        earlier = await loop.run_in_executor(
            self._maker, lambda: find_earlier(self.folder, **names)
        )
        self.nonce = earlier.nonce or self.nonce
        self.recovery.found(earlier)
        ids = ids_of_new_incarnation(earlier.ids, self._clock())
        self._next_segment = ids.segment
        self.blocks.skip_to(ids.block)
        size = min(self.budget.segment_bytes, self._left())
        if not earlier.segments and not earlier.damaged:
            await self._make_segment(size)
        elif size > PAGE:
            try:
                await self._make_segment(size)
            except QuotaExceeded as error:
                self._no_new_segment(error)

    @property
    def recovering(self) -> bool:
        """Whether blocks of an earlier incarnation may be there that only `reconcile` brings back:
        until then a block that is not here need not be gone."""
        return self.recovery.pending

    async def reconcile(self, live: Live) -> list[int]:
        """Agree with the tag store on what lives here; the live blocks whose bytes are lost.

        To be called at every registering, before anything else is told or heard. What was published
        before the call and is not live ends; a block that is being published stays. The first
        call after a start takes over what lives in old segments, and unlinks the others. It may be
        repeated, also after it was given up in the middle.

        Raises:
            InvalidRequest: these are not four arrays of one length. Nothing changed.
            InternalError: the process is out of descriptors or memory; nothing was freed.
        """
        return await self.recovery.reconcile(live)

    def reconcile_holds(self, kept: Mapping[int, int]) -> list[int]:
        """Agree with the tag store on what is held: so many bytes are outstanding of each attempt
        that it keeps room for here. The attempts for which nothing is held, which it may ask for.

        All other holds end, those under tokens too, and so does all waiting for one: who asked for
        it is gone.
        """
        for request in list(self._wanted.values()):
            gone = "the tag store that asked for this room was restarted"
            request.settle(error=InvalidRequest(gone))
        self._wanted.clear()
        missing = self.holds.keep(kept)
        self.freed()
        return missing

    def close(self, *, keep: bool = False) -> None:
        """Give back every segment, or keep the files for a later incarnation. Readers that map them
        keep their pages."""
        self._maker.shutdown(wait=True)
        for segment in self.segments.values():
            if not keep:
                segment.unlink()
            segment.close()
        self.segments.clear()
        if keep:
            return
        self.recovery.give_back()
        forget(self.folder)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    # -- room --------------------------------------------------------------------------------

    def allocate(
        self, nbytes: int, owner: Hashable, timeout_s: float | None, draw: Draw | None = None
    ) -> Extent | asyncio.Future[Extent]:
        """Room for a block, at once or as a future that ends in it or in QuotaExceeded.

        With a timeout of 0 it waits for a segment that the store can make, and for nobody else;
        with None not even for that. `draw` says on which hold it may draw: that of an attempt, if
        this store has one, or with True on any.
        """
        if draw is not None and draw is not True and draw not in self.holds:
            draw = None
        if draw is None:
            if not (self._requests or self._draws):
                extent = self.blocks.allocate(nbytes, owner)
                if extent is not None:
                    return extent
        else:
            extent = self.holds.draw(nbytes, owner, draw)
            if extent is not None:
                if self.holds.short_bytes:
                    self._replenish()
                return extent
        if PAGE + round_up(nbytes) > self.budget.capacity_bytes:
            raise self._too_large(f"a put of {nbytes} bytes is", "split it")
        future: asyncio.Future[Extent] = asyncio.get_running_loop().create_future()
        return self._wait(_Request(nbytes, future, owner=owner, draw=draw), timeout_s)

    def hold(self, attempt: int, nbytes: int, timeout_s: float) -> asyncio.Future[None] | None:
        """Hold room for an attempt: at once, or when the future ends in None or QuotaExceeded.

        With a timeout of 0 it waits for segments that the store can make, and for nobody else.
        It waits in the queue of plain puts, and while it does, `held` with 0 ends it too.
        """
        if attempt in self.holds or attempt in self._wanted:
            raise InvalidRequest(f"room is held for attempt {attempt} already, or waited for")
        if PAGE + round_up(nbytes) > self.budget.capacity_bytes:
            raise self._too_large(
                f"a group that declares {nbytes} bytes is", "declare what it really takes"
            )
        if not (self._requests or self._draws) and self.holds.grant(attempt, nbytes):
            return None
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = _Request(nbytes, future, attempt=attempt)
        self._wait(request, timeout_s)
        self._wanted[attempt] = request

        def ended(_: asyncio.Future[None]) -> None:
            if self._wanted.get(attempt) is request:
                del self._wanted[attempt]

        future.add_done_callback(ended)
        return future

    def bind(self, token: int, attempt: int) -> None:
        """What is held under a token is an attempt's from now on."""
        self.holds.bind(token, attempt)

    def held(self, updates: Iterable[tuple[int, int]]) -> None:
        """So much is outstanding of what these attempts declared; with 0 their holds end."""
        for attempt, outstanding in updates:
            self.holds.tell(attempt, outstanding)
            request = self._wanted.get(attempt)
            if request is not None and outstanding <= 0:
                gone = f"attempt {attempt} ended while it waited for room"
                request.settle(error=InvalidRequest(gone))
        self.freed()

    def _wait(self, request: _Request, timeout_s: float | None) -> asyncio.Future[Any]:
        draws = request.draw is not None
        if timeout_s is None or (not timeout_s and self._stuck and not draws):
            raise self._no_room(request, 0.0)
        loop = asyncio.get_running_loop()
        if timeout_s:
            request.timer = loop.call_later(timeout_s, self._give_up, request, timeout_s)
        else:
            self._impatient.append(request)
        (self._draws if draws else self._requests).append(request)
        if self._server is None:
            self._server = loop.create_task(self._serve())
        elif draws:
            self._freed.set()  # the store may be able to do something for it
        return request.future

    def _replenish(self) -> None:
        """Make a segment for what is held, if there is not all of it and no room came free."""
        can = not self._refused and self._left() > PAGE + self.holds.least_piece
        if can and self._server is None:
            self._server = asyncio.get_running_loop().create_task(self._serve())

    def _give_up(self, request: _Request, waited_s: float) -> None:
        request.settle(error=self._no_room(request, waited_s))
        self._freed.set()

    def _too_large(self, what: str, remedy: str) -> QuotaExceeded:
        return QuotaExceeded(
            f"{what} larger than the whole value store ({self.budget.capacity_bytes} bytes): "
            f"{remedy}, or raise capacity_bytes or the size of the mount at "
            f"{mount_of(self.folder)}",
            used_bytes=self.used_bytes,
            limit_bytes=self.budget.capacity_bytes,
        )

    def _no_room(self, request: _Request, waited_s: float) -> QuotaExceeded:
        used, limit = self.used_bytes, self.budget.capacity_bytes
        what = f"{request.nbytes} bytes"
        if request.attempt is not None:
            what = f"a group that declares {what}"
        held = ""
        if self.holds:
            held = f" and {self.holds.held_bytes} are held for {len(self.holds)} groups"
        if request.attempt is None and used + request.nbytes <= limit:
            run = max(self.blocks.largest, self._left() - PAGE, 0)
            held += f", the largest free run is of {run}"
        return QuotaExceeded(
            f"no room for {what} came free within {waited_s:g} s: {used} of {limit} bytes are in "
            f"use{held}; clear rows that were consumed, or raise capacity_bytes" + self._refused,
            used_bytes=used,
            limit_bytes=limit,
        )

    @property
    def used_bytes(self) -> int:
        """Bytes of the extents of all blocks; room that is held and not used is not among them."""
        return self.blocks.used_bytes - self.holds.pooled_bytes

    async def _serve(self) -> None:
        """Satisfy waiting requests in order."""
        try:
            while True:
                request = self._first_unserved()
                self._freed.clear()
                if request is None:
                    self._impatient.clear()
                    if self.holds.short_bytes and await self._grow(0, holds=True):
                        continue
                    return
                if await self._grow(request.nbytes, holds=request.attempt is not None):
                    continue
                self._refuse_impatient()
                if request.future.done():
                    continue
                self._stuck = True
                try:
                    if not await self._make_room():
                        await self._freed.wait()
                finally:
                    self._stuck = False
        finally:
            self._server = None

    def _first_unserved(self) -> _Request | None:
        """Serve all that can be; the first that cannot, if any."""
        if self._draws:
            # Each draws on its own hold, so one that finds nothing there stops no other.
            left: deque[_Request] = deque()
            for request in self._draws:
                move = len(left) < MAX_MOVED_FOR
                if not request.future.done() and not self._place(request, move=move):
                    left.append(request)
            self._draws = left
            if left:
                return left[0]
        if self.holds.short_bytes:
            self.holds.refill()
        while self._requests:
            request = self._requests[0]
            if not request.future.done() and not self._place(request):
                return request
            self._requests.popleft()
        return None

    def _place(self, request: _Request, *, move: bool = True) -> bool:
        """Whether the request has what it waited for; moving what is held costs more."""
        if request.attempt is not None:
            granted = self.holds.grant(request.attempt, request.nbytes)
            if granted:
                request.settle()
            return granted
        nbytes, owner, draw = request.nbytes, request.owner, request.draw
        if draw is None:
            extent = self.holds.allocate(nbytes, owner)
        else:
            extent = self.holds.draw(nbytes, owner, draw, move=move)
        if extent is None:
            return False
        request.settle(extent)
        return True

    def _refuse_impatient(self) -> None:
        for request in self._impatient:
            request.settle(error=self._no_room(request, 0.0))
        self._impatient.clear()

    async def _grow(self, nbytes: int, *, holds: bool) -> bool:
        """Whether there is a new segment now, with room for a block of so many bytes, or for as
        much of a hold as can be."""
        if holds:
            nbytes = self.holds.piece_for(nbytes)
        needed = PAGE + round_up(nbytes)
        empty = self.blocks.empty_segments()
        if self._left() + sum(self.segments[i].size for i in empty) >= needed:
            for segment_id in empty:
                if self._left() >= needed:
                    break
                self._give_back(segment_id)
            size = min(segment_size_for(nbytes, self.budget.segment_bytes), self._left())
        elif holds and self._left() > PAGE + self.holds.least_piece:
            size = self._left()
        else:
            return False
        try:
            await self._make_segment(size)
        except DataplaneError as error:
            # The mount is fuller than its free space said; live with the segments there are.
            self._no_new_segment(error)
            return False
        self._refused = ""
        return True

    def _no_new_segment(self, error: DataplaneError) -> None:
        log.warning("no new segment: %s", error)
        self._refused = f"; no new segment could be made: {error}"

    async def _make_room(self) -> bool:
        """Whether room was made by copying, or will be when the tag store has heard of it."""
        if self.repack is not None and await self.repack():
            return True
        return self.evacuate is not None and await self.evacuate()

    async def room_to_evacuate(self, nbytes: int, size: int) -> bool:
        """Whether there is room now for what lives in a segment of this size that is to go.

        The room is beyond the capacity until it has gone: never more than one segment at a time.
        """
        if self._left() < 0:
            return False
        # Where the mount has no room for another one like it, one for what lives in it will do.
        for wanted in (size, PAGE + nbytes):
            try:
                await self._make_segment(wanted)
            except DataplaneError as error:
                log.info("no room to empty a segment: %s", error)
            else:
                return True
        return False

    def _left(self) -> int:
        return self.budget.capacity_bytes - self._segment_bytes

    @property
    def segment_bytes(self) -> int:
        """Shared memory that is taken."""
        return self._segment_bytes

    @property
    def waiting(self) -> int:
        """How many wait for room that others have to make."""
        return sum(
            request.timer is not None and not request.future.done()
            for request in (*self._draws, *self._requests)
        )

    @property
    def _segment_bytes(self) -> int:
        return self.blocks.segment_bytes + self.recovery.pending_bytes

    async def _make_segment(self, size: int) -> None:
        segment_id = self._next_segment
        self._next_segment += 1
        size = size // PAGE * PAGE
        loop = asyncio.get_running_loop()
        ids = Ids(self._next_segment, self.blocks.next_block)

        def make() -> Segment:
            note(self.folder, ids)
            return create(
                self.folder,
                segment_id,
                size,
                plane_id=self.plane_id,
                store_id=self.store_id,
                nonce=self.nonce,
            )

        segment = await loop.run_in_executor(self._maker, make)
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
        if self.holds.short_bytes and not self._draws:
            self.holds.refill()
            if self.holds.short_bytes:
                self._replenish()
        self._freed.set()

    # -- blocks ------------------------------------------------------------------------------

    def memory(self, extent: Extent) -> memoryview:
        """The bytes of a block."""
        return self.segments[extent.segment].view[extent.offset : extent.offset + extent.nbytes]

    def kill(self, blocks: Sequence[int]) -> None:
        """The tag store says that these blocks are dead. May be repeated."""
        self.recovery.died(blocks)
        not_here = self.blocks.kill(blocks)
        if self.holds:
            self.holds.ended(set(blocks).difference(not_here))
        self.freed()

    def published(self, block: int) -> None:
        """The tag store has published the block."""
        self.blocks.publish(block)
        if self.holds:
            self.holds.published(block)

    def abort(self, block: int, owner: Hashable = None) -> None:
        """A block that will not be published."""
        if self.blocks.abort(block, owner):
            self.holds.ended((block,))
        self.freed()

    def unpin(self, handle: int, owner: Hashable) -> None:
        """A reader let go."""
        self.blocks.unpin(handle, owner)
        waited_for = self._requests or self._draws or (self.holds and self.holds.short_bytes)
        if waited_for or self.blocks.segments_to_unlink():
            self.freed()

    def drop(self, owner: Hashable, *, stopped: bool) -> None:
        """A client is gone, with all that it held."""
        # A retired segment is never written again. Its file stays until nothing lives in it: rows
        # of others do, and have to be found again should this process die.
        retired = self.blocks.drop_owner(owner, trusted_stopped=stopped)
        self.holds.dropped(owner, retired)
        self.freed()

    def counts(self) -> dict[str, Any]:
        """Sizes for `status`."""
        counts = self.blocks.counts()
        counts["reserved"] -= self.holds.pieces
        return {
            "pid": os.getpid(),
            "capacity_bytes": self.budget.capacity_bytes,
            "segment_bytes": self._segment_bytes,
            "segments": len(self.segments),
            "used_bytes": self.used_bytes,
            "held_bytes": self.holds.held_bytes,
            "holds": len(self.holds),
            "blocks": len(self.blocks) - self.holds.pieces,
            "waiting": self.waiting,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            **{f"blocks_{k}" if k != "pins" else k: v for k, v in counts.items()},
        }
