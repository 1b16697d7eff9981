"""Puts at the tag store: checked, admitted, journaled, applied, once each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dataplane.codec.template import Templates
from dataplane.errors import (
    DataplaneError,
    InternalError,
    InvalidRequest,
    OutcomeUnknown,
    PermissionDenied,
)
from dataplane.server.connection import Connection, Verb
from dataplane.tags import journal as j
from dataplane.tags.keys import check_keys, unpack_tags
from dataplane.tags.partition import Partition
from dataplane.tags.placement import Placement
from dataplane.tags.puts import Found, PutRows
from dataplane.tags.quota import Shortage, shortage_of_put, takes_room
from dataplane.tags.requests import PUT
from dataplane.tags.resulting import resulting
from dataplane.tags.rows import Row
from dataplane.wire.frames import MAX_HEADER_BYTES, Body
from dataplane.wire.messages import (
    IF_ABSENT,
    MUST_EXIST,
    RESTORE,
    RETRY,
    RETURN_TAGS,
    PutAnswer,
    PutMeta,
    WireRevision,
)

if TYPE_CHECKING:
    from dataplane.server.tag_service import TagService

MAX_ANSWERED_TAG_BYTES = MAX_HEADER_BYTES - (64 << 10)
"""Merged tags that go back with one put: they travel in the answer's header."""


