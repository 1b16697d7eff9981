"""A tag service that is driven without sockets, its journal in memory, and all that it knows as
plain data: to be compared with what a replay of that journal makes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from io import BytesIO
from typing import Any

import msgpack

from dataplane.errors import DataplaneError, QuotaExceeded, to_wire
from dataplane.server.tag_service import TagService
from dataplane.tags.accounts import Account, Producer
from dataplane.tags.claims.leases import Granted, Lease
from dataplane.tags.claims.tasks import Task
from dataplane.tags.groups import Group
from dataplane.tags.history import History
from dataplane.tags.partition import Partition
from dataplane.tags.placement import Placement
from dataplane.tags.records import Head, Record, Records, framed, head_bytes
from dataplane.tags.replay.replay import Replay
from dataplane.tags.requests import Answered
from dataplane.tags.rows import CHUNK_BITS, Row, Tombstone
from dataplane.tags.store import TagStore

HEAD = Head("plane", 1, open_schemas=False)


class MemoryJournal:
    """A journal in memory, byte by byte as it would be in a file."""

    def __init__(self) -> None:
        self.file = BytesIO()
        self.file.write(head_bytes(HEAD))
        self._read = self.file.tell()

    def append(self, kind: int, n: int, at: float, body: Any) -> None:
        self.file.write(framed(msgpack.packb((kind, n, at, body))))

    def close(self) -> None:
        pass

    def fresh(self) -> list[Record]:
        """What was written since the last time."""
        end = self.file.tell()
        start = head_bytes(HEAD)
        part = BytesIO(start + self.file.getvalue()[self._read :])
        self._read = end
        return list(Records(part, "memory"))

    def all(self) -> Records:
        return Records(BytesIO(self.file.getvalue()), "memory")


class Caller:
    """Somebody at the other end of a connection, who is answered here."""

    def __init__(self, service: TagService, client_id: str, role: str = "client") -> None:
        self.service = service
        self.client_id = client_id
        self.role = role
        self.local = True
        self.closed = False
        self.freed: list[int] = []
        """Blocks that a value store was told are dead."""
        self.room = 1 << 30
        """What a value store has to keep room for groups."""
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- asking ------------------------------------------------------------------------------

    def send(self, verb: str, *body: Any) -> asyncio.Future[Any]:
        """Ask, and look for the answer later."""
        self._number += 1
        number = self._number
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            waiting: Any = self.service.verbs[verb](self, number, _travelled(body))  # type: ignore[arg-type]
        except DataplaneError as error:
            self.fail(number, error)
            return future
        if waiting is not None:
            self.outlive(verb, number, waiting)
        return future

    async def call(self, verb: str, *body: Any) -> Any:
        """The answer as it would travel; an error as a map."""
        return await self.send(verb, *body)

    # -- being answered ----------------------------------------------------------------------

    def reply(self, number: int, body: Any) -> None:
        self._answers.pop(number).set_result(_travelled(body))

    def fail(self, number: int, error: DataplaneError) -> None:
        self._answers.pop(number).set_result(to_wire(error))

    def fail_with(self, number: int, error: BaseException) -> None:
        assert isinstance(error, DataplaneError), repr(error)
        self.fail(number, error)

    async def reply_with(self, number: int, body: Any, payload: Sequence[Any], nbytes: int) -> None:
        self.reply(number, [body, b"".join(map(bytes, payload)), nbytes])

    def outlive(self, verb: str, number: int, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except DataplaneError as error:
                self.fail(number, error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- as a value store --------------------------------------------------------------------

    def ask(self, verb: str, body: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if verb == "hold" and body[1] > self.room:
            future.set_exception(QuotaExceeded("full", used_bytes=0, limit_bytes=self.room))
        else:
            self.freed += body[0] if verb == "free" else []
            future.set_result(None)
        return future


def _travelled(body: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(body, default=list))


class Live:
    """A service with its clock, its journal and a replay that follows it."""

    def __init__(
        self, history: tuple[int, float] = (10_000, 600.0), store: TagStore | None = None
    ) -> None:
        self.now = 1000.0
        self.journal = MemoryJournal()
        self.store = store or TagStore(1, History(*history))
        self.service = TagService(
            self.store, self.journal, on_destroy=lambda: None, clock=lambda: self.now
        )
        self.replay = Replay(1, History(*history))
        self.records: list[Record] = []

    def follow(self) -> Replay:
        """The replay, with all that has been written by now."""
        for record in self.journal.fresh():
            self.replay.apply(record)
            self.records.append(record)
        return self.replay

    async def rest(self) -> None:
        """Until everything that goes on in the background is done."""
        deadline = time.monotonic() + 10.0
        for _ in range(4):
            await asyncio.sleep(0)
        service = self.service
        while service._background or service._changed or service.freeing.unheard:
            assert time.monotonic() < deadline
            await asyncio.sleep(0)


# -- all that a store knows --------------------------------------------------------------------


def described(store: TagStore) -> dict[str, Any]:
    """As plain data; of what history forgets not how far it was carried out."""
    floor = store.history.floor
    names = {*store.partitions, *(n for n, at in store.dropped.items() if at > floor)}
    return {
        "revision": store.revision(),
        "attempts": {n: g.uid for n, g in store.attempts.items()},
        "dropped": {name: n for name, n in store.dropped.items() if n > floor},
        "placements": {number: _placement(p) for number, p in store.placements.items()},
        "partitions": {name: _partition(store, p) for name, p in store.partitions.items()},
        "history": {
            name: [
                (c.n, c.at, list(c.keys), None if c.positions is None else list(c.positions), c.by)
                for c in store.history.since(name, floor)
            ]
            for name in names
        },
        "floor": (floor, store.history.floor_at, store.history.size),
    }


def requests_of(store: TagStore) -> dict[str, tuple[int, dict[int, Any]]]:
    """Of each client the floor and what is remembered above it."""
    known = {
        client_id: (requests.floor, {n: _answered(a) for n, a in requests.answers.items()})
        for client_id, requests in store.requests.items()
        if requests.answers or requests.floor
    }
    gone: dict[str, tuple[int, dict[int, Any]]] = {c: (n, {}) for c, n in store.gone.items()}
    assert not known.keys() & gone.keys()
    return known | gone


def _answered(found: Answered) -> Any:
    return (found.verb, _travelled(found.answer), found.block)


def _placement(p: Placement) -> Any:
    charged = p.charged
    assert charged is not None
    shares = charged if isinstance(charged, dict) else {charged: p.extent_bytes}
    return (
        p.live, p.partition_id, list(p.positions), p.segment, p.offset, p.nbytes, p.rows, p.lengths,
        p.template.blob, [(_account(account), share) for account, share in shares.items()],
    )  # fmt: skip


def _account(account: Account) -> Any:
    if type(account) is Group:
        return ("group", account.attempt)
    assert type(account) is Producer
    return ("producer", account.client_id)


def _sums(a: Account) -> tuple[int, ...]:
    return a.rows, a.tag_bytes, a.extent_bytes, a.held_bytes, a.held_rows


def _partition(store: TagStore, partition: Partition) -> dict[str, Any]:
    floor = store.history.floor
    rows: dict[int, Any] = {}
    gone: dict[int, int] = {}
    for number, chunk in enumerate(partition.slots.chunks):
        for at, slot in enumerate(chunk.rows if chunk is not None else ()):
            position = number << CHUNK_BITS | at
            if type(slot) is Row:
                rows[position] = _row(slot, floor, partition)
                assert partition.index.get(slot.key) == position
            elif type(slot) is Tombstone and slot.revision > floor:
                gone[position] = slot.revision
    return {
        "rows": rows,
        "gone": gone,
        "tombstones": {
            key: at for shard in partition.index.shards for key, at in shard.items() if at in gone
        },
        "schema": partition.schema,
        "settings": (
            partition.open_schema, partition.sealed, partition.quota, partition.retention,
            partition.revision, partition.born if partition.born > floor else 0,
        ),
        "covers": [store.history.covers(partition.partition_id, n) for n in range(floor, store.n)],
        "bytes": (partition.payload_bytes, partition.tag_bytes),
        "sums": (_sums(partition.account), _sums(partition.prompts)),
        "producers": {c: _sums(p) for c, p in partition.producers.items() if not p.is_empty},
        "groups": {
            uid: (
                g.attempt, g.n, g.declared_bytes, g.status, g.since, g.at, g.open, g.store,
                g.producer.client_id, sorted(g.positions), _sums(g),
            )
            for uid, g in partition.groups.items()
        },
        "tasks": {
            # One that was only asked in is nothing that lasts.
            name: about for name, task in partition.claims.tasks.items()
            if any(list((about := _task(task)).values())[1:-1]) or task.forgotten >= 0
        },
    }  # fmt: skip


def _row(row: Row, floor: int, partition: Partition) -> Any:
    layers = [(at.store, at.block) if isinstance(at, Placement) else at for at in row.layers]
    is_prompt = row.account.parent is partition.prompts
    cleared_at = row.cleared_at if row.cleared_at > floor else 0
    return (
        row.key, row.tags, row.tag_bytes, layers, row.revision, cleared_at, _account(row.account),
        is_prompt,
    )  # fmt: skip


def _task(task: Task) -> dict[str, Any]:
    return {
        "last": task.last_id,
        "committed": list(task.committed),
        "offered": task.offered,
        "held": {at: lease.claim_id for at, lease in task.held.items()},
        "leases": {claim_id: _lease(lease) for claim_id, lease in task.leases.items()},
        "closed": {claim_id: tuple(closed) for claim_id, closed in task.closed.items()},
        "batches": {
            index: (
                batch.terms,
                [
                    (share.asked if share.granted.rows else None, _granted(share.granted))
                    for share in batch.shares
                ],
            )
            for index, batch in task.batches.items()
            if batch.shares is not None
        },
        "settled": (list(task.settled), task.forgotten),
    }


def _lease(lease: Lease) -> Any:
    return (
        _granted(lease.granted), lease.rows, lease.lost, lease.done, lease.holders, lease.lease_s,
        lease.grouped, lease.at, lease.share,
    )  # fmt: skip


def _granted(granted: Granted) -> Any:
    rows = [(row.key, row.tags, row.revision) for row in granted.rows]
    return granted.claim_id, rows, granted.positions, granted.deliveries, granted.revision


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Where two descriptions differ, each place on a line."""
    if isinstance(found, dict) and isinstance(expected, dict):
        names = [*found, *(name for name in expected if name not in found)]
        return [
            line
            for name in names
            for line in differences(found.get(name), expected.get(name), f"{where}/{name}")
        ]
    same_kind = type(found) is type(expected) and isinstance(found, list | tuple)
    if same_kind and len(found) == len(expected):
        return [
            line
            for i, pair in enumerate(zip(found, expected, strict=True))
            for line in differences(*pair, f"{where}/{i}")
        ]
    return [] if found == expected else [f"{where}: {found!r:.300} is not {expected!r:.300}"]
