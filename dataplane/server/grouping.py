"""Groups at the tag store: begun when there is room for all of them, ended once.

Room is reserved before a group exists: under its partition's quota first, then in a value store,
the home of who asks or another one that has room. Only then is the group made, at one revision
with its prompt's row and with the end of its older attempt.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dataplane.errors import (
    DataplaneError,
    InvalidRequest,
    PartitionNotFound,
    QuotaExceeded,
    StaleWrite,
)
from dataplane.server.connection import Connection, Verb
from dataplane.server.keeping import Keeping, Kept
from dataplane.tags import journal as j
from dataplane.tags.accounts import Account
from dataplane.tags.groups import RUNNING, Group, check_begin
from dataplane.tags.keys import check_keys, check_name
from dataplane.tags.prompts import begin_group, put_of_begin, put_of_end
from dataplane.tags.quota import Shortage, shortage_of_group
from dataplane.tags.requests import BEGIN_GROUP as BEGIN
from dataplane.tags.requests import END_GROUP as END
from dataplane.wire.frames import Body
from dataplane.wire.messages import check_wait, is_attempt, with_fullest

if TYPE_CHECKING:
    from dataplane.server.tag_service import TagService


class _Wish(NamedTuple):
    """A group that somebody wants to begin."""

    client_id: str
    uid: str
    partition_id: str
    n: int
    declared: int
    """Bytes to reserve."""
    request: int
    asked_at: int
    """The revision when it was asked for."""


class Grouping:
    """The verbs that begin and end groups."""

    def __init__(self, service: TagService) -> None:
        self._service = service
        self._store = service.store
        self.keeping = Keeping(service)
        self._beginning: dict[tuple[str, int], asyncio.Task[Any] | None] = {}
        """Groups that wait for room, by client and request."""
        self.verbs: dict[str, Verb] = {BEGIN: self._begin, END: self._end}

    # -- begin -------------------------------------------------------------------------------

    async def _begin(self, connection: Connection, number: int, body: Body) -> None:
        uid, partition_id, n, declared_bytes, home, wait_s, request, settled = body
        client_id = connection.client_id
        answered = self._service.repeats.answered(client_id, request, settled, BEGIN)
        if answered is None:
            check_keys([uid])
            if type(partition_id) is not str:
                raise InvalidRequest(f"a partition_id is a string, not {partition_id!r:.80}")
            check_name(partition_id, "partition name")
            check_begin(n, declared_bytes)
            if home is not None and type(home) is not str:
                raise InvalidRequest(f"the home of a client is a store's id, not {home!r:.80}")
            deadline = asyncio.get_running_loop().time() + check_wait(wait_s)
            declared = self._declared(partition_id, declared_bytes)
            wish = _Wish(client_id, uid, partition_id, n, declared, request, self._store.n)
            key = client_id, request
            # A request that comes again does so because its connection broke: the one before it
            # must not go on and succeed after this one was told that there is no room.
            before = self._beginning.get(key)
            if before is not None:
                before.cancel()
            mine = self._beginning[key] = asyncio.current_task()
            try:
                answered = await self._begin_once(wish, settled, home, deadline)
            except DataplaneError as error:
                self._service.tracing.refused(client_id, BEGIN, partition_id, [uid], error)
                raise
            finally:
                if self._beginning.get(key) is mine:
                    del self._beginning[key]
        connection.reply(number, answered)

    async def _begin_once(
        self, wish: _Wish, settled: int, home: str | None, deadline: float
    ) -> Any:
        """The attempt, once there is room for all of the group."""
        repeats = self._service.repeats
        kept: Kept | None = None
        try:
            while True:
                reserved = await self._reserve(wish, deadline)
                try:
                    if kept is None:
                        kept = await self._keep(wish, home, deadline)
                finally:
                    reserved.hold(0, 0)
                # From here on nobody comes in between.
                answered = repeats.answered(wish.client_id, wish.request, settled, BEGIN)
                if answered is not None:
                    self._give_back(wish, kept)
                    return answered
                if self._lacks(wish) is None:
                    break
            group = self._apply(wish, kept, settled)
        except BaseException:
            self._give_back(wish, kept)
            raise
        repeats.remember(wish.client_id, wish.request, BEGIN, group.attempt)
        if kept is not None:
            await self.keeping.bind(kept, group)
        elif wish.declared:
            self._service.in_background(self.keeping.room_later(group, home, deadline))
        return group.attempt

    async def _keep(self, wish: _Wish, home: str | None, deadline: float) -> Kept | None:
        """Room in a value store. None where the older attempt of the group may be what is in the
        way: then it has to go first, and room is kept as it comes free."""
        if not wish.declared:
            return None
        partition = self._store.partitions.get(wish.partition_id)
        begins_anew = partition is not None and wish.uid in partition.groups
        try:
            return await self.keeping.room(wish.declared, home, deadline, wait=not begins_anew)
        except QuotaExceeded as error:
            if wish.declared < error.limit_bytes:  # more would not fit into an empty store either
                with_fullest(error, self._service.fullest())
            raise

    def _give_back(self, wish: _Wish, kept: Kept | None) -> None:
        """A group does not begin: others may have its room."""
        if kept is not None:
            kept.give_back()
        partition = self._store.partitions.get(wish.partition_id)
        if partition is not None:
            self._service.admission.run(partition)

    def _declared(self, partition_id: str, declared_bytes: int | None) -> int:
        """What the group is to have reserved. InvalidRequest where it never could have."""
        partition = self._store.partitions.get(partition_id)
        quota = None if partition is None else partition.quota
        if quota is None:
            return declared_bytes or 0
        if declared_bytes is None and quota.group_bytes is not None:
            return quota.group_bytes
        if not declared_bytes and (quota.bytes is not None or quota.producer_bytes is not None):
            raise InvalidRequest(
                f"partition {partition_id!r} has a quota in bytes: declare what the group will "
                "take (declared_bytes), or set group_bytes in the quota; groups that reserve "
                "nothing could block each other half-made"
            )
        return declared_bytes or 0

    def _lacks(self, wish: _Wish) -> Shortage | None:
        """What the group has no room for in its partition's quota."""
        store, partition_id = self._store, wish.partition_id
        partition = store.partitions.get(partition_id)
        gone = store.dropped.get(partition_id, 0) if partition is None else partition.born
        if gone > wish.asked_at:
            raise PartitionNotFound(
                f"partition {partition_id!r} was dropped while group {wish.uid!r:.80} waited for "
                "room in it",
                partition_id=partition_id,
            )
        if partition is None:
            return None
        if partition.sealed:
            raise InvalidRequest(
                f"partition {partition_id!r} is sealed and takes no new row: no group begins there"
            )
        return shortage_of_group(partition, wish.client_id, wish.uid, wish.declared, wish.n)

    async def _reserve(self, wish: _Wish, deadline: float) -> Account:
        """Room under the partition's quota, in an account of its own for the time being."""
        store = self._store

        def attempt() -> Account | Shortage:
            short = self._lacks(wish)
            if short is not None:
                return short
            partition = store.partitions.get(wish.partition_id)
            if partition is None or partition.quota is None:
                return Account()
            account = Account(partition.producer(wish.client_id))
            account.hold(*self._beyond_older(wish))
            return account

        partition = store.partitions.get(wish.partition_id)
        if partition is None or partition.quota is None or self._beyond_older(wish) == (0, 0):
            room = attempt()
            if isinstance(room, Account):
                return room
        wait_s = max(0.0, deadline - asyncio.get_running_loop().time())
        granted = self._service.admission.admit(
            wish.partition_id, wish.client_id, wish.request, attempt, lambda: self._lacks(wish),
            wait_s,
        )  # fmt: skip
        if not isinstance(granted, asyncio.Future):
            return granted
        coming = cast("asyncio.Future[Account]", granted)
        try:
            return await coming
        except asyncio.CancelledError:
            # Room that came in the very moment in which nobody waited for it any more.
            if coming.done() and not coming.cancelled() and coming.exception() is None:
                coming.result().hold(0, 0)
            raise

    def _beyond_older(self, wish: _Wish) -> tuple[int, int]:
        """Bytes and rows that the group takes beyond what its older attempt gives back."""
        partition = self._store.partitions.get(wish.partition_id)
        older = None if partition is None else partition.groups.get(wish.uid)
        if older is None:
            return wish.declared, wish.n
        return max(0, wish.declared - older.total_bytes), max(0, wish.n - older.total_rows)

    def _apply(self, wish: _Wish, kept: Kept | None, settled: int) -> Group:
        store, service = self._store, self._service
        attempt = store.n + 1
        prompt = put_of_begin(wish.partition_id, wish.uid, wish.n, attempt, wish.client_id)
        found = store.check_put(prompt)
        now = service.clock()
        store_id = "" if kept is None else kept.values.store_id
        change = (
            wish.client_id, wish.partition_id, wish.uid, wish.n, wish.declared, store_id,
            wish.request, settled,
        )  # fmt: skip
        service.journal.append(j.BEGIN, attempt, now, change)
        group = begin_group(store, prompt, found, wish.n, wish.declared, now=now, kept_by=store_id)
        service.freeing.run()
        return group

    # -- end ---------------------------------------------------------------------------------

    def _end(self, connection: Connection, number: int, body: Body) -> None:
        attempt, status, *of, request, settled = body
        client_id = connection.client_id
        answered = self._service.repeats.answered(client_id, request, settled, END)
        if answered is None:
            if not is_attempt(attempt):
                raise InvalidRequest(
                    f"an attempt is what begin_group answered, not {attempt!r:.80}"
                )
            if type(status) is not str or not 0 < len(status) <= 256 or status == RUNNING:
                raise InvalidRequest(
                    "the status at which a group ends is a word such as 'finished' or 'failure', "
                    f"not {status!r:.80}"
                )
            try:
                answered = self._apply_end(client_id, attempt, status, request, settled, of)
            except StaleWrite as error:
                self._service.tracing.refused(client_id, END, "", [], error, attempt)
                raise
            self._service.repeats.remember(client_id, request, END, answered)
        connection.reply(number, answered)

    def _apply_end(
        self,
        client_id: str,
        attempt: int,
        status: str,
        request: int,
        settled: int,
        of: list[Any],
    ) -> tuple[int, int]:
        store, service = self._store, self._service
        group = store.attempts.get(attempt)
        if group is None or (of and of != [group.partition_id]):
            raise StaleWrite(
                f"attempt {attempt} is not open: its group ended, began anew or was retired",
                attempt=attempt,
                keys=[],
            )
        prompt = put_of_end(store, group, status, client_id)
        now = service.clock()
        change = (client_id, attempt, status, request, settled)
        service.journal.append(j.END, store.n + 1, now, change)
        n = store.apply_end(group, status, prompt, now, client_id)
        service.freeing.run()
        return store.epoch, n
