"""Small puts that travel together: gathered for a moment, answered each by itself.

Trajectories that are submitted one by one are gathered by partition, attempt and which fields they
have, up to so many, so many bytes, or so long; each gathering is one atomic put. Where the plane
refuses some of the keys, the others are put without them. What is submitted and not answered yet is
bounded: beyond that `submit` waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from dataplane.errors import (
    AlreadyWritten,
    DataplaneError,
    InvalidRequest,
    KeyNotFound,
    PlaneLost,
    StaleWrite,
)
from dataplane.producer.puts import Put
from dataplane.producer.trajectory import TrajectoriesPut, TrajectoryResult, alike
from dataplane.v1 import dataplane_pb2 as pb

SendPut = Callable[[Put], Awaitable[TrajectoriesPut]]


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """When a gathering goes off, and how much may be under way."""

    max_rows: int = 256
    max_bytes: int = 1 << 20
    max_delay_s: float = 0.02
    """The longest that the first of a gathering waits for others."""
    max_pending_bytes: int = 64 << 20
    """Submitted and not answered yet; beyond that `submit` waits."""

    def __post_init__(self) -> None:
        if (
            min(self.max_rows, self.max_bytes) < 1
            or self.max_delay_s < 0
            or self.max_pending_bytes < self.max_bytes
        ):
            raise InvalidRequest(
                "a batch has a row and a byte at least, and what may be pending is not less than "
                f"one batch; not {self}"
            )


class Where(NamedTuple):
    """What the trajectories of one gathering share."""

    partition_id: str
    attempt: int
    mode: pb.PutMode
    fields: tuple[bool, ...]


@dataclass(slots=True)
class _Item:
    message: pb.Trajectory
    nbytes: int
    answer: asyncio.Future[TrajectoryResult]

    @property
    def key(self) -> str:
        return f"{self.message.uid}_{self.message.session_id}_{self.message.index}"


@dataclass(slots=True)
class _Gathering:
    timer: asyncio.TimerHandle
    items: list[_Item] = field(default_factory=list[_Item])
    keys: set[str] = field(default_factory=set[str])
    nbytes: int = 0


class Batcher:
    """Gathers trajectories. Of one event loop."""

    def __init__(self, send: SendPut, policy: BatchPolicy) -> None:
        self._send = send
        self._policy = policy
        self._gatherings: dict[Where, _Gathering] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._pending_bytes = 0
        self._room = asyncio.Condition()
        self._closed = False

    async def submit(
        self, message: pb.Trajectory, partition_id: str, attempt: int, mode: pb.PutMode
    ) -> asyncio.Future[TrajectoryResult]:
        """Take a trajectory, as soon as there is room for it; a future of what becomes of it."""
        nbytes = message.ByteSize()
        async with self._room:
            await self._room.wait_for(lambda: self._closed or self._has_room(nbytes))
            if self._closed:
                raise PlaneLost("this producer was closed; make another")
            self._pending_bytes += nbytes
        item = _Item(message, nbytes, asyncio.get_running_loop().create_future())
        where = Where(partition_id, attempt, mode, alike(message))
        gathering = self._gatherings.get(where)
        if gathering is not None and (
            item.key in gathering.keys  # a put has each key once
            or gathering.nbytes + nbytes > self._policy.max_bytes
        ):
            self._go(where)
            gathering = None
        if gathering is None:
            timer = asyncio.get_running_loop().call_later(self._policy.max_delay_s, self._go, where)
            gathering = self._gatherings[where] = _Gathering(timer)
        gathering.items.append(item)
        gathering.keys.add(item.key)
        gathering.nbytes += nbytes
        if (
            len(gathering.items) >= self._policy.max_rows
            or gathering.nbytes >= self._policy.max_bytes
        ):
            self._go(where)
        return item.answer

    async def flush(self) -> None:
        """Send what is gathered; returns when all that was submitted so far is answered."""
        for where in list(self._gatherings):
            self._go(where)
        if self._sending:
            await asyncio.wait(set(self._sending))

    async def close(self) -> None:
        """Answer what is there, and take nothing more."""
        self._closed = True
        async with self._room:
            self._room.notify_all()
        await self.flush()

    def _has_room(self, nbytes: int) -> bool:
        # One that is larger than all the room goes when nothing else is under way.
        used = self._pending_bytes
        return not used or used + nbytes <= self._policy.max_pending_bytes

    def _go(self, where: Where) -> None:
        gathering = self._gatherings.pop(where, None)
        if gathering is None:
            return
        gathering.timer.cancel()
        task = asyncio.get_running_loop().create_task(self._put_all(where, gathering))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _put_all(self, where: Where, gathering: _Gathering) -> None:
        try:
            await self._put(where, gathering.items)
        finally:
            for item in gathering.items:
                if not item.answer.done():
                    item.answer.cancel()
            async with self._room:
                self._pending_bytes -= gathering.nbytes
                self._room.notify_all()

    async def _put(self, where: Where, items: list[_Item]) -> None:
        message = pb.PutTrajectoriesRequest(
            partition_id=where.partition_id,
            trajectories=[item.message for item in items],
            attempt=where.attempt,
            mode=where.mode,
        )
        try:
            put = await self._send(Put(message))
        except (AlreadyWritten, KeyNotFound, StaleWrite) as error:
            # Nothing was put. Those that it names are left out.
            named = set(error.keys or ())
            refused = [item for item in items if item.key in named] or items
            _fail(refused, error)
            if len(refused) < len(items):
                await self._put(where, [item for item in items if item.key not in named])
        except DataplaneError as error:
            _fail(items, error)
        else:
            for item, result in zip(items, put.results, strict=True):
                if not item.answer.done():
                    item.answer.set_result(result)


def _fail(items: list[_Item], error: DataplaneError) -> None:
    for item in items:
        if not item.answer.done():
            item.answer.set_exception(error)
