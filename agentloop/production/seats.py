"""The workers of a manager: who has room for a group, and who is started again after it died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from agentloop.groups.job import GroupJob
from agentloop.groups.outcome import GroupOutcome
from agentloop.workers.types import Worker, WorkerError, WorkerLost

_log = logging.getLogger(__name__)

StartWorker: TypeAlias = Callable[[], Awaitable[Worker]]
"""Starts a worker that has joined the plane and is ready to run groups."""

RESTART_PAUSE_S: Final = (0.0, 0.5, 2.0, 5.0, 10.0)
"""How long a seat waits before it starts its worker for the first, second … time in a row."""


class NoWorkers(Exception):
    """No worker could be started, so nothing can be produced."""


class _Seat:
    """One worker, and whoever takes its place when it dies."""

    def __init__(self, start: StartWorker) -> None:
        self.start = start
        self.worker: Worker | None = None
        self.filled = 0
        """Workers that it has had."""
        self.load = 0
        self.failures = 0
        """Starts and runs in a row that ended with a lost worker."""
        self.starting: asyncio.Task[None] | None = None


class Seats:
    """Several workers, each with room for a number of groups."""

    def __init__(self, starts: list[StartWorker], groups_each: int) -> None:
        if not starts or groups_each < 1:
            raise ValueError("a manager needs a worker that runs at least one group")
        self._seats = [_Seat(start) for start in starts]
        self._groups_each = groups_each
        self._changed = asyncio.Condition()
        self._paused = False
        self._version: int | None = None
        self.restarts = 0

    @property
    def capacity(self) -> int:
        """How many groups may run at once."""
        return len(self._seats) * self._groups_each

    async def open(self) -> None:
        """Start all workers. NoWorkers if none could be."""
        await asyncio.gather(*(self._fill(seat) for seat in self._seats))
        if all(seat.worker is None for seat in self._seats):
            raise NoWorkers("no worker could be started; the log says why")

    async def run(self, job: GroupJob) -> GroupOutcome:
        """Run a group where there is most room, as soon as there is any.

        Raises:
            WorkerLost: the worker died over it.
            WorkerError: the worker could not run it.
            NoWorkers: there is none left that could be started.
        """
        seat = await self._take()
        worker = seat.worker
        assert worker is not None
        try:
            outcome = await worker.run(job)
            seat.failures = 0
            return outcome
        except WorkerLost:
            self._lost(seat, worker)
            raise
        finally:
            await self._give_back(seat)

    async def pause(self, limit_s: float) -> None:
        """Interrupt every group of every worker; those that die of it are started again."""
        self._paused = True
        await self._each(lambda worker: worker.pause(limit_s))

    async def resume(self) -> None:
        self._paused = False
        await self._each(lambda worker: worker.resume())

    async def update_weights(self, version: int) -> None:
        """All workers, and those that are started later, generate with this version."""
        self._version = version
        await self._each(lambda worker: worker.update_weights(version))

    async def plane_times(self) -> dict[object, float]:
        """Seconds so far that each worker was busy with the plane, by who it is.

        Workers that are gone are left out.
        """
        seats = [(place, seat) for place, seat in enumerate(self._seats) if seat.worker is not None]
        names = {id(seat.worker): (place, seat.filled) for place, seat in seats}
        times: dict[object, float] = {}

        async def ask(worker: Worker) -> None:
            times[names[id(worker)]] = await worker.plane_time_s()

        await self._each(ask)
        return times

    async def close(self) -> None:
        for seat in self._seats:
            if seat.starting is not None:
                seat.starting.cancel()
                await asyncio.wait({seat.starting})
        await self._each(lambda worker: worker.close())

    # -- seats -------------------------------------------------------------------------------

    async def _take(self) -> _Seat:
        async with self._changed:
            while True:
                free = [
                    seat
                    for seat in self._seats
                    if seat.worker is not None and seat.load < self._groups_each
                ]
                if free:
                    seat = min(free, key=lambda seat: seat.load)
                    seat.load += 1
                    return seat
                if all(seat.worker is None and seat.starting is None for seat in self._seats):
                    raise NoWorkers("every worker died, and none could be started again")
                await self._changed.wait()

    async def _give_back(self, seat: _Seat) -> None:
        seat.load -= 1
        async with self._changed:
            self._changed.notify_all()

    def _lost(self, seat: _Seat, worker: Worker) -> None:
        if seat.worker is not worker:
            return  # another group of it said so before
        seat.worker = None
        seat.failures += 1
        self.restarts += 1
        seat.starting = asyncio.create_task(self._refill(seat, worker))

    async def _refill(self, seat: _Seat, dead: Worker) -> None:
        try:
            try:
                await dead.close()
            except (WorkerLost, WorkerError):
                pass
            while seat.worker is None and seat.failures <= len(RESTART_PAUSE_S):
                await asyncio.sleep(RESTART_PAUSE_S[seat.failures - 1])
                await self._fill(seat)
                if seat.worker is None:
                    seat.failures += 1
            if seat.worker is None:
                _log.error("a seat stays empty: its worker was lost %d times", seat.failures)
        except Exception:
            _log.exception("a worker cannot be started again")
        finally:
            seat.starting = None
            async with self._changed:
                self._changed.notify_all()

    async def _fill(self, seat: _Seat) -> None:
        """Start the seat's worker, with the weights and the state that the others have."""
        try:
            worker = await seat.start()
            try:
                if self._version is not None:
                    await worker.update_weights(self._version)
                if self._paused:
                    await worker.pause(0.0)
            except BaseException:
                await worker.close()
                raise
        except (WorkerLost, WorkerError) as error:
            _log.warning("a worker could not be started: %s", error)
            return
        seat.worker = worker
        seat.filled += 1

    async def _each(self, ask: Callable[[Worker], Awaitable[None]]) -> None:
        """Ask all workers at once. One that is gone is started again and is no error."""
        seats = [(seat, seat.worker) for seat in self._seats if seat.worker is not None]
        answers = await asyncio.gather(
            *(ask(worker) for _, worker in seats), return_exceptions=True
        )
        for (seat, worker), answer in zip(seats, answers, strict=True):
            if isinstance(answer, WorkerLost):
                self._lost(seat, worker)
            elif isinstance(answer, BaseException):
                raise answer
