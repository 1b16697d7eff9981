"""Room made by copying: live rows out of mostly dead blocks, and live blocks out of old segments.

Owns the copying and when a copy counts. Who needs room, and when, is for values/store.py; which
rows live only the tag store knows, and it points to the copies block by block.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, Protocol

from dataplane.codec.template import Templates
from dataplane.errors import DataplaneError, OutcomeUnknown, PlaneLost
from dataplane.values.extents import round_up
from dataplane.values.repack import Repack, plan_repack
from dataplane.values.store import ValueStore
from dataplane.wire.frames import Body

log = logging.getLogger("dataplane.values")

REPACK_BLOCKS = 64
"""Blocks copied in one go under pressure."""
SEGMENT_BLOCKS = 32_768
"""Blocks of a segment that are copied out of it at most."""
LOOK_SEGMENTS = 8
"""Segments that are looked at for one that is worth it, at a time."""
WORTH_COPYING = 0.75
"""A segment in which a larger share lives is not emptied by copying."""
IN_DOUBT = (OutcomeUnknown, PlaneLost, ConnectionError)
"""Errors after which the tag store may have a block all the same: its bytes may not be freed."""


class Candidate(NamedTuple):
    """A block, and what of it lives."""

    block: int
    blob: bytes
    """Its template."""
    rows: int
    lengths: bytes
    keep: list[int]
    """Numbers of the rows that live."""
    positions: list[int]
    """Where each of them is in its partition."""
    fields: list[str]
    """Fields of which a cell lives."""


class Repackable(Protocol):
    """The tag store, as far as it says what to copy and takes the copies."""

    async def repack_candidates(self, limit: int, segment: int | None = None) -> list[Any]: ...

    async def repack(self, old: int, block: Body, moves: list[Any]) -> None: ...


class Repacking:
    """What one value store copies within itself."""

    def __init__(self, store: ValueStore, tags: Repackable) -> None:
        self._store = store
        self._tags = tags
        self._templates = Templates()

    async def repack(self) -> bool:
        """Copy live rows out of mostly dead blocks; whether any block was emptied."""
        moved = False
        for candidate in await self._candidates(REPACK_BLOCKS):
            moved |= await self._copy_block(candidate)
        return moved

    async def evacuate(self) -> bool:
        """Copy what lives in a segment that takes no new block, so that it can go; whether anything
        was copied.

        A segment of an earlier incarnation is never written again, so what is free in it is of use
        to nobody until all of it is.
        """
        for segment, size in self._store.blocks.retired_segments()[:LOOK_SEGMENTS]:
            candidates = await self._candidates(SEGMENT_BLOCKS, segment)
            lives = sum(round_up(self._plan(candidate).nbytes) for candidate in candidates)
            if not candidates or lives > WORTH_COPYING * size:
                continue
            if not await self._store.room_to_evacuate(lives, size):
                return False
            moved = False
            for candidate in candidates:
                moved |= await self._copy_block(candidate)
            return moved
        return False

    async def _candidates(self, limit: int, segment: int | None = None) -> list[Candidate]:
        try:
            found = await self._tags.repack_candidates(limit, segment)
        except (DataplaneError, ConnectionError) as error:
            log.info("no block was repacked: %s", error)
            return []
        return [Candidate(*candidate) for candidate in found]

    def _plan(self, of: Candidate) -> Repack:
        return plan_repack(self._templates.parse(of.blob), of.rows, of.lengths, of.keep, of.fields)

    async def _copy_block(self, candidate: Candidate) -> bool:
        """Whether the tag store points to a copy of what lives in a block."""
        blocks, block = self._store.blocks, candidate.block
        old = blocks.extent(block)
        if old is None:
            return False
        plan = self._plan(candidate)
        pinned = blocks.pin([block], self)
        if pinned.gone:
            return False
        try:
            new = blocks.allocate(plan.nbytes, self)
            if new is None:
                return False
            source, target = self._store.memory(old), self._store.memory(new)
            front = plan.template.front(plan.lengths, plan.rows)
            target[: len(front)] = front
            for at, to, nbytes in plan.copies:
                target[to : to + nbytes] = source[at : at + nbytes]
            del source, target
            blocks.seal(new.block, self)
            placement = (
                new.block, new.segment, new.offset, new.nbytes,
                plan.template.blob, plan.rows, plan.lengths,
            )  # fmt: skip
            moves = list(zip(candidate.keep, candidate.positions, strict=True))
            try:
                await self._tags.repack(block, placement, moves)
            except (DataplaneError, ConnectionError) as error:
                log.info("block %d was not repacked: %s", block, error)
                if isinstance(error, IN_DOUBT):
                    blocks.publish(new.block)
                else:
                    self._store.abort(new.block)
                return False
            blocks.publish(new.block)
            return True
        finally:
            blocks.unpin(pinned.handle, self)
            if blocks.state(block) is None:  # what was not freed wakes nobody
                self._store.freed()
