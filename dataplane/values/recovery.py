"""How a value store and its tag store agree again on which blocks live, after either was restarted.

Owns the walk: which blocks are taken over from an earlier incarnation's segments, which end because
their death was not heard, and which are lost. The tag store's word is the measure; what to make of
lost blocks is its business. Old segments are only read: they are mapped without the right to write.

The walk gives way to others every millisecond, so blocks are made, published, pinned and ended
while it goes on. It ends only what was published before it began, and takes over nothing of whose
death it hears meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.errors import InvalidRequest
from dataplane.values.blocks import BlockTable, Extent, State
from dataplane.values.incarnation import Earlier, open_earlier
from dataplane.values.segments import Segment, segment_path

log = logging.getLogger("dataplane.values")

Ints = npt.NDArray[np.int64]
T = TypeVar("T")

STEP_BLOCKS = 256
"""Blocks looked at between two looks at the clock: under 1 ms."""
SLICE_S = 0.001


class Live(NamedTuple):
    """What the tag store says is published in one store: equally long arrays, one entry a block."""

    block: Ints
    segment: Ints
    offset: Ints
    nbytes: Ints

    def check(self) -> None:
        """InvalidRequest unless these are four equally long arrays of 64-bit integers."""
        for name, column in zip(self._fields, self, strict=True):
            if column.dtype != np.int64 or column.shape != (len(self.block),):
                raise InvalidRequest(
                    f"live blocks come in four arrays of {len(self.block)} int64, and {name} is "
                    f"{column.dtype} {column.shape}"
                )


class _Pace:
    """Gives way to others once a slice is used up."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + SLICE_S

    async def breathe(self) -> None:
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + SLICE_S


