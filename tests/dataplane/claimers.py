"""Claimers of a bare tag store: what the server does around `Claims`, without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from dataplane.errors import DataplaneError, InternalError
from dataplane.tags.claims.leases import Granted
from dataplane.tags.claims.queues import Ask
from dataplane.tags.claims.ready import SHARD_BITS
from dataplane.tags.claims.wants import Want
from dataplane.tags.groups import Group
from dataplane.tags.history import History
from dataplane.tags.partition import Partition
from dataplane.tags.puts import PutRows
from dataplane.tags.rows import Row
from dataplane.tags.store import TagStore
from dataplane.types import Quota
from tests.dataplane.audit import Blocks, put

P = "train"


class Ledger:
    """A Registrar that keeps what it is told, and can be made to fail."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lease_now = 0.0
        self.away: set[str] = set()
        self.written: list[tuple[str, Any]] = []
        self.broken = False
        self._last_id = 0

    def claim_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def is_away(self, client_id: str) -> bool:
        return client_id in self.away

    def claimed(self, body: Any) -> None:
        self._write("claim", body)

    def committed(self, body: Any) -> None:
        self._write("commit", body)

    def released(self, body: Any) -> None:
        self._write("release", body)

    def left(self, body: Any) -> None:
        self._write("left", body)

    def _write(self, what: str, body: Any) -> None:
        if self.broken:
            raise InternalError("the journal is broken")
        self.written.append((what, msgpack.unpackb(msgpack.packb(body))))


class Asked:
    """One request for rows, and what it was answered."""

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.answer: Granted | DataplaneError | None = None
        self.ask: Ask | None = None

    def reply(self, answer: Granted | DataplaneError) -> None:
        assert self.answer is None
        self.answer = answer

    @property
    def granted(self) -> Granted:
        if isinstance(self.answer, DataplaneError):
            raise self.answer
        assert self.answer is not None, "it still waits"
        return self.answer

    @property
    def keys(self) -> list[str] | None:
        """The keys that were granted; None while it waits."""
        return None if self.answer is None else [row.key for row in self.granted.rows]

    @property
    def claim_id(self) -> int:
        return self.granted.claim_id

    @property
    def deliveries(self) -> list[int]:
        return self.granted.deliveries


