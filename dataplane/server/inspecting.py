"""The verbs that an operator asks: keys, tallies and statistics of partitions, claims, who waits.

They change nothing. Walks go in slices; what is waited for and claimed is told as it is right now.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final, cast

import msgpack
import numpy as np

from dataplane.errors import InvalidRequest
from dataplane.fields import LOST
from dataplane.server.connection import Connection, Verb
from dataplane.server.slices import Slices
from dataplane.tags.census import Census
from dataplane.tags.claims.leases import Lease
from dataplane.tags.claims.tasks import Task
from dataplane.tags.explain.clients import Clients
from dataplane.tags.groups import Group
from dataplane.tags.keys import check_keys
from dataplane.tags.partition import Partition
from dataplane.tags.query import compile_where
from dataplane.tags.rows import Row
from dataplane.tags.tally import Tally, cells_of
from dataplane.wire.frames import Body
from dataplane.wire.messages import is_revision

if TYPE_CHECKING:
    from dataplane.server.tag_service import TagService

MAX_KEYS: Final = 1000
"""Keys that are told of at once, with all there is to say of each."""
MAX_CLAIMS: Final = 10_000
MAX_CLAIM_KEYS: Final = 250_000
"""Claims, and keys of all of them, that one answer tells: it travels in a header."""
MAX_WAITERS: Final = 10_000
MAX_WHERE: Final = 500
"""Characters of a predicate that are told."""
BLOCKS_STEP: Final = 4096


class Inspecting:
    def __init__(self, service: TagService) -> None:
        self._service = service
        self._store = service.store
        self.verbs: dict[str, Verb] = {
            "inspect": self._inspect,
            "tally": self._tally,
            "stats": self._stats,
            "claims": self._claims,
            "waiters": self._waiters,
            "moment": self._moment,
            "unknown_blocks": self._unknown_blocks,
        }

    @property
    def _clients(self) -> Clients:
        return Clients(self._service.attached, self._service.labels)

    # -- keys --------------------------------------------------------------------------------

    async def _inspect(self, connection: Connection, number: int, body: Body) -> None:
        partition_id, keys = body
        partition = self._store.partition(partition_id)
        names = check_keys(keys, unique=False)
        if len(names) > MAX_KEYS:
            raise InvalidRequest(f"at most {MAX_KEYS} keys are told of at once, not {len(names)}")
        slices = Slices(self._service.worst)
        told: list[Any] = []
        for name in names:
            row = partition.row(name)
            told.append(None if row is None else self._about(partition, row))
            await slices.breathe()
        connection.reply(number, told)

    def _about(self, partition: Partition, row: Row) -> dict[str, Any]:
        store = self._store
        made_at = store.moments.made_at(row.revision)
        account = row.account
        group = account if type(account) is Group else partition.groups.get(row.key)
        producer = group.producer if group is not None else account
        position = partition.index.get(row.key)
        return {
            "key": row.key,
            "revision": [store.epoch, row.revision],
            "age_s": None if made_at is None else max(0.0, self._service.clock() - made_at),
            "tags": row.tags,
            "tag_bytes": row.tag_bytes,
            "fields": _fields(row),
            "producer": self._clients.about(getattr(producer, "client_id", "")),
            "group": None if group is None else _group(group),
            "tasks": {
                name: _of_task(task, position) for name, task in partition.claims.tasks.items()
            },
            "lost": LOST in row.tags,
        }

    # -- partitions --------------------------------------------------------------------------

    async def _tally(self, connection: Connection, number: int, body: Body) -> None:
        partition_id, where, until = body
        partition = self._store.partition(partition_id)
        predicate = compile_where(where)
        if until is not None and not is_revision(until):
            raise InvalidRequest(f"until is the revision of an earlier answer, not {until!r:.80}")
        latest = None if until is None else self._store.stamp_of(until)
        tally = Tally(partition, predicate, latest)
        slices = Slices(self._service.worst)
        for _ in tally.take():
            await slices.breathe()
        upto = tally.revision if latest is None else min(latest, tally.revision)
        connection.reply(number, {**tally.told(), "revision": [self._store.epoch, upto]})

    async def _stats(self, connection: Connection, number: int, body: Body) -> None:
        (partition_id,) = body
        partition = self._store.partition(partition_id)
        census = Census(partition, self._store.moments, self._service.clock())
        revision = [self._store.epoch, partition.revision]
        slices = Slices(self._service.worst)
        for _ in census.take(list(self._store.placements.values())):
            await slices.breathe()
        connection.reply(number, {**census.told(self._clients), "revision": revision})

    def _moment(self, connection: Connection, number: int, body: Body) -> None:
        """The last revision that is known to be so many seconds old; nothing if none is."""
        (age_s,) = body
        if type(age_s) not in (int, float) or not 0 <= age_s < 1e12:
            raise InvalidRequest(f"an age is seconds, not {age_s!r:.80}")
        n = self._store.moments.revision_at(self._service.clock() - age_s)
        connection.reply(number, [self._store.epoch, n] if n else None)

    # -- claims ------------------------------------------------------------------------------

    async def _claims(self, connection: Connection, number: int, body: Body) -> None:
        (partition_id,) = body
        if partition_id is None:
            partitions = list(self._store.partitions.values())
        else:
            partitions = [self._store.partition(partition_id)]
        claims: list[dict[str, Any]] = []
        tasks: list[dict[str, Any]] = []
        keys = 0
        slices = Slices(self._service.worst)
        for partition in partitions:
            for task in list(partition.claims.tasks.values()):
                tasks.append(_task(partition, task))
                for lease in list(task.leases.values()):
                    keys += len(lease.rows)
                    if len(claims) == MAX_CLAIMS or keys > MAX_CLAIM_KEYS:
                        raise InvalidRequest(
                            f"more than {MAX_CLAIMS} claims or {MAX_CLAIM_KEYS} claimed keys are "
                            "too much for one answer: ask for one partition"
                        )
                    claims.append(self._claim(partition, task, lease))
                    await slices.breathe()
        connection.reply(number, [tasks, claims])

    def _claim(self, partition: Partition, task: Task, lease: Lease) -> dict[str, Any]:
        now, clients = self._service.claiming.lease_now, self._clients
        expires_at = lease.expires_at(partition.claims.holders.away)
        return {
            "partition_id": partition.partition_id,
            "task": task.name,
            "claim_id": lease.claim_id,
            "keys": list(lease.rows),
            "holders": [clients.about(client_id) for client_id in lease.holders],
            "age_s": max(0.0, self._service.clock() - lease.at),
            "lease_s": lease.lease_s,
            "left_s": None if expires_at is None else max(0.0, expires_at - now),
        }

    # -- who waits ---------------------------------------------------------------------------

    async def _waiters(self, connection: Connection, number: int, body: Body) -> None:
        if body != []:
            raise InvalidRequest("waiters takes nothing")
        service, clients = self._service, self._clients
        now = asyncio.get_running_loop().time()
        # What is waited for at this moment; how that is told takes its time.
        rows = list(service.waiting.waiting())
        claims = list(service.claiming.waiting())
        room = list(service.admission.entries())
        slices = Slices(service.worst)

        def told(
            kind: str, client_id: str, partition_id: str, started: float, until: float | None
        ) -> dict[str, Any]:
            return {
                "kind": kind,
                "client": clients.about(client_id),
                "partition_id": partition_id,
                "waited_s": max(0.0, now - started),
                "left_s": None if until is None else max(0.0, until - now),
            }

        out: list[dict[str, Any]] = []
        for client_id, waited in rows:
            out.append({
                **told(
                    waited.kind, client_id, waited.partition_id, waited.started, waited.deadline
                ),
                "count": waited.wanted,
                "where": _said(waited.where),
                "fields": list(waited.fields),
                "grouped": waited.grouped,
            })  # fmt: skip
            await slices.breathe()
        for client_id, want, started, deadline in claims:
            out.append({
                **told("claim", client_id, want.partition_id, started, deadline),
                "count": want.count,
                "where": _said(msgpack.unpackb(want.predicate.canonical)),
                "task": want.task,
                "fields": sorted(want.condition.fields),
                "grouped": want.condition.grouped,
            })  # fmt: skip
            await slices.breathe()
        for partition_id, client_id, started, until in room:
            out.append(told("room", client_id, partition_id, started, until))
            await slices.breathe()
        out.sort(key=lambda each: -each["waited_s"])
        connection.reply(number, out[:MAX_WAITERS])

    # -- blocks ------------------------------------------------------------------------------

    async def _unknown_blocks(self, connection: Connection, number: int, body: Body) -> None:
        """Which blocks of a value store nothing refers to, and that it was not told to free."""
        store_id, blocks = body
        if type(store_id) is not str or type(blocks) is not bytes or len(blocks) % 8:
            raise InvalidRequest("a value store is named, and its blocks are 64-bit integers")
        unknown: dict[int, None] = {}
        slices = Slices(self._service.worst)
        ids = cast("list[int]", np.frombuffer(blocks, np.int64).tolist())
        for number_of, block in enumerate(ids, 1):
            if (store_id, block) not in self._store.placements:
                unknown[block] = None
            if not number_of % BLOCKS_STEP:
                await slices.breathe()
        if unknown:
            for block in self._service.freeing.untold(store_id):
                unknown.pop(block, None)
        connection.reply(number, list(unknown))


def _fields(row: Row) -> list[dict[str, Any]]:
    """The live cells of a row, by name."""
    told: list[dict[str, Any]] = []
    for name, placement, at, nbytes in cells_of(row):
        template = placement.template
        c = template.index[name]
        lengths = memoryview(placement.lengths).cast("i")
        shape = [
            size
            if size >= 0
            else lengths[
                (template.first_free[c] + template.columns[c].free.index(dim)) * placement.rows + at
            ]
            for dim, size in enumerate(template.columns[c].dims)
        ]
        told.append({
            "name": name,
            "dtype": template.columns[c].dtype,
            "shape": shape,
            "nbytes": nbytes,
            "store": placement.store,
            "block": placement.block,
            "segment": placement.segment,
            "offset": placement.offset,
        })  # fmt: skip
    return sorted(told, key=lambda field: field["name"])


def _group(group: Group) -> dict[str, Any]:
    return {
        "uid": group.uid,
        "attempt": group.attempt,
        "status": group.status,
        "open": group.open,
        "n": group.n,
        "sessions": len(group.positions),
        "declared_bytes": group.declared_bytes,
    }


def _of_task(task: Task, position: int | None) -> str:
    if position in task.held:
        return "claimed"
    return "committed" if position is not None and position in task.committed else "not claimed"


def _task(partition: Partition, task: Task) -> dict[str, Any]:
    committed = len(task.committed)
    return {
        "partition_id": partition.partition_id,
        "task": task.name,
        "committed": committed,
        "held": len(task.held),
        "lag": max(0, len(partition) - committed),
        "waiting": sum(len(queue.asks) for queue in task.queues.values()),
    }


def _said(where: Body) -> str:
    text = json.dumps(where, ensure_ascii=False, default=str) if where else ""
    return text if len(text) <= MAX_WHERE else text[: MAX_WHERE - 1] + "…"
