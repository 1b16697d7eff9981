"""The tag store behind a socket: verbs in, journal, store, answers out. No rule of its own.

Slow walks (listings, clears by predicate) run in slices of at most a millisecond over a cut, so
that every other client is served in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from dataplane.codec.template import Template
from dataplane.errors import DataplaneError, InvalidRequest
from dataplane.server.connection import Connection, Verb
from dataplane.tags import journal as j
from dataplane.tags import listing
from dataplane.tags.keys import check_keys, unpack_tags
from dataplane.tags.partition import Partition, PutRows
from dataplane.tags.placement import Placement
from dataplane.tags.query import Predicate, compile_where
from dataplane.tags.resolve import resolve
from dataplane.tags.rows import Chunk, Row
from dataplane.tags.store import Doomed, TagStore
from dataplane.wire.frames import Body
from dataplane.wire.messages import IF_ABSENT, MUST_EXIST, RETRY, RETURN_TAGS, PutAnswer, PutMeta

log = logging.getLogger("dataplane.tags")

SLICE_S = 0.001
"""CPU time that a walk takes before it lets others run."""
SMALL_SINCE = 4096
"""Changed keys up to which a listing since a revision is answered in one go."""
FREE_RETRY_S = 0.2


class Values(Protocol):
    """A value store as the tag store sees it."""

    store_id: str
    address: Body

    def free(self, blocks: Sequence[int]) -> Awaitable[None]:
        """Tell it that these blocks are dead; returns once it has heard."""
        ...


class RemoteValues:
    """A value store at the other end of a connection."""

    def __init__(self, store_id: str, address: Body, connection: Connection) -> None:
        self.store_id = store_id
        self.address = address
        self.connection = connection

    def free(self, blocks: Sequence[int]) -> Awaitable[None]:
        return self.connection.ask("free", [list(blocks)])


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
        self.values: dict[str, Values] = {}
        self.worst_slice_s = 0.0
        self.attached: dict[str, int] = {}
        """Connections of each client."""
        self._gone_since: dict[str, float] = {}
        self._on_destroy = on_destroy
        self._templates: dict[bytes, Template] = {}
        self._freeing: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.verbs: dict[str, Verb] = {
            "put_tags": self._put_tags,
            "publish": self._publish,
            "begin": self._begin,
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
        self, client_id: str, packed: object, tags: object, block: Body, store_id: str
    ) -> PutAnswer:
        """Make one put happen, once: the answer of a repeated request is the first one."""
        meta = PutMeta.unpack(packed)
        store = self.store
        requests = store.client(client_id)
        requests.settle(meta.settled)
        answered = requests.recall(meta.number, f"{client_id}/{meta.number}")
        if answered is not None:
            if block is not None and answered.block != (store_id, block[0]):
                # The repetition was written to a block of its own, which nobody refers to.
                self._drop(store_id, block[0])
            return answered.answer
        put = self._checked(meta, tags, block, store_id)
        found = store.check_put(put)
        now = self.clock()
        self.journal.append(j.PUT, store.n + 1, now, (client_id, packed, tags, store_id, block))
        n = store.apply_put(put, found, now)
        merged = fields = None
        if meta.flags & RETURN_TAGS:
            merged = store.merged_tags(meta.partition_id, put.keys)
            fields = _common_fields(store.partition(meta.partition_id), put.keys)
        answer = PutAnswer((store.epoch, n), merged, fields)
        requests.remember(meta.number, Answered(answer, block and (store_id, block[0])))
        if store.dead:
            self.free_dead()
        return answer

    def _checked(self, meta: PutMeta, tags: object, block: Body, store_id: str) -> PutRows:
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
        begun = meta.stamp or (meta.seen if meta.flags & RETRY else None)
        if begun is not None:
            # What began in an earlier epoch began before everything of this one.
            stamp = begun[1] if begun[0] == self.store.epoch else 0
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

    def _placement(self, store_id: str, block: Body) -> Placement:
        number, segment, offset, nbytes, blob, rows, lengths = block
        template = self._templates.get(blob)
        if template is None:
            template = Template.parse(blob)
            if len(self._templates) > 4096:
                self._templates.clear()
            self._templates[blob] = template
        return Placement(store_id, number, segment, offset, nbytes, template, rows, lengths)

    def _put_tags(self, connection: Connection, number: int, body: Body) -> None:
        meta, tags = body
        connection.reply(number, self.put(connection.client_id, meta, tags, None, ""))

    def _publish(self, connection: Connection, number: int, body: Body) -> None:
        client_id, meta, tags, block = body
        self._only_stores(connection)
        connection.reply(number, self.put(client_id, meta, tags, block, connection.client_id))

    def _begin(self, connection: Connection, number: int, body: Body) -> None:
        connection.reply(number, self.store.revision())

    # -- value stores ------------------------------------------------------------------------

    def register(self, values: Values) -> None:
        """A value store says that it is there."""
        self.values[values.store_id] = values
        self.free_dead()

    def _register(self, connection: Connection, number: int, body: Body) -> None:
        self._only_stores(connection)
        (address,) = body
        store_id = connection.client_id
        self.journal.append(j.STORE, self.store.n, self.clock(), (store_id, address))
        self.register(RemoteValues(store_id, address, connection))
        connection.reply(number, None)

    def _only_stores(self, connection: Connection) -> None:
        if connection.role != "store":
            raise InvalidRequest("only a value store may ask this")

    def _stores(self, connection: Connection, number: int, body: Body) -> None:
        connection.reply(number, {v.store_id: v.address for v in self.values.values()})

    def _drop(self, store_id: str, block: int) -> None:
        """Free a block that never had a row."""
        orphan = Placement(store_id, block, 0, 0, 0, Template(()), 0, b"")
        self.store.dead.append(orphan)
        self.free_dead()

    def free_dead(self) -> None:
        """Tell value stores which blocks are dead, again until they have heard."""
        for store_id in {placement.store for placement in self.store.dead}:
            values = self.values.get(store_id)
            if values is not None and store_id not in self._freeing:
                self._freeing.add(store_id)
                self._spawn(self._free(values))

    async def _free(self, values: Values) -> None:
        dead = self.store.dead
        try:
            while True:
                await asyncio.sleep(0)  # gather what this turn of the loop clears
                mine = [p for p in dead if p.store == values.store_id]
                if not mine:
                    return
                try:
                    await values.free([p.block for p in mine])
                except (DataplaneError, ConnectionError) as error:
                    if self.values.get(values.store_id) is not values:
                        return  # it came back as another connection, which starts over
                    if isinstance(error, ConnectionError):
                        return  # told again when it registers
                    log.info("value store %s did not free: %s", values.store_id, error)
                    await asyncio.sleep(FREE_RETRY_S)
                    continue
                heard = {id(p) for p in mine}
                kept = [p for p in dead if id(p) not in heard]
                dead.clear()
                dead.extend(kept)
        finally:
            self._freeing.discard(values.store_id)

    async def _repack_candidates(self, connection: Connection, number: int, body: Body) -> None:
        self._only_stores(connection)
        (limit,) = body
        connection.reply(number, await self.repack_candidates(connection.client_id, limit))

    async def repack_candidates(self, store_id: str, limit: int) -> list[Any]:
        """Mostly dead blocks of a store, the emptiest first.

        Each is [block, template, rows, lengths, live rows, their positions, live fields].
        """
        found: list[tuple[float, Placement]] = []
        pause = _Pause(self)
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
            self._drop(store_id, block[0])
            return
        new = self._placement(store_id, block)
        pairs = [(row, position) for row, position in moves]
        now = self.clock()
        self.journal.append(j.REPACK, self.store.n, now, (store_id, old, block, pairs))
        self.store.apply_repack(placement, new, pairs)
        self.free_dead()

    # -- read --------------------------------------------------------------------------------

    def _resolve(self, connection: Connection, number: int, body: Body) -> None:
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
        partition_id, where, since, columns, limit = body
        partition = self.store.partition(partition_id)
        predicate = compile_where(where)
        if columns is not None and not (
            type(columns) is list and all(type(name) is str for name in columns)
        ):
            raise InvalidRequest("columns is a list of tag names")
        if limit is not None and (type(limit) is not int or limit < 0):
            raise InvalidRequest(f"limit is a number of rows, not {limit!r:.80}")
        wanted = None if columns is None else frozenset(columns)
        revision = (self.store.epoch, partition.revision)
        cleared: list[str] = []
        full = since is None or since[0] != self.store.epoch or not self.store.history.covers(
            since[1]
        )
        walk = _Walk(self, predicate, wanted, limit)
        if full:
            await walk.chunks(partition.slots.cut())
        else:
            changes = list(self.store.history.since(partition_id, since[1]))
            if sum(len(change.keys) for change in changes) <= SMALL_SINCE:
                keys = dict.fromkeys(key for change in reversed(changes) for key in change.keys)
                rows = [row for key in keys if (row := partition.row(key)) is not None]
                if len(rows) != len(keys):
                    present = {row.key for row in rows}
                    cleared = [key for key in keys if key not in present]
                walk.rows([row for row in rows if predicate.matches_all or predicate(row.tags)])
            else:
                cut = partition.slots.cut()
                seen = await walk.chunks(cut, newer_than=since[1])
                for change in changes:
                    if change.positions is not None:
                        cleared += [key for key in change.keys if key not in seen]
                        await walk.breathe()
                cleared = list(dict.fromkeys(cleared))
        head, payload, nbytes = walk.answer()
        await connection.reply_with(
            number, [revision, full, cleared, *head], payload, nbytes
        )

    # -- clear -------------------------------------------------------------------------------

    def _clear(self, connection: Connection, number: int, body: Body) -> Any:
        partition_id, keys, where = body
        partition = self.store.partition(partition_id)
        if where is not None:
            return self._clear_where(connection, number, partition, keys, where)
        names = check_keys(keys, unique=False)
        found, _ = partition.present(names)
        removed = 0
        if found:
            now = self.clock()
            self.journal.append(j.CLEAR, self.store.n + 1, now, (partition_id, found, None))
            removed = self.store.apply_clear(partition_id, found, now)
            self.free_dead()
        connection.reply(number, [removed, (self.store.epoch, partition.revision)])
        return None

    async def _clear_where(
        self, connection: Connection, number: int, partition: Partition, keys: Body, where: Body
    ) -> None:
        if keys is not None:
            raise InvalidRequest("clear names keys or a predicate, not both")
        predicate = compile_where(where)
        store = self.store
        found: dict[int, Doomed | None] = {}
        scanned: dict[int, Chunk | None] = {}
        pause = _Pause(self)
        for attempt in range(50):
            chunks = partition.slots.chunks
            stale = [
                i for i in range(len(chunks)) if i not in scanned or scanned[i] is not chunks[i]
            ]
            # The last few chunks are scanned in one go with the removal: nothing can slip by.
            last = len(stale) <= 2 or attempt == 49
            for i in stale:
                found[i] = store.scan_clear(partition, i, predicate)
                chunk = scanned[i] = partition.slots.chunks[i]
                if chunk is not None:
                    chunk.frozen = True  # a change makes another chunk, which shows here
                if not last:
                    await pause.breathe()
            if last:
                break
        doomed = [part for part in found.values() if part is not None]
        removed = sum(len(part.rows) for part in doomed)
        if removed:
            now = self.clock()
            self.journal.append(
                j.CLEAR, store.n + 1, now, (partition.partition_id, None, where)
            )
            rows = list(store.apply_scanned_clear(partition, doomed, now).parts)
            revision = (store.epoch, partition.revision)
            # The rows are gone for everybody; their bytes are by the time this is answered.
            await self._release(partition, rows)
        else:
            revision = (store.epoch, partition.revision)
        connection.reply(number, [removed, revision])

    async def _release(self, partition: Partition, parts: Sequence[Sequence[Row]]) -> None:
        pause = _Pause(self)
        for rows in parts:
            self.store.release_rows(partition, rows)
            self.free_dead()
            await pause.breathe()

    # -- the rest ----------------------------------------------------------------------------

    def _status(self, connection: Connection, number: int, body: Body) -> None:
        connection.reply(number, self.status())

    def status(self) -> dict[str, Any]:
        """Sizes and the worst time that one step held the loop."""
        counts = self.store.counts()
        counts["worst_slice_ms"] = round(self.worst_slice_s * 1e3, 3)
        counts["clients"] = len(self.attached)
        counts["stores"] = {v.store_id: v.address for v in self.values.values()}
        return counts

    def _destroy(self, connection: Connection, number: int, body: Body) -> None:
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
                    self.store.requests.pop(client_id, None)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Answered:
    """What is kept of a put for its repetitions."""

    __slots__ = ("answer", "block")

    def __init__(self, answer: PutAnswer, block: tuple[str, int] | None) -> None:
        self.answer = answer
        self.block = block


class _Pause:
    """Lets others run once a slice of CPU time is used up."""

    def __init__(self, service: TagService) -> None:
        self._service = service
        self._started = time.perf_counter()

    async def breathe(self) -> None:
        took = time.perf_counter() - self._started
        if took >= SLICE_S:
            if took > self._service.worst_slice_s:
                self._service.worst_slice_s = took
            await asyncio.sleep(0)
            self._started = time.perf_counter()


class _Walk(_Pause):
    """Gathers the pieces of one listing."""

    def __init__(
        self,
        service: TagService,
        predicate: Predicate,
        wanted: frozenset[str] | None,
        limit: int | None,
    ) -> None:
        super().__init__(service)
        self._predicate = predicate
        self._wanted = wanted
        self._left = limit
        self._pieces: list[listing.Piece] = []

    async def chunks(self, cut: Sequence[Chunk], newer_than: int | None = None) -> set[str]:
        """Take the matching rows of a cut; with `newer_than`, the keys of all newer rows."""
        seen: set[str] = set()
        whole = self._predicate.matches_all and newer_than is None
        for chunk in cut:
            if self._left is not None and self._left <= 0:
                break
            if whole and (self._left is None or chunk.live <= self._left):
                piece = listing.piece_of_chunk(chunk, self._wanted)
                self._pieces.append(piece)
                if self._left is not None:
                    self._left -= piece.rows
            else:
                rows = chunk.live_rows()
                if newer_than is not None:
                    rows = [row for row in rows if row.revision > newer_than]
                    seen.update(row.key for row in rows)
                if not self._predicate.matches_all:
                    rows = [row for row in rows if self._predicate(row.tags)]
                self.rows(rows)
            await self.breathe()
        return seen

    def rows(self, rows: Sequence[Row]) -> None:
        """Take these rows, up to the limit."""
        if self._left is not None:
            rows = rows[: self._left]
            self._left -= len(rows)
        if rows:
            self._pieces.append(listing.piece_of_rows(rows, self._wanted))

    def answer(self) -> tuple[list[Any], list[Any], int]:
        """[rows of each piece, field sets, columns] and the buffers that follow."""
        return pack_pieces(self._pieces)


def pack_pieces(pieces: Sequence[listing.Piece]) -> tuple[list[Any], list[Any], int]:
    """A listing as [rows of each piece, field sets of each piece, columns] and its buffers.

    A column is [name, [[kind, sizes of its buffers] per piece, or nil where it has none]].
    """
    names = dict.fromkeys(name for piece in pieces for name in piece.columns)
    buffers: list[Any] = []
    columns: list[Any] = []
    total = 0
    for name in names:
        parts: list[Any] = []
        for piece in pieces:
            column = piece.columns.get(name)
            if column is None:
                parts.append(None)
                continue
            taken = column.buffers[:2] if column.kind == "n" else column.buffers
            sizes: list[int] = []
            for buffer in taken:
                if buffer is None:
                    sizes.append(-1)
                else:
                    size = len(buffer)
                    sizes.append(size)
                    total += size
                    if size:
                        buffers.append(buffer)
            parts.append([column.kind, sizes])
        columns.append([name, parts])
    head = [[piece.rows for piece in pieces], [piece.field_sets for piece in pieces], columns]
    return head, buffers, total


def _common_fields(partition: Partition, keys: Sequence[str]) -> list[str]:
    common: set[str] | None = None
    for key in keys:
        row = partition.row(key)
        names = {n for p in row.layers[::2] for n in p.template.names} if row else set[str]()  # pyright: ignore
        common = names if common is None else common & names
    return sorted(common or ())