class Desk:
    """One partition, those who put into it and those who claim from it."""

    def __init__(self, history: History | None = None) -> None:
        self.store = TagStore(1, history)
        self.blocks = Blocks()
        self.ledger = Ledger()
        self._numbers: dict[str, int] = {}
        put(self.store, P, ["first"], tags=[{}])
        self.store.apply_clear(P, ["first"], 0.0)

    @property
    def partition(self) -> Partition:
        return self.store.partition(P)

    # -- producers ---------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[str] | str,
        tags: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        lengths: Mapping[str, Sequence[int]] | None = None,
        **options: Any,
    ) -> None:
        """Rows with tags (those of all of them, or of each), and fields of these row lengths."""
        names = keys.split() if isinstance(keys, str) else list(keys)
        each = [dict(tags or {})] * len(names) if isinstance(tags, Mapping) or not tags else tags
        block = None if lengths is None else self.blocks.block(len(names), lengths)
        put(self.store, P, names, block, each, **options)
        self.serve()

    def clear(self, keys: Sequence[str] | str) -> int:
        names = keys.split() if isinstance(keys, str) else list(keys)
        count = self.store.apply_clear(P, names, 0.0)
        self.serve()
        return count

    def begin(self, uid: str, n: int = 2) -> Group:
        prompt = self._prompt(uid, {"status": "running", "is_prompt": True})
        producer = self.partition.producer("producer")
        group = Group(uid, P, self.store.n + 1, n, 0, producer, at=0.0)
        self.store.apply_begin(prompt, self.store.check_put(prompt), group, 0.0)
        self.serve()
        return group

    def end(self, group: Group, status: str = "finished") -> None:
        there = self.partition.row(group.uid) is not None
        prompt = self._prompt(group.uid, {"status": status}) if there else None
        written = None if prompt is None else (prompt, self.store.check_put(prompt))
        self.store.apply_end(group, status, written, 0.0, "producer")
        self.serve()

    def finished(self, uid: str, *tags: Mapping[str, Any]) -> Group:
        """A group that is over, with one trajectory `uid_i` for each of the tags."""
        group = self.begin(uid, len(tags))
        keys = [f"{uid}_{i}" for i in range(len(tags))]
        self.put(keys, tags, group=group)
        self.end(group)
        return group

    def _prompt(self, uid: str, tags: dict[str, Any]) -> PutRows:
        return PutRows(P, [uid], [tags], [len(msgpack.packb(tags))], None)

    def seal(self) -> None:
        self.store.apply_seal(self.partition, 0.0)
        self.serve()

    def limit_rows(self, rows: int) -> None:
        self.partition.quota = Quota(rows=rows)

    # -- consumers ---------------------------------------------------------------------------

    def claim(
        self,
        count: int = 1,
        *,
        client: str = "c",
        task: str = "t",
        fields: Sequence[str] = (),
        where: Any = None,
        order_by: str | None = None,
        groups: bool = False,
        lease_s: float = 30.0,
        replica: tuple[int, int, int] | None = None,
        number: int | None = None,
    ) -> Asked:
        """Ask for rows, and be answered if there are enough."""
        want = Want.parse(
            P, task, count, list(fields), where, order_by, groups, lease_s, replica
        )  # fmt: skip
        partition = self.partition
        claims = partition.claims
        claims.check_count(partition, want.count)
        if number is None:
            number = self._numbers[client] = self._numbers.get(client, 0) + 1
        asked = Asked(client)
        again = claims.granted(client, number)
        if again is not None:
            asked.reply(again)
            return asked
        queue = claims.open(partition, task, want.condition, want.predicate, want.order)
        for _ in partition.views.scan(queue.view):
            pass
        if not queue.complete:
            for _ in queue.fill():
                pass
        asked.ask = Ask(
            client, number, queue, want.count, want.fields, want.lease_s, want.rank, asked.reply
        )
        try:
            claims.enter(partition, asked.ask, self.ledger)
            self.serve()
        except DataplaneError:
            claims.close(partition, queue)
            raise
        if asked.answer is not None:
            claims.close(partition, queue)
        return asked

    def leave(self, asked: Asked) -> None:
        """Stop waiting."""
        assert asked.ask is not None
        self.partition.claims.withdraw(asked.ask)
        self.partition.claims.close(self.partition, asked.ask.queue)
        self.serve()

    def commit(self, asked: Asked, keys: Sequence[str] | None = None, task: str = "t") -> int:
        n = self.partition.claims.commit(
            self.partition, task, asked.claim_id, self._keys(asked, keys), self.ledger
        )
        self.serve()
        return n

    def release(self, asked: Asked, keys: Sequence[str] | None = None, task: str = "t") -> int:
        n = self.partition.claims.release(
            self.partition, task, asked.claim_id, self._keys(asked, keys), self.ledger
        )
        self.serve()
        return n

    def _keys(self, asked: Asked, keys: Sequence[str] | None) -> list[str]:
        return [row.key for row in asked.granted.rows] if keys is None else list(keys)

    def abandon(self, client: str, *numbers: int) -> None:
        self.partition.claims.abandon(self.partition, client, numbers, self.ledger)
        self.serve()

    def leaves(self, client: str) -> None:
        """A client loses its last connection."""
        self.ledger.away.add(client)
        self.partition.claims.holders.detached(client, self.ledger.lease_now)

    def returns(self, client: str) -> None:
        self.ledger.away.discard(client)
        self.partition.claims.holders.attached(client)

    def passes(self, seconds: float) -> None:
        """The clock of leases goes on."""
        self.ledger.lease_now += seconds
        self.partition.claims.expire(self.partition, self.ledger)
        self.serve()

    def serve(self) -> None:
        groups = self.store.attempts.values()
        growing = any(group.partition_id == P for group in groups)
        self.partition.claims.serve(self.partition, self.ledger, growing=growing)

    # -- what must always be true ------------------------------------------------------------

    def check(self) -> None:
        """Every queue knows exactly what is ready, and nobody waits who could be answered."""
        partition = self.partition
        claims = partition.claims
        rows = {
            position: row
            for position in range(len(partition.slots.chunks) << 10)
            if position < self._end() and type(row := partition.slots.at(position)) is Row
        }
        for task in claims.tasks.values():
            for position, lease in task.held.items():
                assert lease.rows[rows[position].key] == position
                assert task.leases[lease.claim_id] is lease
                assert position not in task.committed
            held = [p for lease in task.leases.values() for p in lease.rows.values()]
            assert sorted(held) == sorted(task.held)
            assert all(position in rows for position in task.committed)
            assert set(task.offered) <= set(rows) - set(task.committed)
            assert set(task.held) <= set(task.offered)
            for queue in task.queues.values():
                if queue.complete:
                    assert self._ready(queue) == self._due(queue, rows)
                first = queue.first()
                assert first is None or len(queue.ready) < first.count
            for lease in task.leases.values():
                for client_id in lease.holders:
                    assert lease in claims.holders.of(client_id)

    def _end(self) -> int:
        chunks = self.partition.slots.chunks
        return sum(1024 if c is None or i < len(chunks) - 1 else len(c.rows)
                   for i, c in enumerate(chunks))  # fmt: skip

    def _ready(self, queue: Any) -> set[int]:
        if not queue.grouped:
            ready = {p for p in range(self._end()) if p in queue.ready}
            for position in ready:
                row = self.partition.slots.at(position)
                assert _place(queue, position) == queue.order.key(row)
            return ready
        ready = {a for a in self._attempts() if a in queue.ready}
        assert ready == set(queue.groups)
        for attempt, group in queue.groups.items():
            rows = map(self.partition.slots.at, group.positions)
            assert _place(queue, attempt) == min(map(queue.order.key, rows))
        assert len(ready) == len(queue.ready)
        return ready

    def _attempts(self) -> list[int]:
        return [group.attempt for group in self.partition.groups.values()]

    def _due(self, queue: Any, rows: Mapping[int, Row]) -> set[int]:
        view, has = queue.view, queue.task.has
        if not queue.grouped:
            return {p for p, row in rows.items() if view.matches(row) and not has(p)}
        return {
            group.attempt
            for group in self.partition.groups.values()
            if group.status == "finished"
            and group.positions
            and all(view.matches(rows[p]) and not has(p) for p in group.positions)
        }


def _place(queue: Any, number: int) -> tuple[Any, ...]:
    """Where a row or group stands among those that are ready."""
    return queue.ready._entries[number >> SHARD_BITS][number][:-2]
