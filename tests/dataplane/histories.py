"""Random histories of a tag service: all kinds of changes, by several clients, as verbs."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import msgpack

from dataplane.codec.template import Templates
from dataplane.server.connection import Connection
from dataplane.server.freeing import RemoteValues
from dataplane.tags.placement import Placement
from dataplane.wire.messages import (
    IF_ABSENT,
    MUST_EXIST,
    RESTORE,
    RETRY,
    RETURN_TAGS,
    PutMeta,
)
from tests.dataplane.audit import COLUMNS, FREE, Blocks
from tests.dataplane.replaying import Caller, Live

CLIENTS = ["c0", "c1", "c2"]
PARTITIONS = ["p", "q", "w@1", "w@2", "w@3"]
WRITTEN = ["p", "p", "p", "q", "w@1"]
KEYS = [f"k{i}" for i in range(14)]
UIDS = ["u0", "u1", "u2"]
TASKS = ["train", "judge"]
STORE = "v0"

WANTS: list[Mapping[str, Any]] = [
    {}, {}, {"fields": ["x"]}, {"where": {"a": 1}}, {"order_by": "-a"}, {"groups": True},
    {"groups": True, "fields": ["x"]},
]  # fmt: skip


class Asked:
    """A numbered request that was made, so that it can be made again."""

    def __init__(self, client_id: str, verb: str, number: int, body: Sequence[Any]) -> None:
        self.client_id = client_id
        self.verb = verb
        self.number = number
        self.body = body
        self.block: int | None = None


class Histories:
    """One service and those who ask it for things."""

    def __init__(self, seed: int, live: Live, *, waits: bool = True) -> None:
        self.random = random.Random(seed)
        self.waits = waits
        """Whether puts may wait for room."""
        self.live = live
        self.blocks = Blocks(STORE)
        self.callers = {c: Caller(live.service, c) for c in CLIENTS}
        self.values = Caller(live.service, STORE, "store")
        for client_id in CLIENTS:
            live.service.attach(client_id)
        self.numbers = dict.fromkeys(CLIENTS, 0)
        self.settled = dict.fromkeys(CLIENTS, 0)
        self.asked: list[Asked] = []
        self.attempts: list[int] = []
        self.claims: list[tuple[str, str, str, int, int, list[str]]] = []
        """client, partition, task, number of the request, claim_id, keys"""
        self.strays: set[int] = set()
        """Blocks that came to nothing: what brought them was a repetition, or refused."""
        self.open: set[asyncio.Future[Any]] = set()
        self.loads = 0
        self.counts: dict[str, int] = {}
        self.templates = Templates()
        self._register(1)

    # -- numbers -----------------------------------------------------------------------------

    def _next(self, client_id: str) -> tuple[int, int]:
        """A number for a request of a client, and what it has settled."""
        number = self.numbers[client_id] = self.numbers[client_id] + 1
        if not self.open and self.random.random() < 0.3:
            self.settled[client_id] = max(
                self.settled[client_id], number - self.random.randint(1, 6)
            )
        return number, self.settled[client_id]

    async def _ask(self, client_id: str, verb: str, number: int, *body: Any) -> Any:
        self.asked.append(Asked(client_id, verb, number, body))
        return await self.callers[client_id].call(verb, *body)

    def _done(self, what: str, answer: Any) -> None:
        failed = isinstance(answer, dict) and "type" in answer
        what = f"{what} {answer['type']}" if failed else what
        self.counts[what] = self.counts.get(what, 0) + 1

    def _any_revision(self) -> list[int]:
        store = self.live.store
        return [store.epoch, self.random.randint(max(0, store.n - 12), store.n)]

    # -- rows --------------------------------------------------------------------------------

    def some_tags(self) -> dict[str, Any]:
        return {t: self.random.randint(0, 3) for t in self.random.sample("abc", 2)}

    def some_block(self, rows: int, fields: Sequence[str]) -> Placement:
        r = self.random
        lengths: dict[str, Any] = {}
        for field in fields:
            sizes = [[r.randint(0, 900) for _ in range(FREE[field])] for _ in range(rows)]
            lengths[field] = [s[0] if FREE[field] == 1 else s for s in sizes] if FREE[field] else []
        return self.blocks.block(rows, lengths)

    async def put(self) -> None:
        r = self.random
        client_id, partition_id = r.choice(CLIENTS), r.choice(WRITTEN)
        keys = r.sample(KEYS, r.choice([1, 1, 2, 5]))
        attempt = None
        if self.attempts and r.random() < 0.5:
            attempt = r.choice(self.attempts[-4:])
            group = self.live.store.attempts.get(attempt)
            if group is not None:
                partition_id = group.partition_id
                keys = [f"{group.uid}_{i}" for i in range(r.randint(1, 3))]
                if r.random() < 0.2:
                    keys[0] = group.uid if r.random() < 0.5 else r.choice(KEYS)
        flags = r.choice([0, 0, 0, MUST_EXIST, IF_ABSENT]) | r.choice([0, RETURN_TAGS])
        flags |= RETRY * (r.random() < 0.1)
        stamp = self._any_revision() if r.random() < 0.2 else None
        number, settled = self._next(client_id)
        waits = self.waits and r.random() < 0.1
        meta = PutMeta(
            partition_id, keys, flags, number, settled, self._any_revision(), stamp, attempt,
            3600.0 if waits else 0.0,
        )  # fmt: skip
        fields = r.sample(sorted(COLUMNS), r.choice([0, 1, 1, 2, 3]))
        tags = None
        if not fields or r.random() < 0.7:
            tags = b"".join(msgpack.packb(self.some_tags()) for _ in keys)
        if not fields:
            future = self.callers[client_id].send("put_tags", meta.pack(), tags)
            self.asked.append(Asked(client_id, "put_tags", number, [meta.pack(), tags]))
        else:
            block = self.some_block(len(keys), fields)
            body = [client_id, meta.pack(), tags, wire(block), 0]
            future = self.values.send("publish", *body)
            self.asked.append(Asked(STORE, "publish", number, body))
            self.asked[-1].block = block.block
            future.add_done_callback(lambda done: self._put_ended(block.block, done.result()))
        if waits:
            self.open.add(future)
            future.add_done_callback(self.open.discard)
            future.add_done_callback(lambda done: self._done("waited put", done.result()))
            await asyncio.sleep(0)
        else:
            self._done("put", await future)

    def _put_ended(self, block: int, answer: Any) -> None:
        if isinstance(answer, dict):
            self.strays.add(block)  # its value store takes it back by itself

    async def clear(self) -> None:
        r = self.random
        client_id, partition_id = r.choice(CLIENTS), r.choice(WRITTEN)
        keys: list[str] | None = r.sample([*KEYS, *UIDS, "u0_0", "u1_0"], r.randint(0, 3))
        where = None
        if r.random() < 0.4:
            keys, where = (
                None,
                r.choice([{"a": r.randint(0, 3), "b": 1}, {"b": {">": 2}}, {"z": 1}]),
            )
        number, settled = self._next(client_id)
        answer = await self._ask(
            client_id, "clear", number, partition_id, keys, where, r.random() < 0.3, number, settled
        )
        self._done("clear", answer)

    async def repack(self) -> None:
        candidates = await self.live.service.repack_candidates(STORE, 3)
        if not candidates:
            return
        old, blob, rows, lengths, live, positions, names = self.random.choice(candidates)
        template = self.templates.parse(blob)
        columns = [template.columns[template.index[name]] for name in names]
        sizes = memoryview(lengths).cast("i")
        flat = array("i")
        for column in columns:
            first = template.first_free[template.index[column.name]]
            for dim in range(first, first + len(column.free)):
                flat.extend(sizes[dim * rows + row] for row in live)
        new = self.blocks.of(columns, len(live), flat.tobytes())
        if self.random.random() < 0.5:
            await self.random.choice([self.put, self.clear, self.drop])()
        placement = self.live.store.placements.get((STORE, old))
        if placement is None or placement.partition_id not in self.live.store.partitions:
            self.strays.add(new.block)
        moves = list(zip(live, positions, strict=True))
        self._done("repack", await self.values.call("repack", old, wire(new), moves))

    # -- groups ------------------------------------------------------------------------------

    async def begin(self) -> None:
        r = self.random
        client_id, partition_id = r.choice(CLIENTS), r.choice(WRITTEN)
        number, settled = self._next(client_id)
        self.values.room = r.choice([0, 1 << 30])
        answer = await self._ask(
            client_id, "begin_group", number, r.choice(UIDS), partition_id, r.randint(1, 4),
            r.choice([None, 0, 50_000, 9_000_000]), r.choice([None, STORE]), 0.0, number, settled,
        )  # fmt: skip
        self.values.room = 1 << 30
        if type(answer) is int:
            self.attempts.append(answer)
        self._done("begin", answer)

    async def end(self) -> None:
        if not self.attempts:
            return
        r = self.random
        client_id = r.choice(CLIENTS)
        number, settled = self._next(client_id)
        answer = await self._ask(
            client_id, "end_group", number, r.choice(self.attempts[-3:]),
            r.choice(["finished", "finished", "failure"]), number, settled,
        )  # fmt: skip
        self._done("end", answer)

    # -- partitions --------------------------------------------------------------------------

    async def create(self) -> None:
        r = self.random
        client_id = r.choice(CLIENTS)
        number, settled = self._next(client_id)
        schema = r.choice([None, None, "open", {"x": ["int64", 1, None], "n": ["float32", 2, 1]}])
        quota = r.choice([
            None, {}, {}, {"rows": 18}, {"bytes": 60_000, "group_bytes": 8192},
            {"producer_bytes": 30_000, "group_bytes": 4096, "producer_rows": 9},
        ])  # fmt: skip
        retention = r.choice([None, {"versions": 1}, {"versions": 2}])
        name = r.choice([*PARTITIONS, "w"])
        answer = await self._ask(
            client_id, "create_partition", number, name, schema, quota, retention, number, settled
        )
        self._done("create", answer)

    async def seal(self) -> None:
        client_id = self.random.choice(CLIENTS)
        number, settled = self._next(client_id)
        name = self.random.choice(PARTITIONS[1:])
        answer = await self._ask(client_id, "seal_partition", number, name, number, settled)
        self._done("seal", answer)

    async def drop(self) -> None:
        r = self.random
        client_id = r.choice(CLIENTS)
        number, settled = self._next(client_id)
        name, older = r.choice(
            [
                *((p, None) for p in PARTITIONS[1:]),
                ("p" if r.random() < 0.2 else "q", None),
                ("w", 2),
                ("w", 3),
                ("w", 1),
            ]
        )
        answer = await self._ask(client_id, "drop_partition", number, name, older, number, settled)
        self._done("drop", answer)

    # -- claims ------------------------------------------------------------------------------

    async def claim(self) -> None:
        r = self.random
        client_id, partition_id, task = r.choice(CLIENTS), r.choice(WRITTEN), r.choice(TASKS)
        number, _ = self._next(client_id)
        want = r.choice(WANTS)
        replica = None
        if r.random() < 0.3:
            replica = [r.randint(0, 1), 2, r.randint(0, 4 + self.numbers["c0"] // 20)]
            want = WANTS[0]
        abandoned = [r.randint(1, number)] if r.random() < 0.1 else []
        answer = await self.callers[client_id].call(
            "claim", *claim_body(partition_id, task, r.choice([1, 1, 2]), want, replica, abandoned),
            0.0, number,
        )  # fmt: skip
        self._done("share" if replica else "claim", answer)
        self._granted(client_id, partition_id, task, number)

    def _granted(self, client_id: str, partition_id: str, task: str, number: int) -> None:
        partition = self.live.store.partitions.get(partition_id)
        granted = None if partition is None else partition.claims.granted(client_id, number)
        if granted is not None:
            keys = [row.key for row in granted.rows]
            self.claims.append((client_id, partition_id, task, number, granted.claim_id, keys))

    async def end_claim(self) -> None:
        if not self.claims:
            return
        r = self.random
        client_id, partition_id, task, _, claim_id, keys = r.choice(self.claims[-6:])
        number, settled = self._next(client_id)
        some = keys if r.random() < 0.6 else r.sample(keys, r.randint(0, len(keys)))
        verb = r.choice(["claim_commit", "claim_commit", "claim_release"])
        body = (partition_id, task, claim_id, some, number, settled)
        self._done(verb, await self._ask(client_id, verb, number, *body))

    async def abandon(self) -> None:
        if not self.claims:
            return
        client_id, _, _, number, _, _ = self.random.choice(self.claims[-6:])
        self._done("abandon", await self.callers[client_id].call("claim_abandon", [number]))

    async def expire(self) -> None:
        """A client is away for so long that its leases end."""
        service = self.live.service
        client_id = self.random.choice(CLIENTS)
        service.detach(client_id)
        ledger = service.claiming._ledger
        ledger.clock.now += self.random.choice([1.0, 100.0])
        for partition in list(self.live.store.partitions.values()):
            partition.claims.expire(partition, ledger)
            service.claiming._serve(partition)
        service.attach(client_id)
        self._done("away", None)

    # -- requests ----------------------------------------------------------------------------

    async def repeat(self) -> None:
        if not self.asked:
            return
        asked = self.random.choice(self.asked[-20:])
        caller = self.values if asked.client_id == STORE else self.callers[asked.client_id]
        body = list(asked.body)
        if asked.block is not None and self.random.random() < 0.5:
            # The repetition was written to a block of its own.
            block = self.some_block(body[3][5], ["x"])
            body[3] = wire(block)
            self.strays.add(block.block)
        if asked.verb == "begin_group":
            body[5] = 0.0
        future = caller.send(asked.verb, *body)
        self.open.add(future)
        future.add_done_callback(self.open.discard)
        for _ in range(3):
            await asyncio.sleep(0)
        self._done("repeat", future.result() if future.done() else None)

    async def outcome(self) -> None:
        client_id = self.random.choice(CLIENTS)
        ahead = self.random.choice([-3, -1, 0, 1])
        number = max(1, self.numbers[client_id] + ahead)
        self.numbers[client_id] = max(self.numbers[client_id], number)
        answer = await self.callers["c0"].call("outcome", client_id, number)
        self._done("outcome", answer)

    async def forget(self) -> None:
        """A client goes for good, and one of the same name is no stranger to what it had asked."""
        service = self.live.service
        client_id = self.random.choice(CLIENTS)
        service.detach(client_id)
        self.live.now += self.live.store.history.max_age_s + 1
        service.forget_gone(self.live.now)
        service.attach(client_id)
        self._done("forgotten", None)

    async def register(self) -> None:
        """The value store comes again, mostly with all that it had."""
        self._register(2, self._some_blocks() if self.random.random() < 0.3 else [])
        self._done("register", None)

    def _register(self, port: int, lost: Sequence[int] = ()) -> None:
        values = RemoteValues(STORE, [None, ["10.0.0.1", port]], cast("Connection", self.values))
        self.live.service.registering.register(values, lost)

    def _some_blocks(self) -> list[int]:
        live = [block for _, block in self.live.store.placements]
        return self.random.sample(live, min(len(live), self.random.randint(0, 2)))

    async def lose(self) -> None:
        """The value store has not got some blocks any more; rarely, none."""
        blocks = None if self.random.random() < 0.1 else self._some_blocks()
        if blocks is None:
            self.strays.update(self.values.freed)  # a replay does not tell of them once more
        rows = self.live.service.losing.lose(STORE, blocks)
        self._done("lost" if rows else "nothing lost", None)

    # -- loads -------------------------------------------------------------------------------

    async def load(self) -> None:
        """A checkpoint is loaded in place of some partitions; or given up."""
        r, store, caller = self.random, self.live.store, self.callers["c2"]
        self.loads += 1
        load_id, name = f"load{self.loads}", f"l{self.loads % 2}"
        stay = sorted(p for p in store.partitions if p != name and r.random() < 0.7)
        saved_n = store.n + r.choice([0, 50])  # no attempt is ever used again
        await caller.call("restore_begin", load_id, 60.0, r.choice([1, 1, 4]), 20 + saved_n, stay)
        schema = {"x": ["int64", 1, 0], "s": ["float64", 0, None]}
        attempt = 5 + saved_n
        groups = [["g0", attempt, 3, 20_000, "running", attempt, 1.0, True, "c1"],
                  ["g1", attempt + 1, 1, 0, "finished", attempt + 2, 2.0, False, "c0"]]  # fmt: skip
        await caller.call("restore_partition", load_id, name, schema, r.random() < 0.3, groups)
        keys = ["g0", "g0_0", "g0_1", "g1_0", "k0", "k1"]
        attempts = [-1, attempt, attempt, attempt + 1, 0, 0]
        revisions = [attempt, 7, 8, 9, 4, 3]
        clears = [0, 0, 2, 0, 1, 0]
        tasks = {"train": array("i", [0, 1, 2, -1, -1, 0]).tobytes()}
        await caller.call(
            "restore_rows", load_id, name, 0, keys,
            b"".join(msgpack.packb(self.some_tags()) for _ in keys),
            *(array("q", part).tobytes() for part in (revisions, clears, attempts)),
            ["c0", "c1"], array("i", [1, 1, 1, 0, 0, 0]).tobytes(), tasks,
        )  # fmt: skip
        for rows in ([1, 2], [4], [9] if r.random() < 0.3 else [3]):
            number, settled = self._next("c2")
            block = self.some_block(len(rows), ["x"])
            meta = PutMeta(name, [], RESTORE, number, settled, None, None)
            body = ["c2", meta.pack(), array("q", rows).tobytes(), wire(block), 0]
            answer = await self.values.call("publish", *body)
            self._put_ended(block.block, answer)
            self.asked.append(Asked(STORE, "publish", number, body))
            self.asked[-1].block = block.block
        if r.random() < 0.3:
            await self.put()
        held = {
            "claim_id": 900 + self.loads, "revision": 9, "rows": [["g0_0", 1], ["g0_1", 2]],
            "held": ["g0_0"], "lost": {"g0_1": "released"}, "done": [], "holders": {"c1": [77]},
            "lease_s": 30.0, "grouped": False, "at": 5.0, "share": None,
        }  # fmt: skip
        about = {"task": "train", "last_id": 900 + self.loads, "leases": [held], "closed": [
            [1, 8, {"k1": "released"}, True]], "batches": [], "forgotten": 2}  # fmt: skip
        state = ("restore_state", load_id, name, r.random() < 0.3, {"rows": 50}, None, [about])
        await caller.call(*state)
        if r.random() < 0.3:
            await caller.call(*state)
        if r.random() < 0.25:
            self._done("load given up", await caller.call("restore_abort", load_id))
            return
        answer = await caller.call("restore_end", load_id)
        self._done("load", answer)
        if isinstance(answer, dict):
            await caller.call("restore_abort", load_id)
        else:
            self.attempts.append(attempt)

    # -- all of it ---------------------------------------------------------------------------

    async def step(self) -> None:
        self.live.now += self.random.choice([0.0, 0.25, 3.0])
        acts: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.put, 12), (self.clear, 4), (self.repack, 4), (self.begin, 4), (self.end, 3),
            (self.create, 3), (self.seal, 1), (self.drop, 1), (self.claim, 8), (self.end_claim, 6),
            (self.abandon, 2), (self.expire, 1), (self.repeat, 4), (self.outcome, 1),
            (self.load, 1), (self.lose, 1),
        ]  # fmt: skip
        if self.random.random() < 0.01:
            await self.forget()
        if self.random.random() < 0.02:
            await self.register()
        (act,) = self.random.choices([a for a, _ in acts], [w for _, w in acts])
        await act()


def claim_body(
    partition_id: str,
    task: str,
    count: int,
    want: Mapping[str, Any],
    replica: Any = None,
    abandoned: Sequence[int] = (),
) -> list[Any]:
    return [
        partition_id, task, count, want.get("fields", []), want.get("where"),
        want.get("order_by"), want.get("groups", False), 30.0, replica, list(abandoned),
    ]  # fmt: skip


def wire(p: Placement) -> list[Any]:
    """A block as it travels."""
    return [p.block, p.segment, p.offset, p.nbytes, p.template.blob, p.rows, p.lengths]
