"""Puts and groups that wait for room under a quota: in the order in which they came.

Owns the line of each partition. What has room is decided by tags/quota.py; whoever is first in line
is tried again when something of the partition was cleared or its settings changed. Who is held up
by a producer's own limit holds up that producer alone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from dataplane.errors import DataplaneError, InternalError, QuotaExceeded
from dataplane.server.slices import SLICE_S
from dataplane.tags.accounts import Account
from dataplane.tags.partition import Partition
from dataplane.tags.quota import Shortage, oldest_unconsumed
from dataplane.tags.store import TagStore

Attempt = Callable[[], Any]
"""Does what was asked for and returns its answer, or the Shortage that keeps it from it."""
Check = Callable[[], Shortage | None]
"""What keeps it from being done, without doing it. Both raise what is wrong with the request."""


class _Waiting:
    """One request in line."""

    __slots__ = ("attempt", "by", "check", "client_id", "future", "place", "request", "seen",
                 "started", "timer")  # fmt: skip

    def __init__(self, client_id: str, request: int, attempt: Attempt, check: Check) -> None:
        loop = asyncio.get_running_loop()
        self.client_id = client_id
        self.request = request
        self.attempt = attempt
        self.check = check
        self.place = 0
        self.by = ""
        """Whose limit it waits for: its producer's, or (empty) the partition's."""
        self.seen: tuple[int, int] | None = None
        """What was taken of that limit when there was no room last; None if it is to be looked at
        in any case."""
        self.future: asyncio.Future[Any] = loop.create_future()
        self.started = loop.time()
        self.timer: asyncio.TimerHandle | None = None


class _Line:
    """Who waits for room in one partition."""

    __slots__ = ("again", "by_place", "by_request", "passing", "waiting")

    def __init__(self) -> None:
        self.by_place: dict[int, _Waiting] = {}
        self.by_request: dict[tuple[str, int], _Waiting] = {}
        self.waiting: dict[str, int] = {}
        """How many wait for each limit."""
        self.passing = False
        """Whether those in line are being gone through."""
        self.again = False

    def add(self, entry: _Waiting) -> None:
        self.by_place[entry.place] = entry
        self.by_request[entry.client_id, entry.request] = entry
        self.waiting[entry.by] = self.waiting.get(entry.by, 0) + 1

    def remove(self, entry: _Waiting) -> None:
        if self.by_place.get(entry.place) is entry:
            del self.by_place[entry.place]
            self._leave(entry.by)
        if self.by_request.get((entry.client_id, entry.request)) is entry:
            del self.by_request[entry.client_id, entry.request]

    def move(self, entry: _Waiting, by: str) -> None:
        """It waits for another limit than before."""
        self._leave(entry.by)
        entry.by = by
        self.waiting[by] = self.waiting.get(by, 0) + 1

    def holds_up(self, client_id: str) -> bool:
        """Whether somebody is in line whom this client must not overtake."""
        return "" in self.waiting or client_id in self.waiting

    def _leave(self, by: str) -> None:
        self.waiting[by] -= 1
        if not self.waiting[by]:
            del self.waiting[by]


class Admission:
    """Who waits for room, by partition."""

    def __init__(self, store: TagStore) -> None:
        self._store = store
        self._lines: dict[str, _Line] = {}
        self._places = itertools.count()
        self._oldest: tuple[str, int, list[str]] = ("", 0, [])

    def __len__(self) -> int:
        """How many wait for room, in all partitions."""
        return sum(len(line.by_place) for line in self._lines.values())

    def waiting(self, partition_id: str) -> int:
        """How many wait for room in a partition."""
        line = self._lines.get(partition_id)
        return 0 if line is None else len(line.by_place)

    def entries(self) -> Iterator[tuple[str, str, float, float | None]]:
        """Who waits: partition, client, since when and until when, on the loop's clock."""
        for partition_id, line in self._lines.items():
            for entry in line.by_place.values():
                until = None if entry.timer is None else entry.timer.when()
                yield partition_id, entry.client_id, entry.started, until

    def admit(
        self,
        partition_id: str,
        client_id: str,
        request: int,
        attempt: Attempt,
        check: Check,
        wait_s: float,
    ) -> Any | asyncio.Future[Any]:
        """The answer of `attempt` at once, or a future of it when there is room for it.

        A request that is in line already, and comes again because its connection broke, takes its
        own place. QuotaExceeded where there can never be room, or at the end of `wait_s`.
        """
        line = self._lines.get(partition_id)
        before = None if line is None else line.by_request.get((client_id, request))
        if line is not None and before is not None:
            line.remove(before)
            _settle(before, error=InternalError("the request came again, and is answered there"))
        if line is not None and line.holds_up(client_id):
            short = check()
        else:
            answer = attempt()
            if type(answer) is not Shortage:
                return answer
            short = answer
        if short is not None and (short.is_lasting or wait_s <= 0):
            raise self._error(partition_id, short, 0.0)
        if wait_s <= 0:
            raise self._behind(partition_id, 0.0)
        entry = _Waiting(client_id, request, attempt, check)
        entry.place = next(self._places) if before is None else before.place
        line = self._lines.setdefault(partition_id, _Line())
        if short is not None:
            entry.by = short.producer
            entry.seen = self._taken(partition_id, short.producer)
        elif "" not in line.waiting:
            entry.by = client_id  # it waits for what came before it of the same producer
        line.add(entry)
        loop = asyncio.get_running_loop()
        entry.timer = loop.call_later(wait_s, self._give_up, partition_id, entry)
        entry.future.add_done_callback(lambda _: self._left(partition_id, entry))
        if before is not None:
            line.by_place = dict(sorted(line.by_place.items()))
            loop.call_soon(self._look, partition_id)  # it may be the first, and there may be room
        return entry.future

    def _look(self, partition_id: str) -> None:
        partition = self._store.partitions.get(partition_id)
        if partition is not None:
            self.run(partition)

    def run(self, partition: Partition, *, everyone: bool = False) -> None:
        """Something of the partition may have come free; or, with `everyone`, its settings changed
        or it is gone, and who waits is looked at whatever is free."""
        partition_id = partition.partition_id
        line = self._lines.get(partition_id)
        if line is None:
            return
        if everyone:
            for entry in line.by_place.values():
                entry.seen = None
        if line.passing:
            line.again = True
        else:
            line.passing = True
            self._pass(partition_id, line, iter(list(line.by_place.values())), set[str]())

    def _pass(
        self, partition_id: str, line: _Line, entries: Iterator[_Waiting], held: set[str]
    ) -> None:
        """Go through those in line, giving way now and then."""
        started = time.thread_time()
        for entry in entries:
            if entry.future.done() or entry.client_id in held:
                continue
            if not self._try(partition_id, line, entry):
                if not entry.by:
                    break  # nobody overtakes it
                held.add(entry.client_id)
            if time.thread_time() - started > SLICE_S:
                asyncio.get_running_loop().call_soon(self._pass, partition_id, line, entries, held)
                return
        line.passing = False
        again, line.again = line.again, False
        if not line.by_place:
            self._lines.pop(partition_id, None)
        elif again:
            line.passing = True
            entries = iter(list(line.by_place.values()))
            held = set[str]()
            asyncio.get_running_loop().call_soon(self._pass, partition_id, line, entries, held)

    def _try(self, partition_id: str, line: _Line, entry: _Waiting) -> bool:
        """Whether the request is done with, one way or the other."""
        if entry.seen is not None:
            now = self._taken(partition_id, entry.by)
            if now[0] >= entry.seen[0] and now[1] >= entry.seen[1]:
                return False  # nothing came free
        try:
            answer = entry.attempt()
        except DataplaneError as error:
            line.remove(entry)
            # Its way here leads to the request, which leads to it: a circle, and a partition in it.
            _settle(entry, error=error.with_traceback(None))
            return True
        except Exception as error:
            line.remove(entry)
            _settle(entry, error=error)
            return True
        if type(answer) is not Shortage:
            line.remove(entry)
            _settle(entry, answer=answer)
            return True
        if answer.is_lasting:
            line.remove(entry)
            _settle(entry, error=self._error(partition_id, answer, _waited(entry)))
            return True
        line.move(entry, answer.producer)
        entry.seen = self._taken(partition_id, entry.by)
        return False

    def _taken(self, partition_id: str, by: str) -> tuple[int, int]:
        """Bytes and rows that are taken of a limit."""
        partition = self._store.partitions.get(partition_id)
        if partition is None:
            return 0, 0
        account: Account | None = partition.producers.get(by) if by else partition.account
        return (0, 0) if account is None else (account.total_bytes, account.total_rows)

    def _left(self, partition_id: str, entry: _Waiting) -> None:
        """A request is done with, or whoever asked is gone; those behind it may go on."""
        if entry.timer is not None:
            entry.timer.cancel()
        line = self._lines.get(partition_id)
        if line is None or line.by_place.get(entry.place) is not entry:
            return
        line.remove(entry)
        if line.by_place or line.passing:
            self._look(partition_id)
        else:
            del self._lines[partition_id]

    def _give_up(self, partition_id: str, entry: _Waiting) -> None:
        if entry.future.done():
            return
        waited_s = _waited(entry)
        try:
            short = entry.check()
        except DataplaneError as error:
            _settle(entry, error=error.with_traceback(None))
            return
        if short is None:
            _settle(entry, error=self._behind(partition_id, waited_s))
        else:
            _settle(entry, error=self._error(partition_id, short, waited_s))

    def _error(self, partition_id: str, short: Shortage, waited_s: float) -> DataplaneError:
        partition = self._store.partitions.get(partition_id)
        if partition is None or short.group is not None:
            return short.error(partition_id, waited_s)
        lagging = partition.claims.lagging_task()
        return short.error(partition_id, waited_s, self._oldest_in(partition), lagging)

    def _behind(self, partition_id: str, waited_s: float) -> QuotaExceeded:
        """There is room for the request, but others who came before it have none yet."""
        partition = self._store.partitions.get(partition_id)
        text = (
            f"others who came before still wait in line for room in partition {partition_id!r} "
            f"after {waited_s:.3g} s; clear rows that were consumed"
        )
        if partition is None or partition.quota is None:
            return QuotaExceeded(text, oldest_keys=[])
        return QuotaExceeded(
            text,
            used_bytes=partition.account.total_bytes,
            limit_bytes=partition.quota.bytes,
            oldest_keys=self._oldest_in(partition),
            lagging_task=partition.claims.lagging_task(),
        )

    def _oldest_in(self, partition: Partition) -> list[str]:
        """Looked up once for all who give up at the same moment."""
        partition_id, revision, oldest = self._oldest
        if (partition_id, revision) != (partition.partition_id, partition.revision):
            oldest = oldest_unconsumed(partition)
            self._oldest = (partition.partition_id, partition.revision, oldest)
        return oldest


def _waited(entry: _Waiting) -> float:
    return entry.future.get_loop().time() - entry.started


def _settle(entry: _Waiting, answer: Any = None, error: Exception | None = None) -> None:
    if entry.timer is not None:
        entry.timer.cancel()
    if entry.future.done():
        return
    if error is None:
        entry.future.set_result(answer)
    else:
        entry.future.set_exception(error)
