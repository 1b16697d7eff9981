"""The tag store behind a socket: verbs in, journal, store, answers out. No rule of its own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from dataplane.codec.template import Templates
from dataplane.errors import InternalError, InvalidRequest, PermissionDenied
from dataplane.server.clearing import clear_where
from dataplane.server.connection import Connection, Verb
from dataplane.server.freeing import Freeing, RemoteValues, Values
from dataplane.server.listings import list_partition
from dataplane.server.slices import Slices, WorstSlice
from dataplane.tags import journal as j
from dataplane.tags.keys import check_keys, unpack_tags
from dataplane.tags.partition import Partition, PutRows
from dataplane.tags.placement import Placement
from dataplane.tags.query import compile_where
from dataplane.tags.resolve import resolve
from dataplane.tags.store import Doomed, TagStore
from dataplane.types import Revision
from dataplane.wire.frames import MAX_HEADER_BYTES, Body
from dataplane.wire.messages import (
    IF_ABSENT,
    MUST_EXIST,
    RETRY,
    RETURN_TAGS,
    PutAnswer,
    PutMeta,
)

MAX_ANSWERED_TAG_BYTES = MAX_HEADER_BYTES - (64 << 10)
"""Merged tags that go back with one put: they travel in the answer's header."""


class TagService:
    def __init__(
        self,
        store: TagStore,
        journal: j.Journal,
        *,
        on_destroy: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.journal = journal
        self.clock = clock
        self.freeing = Freeing(store)
        self.worst = WorstSlice()
        self.attached: dict[str, int] = {}
        """Connections of each client."""
        self._gone_since: dict[str, float] = {}
        self.ending = False
        """Destroyed: whoever comes now has come too late."""
        self._begun: dict[tuple[str, int], Revision] = {}
        """Where puts began that have not arrived whole, by store and its token."""
        self._on_destroy = on_destroy
        self._templates = Templates()
        self.verbs: dict[str, Verb] = {
            "put_tags": self._put_tags,
            "publish": self._publish,
            "begin": self._begin,
            "begun": self._note_begun,
            "forget": self._note_forgotten,
            "register": self._register,
            "repack_candidates": self._repack_candidates,
            "repack": self._repack,
            "resolve": self._resolve,
            "list": self._list,
            "clear": self._clear,
            "stores": self._stores,
            "status": self._status,
            "destroy": self._destroy,
        }

    # -- put ---------------------------------------------------------------------------------

    def put(
        self,
        client_id: str,
        packed: object,
        tags: object,
        block: Body,
        store_id: str,
        token: int = 0,
    ) -> PutAnswer:
        """Make one put happen, once: the answer of a repeated request is the first one."""
        begun = self._begun.pop((store_id, token), None) if token else None
        meta = PutMeta.unpack(packed)
        store = self.store
        requests = store.client(client_id)
        requests.settle(meta.settled)
        answered = requests.recall(meta.number, f"{client_id}/{meta.number}")
        if answered is not None:
            if type(answered) is not Answered:
                raise InvalidRequest(f"request number {meta.number} was used for a clear")
            if block is not None and answered.block != (store_id, block[0]):
                # The repetition was written to a block of its own, which nobody refers to.
                self.freeing.drop(store_id, block[0])
            return answered.answer
        put = self._checked(meta, tags, block, store_id, begun)
        found = store.check_put(put)
        if meta.flags & RETURN_TAGS:
            self._check_answer_fits(put)
        now = self.clock()
        self.journal.append(j.PUT, store.n + 1, now, (client_id, packed, tags, store_id, block))
        try:
            n = store.apply_put(put, found, now)
        except Exception as error:
            # Checked puts do not fail; if one does, its caller must not take it for refused.
            raise InternalError(f"a checked put failed while it was applied: {error!r}") from error
        merged = fields = None
        if meta.flags & RETURN_TAGS:
            merged = store.merged_tags(meta.partition_id, put.keys)
            fields = _common_fields(store.partition(meta.partition_id), put.keys)
        answer = PutAnswer((store.epoch, n), merged, fields)
        requests.remember(meta.number, Answered(answer, block and (store_id, block[0])))
        if store.dead:
            self.freeing.run()
        return answer

    def _checked(
        self, meta: PutMeta, tags: object, block: Body, store_id: str, begun: Revision | None
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
            placement = self._placement(store_id, block)
            if placement.rows != len(keys):
                raise InvalidRequest(f"a block of {placement.rows} rows for {len(keys)} keys")
        elif all_tags is None:
            raise InvalidRequest("a put brings fields, tags or both")
        stamp = None
        since = meta.stamp or (meta.seen if meta.flags & RETRY else begun)
        if since is not None:
            # What began in an earlier epoch began before everything of this one.
            stamp = since[1] if since[0] == self.store.epoch else 0
        return PutRows(
            meta.partition_id,
            keys,
            all_tags,
            sizes,
            placement,
            bool(meta.flags & MUST_EXIST),
            bool(meta.flags & IF_ABSENT),
            stamp,
        )

    def _check_answer_fits(self, put: PutRows) -> None:
        """Refuse a put, while nothing is done yet, whose merged tags are too much to send back."""
        partition = self.store.partitions.get(put.partition_id)
        nbytes = sum(put.tag_sizes or ())
        if partition is not None:
            nbytes += sum(row.tag_bytes for key in put.keys if (row := partition.row(key)))
        if nbytes > MAX_ANSWERED_TAG_BYTES:
            raise InvalidRequest(
                f"the merged tags of {len(put.keys)} keys take up to {nbytes} bytes; at most "
                f"{MAX_ANSWERED_TAG_BYTES} are sent back: leave out return_tags and list the keys, "
                "or put fewer at a time"
            )

    def _placement(self, store_id: str, block: Body) -> Placement:
        number, segment, offset, nbytes, blob, rows, lengths = block
        template = self._templates.parse(blob)
        return Placement(store_id, number, segment, offset, nbytes, template, rows, lengths)

    def _put_tags(self, connection: Connection, number: int, body: Body) -> None:
        meta, tags = body
        connection.reply(number, self.put(connection.client_id, meta, tags, None, ""))

    def _publish(self, connection: Connection, number: int, body: Body) -> None:
        client_id, meta, tags, block, token = body
        self._only_stores(connection)
        store_id = connection.client_id
        connection.reply(number, self.put(client_id, meta, tags, block, store_id, token))

    def begun(self, store_id: str, token: int) -> None:
        """A put has reached its value store, and not yet whole: it begins here."""
        self._begun[store_id, token] = self.store.revision()

    def forget(self, store_id: str, token: int) -> None:
        """A put that began will not be published."""
        self._begun.pop((store_id, token), None)

    def _note_begun(self, connection: Connection, number: int, body: Body) -> None:
        self._only_stores(connection)
        (token,) = body
        self.begun(connection.client_id, token)

    def _note_forgotten(self, connection: Connection, number: int, body: Body) -> None:
        self._only_stores(connection)
        (token,) = body
        self.forget(connection.client_id, token)

    def _begin(self, connection: Connection, number: int, body: Body) -> None:
        connection.reply(number, self.store.revision())

    # -- value stores ------------------------------------------------------------------------

    def register(self, values: Values) -> None:
        """A value store says that it is there."""
        self.freeing.register(values)

    def _register(self, connection: Connection, number: int, body: Body) -> None:
        self._only_stores(connection)
        (address,) = body
        store_id = connection.client_id
        self.journal.append(j.STORE, self.store.n, self.clock(), (store_id, address))
        self.register(RemoteValues(store_id, address, connection))
        connection.reply(number, None)

    def _only_stores(self, connection: Connection) -> None:
        if connection.role != "store":
            raise PermissionDenied("only a value store may ask this")

    def _stores(self, connection: Connection, number: int, body: Body) -> None:
        connection.reply(number, {v.store_id: v.address for v in self.freeing.stores.values()})

    async def _repack_candidates(self, connection: Connection, number: int, body: Body) -> None:
        self._only_stores(connection)
        (limit,) = body
        connection.reply(number, await self.repack_candidates(connection.client_id, limit))

    async def repack_candidates(self, store_id: str, limit: int) -> list[Any]:
        """Mostly dead blocks of a store, the emptiest first.

        Each is [block, template, rows, lengths, live rows, their positions, live fields].
        """
        found: list[tuple[float, Placement]] = []
        pause = Slices(self.worst)
        for placement in list(self.store.placements.values()):
            share = placement.live / max(1, placement.rows * len(placement.template.columns))
            if placement.store == store_id and 0 < share <= 0.5:
                found.append((share, placement))
            await pause.breathe()
        found.sort(key=lambda item: item[0])
        out: list[Any] = []
        for _, p in found[:limit]:
            live = self.store.partition(p.partition_id).live_rows_of(p)
            if live:
                out.append([
                    p.block, p.template.blob, p.rows, p.lengths,
                    [row for row, _, _ in live], [position for _, position, _ in live],
                    sorted({name for _, _, names in live for name in names}),
                ])  # fmt: skip
            await pause.breathe()
        return out

    def _repack(self, connection: Connection, number: int, body: Body) -> None:
        self._only_stores(connection)
        self.repack(connection.client_id, *body)
        connection.reply(number, None)

    def repack(self, store_id: str, old: int, block: Body, moves: list[Any]) -> None:
        """Point the cells of a block that are still live at their copies in a new one."""
        placement = self.store.placements.get((store_id, old))
        if placement is None:
            self.freeing.drop(store_id, block[0])
            return
        new = self._placement(store_id, block)
        pairs = [(row, position) for row, position in moves]
        now = self.clock()
        self.journal.append(j.REPACK, self.store.n, now, (store_id, old, block, pairs))
        self.store.apply_repack(placement, new, pairs)
        self.freeing.run()

    # -- read --------------------------------------------------------------------------------

    def _resolve(self, connection: Connection, number: int, body: Body) -> None:
        fields: list[Any] | None
        partition_id, keys, fields, drop = body
        keys = check_keys(keys, unique=False)
        if fields is not None and not (
            type(fields) is list and all(type(name) is str for name in fields)
        ):
            raise InvalidRequest("select_fields is a list of field names")
        partition = self.store.partition(partition_id)
        answer = resolve(partition, keys, fields, drop_missing=bool(drop))
        connection.reply(number, [(self.store.epoch, partition.revision), *answer])

    async def _list(self, connection: Connection, number: int, body: Body) -> None:
        answer, buffers, nbytes = await list_partition(self.store, body, self.worst)
        await connection.reply_with(number, answer, buffers, nbytes)

    # -- clear -------------------------------------------------------------------------------

    def _clear(self, connection: Connection, number: int, body: Body) -> None:
        partition_id, keys, where, request, settled = body
        if not (type(request) is type(settled) is int and 0 <= settled < request < 1 << 63):
            raise InvalidRequest("a clear's number and settled number are integers, ascending")
        requests = self.store.client(connection.client_id)
        requests.settle(settled)
        answered = requests.recall(request, f"{connection.client_id}/{request}")
        if isinstance(answered, asyncio.Future):

            def repeat(done: asyncio.Future[Any]) -> None:
                if done.cancelled():
                    connection.fail(number, InternalError("the clear that this repeats failed"))
                else:
                    connection.reply(number, done.result())

            cast("asyncio.Future[Any]", answered).add_done_callback(repeat)
            return
        if type(answered) is Answered:
            raise InvalidRequest(f"request number {request} was used for a put")
        if answered is not None:
            connection.reply(number, answered)
            return
        partition = self.store.partition(partition_id)
        if where is not None:
            work = self._clear_where(connection, number, partition, keys, where, request)
            connection.outlive("clear", number, work)
            return
        names = check_keys(keys, unique=False)
        found, _ = partition.present(names)
        removed = 0
        if found:
            now = self.clock()
            self.journal.append(j.CLEAR, self.store.n + 1, now, (partition_id, found, None))
            removed = self.store.apply_clear(partition_id, found, now)
            self.freeing.run()
        answer = [removed, (self.store.epoch, partition.revision)]
        requests.remember(request, answer)
        connection.reply(number, answer)

    async def _clear_where(
        self,
        connection: Connection,
        number: int,
        partition: Partition,
        keys: Body,
        where: Body,
        request: int,
    ) -> None:
        if keys is not None:
            raise InvalidRequest("clear names keys or a predicate, not both")
        store = self.store
        predicate = compile_where(where)
        requests = store.client(connection.client_id)
        # A repetition that comes while this one is under way waits for it.
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        requests.remember(request, done)

        def commit(found: list[Doomed]) -> None:
            now = self.clock()
            change = (partition.partition_id, None, where)
            self.journal.append(j.CLEAR, store.n + 1, now, change)
            store.apply_scanned_clear(partition, found, now)

        try:
            removed = await clear_where(store, partition, predicate, commit, self.worst)
        except BaseException:
            requests.answers.pop(request, None)
            done.cancel()
            raise
        finally:
            self.freeing.run()
        answer = [removed, (store.epoch, partition.revision)]
        requests.remember(request, answer)
        done.set_result(answer)
        connection.reply(number, answer)

    # -- the rest ----------------------------------------------------------------------------

    def _status(self, connection: Connection, number: int, body: Body) -> None:
        connection.reply(number, self.status())

    def status(self) -> dict[str, Any]:
        """Sizes, and the most CPU time that one slice of a walk held the loop."""
        counts = self.store.counts()
        counts["dead_blocks"] = self.freeing.unheard
        counts["worst_slice_ms"] = round(self.worst.seconds * 1e3, 3)
        counts["pid"] = os.getpid()
        counts["clients"] = len(self.attached)
        counts["stores"] = {v.store_id: v.address for v in self.freeing.stores.values()}
        return counts

    def _destroy(self, connection: Connection, number: int, body: Body) -> None:
        if body != []:
            raise InvalidRequest("destroy takes nothing")
        self.ending = True
        connection.reply(number, None)
        asyncio.get_running_loop().call_later(0.01, self._on_destroy)

    def attach(self, client_id: str) -> None:
        """One more connection of a client."""
        self.attached[client_id] = self.attached.get(client_id, 0) + 1
        self._gone_since.pop(client_id, None)

    def detach(self, client_id: str) -> None:
        """One connection less; after the last one the client's answers are kept for a while."""
        left = self.attached.get(client_id, 0) - 1
        if left > 0:
            self.attached[client_id] = left
        else:
            self.attached.pop(client_id, None)
            self._gone_since[client_id] = self.clock()

    async def upkeep(self) -> None:
        """Trim history while nothing changes, and forget clients that are long gone."""
        while True:
            await asyncio.sleep(1.0)
            now = self.clock()
            self.store.upkeep(now)
            for client_id, since in list(self._gone_since.items()):
                if now - since > self.store.history.max_age_s:
                    del self._gone_since[client_id]
                    # What it repeats after that long may have happened: `OutcomeUnknown`.
                    self.store.client(client_id).forget()


class Answered:
    """What is kept of a put for its repetitions."""

    __slots__ = ("answer", "block")

    def __init__(self, answer: PutAnswer, block: tuple[str, int] | None) -> None:
        self.answer = answer
        self.block = block


def _common_fields(partition: Partition, keys: Sequence[str]) -> list[str]:
    common: set[str] | None = None
    for key in keys:
        row = partition.row(key)
        names = {n for p in row.layers[::2] for n in p.template.names} if row else set[str]()
        common = names if common is None else common & names
    return sorted(common or ())