class Putting:
    """The verbs that write rows."""

    def __init__(self, service: TagService) -> None:
        self._service = service
        self._store = service.store
        self._begun: dict[tuple[str, int], WireRevision] = {}
        """Where puts began that have not arrived whole, by store and its token."""
        self._waiting: dict[tuple[str, int], asyncio.Future[PutAnswer]] = {}
        """Puts that wait for room under a quota, likewise."""
        self._templates = Templates()
        self.verbs: dict[str, Verb] = {
            "put_tags": self._put_tags,
            "publish": self._publish,
            "begin": self._begin,
            "begun": self._note_begun,
            "forget": self._note_forgotten,
        }

    def put(
        self,
        client_id: str,
        packed: object,
        tags: object,
        block: Body,
        store_id: str,
        token: int = 0,
    ) -> PutAnswer | asyncio.Future[PutAnswer]:
        """Make one put happen, once: the answer of a repeated request is the first one.

        The answer is a future where the put has to wait for room under its partition's quota.
        """
        try:
            return self._put(client_id, packed, tags, block, store_id, token)
        except OutcomeUnknown:
            # Its store keeps the block, which may be one that was published. If not, it may go.
            loading = self._service.checkpointing.restorer
            if block is not None:
                place = store_id, block[0]
                if place not in self._store.placements and not loading.has(place):
                    self._service.freeing.drop(*place)
            raise
        except DataplaneError as error:
            self._service.totals.refuse(error)
            self._service.tracing.refused_put(client_id, packed, error)
            raise

    def _put(
        self,
        client_id: str,
        packed: object,
        tags: object,
        block: Body,
        store_id: str,
        token: int,
    ) -> PutAnswer | asyncio.Future[PutAnswer]:
        begun = self._begun.pop((store_id, token), None) if token else None
        meta = PutMeta.unpack(packed)
        if meta.flags & RESTORE:
            placement = self.placement(store_id, block)
            return self._service.checkpointing.restorer.put(
                client_id, meta, packed, tags, placement, block
            )
        answered = self._answered(client_id, meta, block, store_id)
        if answered is not None:
            return answered
        store = self._store
        put = self._checked(client_id, meta, tags, block, store_id, begun)
        partition = store.partitions.get(meta.partition_id)
        if partition is None or self._waits_for_nobody(put, partition):
            answer = self._apply(meta, put, packed, tags, block, store_id)
            if isinstance(answer, PutAnswer):
                return answer
            raise answer.error(meta.partition_id)
        if put.stamp is None:
            # Should it have to wait: what is cleared meanwhile it must not bring back.
            put = put._replace(stamp=store.n)
        attempt = partial(self._try, client_id, meta, put, packed, tags, block, store_id)
        admitted: Any = self._service.admission.admit(
            meta.partition_id, client_id, meta.number, attempt, partial(self._lacks, put),
            meta.wait_s,
        )  # fmt: skip
        if not isinstance(admitted, asyncio.Future):
            return admitted
        waiting = cast("asyncio.Future[PutAnswer]", admitted)
        waiting.add_done_callback(self._note_refused)

        def ended(answer: asyncio.Future[PutAnswer]) -> None:
            if not answer.cancelled() and (error := answer.exception()) is not None:
                self._service.tracing.refused_put(client_id, packed, error)

        waiting.add_done_callback(ended)
        if token:
            place = store_id, token
            self._waiting[place] = waiting
            waiting.add_done_callback(lambda _: self._waiting.pop(place, None))
        return waiting

    def _note_refused(self, waiting: asyncio.Future[PutAnswer]) -> None:
        if not waiting.cancelled() and isinstance(waiting.exception(), DataplaneError):
            self._service.totals.refuse(cast("DataplaneError", waiting.exception()))

    def _answered(
        self, client_id: str, meta: PutMeta, block: Body, store_id: str
    ) -> PutAnswer | None:
        """The answer of an earlier request with this number."""
        found = self._service.repeats.find(client_id, meta.number, meta.settled, PUT)
        if found is None:
            return None
        if block is not None and found.block != (store_id, block[0]):
            # The repetition was written to a block of its own, which nobody refers to.
            self._service.freeing.drop(store_id, block[0])
        return found.answer

    def _try(
        self,
        client_id: str,
        meta: PutMeta,
        put: PutRows,
        packed: object,
        tags: object,
        block: Body,
        store_id: str,
    ) -> PutAnswer | Shortage:
        """The same put again, when there may be room for it."""
        answered = self._answered(client_id, meta, block, store_id)
        if answered is not None:
            return answered
        return self._apply(meta, put, packed, tags, block, store_id)

    def _waits_for_nobody(self, put: PutRows, partition: Partition) -> bool:
        """Whether a put stands in no line: it draws on what groups reserved, there is no limit, or
        it takes nothing of what is limited."""
        if put.must_exist or put.group is not None or partition.quota is None:
            return True
        if not self._service.admission.waiting(partition.partition_id):
            return False  # there is no line
        return not takes_room(put, self._store.check_put(put), partition.quota)

    def _lacks(self, put: PutRows) -> Shortage | None:
        """What a put has no room for now."""
        found = self._store.check_put(put)
        return shortage_of_put(put, found, self._store.partitions.get(put.partition_id))

    def _apply(
        self,
        meta: PutMeta,
        put: PutRows,
        packed: object,
        tags: object,
        block: Body,
        store_id: str,
    ) -> PutAnswer | Shortage:
        service, store = self._service, self._store
        found = store.check_put(put)
        shortage = shortage_of_put(put, found, store.partitions.get(put.partition_id))
        if shortage is not None:
            return shortage
        if meta.flags & RETURN_TAGS:
            _check_answer_fits(put, found)
        now = service.clock()
        change = (put.client_id, packed, tags, store_id, block)
        service.journal.append(j.PUT, store.n + 1, now, change)
        try:
            n = store.apply_put(put, found, now)
        except Exception as error:
            # Checked puts do not fail; if one does, its caller must not take it for refused.
            raise InternalError(f"a checked put failed while it was applied: {error!r}") from error
        totals = service.totals
        totals.puts += 1
        totals.rows_put += len(put.keys)
        if put.placement is not None:
            totals.bytes_put += put.placement.nbytes
        merged = fields = None
        if meta.flags & RETURN_TAGS:
            merged, fields = resulting(store, put, found)
        answer = PutAnswer((store.epoch, n), merged, fields)
        place = None if block is None else (store_id, block[0])
        service.repeats.remember(put.client_id, meta.number, PUT, answer, place)
        if store.dead:
            service.freeing.run()
        return answer

    def _checked(
        self,
        client_id: str,
        meta: PutMeta,
        tags: object,
        block: Body,
        store_id: str,
        begun: WireRevision | None,
    ) -> PutRows:
        keys = check_keys(meta.keys)
        if not keys:
            raise InvalidRequest("a put of no keys does not travel")
        all_tags = sizes = None
        if tags is not None:
            if type(tags) is not bytes:
                raise InvalidRequest("the tags of a put are packed bytes")
            all_tags, sizes = unpack_tags(tags, keys)
        placement = None
        if block is not None:
            placement = self.placement(store_id, block)
            if (store_id, placement.block) in self._store.placements:
                raise InvalidRequest(f"block {placement.block} is another put's already")
            if placement.rows != len(keys):
                raise InvalidRequest(f"a block of {placement.rows} rows for {len(keys)} keys")
        elif all_tags is None:
            raise InvalidRequest("a put brings fields, tags or both")
        known = [meta.stamp]
        if meta.stamp is None and meta.flags & RETRY:
            known = [meta.seen]  # an earlier try may have come before this one
        elif meta.stamp is None and begun is not None:
            # A store that sends it again says what it had seen itself, which may be less.
            known = [begun, meta.seen]
        stamps = [self._store.stamp_of(since) for since in known if since is not None]
        stamp = max(stamps, default=None)
        group = None
        if meta.attempt is not None:
            group = self._store.attempt(meta.attempt, meta.partition_id, keys)
        return PutRows(
            meta.partition_id,
            keys,
            all_tags,
            sizes,
            placement,
            bool(meta.flags & MUST_EXIST),
            bool(meta.flags & IF_ABSENT),
            stamp,
            client_id,
            group,
        )

    def placement(self, store_id: str, block: Body) -> Placement:
        """The placement that travelled. InvalidRequest if its template is none."""
        number, segment, offset, nbytes, blob, rows, lengths = block
        template = self._templates.parse(blob)
        placed = Placement(store_id, number, segment, offset, nbytes, template, rows, lengths)
        placed.check()
        return placed

    def _put_tags(
        self, connection: Connection, number: int, body: Body
    ) -> Coroutine[Any, Any, None] | None:
        meta, tags = body
        answer = self.put(connection.client_id, meta, tags, None, "")
        if isinstance(answer, asyncio.Future):
            return _answer_later(connection, number, answer)
        connection.reply(number, answer)
        return None

    def _publish(self, connection: Connection, number: int, body: Body) -> None:
        client_id, meta, tags, block, token = body
        only_stores(connection)
        if type(client_id) is not str or type(token) is not int:
            raise InvalidRequest("a store says whose put it is, and its own number for it")
        store_id = connection.client_id
        answer = self.put(client_id, meta, tags, block, store_id, token)
        answer_when_done(connection, number, answer)

    def begun(self, store_id: str, token: int, since: WireRevision | None = None) -> None:
        """A put has reached its value store, and not yet whole: it begins here, or began where
        the store says that had seen no later revision then."""
        self._begun[store_id, token] = self._store.revision() if since is None else since

    def forget(self, store_id: str, token: int) -> None:
        """A put that began will not be published, or its writer is gone while it waits for room."""
        self._begun.pop((store_id, token), None)
        waiting = self._waiting.get((store_id, token))
        if waiting is not None:
            waiting.cancel()

    def store_gone(self, store_id: str) -> None:
        """A value store's connection ended: what it had under way comes again, or never."""
        for place in [place for place in self._begun if place[0] == store_id]:
            del self._begun[place]
        for (of, _), waiting in list(self._waiting.items()):
            if of == store_id:
                waiting.cancel()

    def _note_begun(self, connection: Connection, number: int, body: Body) -> None:
        only_stores(connection)
        token, *since = body
        self.begun(connection.client_id, token, *since)

    def _note_forgotten(self, connection: Connection, number: int, body: Body) -> None:
        only_stores(connection)
        (token,) = body
        self.forget(connection.client_id, token)

    def _begin(self, connection: Connection, number: int, body: Body) -> None:
        connection.reply(number, self._store.revision())


