"""The controller's copies of partitions: brought up to date with the plane, and numbered.

Owns who may change a partition's copy, and who waits for one to change. Every change that the
controller makes is a put to the plane first; the copy follows. Nothing is polled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager

from dataplane.client.aio import AsyncClient
from dataplane.client.groups import GRACE_S
from dataplane.client.tags import present
from dataplane.client.wait import watch_once
from dataplane.errors import (
    DeadlineExceeded,
    KeyNotFound,
    PartitionNotFound,
    RequestError,
    StaleWrite,
)
from dataplane.types import Revision

from ..names import HIDDEN
from .indexes import Indexes
from .registry import PartitionRows, Place, Tags, reserved

MAX_ROWS = 16_384
"""Rows that are written in one put of tags."""


class _Copy:
    """A partition's rows, if they were looked at, and whose turn it is."""

    __slots__ = ("lock", "rows", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.rows: PartitionRows | None = None
        self.users = 0


class Mirrors:
    """Copies of all partitions that were asked for. For one event loop."""

    def __init__(self, plane: AsyncClient, wait_timeout_s: float, ahead: int = 1) -> None:
        self._plane = plane
        self._wait_timeout_s = wait_timeout_s
        self.indexes = Indexes(plane, ahead)
        self._copies: dict[str, _Copy] = {}
        self._watches: dict[str, tuple[asyncio.Task[None], list[int]]] = {}

    # -- partitions --------------------------------------------------------------------------

    @asynccontextmanager
    async def fresh(self, partition_id: str) -> AsyncGenerator[PartitionRows | None]:
        """A partition's rows as they are now, all with an index, and nobody else's to change while
        this lasts; None if there is no such partition."""
        async with self._turn(partition_id):
            yield await self.again(partition_id)

    async def again(self, partition_id: str) -> PartitionRows | None:
        """The rows as they are now, once more: for who has them from `fresh`."""
        copy = self._copies[partition_id]
        try:
            copy.rows = await self._sync(partition_id, copy.rows)
        except PartitionNotFound:
            copy.rows = None
        return copy.rows

    async def names(self) -> list[str]:
        """The partitions that there are."""
        found = await self._plane.kv_list_partitions()
        return [name for name in found if name != HIDDEN]

    async def drop(self, partition_id: str) -> bool:
        """Take a partition away with all its rows; whether there was one."""
        async with self._turn(partition_id) as copy:
            copy.rows = None
            await self.indexes.take_back(partition_id)
            try:
                await self._plane.kv_drop_partition(partition_id)
            except PartitionNotFound:
                return False
            return True

    async def forget(self) -> None:
        """The plane was loaded with other rows: look again."""
        for copy in self._copies.values():
            copy.rows = None

    @asynccontextmanager
    async def _turn(self, partition_id: str) -> AsyncGenerator[_Copy]:
        copy = self._copies.setdefault(partition_id, _Copy())
        copy.users += 1
        try:
            async with copy.lock:
                yield copy
        finally:
            copy.users -= 1
            if not copy.users and copy.rows is None:
                del self._copies[partition_id]

    async def _sync(self, partition_id: str, rows: PartitionRows | None) -> PartitionRows:
        """The rows, brought up to date or read for the first time, and numbered."""
        new = rows is None
        if rows is None:
            rows = PartitionRows(partition_id)
        rows.take(await self._plane.kv_list(partition_id, since=rows.revision))
        if new:
            rows.ahead = await self.indexes.read_ahead(partition_id)
        while keys := rows.unnumbered()[:MAX_ROWS]:
            taken = await self.indexes.take(rows, len(keys))
            indexes = dict(zip(keys, taken, strict=True))
            if await self._write(partition_id, {key: reserved(indexes[key]) for key in keys}):
                # Some were cleared meanwhile: the others are written in another round.
                rows.take(await self._plane.kv_list(partition_id, since=rows.revision))
            else:
                rows.number(indexes)
        if new:
            await self.indexes.give_ahead(rows)
        return rows

    # -- rows --------------------------------------------------------------------------------

    async def reserve(self, partition_id: str, count: int) -> list[int]:
        """Indexes of rows that a client is about to put; none of them is shown before it has."""
        async with self.fresh(partition_id) as rows:
            return await self.indexes.take(rows or PartitionRows(partition_id), count)

    async def make(self, partition_id: str, keys: Iterable[str]) -> None:
        """Make rows without values for those of these keys that have none."""
        async with self.fresh(partition_id) as rows:
            rows = rows or PartitionRows(partition_id)
            new = [key for key in dict.fromkeys(keys) if rows.keyed(key) is None]
            indexes = await self.indexes.take(rows, len(new))
            # A row of this key that came in the meantime takes the index, and keeps what it has.
            made = {key: reserved(index) for key, index in zip(new, indexes, strict=True)}
            await self._put(partition_id, made, must_exist=False)

    async def consume(
        self, rows: PartitionRows, task: str, places: Mapping[int, Place]
    ) -> list[str]:
        """Write that a task consumed rows, all or none; keys that are gone, and then none are."""
        written: dict[str, Tags] = {}
        fresh: dict[int, Place] = {}
        for index, place in places.items():
            row = rows.row(index)
            assert row is not None
            if task not in row.consumed:
                fresh[index] = place
                written[row.key] = reserved(
                    index, (*row.consumed, task), {**row.claims, task: place}
                )
        gone = await self._write(rows.partition_id, written)
        if not gone:
            rows.consume(task, fresh)
        return gone

    async def unconsume(self, rows: PartitionRows, task: str | None) -> None:
        """Write that a task, or every one, has consumed nothing."""
        written: dict[str, Tags] = {}
        for row in rows.rows:
            left = () if task is None else tuple(name for name in row.consumed if name != task)
            if left != row.consumed:
                claims = {name: place for name, place in row.claims.items() if name in left}
                written[row.key] = reserved(row.index, left, claims)
        listed = list(written.items())
        for at in range(0, len(listed), MAX_ROWS):
            part = dict(listed[at : at + MAX_ROWS])
            while gone := await self._write(rows.partition_id, part):
                part = {key: tags for key, tags in part.items() if key not in gone}

    # -- waiting -----------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many wait for a partition to change."""
        return sum(waiting for _, (waiting,) in self._watches.values())

    async def now(self) -> Revision:
        """The plane's revision, for a wait for a partition that is not there yet."""
        return await self._plane.run(present)

    async def changed(self, partition_id: str, since: Revision, deadline: float) -> None:
        """Return when the partition has changed since, or at the deadline (the loop's time).

        Those who wait for one partition share one watch at the plane.
        """
        known = self._watches.get(partition_id)
        watch, waiting = (None, [0]) if known is None else known
        if watch is None or watch.done():
            watch = asyncio.get_running_loop().create_task(self._watch(partition_id, since))
            waiting = [0]
            self._watches[partition_id] = watch, waiting
        waiting[0] += 1
        try:
            left = deadline - asyncio.get_running_loop().time()
            await asyncio.wait([watch], timeout=max(0.0, left))
        finally:
            waiting[0] -= 1
            if not waiting[0]:
                watch.cancel()
                if self._watches.get(partition_id) == (watch, waiting):
                    del self._watches[partition_id]
        if watch.done() and not watch.cancelled() and (error := watch.exception()) is not None:
            raise error

    async def _watch(self, partition_id: str, since: Revision) -> None:
        # What the deadline of a watch or the end of its partition mean, those who wait find out.
        with contextlib.suppress(DeadlineExceeded, RequestError):
            await self._plane.run(
                lambda core, deadline: watch_once(
                    core, partition_id, since, None, deadline - GRACE_S
                ),
                self._wait_timeout_s + GRACE_S,
            )

    # -- writing -----------------------------------------------------------------------------

    async def _write(self, partition_id: str, tags: Mapping[str, Tags]) -> list[str]:
        """Write tags to rows that exist, all or none; keys that do not, and then none are."""
        try:
            await self._put(partition_id, tags, must_exist=True)
        except (KeyNotFound, StaleWrite) as error:
            return error.keys
        except PartitionNotFound:
            return list(tags)
        return []

    async def _put(self, partition_id: str, tags: Mapping[str, Tags], *, must_exist: bool) -> None:
        if tags:
            await self._plane.kv_batch_put(
                list(tags), partition_id, tags=list(tags.values()), must_exist=must_exist
            )
