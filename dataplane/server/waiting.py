"""The verbs that wait for rows and for changes: `wait` and `watch`. They never poll.

Owns who waits where: a crowd per condition and partition, and those whose partition is not there
yet. A request that waits is a task of its connection, and ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dataplane.errors import DeadlineExceeded, InvalidRequest, PartitionNotFound
from dataplane.server.connection import Connection, Verb
from dataplane.server.crowd import BEFORE_ALL, Crowd, Late
from dataplane.tags.explain.wording import many
from dataplane.tags.keys import check_name
from dataplane.tags.partition import Partition
from dataplane.tags.query import Predicate, compile_where
from dataplane.tags.views.view import Condition, condition_of
from dataplane.wire.frames import Body
from dataplane.wire.messages import check_wait, is_revision

if TYPE_CHECKING:
    from dataplane.server.tag_service import TagService


class Waited(NamedTuple):
    """What a request waits for."""

    kind: str
    """`rows` or `changes`."""
    partition_id: str
    where: Body
    started: float
    deadline: float
    """On the loop's clock, both."""
    fields: list[str]
    wanted: int | None = None
    grouped: bool = False


class _Request(NamedTuple):
    """A request that waits."""

    task: asyncio.Task[Any]
    number: int
    """What to answer it by."""
    waited: Waited


