"""Claims at the tag store: those who wait are answered, and leases of clients that are gone end.

Owns the waiting, the clock of leases and what of claims is journaled. Who gets which rows is for
tags/claims/claims.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InvalidRequest,
    PartitionNotFound,
)
from dataplane.server.connection import Connection, Verb
from dataplane.server.listings import PIECE_ROWS, pack_pieces
from dataplane.server.slices import Slices
from dataplane.tags import journal as j
from dataplane.tags import listing
from dataplane.tags.claims.leases import Granted, LeaseClock
from dataplane.tags.claims.queues import Ask, Queue
from dataplane.tags.claims.wants import Want, check_number, check_numbers
from dataplane.tags.explain.wording import many
from dataplane.tags.keys import check_keys, check_name
from dataplane.tags.partition import Partition
from dataplane.tags.requests import COMMIT, RELEASE
from dataplane.types import FieldSchema
from dataplane.wire.frames import Body
from dataplane.wire.messages import check_wait

if TYPE_CHECKING:
    from dataplane.server.tag_service import TagService

log = logging.getLogger("dataplane.tags")

TICK_S = 0.05
"""Time between two looks at the leases of clients that are away."""


class Ledger:
    """Writes down what claims are about to do, and tells them what they need to know for it."""

    def __init__(self, service: TagService) -> None:
        self._service = service
        self._last_id = 0
        self._asked: tuple[str, int, int] | None = None
        self.clock = LeaseClock()

    @property
    def now(self) -> float:
        return self._service.clock()

    @property
    def lease_now(self) -> float:
        # Between two ticks too: a term that began at the last one would end too early.
        return self.clock.at(time.monotonic())

    def claim_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def skip_ids(self, up_to: int) -> None:
        """Claims of these numbers are known from elsewhere."""
        self._last_id = max(self._last_id, up_to)

    def is_away(self, client_id: str) -> bool:
        return client_id not in self._service.attached

    def claimed(self, body: Any) -> None:
        self._append(j.CLAIM, body)
        # Of none where one more joins the lease of a share.
        grants: list[Any] = cast("list[Any]", body[5]) if type(body[5]) is list else []
        self._service.totals.claims += len(grants)
        self._service.totals.rows_claimed += sum(len(grant[3]) for grant in grants)

    def committed(self, body: Any) -> None:
        self._append(j.COMMIT, (*body, *self._take_asked()))
        self._service.totals.commits += 1
        self._service.totals.rows_committed += len(body[3])

    def released(self, body: Any) -> None:
        self._append(j.RELEASE, (*body, *self._take_asked()))
        self._service.totals.releases += 1

    def left(self, body: Any) -> None:
        self._append(j.LEAVE, body)

    def asked(self, client_id: str, number: int, settled: int) -> None:
        """What is written down next is what this request asks for."""
        self._asked = client_id, number, settled

    def _take_asked(self) -> tuple[str, int, int] | tuple[()]:
        asked, self._asked = self._asked, None
        return asked or ()

    def wrote(self) -> bool:
        """Whether anything was written down since `asked`; if not, it will not be as asked for."""
        return not self._take_asked()

    def _append(self, kind: int, body: Any) -> None:
        self._service.journal.append(kind, self._service.store.n, self._service.clock(), body)


class _Pending:
    """One claim that is waited for, by as many connections as asked for it."""

    __slots__ = (
        "answer", "ask", "deadline", "entering", "partition", "queue", "started", "users", "want",
    )  # fmt: skip

    def __init__(self, want: Want, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.want = want
        self.started = loop.time()
        self.deadline = self.started + wait_s
        self.answer: asyncio.Future[Granted] = loop.create_future()
        self.users = 0
        self.partition: Partition | None = None
        self.queue: Queue | None = None
        self.ask: Ask | None = None
        self.entering: asyncio.Task[None] | None = None

    def reply(self, answer: Granted | Exception) -> None:
        """Answer it; the first answer counts."""
        if self.answer.done():
            return
        if isinstance(answer, Exception):
            self.answer.set_exception(answer)
            self.answer.exception()  # nobody may be left who looks at it
        else:
            self.answer.set_result(answer)


class Claiming:
    """The verbs of claims."""

    def __init__(self, service: TagService) -> None:
        self._service = service
        self._store = service.store
        self._ledger = Ledger(service)
        self._pending: dict[tuple[str, int], _Pending] = {}
        """By client and number of the request."""
        self._filling: dict[Queue, asyncio.Task[None]] = {}
        self._ticking: asyncio.Task[None] | None = None
        self.verbs: dict[str, Verb] = {
            "claim": self._claim,
            "claim_abandon": self._abandon,
            COMMIT: self._commit,
            RELEASE: self._release,
        }
        service.on_change.append(self._changed)

    def __len__(self) -> int:
        """How many claims wait for rows, of partitions that are there."""
        return sum(
            pending.ask is not None and not pending.answer.done()
            for pending in self._pending.values()
        )

    def waiting(self) -> Iterator[tuple[str, Want, float, float]]:
        """Who waits, by client, and for what, since when and until when, on the loop's clock."""
        for (client_id, _), pending in self._pending.items():
            if not pending.answer.done():
                yield client_id, pending.want, pending.started, pending.deadline

    @property
    def lease_now(self) -> float:
        """The time on the clock of leases."""
        return self._ledger.lease_now

    # -- claim -------------------------------------------------------------------------------

    async def _claim(self, connection: Connection, number: int, body: Body) -> None:
        *asked, abandoned, wait_s, request = body
        self.give_up(connection.client_id, check_numbers(abandoned, "claim"))
        want = Want.parse(*asked)
        wait_s = check_wait(wait_s)
        name = connection.client_id, check_number(request, "claim")
        granted = await self._wait(name, want, wait_s)
        partition = self._store.partitions.get(want.partition_id)
        schema = {} if partition is None else partition.schema
        await self._reply(connection, number, granted, schema)

    async def _wait(self, name: tuple[str, int], want: Want, wait_s: float) -> Granted:
        pending = self._pending.get(name)
        if pending is None:
            pending = self._pending[name] = _Pending(want, wait_s)
            try:
                self._begin(pending, name, want)
            except BaseException:
                self._forget(name, pending)
                raise
        pending.users += 1
        try:
            if not pending.answer.done():
                await asyncio.wait([pending.answer], timeout=wait_s)
            if pending.answer.done():
                return pending.answer.result()
        finally:
            pending.users -= 1
            if not pending.users:
                self._forget(name, pending)
            del pending  # it has the error that leads here, if there is one
        raise await self._late(want, wait_s)

    def _begin(self, pending: _Pending, name: tuple[str, int], want: Want) -> None:
        partition = self._store.partitions.get(want.partition_id)
        if partition is not None:
            again = partition.claims.granted(*name)
            if again is not None:
                pending.reply(again)
                return
            self._open(pending, partition, want)
            if pending.queue is not None and pending.queue.complete:
                self._enter(pending, name, want)
                return
        pending.entering = asyncio.get_running_loop().create_task(
            self._enter_later(pending, name, want)
        )

    def _open(self, pending: _Pending, partition: Partition, want: Want) -> None:
        partition.claims.check_count(partition, want.count)
        pending.queue = partition.claims.open(
            partition, want.task, want.condition, want.predicate, want.order
        )
        pending.partition = partition

    async def _enter_later(self, pending: _Pending, name: tuple[str, int], want: Want) -> None:
        """Enter when the partition is there and the queue is filled."""
        try:
            partition = await self._service.births.of(want.partition_id)
            if pending.queue is None:
                self._open(pending, partition, want)
            assert pending.queue is not None
            if not pending.queue.complete:
                await asyncio.shield(self._fill(partition, pending.queue))
            if self._store.partitions.get(want.partition_id) is not pending.partition:
                raise _dropped(want.partition_id)
            self._enter(pending, name, want)
        except Exception as error:
            pending.reply(error)

    def _enter(self, pending: _Pending, name: tuple[str, int], want: Want) -> None:
        assert pending.partition is not None
        assert pending.queue is not None
        # A quota may have been set while the queue was filled.
        pending.partition.claims.check_count(pending.partition, want.count)
        client_id, request = name
        pending.ask = Ask(
            client_id, request, pending.queue, want.count, want.fields, want.lease_s, want.rank,
            pending.reply,
        )  # fmt: skip
        pending.partition.claims.enter(pending.partition, pending.ask, self._ledger)
        self._serve(pending.partition)

    def _fill(self, partition: Partition, queue: Queue) -> asyncio.Task[None]:
        task = self._filling.get(queue)
        if task is None:

            async def fill() -> None:
                slices = Slices(self._service.worst)
                try:
                    for _ in partition.views.scan(queue.view):
                        await slices.breathe()
                    for _ in queue.fill():
                        await slices.breathe()
                finally:
                    del self._filling[queue]

            task = self._filling[queue] = asyncio.get_running_loop().create_task(fill())
        return task

    def _forget(self, name: tuple[str, int], pending: _Pending) -> None:
        """Nobody waits for it any more; what was granted stays so, for the request's repetition."""
        del self._pending[name]
        if pending.entering is not None:
            pending.entering.cancel()
        partition, queue, ask = pending.partition, pending.queue, pending.ask
        # An ask leads to who waits for it: a circle, which would keep a dropped partition.
        pending.partition = pending.queue = pending.ask = None
        if partition is None or queue is None:
            return
        if ask is not None:
            partition.claims.withdraw(ask)
        partition.claims.close(partition, queue)
        self._serve(partition)

    async def _late(self, want: Want, wait_s: float) -> DeadlineExceeded:
        """The error of a claim that was not answered in time."""
        what = many(want.count, "whole group" if want.condition.grouped else "row")
        text = (
            f"task {want.task!r} got no claim of {what} of partition {want.partition_id!r} within "
            f"{wait_s:.3g} s"
        )
        why = await self._service.explaining.explain_text(
            want.partition_id, want.predicate, want.condition.fields, want.condition.grouped,
            want.task, want.count,
        )  # fmt: skip
        return DeadlineExceeded(f"{text}: {why}", waited_s=wait_s, explanation=why)

    async def _reply(
        self,
        connection: Connection,
        number: int,
        granted: Granted,
        schema: dict[str, FieldSchema],
    ) -> None:
        slices = Slices(self._service.worst)
        pieces: list[listing.Piece] = []
        for at in range(0, len(granted.rows), PIECE_ROWS):
            rows = granted.rows[at : at + PIECE_ROWS]
            pieces.append(listing.piece_of_rows(rows, None, schema))
            await slices.breathe()
        head, buffers, nbytes = pack_pieces(pieces)
        deliveries = array("i", granted.deliveries).tobytes()
        revision = (self._store.epoch, granted.revision)
        answer = [granted.claim_id, deliveries, granted.end, revision, *head]
        if nbytes:
            await connection.reply_with(number, answer, buffers, nbytes)
        else:
            connection.reply(number, answer)

    # -- the end of claims -------------------------------------------------------------------

    def _commit(self, connection: Connection, number: int, body: Body) -> None:
        self._end(connection, number, body, COMMIT)

    def _release(self, connection: Connection, number: int, body: Body) -> None:
        self._end(connection, number, body, RELEASE)

    def _end(self, connection: Connection, number: int, body: Body, verb: str) -> None:
        partition_id, task, claim_id, keys, request, settled = body
        client_id = connection.client_id
        answered = self._service.repeats.answered(client_id, request, settled, verb)
        if answered is None:
            if type(partition_id) is not str:
                raise InvalidRequest(f"a partition_id is a string, not {partition_id!r:.80}")
            check_name(task, "task name")
            if type(claim_id) is not int:
                raise InvalidRequest(f"a claim_id is the number of a claim, not {claim_id!r:.80}")
            check_keys(keys)
            self._ledger.asked(client_id, request, settled)
            try:
                partition = self._store.partition(partition_id)
                end = partition.claims.commit if verb == COMMIT else partition.claims.release
                n = end(partition, task, claim_id, keys, self._ledger)
            except DataplaneError as error:
                self._service.tracing.refused(client_id, verb, partition_id, keys, error)
                raise
            finally:
                wrote = self._ledger.wrote()
            answered = (self._store.epoch, n)
            repeats = self._service.repeats
            if wrote:
                repeats.remember(client_id, request, verb, answered)
            else:  # it had ended just so before
                repeats.keep(client_id, request, settled, verb, answered)
            self._serve(partition)
        connection.reply(number, answered)

    def _abandon(self, connection: Connection, number: int, body: Body) -> None:
        (numbers,) = body
        given_up = check_numbers(numbers, "claim_abandon")
        # A claim that came just before this has not begun to run, and will before this goes on.
        asyncio.get_running_loop().call_soon(self._abandoned, connection, number, given_up)

    def _abandoned(self, connection: Connection, number: int, numbers: list[int]) -> None:
        try:
            self.give_up(connection.client_id, numbers)
        except DataplaneError as error:
            connection.fail(number, error)
        else:
            connection.reply(number, None)

    def give_up(self, client_id: str, numbers: Sequence[int]) -> None:
        """Nobody waits for these requests of a client any longer: what they got goes back."""
        if not numbers:
            return
        for request in numbers:
            pending = self._pending.get((client_id, request))
            if pending is not None:
                pending.reply(InvalidRequest(f"claim request {request} was given up"))
                if pending.ask is not None and pending.partition is not None:
                    pending.partition.claims.withdraw(pending.ask)
        for partition in self._holding(client_id):
            partition.claims.abandon(partition, client_id, numbers, self._ledger)
            self._serve(partition)

    # -- clients and their leases ------------------------------------------------------------

    def attached(self, client_id: str) -> None:
        """A client has its first connection."""
        for partition in self._holding(client_id):
            partition.claims.holders.attached(client_id)

    def detached(self, client_id: str) -> None:
        """A client has lost its last connection: the terms of its leases run."""
        for partition in self._holding(client_id):
            partition.claims.holders.detached(client_id, self._ledger.lease_now)
            self._watch_leases()

    def skip_ids(self, up_to: int) -> None:
        """Claims of the plane have had these numbers."""
        self._ledger.skip_ids(up_to)

    def restored(self, partition: Partition) -> None:
        """The claims of a partition came from elsewhere: their clients have yet to come."""
        claims = partition.claims
        claims.holders.begin_anew(self._ledger.lease_now)
        for client_id in self._service.attached:
            claims.holders.attached(client_id)
        self._ledger.skip_ids(max([task.last_id for task in claims.tasks.values()], default=0))
        self._watch_leases()

    def _holding(self, client_id: str) -> list[Partition]:
        return [p for p in self._store.partitions.values() if client_id in p.claims.holders]

    def _watch_leases(self) -> None:
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        clock = self._ledger.clock
        failing = False
        try:
            while True:
                clock.tick(time.monotonic())
                away = [p for p in self._store.partitions.values() if p.claims.holders.away]
                if not away:
                    return
                for partition in away:
                    try:
                        partition.claims.expire(partition, self._ledger)
                        failing = False
                    except (
                        DataplaneError
                    ) as error:  # the journal takes no more, for now or for ever
                        if not failing:
                            about = {"partition": partition.partition_id}
                            log.error("leases cannot end: %s", error, extra=about)
                        failing = True
                    self._serve(partition)
                await asyncio.sleep(TICK_S)
        finally:
            clock.pause()
            self._ticking = None

    # -- partitions --------------------------------------------------------------------------

    def _changed(self, partition: Partition) -> None:
        if partition.claims.active:
            self._serve(partition)

    def _serve(self, partition: Partition) -> None:
        """Answer everybody who can be answered."""
        partition_id = partition.partition_id
        if self._store.partitions.get(partition_id) is not partition:
            return
        attempts = self._store.attempts.values() if partition.sealed else ()
        growing = any(group.partition_id == partition_id for group in attempts)
        partition.claims.serve(partition, self._ledger, growing=growing)
        if partition.claims.holders.away:
            self._watch_leases()

    def dropped(self, partition: Partition) -> None:
        """A partition is gone."""
        for ask in partition.claims.end():
            ask.reply(_dropped(partition.partition_id))


def _dropped(partition_id: str) -> PartitionNotFound:
    return PartitionNotFound(
        f"partition {partition_id!r} was dropped while a claim waited for it",
        partition_id=partition_id,
    )