def only_stores(connection: Connection) -> None:
    """PermissionDenied unless a value store is at the other end."""
    if connection.role != "store":
        raise PermissionDenied("only a value store may ask this")


def when_done(answer: Any, done: Callable[[Any, BaseException | None], None]) -> None:
    """Tell what came of a request that may be under way still: its answer, or its error."""
    if not isinstance(answer, asyncio.Future):
        done(answer, None)
        return

    def ended(future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            done(None, InternalError("the request was given up"))
        else:
            error = future.exception()
            done(None if error else future.result(), error)

    cast("asyncio.Future[Any]", answer).add_done_callback(ended)


async def _answer_later(
    connection: Connection, number: int, answer: asyncio.Future[PutAnswer]
) -> None:
    """Answer when what a request waits for has come; with its connection it is given up."""
    connection.reply(number, await answer)


def answer_when_done(connection: Connection, number: int, answer: Any) -> None:
    """Answer a request now, or when what it waits for has come."""

    def done(answer: Any, error: BaseException | None) -> None:
        if error is None:
            connection.reply(number, answer)
        else:
            connection.fail_with(number, error)

    when_done(answer, done)


def _check_answer_fits(put: PutRows, found: Found) -> None:
    """Refuse a put, while nothing is done yet, whose merged tags are too much to send back."""
    nbytes = sum(put.tag_sizes or ())
    nbytes += sum(slot.tag_bytes for slot in found.slots or () if type(slot) is Row)
    if nbytes > MAX_ANSWERED_TAG_BYTES:
        raise InvalidRequest(
            f"the merged tags of {len(put.keys)} keys take up to {nbytes} bytes; at most "
            f"{MAX_ANSWERED_TAG_BYTES} are sent back: leave out return_tags and list the keys, "
            "or put fewer at a time"
        )
