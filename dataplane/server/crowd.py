"""Who waits on one condition in one partition, and what wakes them.

Owns the order in which they are looked at: a change of the view costs nothing until enough rows
match for somebody. Those who are woken by the same change share one answer, which is packed once.
Who watches is told from where it stands, or from where it is known that nothing happened before;
so history is never gone through for changes that do not concern it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Coroutine, Iterable
from copy import copy
from typing import Any

from dataplane.errors import DataplaneError
from dataplane.server.listings import Packed
from dataplane.server.slices import Slices, WorstSlice
from dataplane.server.telling import Told, changes_since, pack_moment
from dataplane.tags.partition import Partition
from dataplane.tags.store import TagStore
from dataplane.tags.views.moment import Moment
from dataplane.tags.views.view import View

WOKEN_AT_ONCE = 8
"""Of those who share an answer; then others may run. Each has it written to its connection."""
BEFORE_ALL = -1
"""Stands before every revision of this epoch."""


class Late(Exception):
    """Nothing came in time."""


class _Waiter:
    """One who waits for so many rows or groups."""

    __slots__ = ("answer", "place")

    def __init__(self, count: int, number: int) -> None:
        self.place = (count, number)
        """By which it is found among the others: no two have the same."""
        self.answer: asyncio.Future[tuple[int, Packed]] = _future()


class _Watcher:
    """One who waits for changes after a revision."""

    __slots__ = ("after", "answer", "calm", "late")

    def __init__(self, after: int) -> None:
        self.after = after
        self.answer: asyncio.Future[Told] = _future()
        self.calm = True
        """Whether nothing has happened since; if not, it is being looked what there is to tell."""
        self.late = False


class _Answer:
    """Rows of one moment for all who were woken by it, and who come while nothing has changed."""

    def __init__(self, moment: Moment, touched: int) -> None:
        self.moment = moment
        self.touched = touched
        self.waiters: list[tuple[_Waiter, int]] = []
        """With the revision at which each of them joined."""


class Crowd:
    """Everybody who waits on a view."""

    def __init__(
        self, store: TagStore, partition: Partition, view: View, worst: WorstSlice
    ) -> None:
        self.members = 0
        self.view = view
        self._store = store
        self._partition = partition
        self._worst = worst
        self._waiters: list[_Waiter] = []
        """By count, and then as they came."""
        self._last_number = 0
        self._watchers: set[_Watcher] = set()
        self._answer: _Answer | None = None
        self._scanning: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: DataplaneError | None = None
        """Why there is nothing to wait for any more. Only copies of it are raised: what was raised
        leads to this crowd, and a circle of a dropped partition would stay."""

    def wake(self, first: int) -> bool:
        """Something of concern has changed, first at this revision; whether anybody is answered
        for it, or may be."""
        woken = bool(self._waiters) and self._wake_waiters()
        if self._watchers:
            woken |= self._look([watcher for watcher in self._watchers if watcher.calm], first - 1)
        return woken

    def end(self, error: DataplaneError) -> None:
        """There is nothing to wait for any more."""
        self._ended = error
        for waiter in self._waiters:
            _fail(waiter.answer, copy(error))
        for watcher in self._watchers:
            _fail(watcher.answer, copy(error))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- rows --------------------------------------------------------------------------------

    async def rows(self, count: int, deadline: float) -> tuple[int, Packed]:
        """The revision and the rows, as soon as so many rows or groups match. `Late` if they did
        not by then, on the clock of the loop."""
        while not self.view.complete:
            # How long it takes does not depend on who asks, so no deadline cuts it short.
            if self._scanning is None:
                self._scanning = self._start(self._scan())
            await asyncio.shield(self._scanning)
        if self._ended is not None:
            raise copy(self._ended)
        self._last_number += 1
        waiter = _Waiter(count, self._last_number)
        insort(self._waiters, waiter, key=_place_of)
        self._wake_waiters()
        timer = asyncio.get_running_loop().call_at(deadline, self._too_late, waiter)
        try:
            return await waiter.answer
        finally:
            timer.cancel()
            self._forget(waiter)
            del waiter  # it has the error that leads here, if there is one

    async def _scan(self) -> None:
        slices = Slices(self._worst)
        for _ in self._partition.views.scan(self.view):
            await slices.breathe()

    def _too_late(self, waiter: _Waiter) -> None:
        if self._forget(waiter):
            _fail(waiter.answer, Late())

    def _forget(self, waiter: _Waiter) -> bool:
        """Whether it was still waiting."""
        at = bisect_left(self._waiters, waiter.place, key=_place_of)
        if at == len(self._waiters) or self._waiters[at] is not waiter:
            return False
        del self._waiters[at]
        return True

    def _wake_waiters(self) -> bool:
        view = self.view
        if not view.complete or self._ended is not None:
            return False
        ready = bisect_left(self._waiters, (view.size + 1, 0), key=_place_of)
        if not ready:
            return False
        answer = self._answer
        if answer is None or answer.touched != view.touched:
            moment = self._partition.views.moment(view)
            answer = self._answer = _Answer(moment, view.touched)
            self._start(self._hand_out(answer))
        revision = self._partition.revision
        answer.waiters += [(waiter, revision) for waiter in self._waiters[:ready]]
        del self._waiters[:ready]
        return True

    async def _hand_out(self, answer: _Answer) -> None:
        waiters = answer.waiters
        try:
            packed = await pack_moment(answer.moment, self._partition.schema, self._worst)
            for number, (waiter, revision) in enumerate(waiters, 1):  # more may join meanwhile
                if not waiter.answer.done():
                    waiter.answer.set_result((revision, packed))
                    if not number % WOKEN_AT_ONCE:
                        await asyncio.sleep(0)
        except Exception as error:
            for waiter, _ in waiters:
                _fail(waiter.answer, error)
        finally:
            if self._answer is answer:
                self._answer = None

    # -- changes -----------------------------------------------------------------------------

    async def changes(self, after: int, deadline: float) -> Told:
        """What changed after a revision, as soon as there is something. `Late` if there was not by
        then."""
        watcher = _Watcher(after)
        self._watchers.add(watcher)
        self._look([watcher], BEFORE_ALL)
        timer = asyncio.get_running_loop().call_at(deadline, self._no_news, watcher)
        try:
            return await watcher.answer
        finally:
            timer.cancel()
            self._watchers.discard(watcher)
            del watcher  # as above

    def _no_news(self, watcher: _Watcher) -> None:
        watcher.late = True
        if watcher.calm:
            _fail(watcher.answer, Late())

    def _look(self, watchers: Iterable[_Watcher], calm_until: int) -> bool:
        """Look for what there is to tell these, once for all who stand at the same revision;
        whether there may be anything."""
        standing: dict[int, list[_Watcher]] = {}
        for watcher in watchers:
            if watcher.after < self.view.touched and not watcher.answer.done():
                watcher.calm = False
                standing.setdefault(max(watcher.after, calm_until), []).append(watcher)
        for after, those in standing.items():
            self._start(self._tell(after, those))
        return bool(standing)

    async def _tell(self, after: int, watchers: list[_Watcher]) -> None:
        match = None if self.view.predicate.matches_all else self.view.matches
        try:
            told = await changes_since(self._store, self._partition, after, match, self._worst)
        except Exception as error:
            for watcher in watchers:
                _fail(watcher.answer, error)
            return
        if told.changes:
            for number, watcher in enumerate(watchers, 1):
                if not watcher.answer.done():
                    watcher.answer.set_result(told)
                    if not number % WOKEN_AT_ONCE:
                        await asyncio.sleep(0)
            return
        for watcher in watchers:
            watcher.after = told.upto
            watcher.calm = True
        self._look(watchers, BEFORE_ALL)
        for watcher in watchers:
            if watcher.late and watcher.calm:
                _fail(watcher.answer, Late())


def _place_of(waiter: _Waiter) -> tuple[int, int]:
    return waiter.place


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
