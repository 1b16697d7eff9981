"""A replay: the records of a journal made again, in order, until the store is what it was. Pure.

Nothing is asked that was asked before a record was written: what stands there has happened. Times
are those of the records. What never was in a journal is not there after it: who is attached, who
waits, what value stores have heard. So every block that died is to be told of again, every room
that is kept for a group, and every client counts as away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dataplane.codec.template import Templates
from dataplane.errors import InternalError
from dataplane.tags import records as r
from dataplane.tags.groups import Group
from dataplane.tags.history import History
from dataplane.tags.keys import unpack_tags
from dataplane.tags.lost import find_losses
from dataplane.tags.partition import Partition
from dataplane.tags.placement import Placement
from dataplane.tags.prompts import begin_group, put_of_begin, put_of_end
from dataplane.tags.puts import PutRows
from dataplane.tags.query import compile_where
from dataplane.tags.records import Record, Records
from dataplane.tags.replay import claims
from dataplane.tags.replay.loads import Loads
from dataplane.tags.requests import (
    BEGIN_GROUP,
    CLEAR,
    COMMIT,
    CREATE,
    DROP,
    END_GROUP,
    PUT,
    RELEASE,
    RESTORED,
    SEAL,
    Answered,
)
from dataplane.tags.resulting import resulting
from dataplane.tags.store import TagStore
from dataplane.types import FieldSchema, Quota, Retention
from dataplane.wire.messages import IF_ABSENT, MUST_EXIST, RETURN_TAGS, PutAnswer, PutMeta

OPEN = "open"
"""The schema of a partition whose fields may change, as a record has it."""


class Replay:
    """What the records so far have made."""

    def __init__(
        self, epoch: int, history: History | None = None, *, open_schemas: bool = False
    ) -> None:
        self.store = TagStore(epoch, history, open_schemas=open_schemas)
        self.stores: dict[str, Any] = {}
        """Addresses of the value stores that have registered, by id, as they said them last."""
        self.last_claim_id = 0
        """The highest number that any claim of the plane has had."""
        self.at: float | None = None
        """When the last record was written."""
        self.loads = Loads()
        self._templates = Templates()
        self._kinds: Mapping[int, Callable[..., None]] = {
            r.PUT: self._put,
            r.CLEAR: self._clear,
            r.REPACK: self._repack,
            r.START: self._start,
            r.STORE: self._register,
            r.CLAIM: self._claim,
            r.COMMIT: self._commit,
            r.RELEASE: self._release,
            r.BEGIN: self._begin,
            r.END: self._end,
            r.PARTITION: self._partition,
            r.RESTORE: self._restore,
            r.ANSWER: self._answer,
            r.KEEP: self._keep,
            r.FORGET: self._forget,
            r.LEAVE: self._leave,
            r.LOST: self._lose,
        }

    def apply(self, record: Record) -> None:
        """Make one change again. InternalError if it cannot have happened here."""
        change = self._kinds.get(record.kind)
        if change is None:
            raise InternalError(f"a record of kind {record.kind} is unknown to this release")
        try:
            change(record.at, *record.body)
        except Exception as error:
            raise InternalError(
                f"the change to revision {record.n} (kind {record.kind}) does not follow from what "
                f"came before it: {type(error).__name__}: {error}"
            ) from error
        if self.store.n != record.n:
            raise InternalError(
                f"the change of kind {record.kind} led to revision {self.store.n}, and was written "
                f"as that to {record.n}"
            )
        self.at = record.at

    def _remember(
        self,
        client_id: str,
        number: int,
        settled: int,
        verb: str,
        answer: Any,
        block: tuple[str, int] | None = None,
    ) -> None:
        if not client_id:
            return  # nobody had asked for it
        requests = self.store.client(client_id)
        requests.settle(settled)
        requests.remember(number, Answered(verb, answer, block))

    # -- rows --------------------------------------------------------------------------------

    def _put(
        self,
        at: float,
        client_id: str,
        packed: bytes,
        tags: bytes | None,
        store_id: str,
        block: Any,
    ) -> None:
        store, meta = self.store, PutMeta.unpack(packed)
        all_tags = sizes = None
        if tags is not None:
            all_tags, sizes = unpack_tags(tags, meta.keys)
        placement = None if block is None else self._placement(store_id, block)
        group = None if meta.attempt is None else store.attempts[meta.attempt]
        # Without its stamp: that it was not too late was found when it came.
        put = PutRows(
            meta.partition_id, meta.keys, all_tags, sizes, placement,
            bool(meta.flags & MUST_EXIST), bool(meta.flags & IF_ABSENT), None, client_id, group,
        )  # fmt: skip
        found = store.check_put(put)
        n = store.apply_put(put, found, at)
        merged = fields = None
        if meta.flags & RETURN_TAGS:
            merged, fields = resulting(store, put, found)
        answer = PutAnswer((store.epoch, n), merged, fields)
        place = None if block is None else (store_id, block[0])
        self._remember(client_id, meta.number, meta.settled, PUT, answer, place)

    def _placement(self, store_id: str, block: Sequence[Any]) -> Placement:
        number, segment, offset, nbytes, blob, rows, lengths = block
        template = self._templates.parse(blob)
        return Placement(store_id, number, segment, offset, nbytes, template, rows, lengths)

    def _clear(
        self,
        at: float,
        client_id: str,
        partition_id: str,
        keys: list[str] | None,
        where: Any,
        retire: bool,
        number: int,
        settled: int,
        until: int | None = None,
    ) -> None:
        store = self.store
        if keys is not None:
            removed = store.apply_clear(partition_id, keys, at, by=client_id, retire=retire)
        else:
            partition = store.partition(partition_id)
            removed = self._clear_where(at, client_id, partition, where, retire, until)
        answer = [removed, (store.epoch, store.n)]
        self._remember(client_id, number, settled, CLEAR, answer)

    def _clear_where(
        self,
        at: float,
        client_id: str,
        partition: Partition,
        where: Any,
        retire: bool,
        until: int | None,
    ) -> int:
        store, predicate = self.store, compile_where(where)
        scans = (
            store.scan_clear(partition, number, predicate, until)
            for number in range(len(partition.slots.chunks))
        )
        doomed = [part for part in scans if part is not None]
        if not doomed:
            raise ValueError("nothing is there to be cleared")
        rows = store.apply_scanned_clear(partition, doomed, at, by=client_id, retire=retire)
        for part in rows.parts:
            store.release_rows(partition, part)
        return len(rows)

    def _repack(
        self, at: float, store_id: str, old: int, block: Sequence[Any], moves: Sequence[Any]
    ) -> None:
        store, new = self.store, self._placement(store_id, block)
        placement = store.placements.get((store_id, old))
        if placement is None:
            # Its rows were cleared, and it was waiting for its turn to be let go of.
            store.dead.append(new)
        else:
            store.apply_repack(placement, new, [(row, position) for row, position in moves])

    def _lose(self, at: float, store_id: str, blocks: list[int] | None) -> None:
        self.store.apply_lost(find_losses(self.store, store_id, blocks), at)

    # -- groups ------------------------------------------------------------------------------

    def _begin(
        self,
        at: float,
        client_id: str,
        partition_id: str,
        uid: str,
        n: int,
        declared: int,
        store_id: str,
        number: int,
        settled: int,
    ) -> None:
        store = self.store
        prompt = put_of_begin(partition_id, uid, n, store.n + 1, client_id)
        found = store.check_put(prompt)
        group = begin_group(store, prompt, found, n, declared, now=at, kept_by=store_id)
        self._remember(client_id, number, settled, BEGIN_GROUP, group.attempt)

    def _end(
        self, at: float, client_id: str, attempt: int, status: str, number: int, settled: int
    ) -> None:
        store = self.store
        group = store.attempts[attempt]
        prompt = put_of_end(store, group, status, client_id)
        n = store.apply_end(group, status, prompt, at, client_id)
        self._remember(client_id, number, settled, END_GROUP, (store.epoch, n))

    def _keep(self, at: float, partition_id: str, uid: str, attempt: int, store_id: str) -> None:
        partition = self.store.partitions.get(partition_id)
        group = None if partition is None else partition.groups.get(uid)
        if group is None or group.attempt != attempt:
            return  # it had ended, and is forgotten
        _keep(self.store, group, store_id)

    # -- partitions --------------------------------------------------------------------------

    def _partition(self, at: float, what: str, *body: Any) -> None:
        {"create": self._create, "seal": self._seal, "drop": self._drop}[what](at, *body)

    def _create(
        self,
        at: float,
        partition_id: str,
        schema: Any,
        quota: Mapping[str, Any] | None,
        retention: Mapping[str, Any] | None,
        *asked: Any,
    ) -> None:
        partition = self.store.apply_create(partition_id, at)
        if schema == OPEN:
            partition.declare({}, opened=True)
        elif schema is not None:
            fields = {name: FieldSchema(*parts) for name, parts in schema.items()}
            partition.declare(fields, opened=False)
        if quota is not None:
            limits = Quota.of(quota)
            partition.quota = limits if limits is not None and limits.limits() else None
        if retention is not None:
            partition.retention = Retention.of(retention)
        self._asked(asked, CREATE, (self.store.epoch, partition.revision))

    def _seal(self, at: float, partition_id: str, surplus: list[str], *asked: Any) -> None:
        n = self.store.apply_seal(self.store.partition(partition_id), at)
        drop(self.store, surplus, at)
        self._asked(asked, SEAL, [(self.store.epoch, n), surplus])

    def _drop(self, at: float, names: list[str], *asked: Any) -> None:
        drop(self.store, names, at)
        self._asked(asked, DROP, [names, self.store.revision()])

    def _asked(self, asked: Sequence[Any], verb: str, answer: Any) -> None:
        client_id, number, settled = asked
        self._remember(client_id, number, settled, verb, answer)

    # -- claims ------------------------------------------------------------------------------

    def _claim(self, at: float, partition_id: str, name: str, *body: Any) -> None:
        partition = self.store.partition(partition_id)
        last_id = claims.claim(partition, name, body, at)
        self.last_claim_id = max(self.last_claim_id, last_id)

    def _commit(
        self, at: float, partition_id: str, name: str, claim_id: int, keys: list[str], *asked: Any
    ) -> None:
        n = claims.commit(self.store.partition(partition_id), name, claim_id, keys)
        self._asked(asked, COMMIT, (self.store.epoch, n))

    def _release(
        self,
        at: float,
        partition_id: str,
        name: str,
        claim_id: int,
        keys: list[str],
        why: str,
        *asked: Any,
    ) -> None:
        n = claims.release(self.store.partition(partition_id), name, claim_id, keys, why)
        if asked:
            self._asked(asked, RELEASE, (self.store.epoch, n))

    def _leave(self, at: float, partition_id: str, *body: Any) -> None:
        claims.leave(self.store.partition(partition_id), *body)

    # -- requests, stores, starts ------------------------------------------------------------

    def _answer(
        self, at: float, client_id: str, number: int, settled: int, verb: str, answer: Any
    ) -> None:
        self._remember(client_id, number, settled, verb, answer)

    def _forget(self, at: float, client_id: str) -> None:
        self.store.forget_client(client_id)

    def _register(self, at: float, store_id: str, address: Any) -> None:
        self.stores[store_id] = address

    def _start(self, at: float, epoch: int) -> None:
        if epoch <= self.store.epoch:
            raise InternalError(f"epoch {epoch} cannot follow epoch {self.store.epoch}")
        self.store.begin_epoch(epoch)

    # -- loads -------------------------------------------------------------------------------

    def _restore(self, at: float, what: str, *body: Any) -> None:
        store = self.store
        if what == "block":
            client_id, packed, rows, store_id, block = body
            meta, placement = PutMeta.unpack(packed), self._placement(store_id, block)
            if self.loads.add_block(meta.partition_id, rows, placement):
                answer = PutAnswer(store.revision(), None, None)
                place = (store_id, placement.block)
                self._remember(client_id, meta.number, meta.settled, RESTORED, answer, place)
        elif what == "end":
            restore_id, names = body
            drop(store, names, at)
            self.loads.end(store, restore_id)
            tasks = (task for p in store.partitions.values() for task in p.claims.tasks.values())
            self.last_claim_id = max([self.last_claim_id, *(task.last_id for task in tasks)])
        else:
            self.loads.take(store, what, body)


def replay(records: Records, history: History | None = None) -> Replay:
    """What all records of a journal make. JournalDamaged names the one that makes no sense."""
    head = records.head
    made = Replay(head.epoch, history, open_schemas=head.open_schemas)
    for record in records:
        try:
            made.apply(record)
        except InternalError as error:
            raise records.damaged(record.offset, str(error)) from error
    return made


def drop(store: TagStore, names: Iterable[str], at: float) -> None:
    """Take partitions away, and let go of all that they held."""
    for name in names:
        partition = store.partition(name)
        for rows in store.apply_drop(partition, at):
            store.release_rows(partition, rows)


def _keep(store: TagStore, group: Group, store_id: str) -> None:
    group.store = store_id
    group.kept_bytes = group.declared_bytes
    store.settled[group] = None