class Waiting:
    def __init__(self, service: TagService) -> None:
        self._service = service
        self._store = service.store
        self._crowds: dict[Partition, dict[Condition, Crowd]] = {}
        self._requests: dict[tuple[Connection, int], _Request] = {}
        """What waits, by the number that a client gave it: so that it can be given up."""
        self._stirred: dict[Crowd, int] = {}
        """Whom changes concern and who were not woken yet, with the first revision that does."""
        self._waking = False
        service.on_change.append(self._changed)
        self.verbs: dict[str, Verb] = {
            "wait": self._wait,
            "watch": self._watch,
            "wait_abandon": self._abandon,
        }

    def __len__(self) -> int:
        """How many wait for rows or changes of partitions that are there."""
        return sum(crowd.members for crowds in self._crowds.values() for crowd in crowds.values())

    # -- verbs -------------------------------------------------------------------------------

    async def _wait(self, connection: Connection, number: int, body: Body) -> None:
        partition_id, where, fields, count, grouped, wait_s, request = body
        check_name(partition_id, "partition_id")
        predicate = compile_where(where)
        if type(fields) is not list or not set(map(type, cast("list[Any]", fields))) <= {str}:
            raise InvalidRequest("fields is a list of field names")
        if type(count) is not int or count < 1:
            raise InvalidRequest(
                f"count is a number of rows or groups, 1 or more, not {count!r:.80}"
            )
        if type(grouped) is not bool:
            raise InvalidRequest(f"grouped is true or false, not {grouped!r:.80}")
        names = frozenset(cast("list[str]", fields))
        condition = condition_of(predicate, names, grouped=grouped)
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + check_wait(wait_s)
        waited = Waited("rows", partition_id, where, started, deadline, fields, count, grouped)
        with self._named(connection, number, request, waited):
            try:
                partition = await self._born(partition_id, deadline)
                crowd = self._join(partition, condition, predicate)
                try:
                    revision, packed = await crowd.rows(count, deadline)
                finally:
                    self._leave(partition, condition, crowd)
            except Late:
                what = many(count, "whole group" if grouped else "matching row")
                # Under no name here: what is raised leads to this frame, which must not lead back.
                raise await self._late(
                    f"partition {partition_id!r} did not come to {what}",
                    loop.time() - started, partition_id, predicate, condition, count,
                ) from None  # fmt: skip
            head, buffers, nbytes = packed
            answer = [(self._store.epoch, revision), *head]
            await connection.reply_with(number, answer, buffers, nbytes)

    async def _watch(self, connection: Connection, number: int, body: Body) -> None:
        partition_id, where, since, wait_s, request = body
        check_name(partition_id, "partition_id")
        predicate = compile_where(where)
        after = self._after(since)
        # A row that turns lost has changed, whatever it is watched for.
        condition = condition_of(predicate, frozenset(), grouped=False, lost=True)
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + check_wait(wait_s)
        waited = Waited("changes", partition_id, where, started, deadline, [])
        with self._named(connection, number, request, waited):
            try:
                partition = await self._born(partition_id, deadline)
                crowd = self._join(partition, condition, predicate)
                try:
                    told = await crowd.changes(after, deadline)
                finally:
                    self._leave(partition, condition, crowd)
            except Late:
                raise await self._late(
                    f"nothing that this watch tells of has changed in partition {partition_id!r}",
                    loop.time() - started, partition_id, predicate, condition, None,
                ) from None  # fmt: skip
            head, buffers, nbytes = told.packed
            answer = [told.changes, *head]
            if nbytes:
                await connection.reply_with(number, answer, buffers, nbytes)
            else:
                connection.reply(number, answer)

    @contextmanager
    def _named(
        self, connection: Connection, number: int, request: object, waited: Waited
    ) -> Generator[None]:
        """While this lasts, the task that runs can be given up by the number of its request."""
        if type(request) is not int or (connection, request) in self._requests:
            raise InvalidRequest(
                f"what waits has a number of its own on its connection, not {request!r:.80}"
            )
        task = asyncio.current_task()
        assert task is not None
        self._requests[connection, request] = _Request(task, number, waited)
        try:
            yield
        finally:
            del self._requests[connection, request]

    def _abandon(self, connection: Connection, number: int, body: Body) -> None:
        (request,) = body
        if type(request) is not int:
            raise InvalidRequest(f"what waits is given up by its number, not {request!r:.80}")
        # A request that came just before this has not begun to run, and will before this goes on.
        asyncio.get_running_loop().call_soon(self._give_up, connection, request)
        connection.reply(number, None)

    def _give_up(self, connection: Connection, request: int) -> None:
        """Nobody waits for the answer to a request any longer."""
        found = self._requests.get((connection, request))
        if found is not None:
            found.task.cancel()
            connection.reply(found.number, None)  # so that it is not expected for ever

    def waiting(self) -> Iterator[tuple[str, Waited]]:
        """Who waits, by client, and for what."""
        for (connection, _), request in self._requests.items():
            yield connection.client_id, request.waited

    def _after(self, since: Body) -> int:
        """The revision from which on to watch; before everything, if it is of an older epoch."""
        if not is_revision(since):
            raise InvalidRequest(f"since is the revision of an earlier answer, not {since!r:.80}")
        epoch, n = since
        if (epoch, n) > self._store.revision():
            raise InvalidRequest(
                f"since is a revision that has been, and {epoch}:{n} is ahead of the plane, which "
                f"is at {self._store.epoch}:{self._store.n}"
            )
        return n if epoch == self._store.epoch else BEFORE_ALL

    async def _late(
        self,
        what: str,
        waited_s: float,
        partition_id: str,
        predicate: Predicate,
        condition: Condition,
        count: int | None,
    ) -> DeadlineExceeded:
        """The error of a wait whose deadline has passed."""
        why = await self._service.explaining.explain_text(
            partition_id, predicate, condition.fields, condition.grouped, None, count
        )
        return DeadlineExceeded(
            f"{what} within {waited_s:.3g} s: {why}", waited_s=waited_s, explanation=why
        )

    # -- who waits where ---------------------------------------------------------------------

    async def _born(self, partition_id: str, deadline: float) -> Partition:
        """The partition, once it is there. `Late` if it was not by then."""
        try:
            async with asyncio.timeout_at(deadline):
                return await self._service.births.of(partition_id)
        except TimeoutError:
            raise Late from None

    def _join(self, partition: Partition, condition: Condition, predicate: Predicate) -> Crowd:
        crowds = self._crowds.setdefault(partition, {})
        crowd = crowds.get(condition)
        if crowd is None:
            view = partition.views.open(condition, predicate)
            crowd = crowds[condition] = Crowd(self._store, partition, view, self._service.worst)
        crowd.members += 1
        return crowd

    def _leave(self, partition: Partition, condition: Condition, crowd: Crowd) -> None:
        crowd.members -= 1
        if crowd.members:
            return
        partition.views.close(crowd.view)
        crowds = self._crowds.get(partition)
        if crowds is not None:
            del crowds[condition]
            if not crowds:
                del self._crowds[partition]

    # -- waking ------------------------------------------------------------------------------

    def _changed(self, partition: Partition) -> None:
        stirred = partition.views.take_stirred()
        crowds = self._crowds.get(partition, {})
        for view, first in stirred.items():
            crowd = crowds.get(view.condition)
            if crowd is not None:
                self._stirred.setdefault(crowd, first)
        if not self._waking:
            self._wake_some()

    def _wake_some(self) -> None:
        """Wake one crowd in a turn of the loop: one change may concern a thousand."""
        self._waking = False
        while self._stirred:
            crowd = next(iter(self._stirred))
            if crowd.wake(self._stirred.pop(crowd)):
                break
        if self._stirred:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._wake_some)

    def dropped(self, partition: Partition) -> None:
        """A partition is gone: nothing more will happen in it."""
        for crowd in self._crowds.pop(partition, {}).values():
            crowd.end(
                PartitionNotFound(
                    f"partition {partition.partition_id!r} was dropped while this waited for it",
                    partition_id=partition.partition_id,
                )
            )
