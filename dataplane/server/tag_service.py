"""The tag store behind a socket: verbs in, journal, store, answers out. No rule of its own.

Composes the services that own the verbs, one noun each; what is left here is reading, clearing and
the value stores.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, cast

from dataplane.errors import DataplaneError, InternalError, InvalidRequest, PartitionNotFound
from dataplane.metrics.totals import Totals
from dataplane.release import release
from dataplane.server.admission import Admission
from dataplane.server.births import Births
from dataplane.server.checkpointing import Checkpointing
from dataplane.server.claiming import Claiming
from dataplane.server.clearing import clear_where
from dataplane.server.connection import Connection, Verb
from dataplane.server.explaining import Explaining
from dataplane.server.freeing import Freeing
from dataplane.server.grouping import Grouping
from dataplane.server.inspecting import Inspecting
from dataplane.server.listings import list_partition
from dataplane.server.losing import Losing
from dataplane.server.partitioning import Partitioning
from dataplane.server.putting import Putting, only_stores
from dataplane.server.registering import Registering
from dataplane.server.repeats import Repeats
from dataplane.server.sampling import Sampling
from dataplane.server.slices import Slices, WorstSlice
from dataplane.server.tracing import Tracing
from dataplane.server.waiting import Waiting
from dataplane.tags import journal as j
from dataplane.tags.keys import check_keys
from dataplane.tags.lineage.lineage import Lineage
from dataplane.tags.partition import Partition
from dataplane.tags.placement import Placement
from dataplane.tags.query import Predicate, compile_where
from dataplane.tags.quota import oldest_unconsumed
from dataplane.tags.replay.replay import Replay
from dataplane.tags.requests import CLEAR
from dataplane.tags.resolve import resolve, tag_of_each
from dataplane.tags.store import Doomed, TagStore
from dataplane.wire.frames import Body
from dataplane.wire.messages import COMMON, is_revision

MAX_LABELS = 50_000
"""Clients whose whereabouts are remembered; the design is for 10,000 at a time."""


class TagService:
    def __init__(
        self,
        store: TagStore,
        journal: j.Journal,
        *,
        on_destroy: Callable[[], None],
        clock: Callable[[], float] = time.time,
        lineage: Lineage | None = None,
    ) -> None:
        self.store = store
        self.journal = journal
        self.clock = clock
        self.freeing = Freeing(store)
        self.repeats = Repeats(store, partial(self.write, j.ANSWER))
        self.admission = Admission(store)
        self.births = Births(store)
        self.worst = WorstSlice()
        self.totals = Totals()
        self.metrics: str | None = None
        """Where this process serves metrics, if it does."""
        self.attached: dict[str, int] = {}
        """Connections of each client."""
        self.labels: dict[str, str] = {}
        """What each client says of itself: where it runs."""
        self._gone_since: dict[str, float] = {}
        self._started = time.monotonic()
        self.ending = False
        """Destroyed: whoever comes now has come too late."""
        self._on_destroy = on_destroy
        self.on_change: list[Callable[[Partition], None]] = []
        """Told of each partition that changed, once in a turn of the loop."""
        self._changed: dict[Partition, None] = {}
        self._background: set[asyncio.Task[None]] = set()
        store.changed = self._note_changed
        self.registering = Registering(self)
        self.putting = Putting(self)
        self.grouping = Grouping(self)
        self.partitioning = Partitioning(self)
        self.waiting = Waiting(self)
        self.claiming = Claiming(self)
        self.explaining = Explaining(self)
        self.checkpointing = Checkpointing(self)
        self.losing = Losing(self)
        self.tracing = Tracing(self, lineage)
        self.inspecting = Inspecting(self)
        self.sampling = Sampling(self)
        self.verbs: dict[str, Verb] = {
            "repack_candidates": self._repack_candidates,
            "repack": self._repack,
            "resolve": self._resolve,
            "list": self._list,
            CLEAR: self._clear,
            "stores": self._stores,
            "fullest": self._fullest,
            "outcome": self._outcome,
            "status": self._status,
            "destroy": self._destroy,
        }
        for part in (
            self.registering, self.putting, self.grouping, self.partitioning, self.waiting,
            self.claiming, self.explaining, self.checkpointing, self.tracing, self.inspecting,
            self.sampling,
        ):  # fmt: skip
            self.verbs.update(part.verbs)

    def resume(self, replay: Replay) -> None:
        """Go on from what the journal says. Nobody is here yet: clients come again with what they
        held, and for as long as they may be away; value stores say what they have."""
        now = self.clock()
        self.store.moments.note(self.store.n, now)  # what a snapshot brought is older than that
        self._gone_since = dict.fromkeys(self.store.requests, now)
        self.store.dead.clear()  # no store keeps what it does not find among its live blocks
        self.registering.resume(replay.stores)
        self.claiming.skip_ids(replay.last_claim_id)
        for partition in self.store.partitions.values():
            self.claiming.restored(partition)
        self.checkpointing.restorer.resume(replay.loads)

    # -- changes -----------------------------------------------------------------------------

    def write(self, kind: int, body: Any) -> None:
        """Journal what is no change of the store, and so makes no revision."""
        self.journal.append(kind, self.store.n, self.clock(), body)

    def _note_changed(self, partition: Partition) -> None:
        # Most changes concern nobody, and then cost nothing more than this look.
        if not (
            partition.views.active
            or partition.claims.active
            or self.store.settled
            or self.admission.waiting(partition.partition_id)
            or self.births.is_awaited(partition.partition_id)
        ):
            return
        if not self._changed:
            asyncio.get_running_loop().call_soon(self._tell_changed)
        self._changed[partition] = None

    def _tell_changed(self) -> None:
        changed, self._changed = self._changed, {}
        self.grouping.keeping.tell()
        for partition in changed:
            self.births.tell(partition.partition_id)
            self.admission.run(partition)
            for tell in self.on_change:
                tell(partition)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work to its end that nobody waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def dropped(self, partition: Partition) -> None:
        """A partition is gone: whoever waits for something in it is told."""
        self.admission.run(partition)
        self.waiting.dropped(partition)
        self.claiming.dropped(partition)
        self.grouping.keeping.tell()

    def fullest(self) -> tuple[str, list[str], str | None] | None:
        """The partition that holds the most bytes, its oldest unconsumed keys, and the task that
        lags most there. None if there is no partition."""
        partitions = self.store.partitions.values()
        fullest = max(partitions, key=lambda each: each.account.total_bytes, default=None)
        if fullest is None:
            return None
        return (
            fullest.partition_id, oldest_unconsumed(fullest), fullest.claims.lagging_task(),
        )  # fmt: skip

    # -- value stores ------------------------------------------------------------------------

    def _stores(self, connection: Connection, number: int, body: Body) -> None:
        connection.reply(number, self.registering.known)

    def _fullest(self, connection: Connection, number: int, body: Body) -> None:
        connection.reply(number, self.fullest())

    async def _repack_candidates(self, connection: Connection, number: int, body: Body) -> None:
        only_stores(connection)
        limit, segment = body
        candidates = await self.repack_candidates(connection.client_id, limit, segment)
        connection.reply(number, candidates)

    async def repack_candidates(
        self, store_id: str, limit: int, segment: int | None = None
    ) -> list[Any]:
        """Mostly dead blocks of a store, the emptiest first; or those in one segment, however much
        of them is alive.

        Each is [block, template, rows, lengths, live rows, their positions, live fields].
        """
        found: list[tuple[float, Placement]] = []
        pause = Slices(self.worst)
        for placement in list(self.store.placements.values()):
            if placement.store == store_id and segment in (None, placement.segment):
                share = placement.live / max(1, placement.rows * len(placement.template.columns))
                if 0 < share <= (0.5 if segment is None else 1.0):
                    found.append((share, placement))
            await pause.breathe()
        found.sort(key=lambda item: item[0])
        out: list[Any] = []
        for _, p in found[:limit]:
            partition = self.store.partitions.get(p.partition_id)
            if partition is None:
                continue  # it was dropped, and is being released
            live = partition.live_rows_of(p)
            if live:
                out.append([
                    p.block, p.template.blob, p.rows, p.lengths,
                    [row for row, _, _ in live], [position for _, position, _ in live],
                    sorted({name for _, _, names in live for name in names}),
                ])  # fmt: skip
            await pause.breathe()
        return out

    def _repack(self, connection: Connection, number: int, body: Body) -> None:
        only_stores(connection)
        self.repack(connection.client_id, *body)
        connection.reply(number, None)

    def repack(self, store_id: str, old: int, block: Body, moves: list[Any]) -> None:
        """Point the cells of a block that are still live at their copies in a new one."""
        if (store_id, block[0]) in self.store.placements:
            return  # it was done, and only its answer was lost
        placement = self.store.placements.get((store_id, old))
        if placement is None or placement.partition_id not in self.store.partitions:
            # All of it died meanwhile, or its partition was dropped and will let go of it.
            self.freeing.drop(store_id, block[0])
            return
        new = self.putting.placement(store_id, block)
        partition = self.store.partition(placement.partition_id)
        pairs = _checked_moves(moves, placement.rows, new.rows, partition.slots.end)
        now = self.clock()
        self.journal.append(j.REPACK, self.store.n, now, (store_id, old, block, pairs))
        self.store.apply_repack(placement, new, pairs)
        self.freeing.run()
        self.admission.run(partition)

    # -- read --------------------------------------------------------------------------------

    def _resolve(self, connection: Connection, number: int, body: Body) -> None:
        fields: list[Any] | None
        partition_id, keys, fields, drop, *asked = body
        keys = check_keys(keys, unique=False)
        if fields is not None and not (
            type(fields) is list and all(type(name) is str for name in fields)
        ):
            raise InvalidRequest("select_fields is a list of field names")
        if asked and (len(asked) > 1 or type(asked[0]) is not str):
            raise InvalidRequest("resolve tells one tag of its rows, by its name")
        try:
            partition = self.store.partition(partition_id)
            answer = resolve(
                partition, keys, fields, drop_missing=bool(drop), common=drop == COMMON
            )
        except DataplaneError as error:
            self.tracing.refused(connection.client_id, "get", partition_id, keys, error)
            raise
        self.totals.gets += 1
        self.totals.rows_got += len(keys)
        self.tracing.got(connection.client_id, partition_id, keys, answer)
        if asked:
            kept = keys if answer[0] is None else answer[0]
            answer.append(tag_of_each(partition, kept, asked[0]))
        connection.reply(number, [(self.store.epoch, partition.revision), *answer])

    async def _list(self, connection: Connection, number: int, body: Body) -> None:
        answer, buffers, nbytes = await list_partition(self.store, body, self.worst)
        await connection.reply_with(number, answer, buffers, nbytes)

    # -- clear -------------------------------------------------------------------------------

    def _clear(self, connection: Connection, number: int, body: Body) -> None:
        partition_id, keys, where, retire, *until, request, settled = body
        client_id = connection.client_id
        answered = self.repeats.answered(client_id, request, settled, CLEAR)
        if isinstance(answered, asyncio.Future):

            def repeat(done: asyncio.Future[Any]) -> None:
                if done.cancelled():
                    connection.fail(number, InternalError("the clear that this repeats failed"))
                else:
                    connection.reply(number, done.result())

            cast("asyncio.Future[Any]", answered).add_done_callback(repeat)
            return
        if answered is not None:
            connection.reply(number, answered)
            return
        if type(retire) is not bool:
            raise InvalidRequest(f"retire is true or false, not {retire!r:.80}")
        partition = self.store.partition(partition_id)
        latest = self._latest(*until)
        if where is not None:
            if keys is not None:
                raise InvalidRequest("clear names keys or a predicate, not both")
            predicate = compile_where(where)
            # A repetition waits for this one, be it read in the same turn of the loop.
            done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self.repeats.remember(client_id, request, CLEAR, done)
            work = self._clear_where(
                connection, number, partition, predicate, where, retire, request, settled, done,
                latest,
            )  # fmt: skip
            connection.outlive(CLEAR, number, work)
            return
        names = check_keys(keys, unique=False)
        if latest is not None:
            rows = ((name, partition.row(name)) for name in names)
            names = [name for name, row in rows if row is None or row.revision <= latest]
        if self.store.would_clear(partition, names, retire=retire):
            now = self.clock()
            change = (client_id, partition_id, names, None, retire, request, settled)
            self.journal.append(j.CLEAR, self.store.n + 1, now, change)
            removed = self.store.apply_clear(partition_id, names, now, by=client_id, retire=retire)
            self.totals.clears += 1
            self.totals.rows_cleared += removed
            self.freeing.run()
            answer = [removed, (self.store.epoch, partition.revision)]
            self.repeats.remember(client_id, request, CLEAR, answer)
        else:
            answer = [0, (self.store.epoch, partition.revision)]
            self.repeats.keep(client_id, request, settled, CLEAR, answer)
        connection.reply(number, answer)

    def _latest(self, until: Body = None) -> int | None:
        """After which change of this store rows are to stay that a clear would remove."""
        if until is None:
            return None
        if not is_revision(until):
            raise InvalidRequest(f"until is the revision of an earlier answer, not {until!r:.80}")
        return self.store.stamp_of(until)

    async def _clear_where(
        self,
        connection: Connection,
        number: int,
        partition: Partition,
        predicate: Predicate,
        where: Body,
        retire: bool,
        request: int,
        settled: int,
        done: asyncio.Future[Any],
        until: int | None,
    ) -> None:
        store, client_id = self.store, connection.client_id
        n: int | None = None

        def commit(found: list[Doomed]) -> None:
            nonlocal n
            if store.partitions.get(partition.partition_id) is not partition:
                raise PartitionNotFound(
                    f"partition {partition.partition_id!r} was dropped, with all rows that were to "
                    "be cleared",
                    partition_id=partition.partition_id,
                )
            now = self.clock()
            asked = (request, settled) if until is None else (request, settled, until)
            change = (client_id, partition.partition_id, None, where, retire, *asked)
            self.journal.append(j.CLEAR, store.n + 1, now, change)
            store.apply_scanned_clear(partition, found, now, by=client_id, retire=retire)
            n = store.n

        try:
            removed = await clear_where(store, partition, predicate, commit, self.worst, until)
            if removed:
                self.totals.clears += 1
                self.totals.rows_cleared += removed
            # While it was carried out others may have changed the partition again.
            answer = [removed, (store.epoch, partition.revision if n is None else n)]
            if n is None:
                self.repeats.keep(client_id, request, settled, CLEAR, answer)
        except BaseException:
            self.repeats.forget(client_id, request)
            done.cancel()
            raise
        finally:
            self.freeing.run()
            self.admission.run(partition)
        self.repeats.remember(client_id, request, CLEAR, answer)
        done.set_result(answer)
        connection.reply(number, answer)

    # -- the rest ----------------------------------------------------------------------------

    async def _outcome(self, connection: Connection, number: int, body: Body) -> None:
        client_id, request = body
        if type(client_id) is not str or type(request) is not int or not 0 < request < 1 << 63:
            raise InvalidRequest("a request id is a client id and a number")
        if client_id in self.attached:
            self.store.client(client_id)  # one that is here and of which no request has come
        verb, answer = self.repeats.outcome(client_id, request)
        if isinstance(answer, asyncio.Future):  # it is under way
            await asyncio.wait([cast("asyncio.Future[Any]", answer)])
            verb, answer = self.repeats.outcome(client_id, request)
        connection.reply(number, [verb, answer])

    def _status(self, connection: Connection, number: int, body: Body) -> None:
        connection.reply(number, self.status())

    def status(self) -> dict[str, Any]:
        """Sizes, who waits for what, the most CPU time that one slice of a walk held the loop, and
        what is kept of others: open groups, leases, clients, answers for their repetitions."""
        counts = self.store.counts()
        counts["dead_blocks"] = self.freeing.unheard
        counts["worst_slice_ms"] = round(self.worst.seconds * 1e3, 3)
        counts["pid"] = os.getpid()
        counts["version"] = release()
        counts["uptime_s"] = round(time.monotonic() - self._started, 3)
        counts["time_s"] = round(self.clock(), 3)
        counts["clients"] = len(self.attached)
        counts["waiting"] = {
            "rows": len(self.waiting),
            "claims": len(self.claiming),
            "room": len(self.admission),
            "partitions": len(self.births),
        }
        counts["held_bytes"] = {
            p.partition_id: p.account.held_bytes
            for p in self.store.partitions.values()
            if p.account.held_bytes
        }
        counts["stores"] = self.registering.known
        counts["totals"] = self.totals.as_dict()
        counts["metrics"] = self.metrics
        store = self.store
        counts["kept"] = {
            "groups": len(store.attempts),
            "leases": sum(
                len(task.leases)
                for partition in store.partitions.values()
                for task in partition.claims.tasks.values()
            ),
            "clients": len(store.requests) + len(store.gone),
            "answers": sum(len(requests.answers) for requests in store.requests.values()),
        }
        return counts

    def _destroy(self, connection: Connection, number: int, body: Body) -> None:
        if body != []:
            raise InvalidRequest("destroy takes nothing")
        self.ending = True
        self.registering.end()
        connection.reply(number, None)
        asyncio.get_running_loop().call_later(0.01, self._on_destroy)

    def attach(self, client_id: str, label: str = "") -> None:
        """One more connection of a client."""
        if label:
            # Kept beyond the client's end: it is asked for when somebody waits for a dead one.
            self.labels.pop(client_id, None)
            self.labels[client_id] = label
            if len(self.labels) > MAX_LABELS:
                del self.labels[next(iter(self.labels))]
        count = self.attached.get(client_id, 0)
        self.attached[client_id] = count + 1
        self._gone_since.pop(client_id, None)
        if not count:
            self.claiming.attached(client_id)

    def detach(self, client_id: str) -> None:
        """One connection less; after the last one the client's answers are kept for a while."""
        left = self.attached.get(client_id, 0) - 1
        if left > 0:
            self.attached[client_id] = left
        else:
            self.attached.pop(client_id, None)
            self._gone_since[client_id] = self.clock()
            self.claiming.detached(client_id)
            self.checkpointing.detached(client_id)

    async def upkeep(self) -> None:
        """Trim history while nothing changes, and forget clients that are long gone."""
        while True:
            self.sampling.look(self.clock())
            await asyncio.sleep(1.0)
            now = self.clock()
            self.store.upkeep(now)
            with suppress(DataplaneError):  # the journal takes no more: who changes things is told
                self.forget_gone(now)

    def forget_gone(self, now: float) -> None:
        """Forget the answers of clients that are long gone."""
        for client_id, since in list(self._gone_since.items()):
            if now - since > self.store.history.max_age_s:
                self.write(j.FORGET, (client_id,))
                del self._gone_since[client_id]
                # What it repeats after that long may have happened: `OutcomeUnknown`.
                self.store.forget_client(client_id)
                self.tracing.forget(client_id)


def _checked_moves(moves: Any, rows: int, copies: int, end: int) -> list[tuple[int, int]]:
    """What a value store says of copied rows: (row in the old block, position), one for each row of
    the new one. InvalidRequest before anything is written down, for that could never be read."""
    listed = cast("list[Any]", moves) if type(moves) is list else []
    pairs: list[tuple[int, int]] = []
    for row, position in listed:
        if type(row) is int and type(position) is int and 0 <= row < rows and 0 <= position < end:
            pairs.append((row, position))
    if not len(pairs) == len(listed) == copies:
        raise InvalidRequest(
            f"a repack names a row of the old block and a position for each of {copies} copies"
        )
    return pairs