class Recovery:
    """The agreement of one store with its tag store. `segments` and `blocks` are the store's own;
    `kill` ends blocks as the tag store's word does, and `freed` says that room may be free."""

    def __init__(
        self,
        folder: Path,
        blocks: BlockTable,
        segments: dict[int, Segment],
        threads: Executor,
        *,
        plane_id: str,
        store_id: str,
        kill: Callable[[Sequence[int]], None],
        freed: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._blocks = blocks
        self._segments = segments
        self._threads = threads
        self._names = {"plane_id": plane_id, "store_id": store_id}
        self._kill = kill
        self._freed = freed
        self._nonce = b""
        self._old: dict[int, int] = {}  # bytes of each segment that is not taken over yet, by id
        self._damaged: dict[int, Path] = {}
        self._died: set[int] = set()
        self._walks = 0
        self._one_at_a_time = asyncio.Lock()

    def found(self, earlier: Earlier) -> None:
        """This is what an earlier incarnation left."""
        self._nonce = earlier.nonce or b""
        self._old = dict(earlier.segments)
        self._damaged = dict(earlier.damaged)

    @property
    def pending(self) -> bool:
        """Whether old segments wait for the tag store's word: their blocks are not here yet."""
        return bool(self._old)

    @property
    def pending_bytes(self) -> int:
        """Bytes of old segments that are not in the block table yet."""
        return sum(n for i, n in self._old.items() if i not in self._segments)

    def died(self, blocks: Collection[int]) -> None:
        """The tag store said that these blocks are dead, whether they are here or not."""
        if self._old or self._walks:
            self._died.update(blocks)

    def give_back(self) -> None:
        """Unlink all that an earlier incarnation left and this one did not take over."""
        paths = [segment_path(self._folder, i) for i in self._old if i not in self._segments]
        for path in (*paths, *self._damaged.values()):
            with contextlib.suppress(OSError):
                path.unlink()
        self._old.clear()
        self._damaged.clear()

    async def reconcile(self, live: Live) -> list[int]:
        """Make the block table what the tag store says; the live blocks whose bytes are not here.

        May be repeated, and given up in the middle and begun again.
        """
        live.check()
        before = self._blocks.next_round()
        self._walks += 1
        try:
            async with self._one_at_a_time:
                order, ids = await self._in_thread(lambda: _arrange(live))
                if len(ids):
                    self._blocks.skip_to(int(ids[-1]) + 1)
                if self._old or self._damaged:
                    await self._take_over(live, order)
                ended = await self._end_dead(ids, before)
                lost = await self._find_lost(live)
        finally:
            self._walks -= 1
            if not self._old and not self._walks:
                self._died.clear()
        self._freed()
        if lost:
            log.warning("of %d live blocks %d are lost", len(ids), len(lost))
        if ended:
            log.info("%d blocks ended without this store hearing of it", ended)
        return lost

    # -- an earlier incarnation's segments ---------------------------------------------------

    async def _take_over(self, live: Live, order: Ints) -> None:
        named = list[int]()  # segments that hold live blocks
        segment_of = await self._in_thread(lambda: live.segment[order])
        for segment_id in list(self._old):
            first, last = np.searchsorted(segment_of, [segment_id, segment_id + 1])
            if first == last and segment_id not in self._segments:
                await self._unlink(segment_path(self._folder, segment_id))
                del self._old[segment_id]
            else:
                named.append(segment_id)
        for segment_id in named:
            first, last = np.searchsorted(segment_of, [segment_id, segment_id + 1])
            if await self._open(segment_id):
                await self._adopt(live, order[first:last], segment_id)
            del self._old[segment_id]
        for segment_id, path in list(self._damaged.items()):
            first, last = np.searchsorted(segment_of, [segment_id, segment_id + 1])
            if first == last:
                # A store that was killed while it made a segment leaves one without a header.
                await self._unlink(path)
            del self._damaged[segment_id]

    async def _open(self, segment_id: int) -> bool:
        """Whether the segment is in the table now, open for blocks to be adopted."""
        if segment_id in self._segments:
            return True  # this was given up in the middle
        try:
            segment = await self._in_thread(
                lambda: open_earlier(self._folder, segment_id, nonce=self._nonce, **self._names)
            )
        except (OSError, ValueError) as error:
            path = segment_path(self._folder, segment_id)
            log.warning("segment %s is lost: %s", path, error)
            return False
        self._blocks.adopt_segment(segment_id, segment.size)
        self._segments[segment_id] = segment
        return True

    async def _adopt(self, live: Live, rows: Ints, segment_id: int) -> None:
        pace = _Pace()
        impossible: list[int] = []
        for step in _steps(rows):
            extents = [
                Extent(*extent)
                for extent in zip(*(column[step].tolist() for column in live), strict=True)
                if self._blocks.state(extent[0]) is None and extent[0] not in self._died
            ]
            impossible += self._blocks.adopt(extents)
            await pace.breathe()
        self._blocks.adopted(segment_id)
        if impossible:
            log.error(
                "%d live blocks cannot be where they are said to be in segment %s, beginning "
                "with %s: they are lost",
                len(impossible), segment_path(self._folder, segment_id), impossible[:10],
            )  # fmt: skip

    # -- what both know ----------------------------------------------------------------------

    async def _end_dead(self, ids: Ints, before: int) -> int:
        """How many blocks ended, of whose death the store had not heard. `ids` is sorted."""
        pace, ended = _Pace(), 0
        for segment_id in self._blocks.segment_ids():
            for step in _steps(np.array(self._blocks.blocks_in(segment_id), np.int64)):
                at = np.searchsorted(ids, step)
                is_live = at < len(ids)
                is_live[is_live] = ids[at[is_live]] == step[is_live]
                dead = self._blocks.published_before(step[~is_live].tolist(), before)
                if dead:
                    self._kill(dead)
                    ended += len(dead)
                await pace.breathe()
        return ended

    async def _find_lost(self, live: Live) -> list[int]:
        pace, lost = _Pace(), list[int]()
        here = (State.PUBLISHING, State.PUBLISHED)
        for first in range(0, len(live.block), STEP_BLOCKS):
            step = slice(first, first + STEP_BLOCKS)
            for said in zip(*(column[step].tolist() for column in live), strict=True):
                block = said[0]
                if self._blocks.state(block) not in here:
                    if block not in self._died:
                        lost.append(block)
                elif self._blocks.extent(block) != said:
                    log.error(
                        "block %d lies at %s, not %s", block, self._blocks.extent(block), said
                    )
                    lost.append(block)
            await pace.breathe()
        return lost

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _unlink(self, path: Path) -> None:
        try:
            await self._in_thread(lambda: path.unlink(missing_ok=True))
        except OSError as error:
            log.warning("cannot remove %s: %s", path, error)


def _arrange(live: Live) -> tuple[Ints, Ints]:
    """The entries in the order in which their blocks lie, and the ids sorted. For a thread: sorting
    a million takes 0.2 s, in which others run."""
    return np.lexsort((live.offset, live.segment)), np.sort(live.block)


def _steps(numbers: Ints) -> Iterator[Ints]:
    for first in range(0, len(numbers), STEP_BLOCKS):
        yield numbers[first : first + STEP_BLOCKS]
