"""Partitions that are made from a checkpoint, seen by nobody before all of them are whole. Pure.

Rows come in the order in which they were saved, which is that of their slots, with the revisions
they had; then blocks, each with the fields of some of them. `finish` gives all of it to the store
at one revision. Nothing that was given up leaves a trace but blocks to be freed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np

from dataplane.codec.shapes import ITEM_BYTES, MAX_RANK
from dataplane.errors import InvalidRequest, quote
from dataplane.tags.accounts import Account, Producer
from dataplane.tags.groups import Group
from dataplane.tags.history import History
from dataplane.tags.keys import check_keys, check_name, unpack_tags
from dataplane.tags.partition import Partition
from dataplane.tags.placement import Placement
from dataplane.tags.rows import CHUNK_ROWS, SHARDS, Row
from dataplane.tags.saved_tasks import restore_rows, restore_task
from dataplane.tags.store import TagStore
from dataplane.types import FieldSchema, Quota, Retention, Tags

PROMPT: Final = -1
"""Stands for the attempt of a row that `begin_group` made for a prompt: it belongs to no group, and
counts against no quota."""


class SavedGroup(NamedTuple):
    """A group as it was."""

    uid: str
    attempt: int
    n: int
    declared_bytes: int
    status: str
    since: int
    at: float
    open: bool
    producer: str

    @classmethod
    def of(cls, group: Group, status: str, since: int, at: float, is_open: bool) -> SavedGroup:
        """What is kept of a group: what never changes, and what it was then."""
        return cls(
            group.uid, group.attempt, group.n, group.declared_bytes, status, since, at, is_open,
            group.producer.client_id,
        )  # fmt: skip

    @classmethod
    def checked(cls, parts: Sequence[object]) -> SavedGroup:
        """What travelled. InvalidRequest if it is no such group."""
        saved = cls(*cast("Sequence[Any]", parts))
        numbers = (saved.attempt, saved.n, saved.declared_bytes, saved.since)
        if not (
            all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
            and all(type(text) is str for text in (saved.uid, saved.status, saved.producer))
            and type(saved.at) in (int, float)
            and abs(saved.at) < 1e15  # false of NaN
            and type(saved.open) is bool
        ):
            raise InvalidRequest(f"a group is not {list(parts)!r:.80}")
        return saved


class SavedRows(NamedTuple):
    """Rows of a partition that follow each other, without their fields."""

    keys: list[str]
    tags: list[Tags]
    sizes: list[int]
    revisions: Sequence[int]
    cleared_at: Sequence[int]
    attempts: Sequence[int]
    """The group that each row belongs to, by its attempt; PROMPT, or 0 for none."""
    producers: list[str]
    tasks: Mapping[str, Sequence[int]]
    """What each task did with each row; see saved_tasks.py."""

    @classmethod
    def unpacked(
        cls,
        keys: Any,
        tags: Any,
        numbers: Sequence[object],
        names: Any,
        codes: Any,
        tasks: object,
    ) -> SavedRows:
        """What travelled: `numbers` are packed revisions, clears and attempts, `codes` say which of
        the names each row's producer has. InvalidRequest if these are no such rows."""
        keys = check_keys(keys)
        unpacked, sizes = unpack_tags(tags, keys, saved=True)
        revisions, cleared_at, attempts = (packed_ints(part, len(keys)) for part in numbers)
        producers = [names[code] for code in np.frombuffer(codes, np.int32).tolist()]
        if len(producers) != len(keys) or not set(map(type, producers)) <= {str}:
            raise InvalidRequest("every row has the id of its producer")
        did = {task: packed_ints(part, len(keys), np.int32) for task, part in _map(tasks).items()}
        return cls(keys, unpacked, sizes, revisions, cleared_at, attempts, producers, did)


class Restoring:
    """What has come of a checkpoint so far."""

    def __init__(self, epoch: int, n: int) -> None:
        self.epoch = epoch
        self.n = n
        """The moment that was saved."""
        self.partitions: dict[str, Partition] = {}
        self.placements: dict[tuple[str, int], Placement] = {}
        self._groups: dict[str, dict[int, Group]] = {}
        self._settled: set[str] = set()

    def partition(self, partition_id: str) -> Partition:
        """A partition in the making. InvalidRequest if it was not begun."""
        partition = self.partitions.get(partition_id)
        if partition is None:
            raise InvalidRequest(f"partition {partition_id!r:.80} is not being restored")
        return partition

    def begin(
        self, partition_id: str, schema: Mapping[str, FieldSchema], *, open_schema: bool
    ) -> None:
        """Make a partition without rows; begun once more, it is left as it is."""
        check_name(partition_id, "partition name")
        if partition_id in self.partitions:
            return
        partition = Partition(partition_id)
        partition.schema.update(schema)
        partition.open_schema = open_schema
        self.partitions[partition_id] = partition
        self._groups[partition_id] = {}

    def add_groups(self, partition_id: str, groups: Iterable[SavedGroup]) -> None:
        """Make groups, before any of their rows; one that is there is left as it is."""
        partition = self.partition(partition_id)
        known = self._groups[partition_id]
        for saved in groups:
            if saved.attempt in known:
                continue
            if saved.uid in partition.groups or not 0 < saved.attempt <= self.n:
                raise InvalidRequest(f"a second group, or a later one, of {quote([saved.uid])}")
            producer = partition.producer(saved.producer)
            group = Group(
                saved.uid, partition_id, saved.attempt, saved.n, saved.declared_bytes, producer,
                at=saved.at,
            )  # fmt: skip
            group.status = saved.status
            group.since = saved.since
            group.open = saved.open
            known[saved.attempt] = partition.groups[saved.uid] = group

    def add_rows(self, partition_id: str, first: int, rows: SavedRows) -> None:
        """Make rows; `first` is the number of the first of them, from 0 on. Rows that are there
        are left as they are, so that a repetition does no harm."""
        partition = self.partition(partition_id)
        count = len(rows.keys)
        if first + count == len(partition) and count:
            return
        if first != len(partition):
            raise InvalidRequest(f"row {first} cannot follow {len(partition)} rows")
        shards = partition.index.shards
        for key in rows.keys:
            if key in shards[hash(key) & (SHARDS - 1)]:
                raise InvalidRequest(f"key {quote([key])} of {partition_id!r} comes twice")
        if max(rows.revisions, default=0) > self.n or max(rows.cleared_at, default=0) > self.n:
            raise InvalidRequest("a row is later than the moment that was saved")
        accounts = [
            self._account(partition, *row)
            for row in zip(rows.keys, rows.attempts, rows.producers, strict=True)
        ]
        made = [
            Row(key, tags, size, (), revision, cleared_at, account)
            for key, tags, size, revision, cleared_at, account in zip(
                rows.keys, rows.tags, rows.sizes, rows.revisions, rows.cleared_at, accounts,
                strict=True,
            )
        ]  # fmt: skip
        partition.slots.extend(made)
        for position, row in enumerate(made, first):
            shards[hash(row.key) & (SHARDS - 1)][row.key] = position
            row.account.add_rows(1, row.tag_bytes)
            if type(row.account) is Group:
                row.account.positions.add(position)
        for task, did in rows.tasks.items():
            restore_rows(partition, task, first, did)

    def _account(self, partition: Partition, key: str, attempt: int, producer: str) -> Account:
        if attempt == PROMPT:
            return partition.prompter(producer)
        group = self._groups[partition.partition_id].get(attempt)
        if group is None or group.uid == key:  # a group's prompt is none of its rows
            return partition.producer(producer)
        return group

    def add_block(self, partition_id: str, positions: Sequence[int], placement: Placement) -> None:
        """Give rows, which have none yet, the fields of a block."""
        partition = self.partition(partition_id)
        if len(positions) != placement.rows or len(set(positions)) < len(positions):
            raise InvalidRequest(f"a block of {placement.rows} rows for {len(positions)} rows")
        if min(positions) < 0 or max(positions) >= len(partition):
            raise InvalidRequest(f"a block for row {max(positions)} of {len(partition)} rows")
        self._check_schema(partition, placement)
        rows: list[Row] = []
        rows_of: dict[Account, int] = {}
        for position in positions:
            row = partition.slots.at(position)
            assert type(row) is Row
            if row.layers:
                raise InvalidRequest(f"a second block for key {quote([row.key])}")
            rows.append(row)
            owner = row.account
            if type(owner) is Producer:  # what is under a prompt is its writer's
                owner = partition.producer(owner.client_id)
            rows_of[owner] = rows_of.get(owner, 0) + 1
        for i, (position, row) in enumerate(zip(positions, rows, strict=True)):
            chunk = partition.slots.writable(position)
            chunk.rows[position & (CHUNK_ROWS - 1)] = Row(
                row.key, row.tags, row.tag_bytes, (placement, i), row.revision, row.cleared_at,
                row.account,
            )  # fmt: skip
        placement.partition_id = partition_id
        placement.positions = list(positions)
        placement.charge(rows_of)
        partition.payload_bytes += placement.payload_bytes
        self.placements[placement.store, placement.block] = placement

    def _check_schema(self, partition: Partition, placement: Placement) -> None:
        for column in placement.template.columns:
            known = partition.schema.get(column.name)
            if known is None or (
                (known.dtype, known.rank) != (column.dtype, len(column.dims))
                and not partition.open_schema
            ):
                raise InvalidRequest(
                    f"field {column.name!r} of {column.dtype} and rank {len(column.dims)} is not "
                    f"what partition {partition.partition_id!r} holds"
                )

    def settle(
        self,
        partition_id: str,
        *,
        sealed: bool,
        quota: Quota | None,
        retention: Retention | None,
        tasks: Sequence[Mapping[str, Any]],
    ) -> None:
        """Give a partition whose rows are there what else it had. Once more, it does nothing."""
        partition = self.partition(partition_id)
        if partition_id in self._settled:
            return
        for task in tasks:
            restore_task(partition, task)
        partition.sealed = sealed
        partition.quota = quota
        partition.retention = retention
        self._settled.add(partition_id)

    def check_end(self, store: TagStore, stay: Collection[str] | None) -> None:
        """InvalidRequest if the store cannot take this: it has partitions, or some of those that
        stay have what came with the checkpoint as well."""
        if stay is None:
            if store.partitions:
                raise InvalidRequest(
                    f"somebody made partition {quote(store.partitions)} while a checkpoint was "
                    "loaded"
                )
            return
        both = [name for name in stay if name in self.partitions]
        if both:
            raise InvalidRequest(f"partition {quote(both)} is to stay, and was loaded")
        # An attempt's number is its group's alone, in the whole plane.
        loaded = {attempt for groups in self._groups.values() for attempt in groups}
        taken = [
            group.uid
            for name in stay
            if (partition := store.partitions.get(name)) is not None
            for group in partition.groups.values()
            if group.attempt in loaded
        ]
        if taken:
            raise InvalidRequest(
                f"groups {quote(taken)} of partitions that are to stay have attempts with the "
                "numbers of others that were loaded: clear them first, or drop their partitions"
            )

    def n_after(self, n: int) -> int:
        """The revision at which all of it appears in a store that is at n."""
        return max(n, self.n) + 1

    def finish(self, store: TagStore, history: History) -> int:
        """Give everything to a store, at one revision, which is returned; see `check_end`.

        History begins with it: what was known or begun before is too old.
        """
        if store.epoch <= self.epoch:
            store.begin_epoch(self.epoch + 1)
        store.n = self.n_after(store.n)
        history.floor = store.n
        store.history = history
        store.dropped.clear()
        for partition in self.partitions.values():
            # Not the revision that it had: what is still remembered of an earlier partition of this
            # name must not be taken for something of this one.
            partition.born = partition.revision = store.n
            for group in list(partition.groups.values()):
                if group.open:
                    store.attempts[group.attempt] = group
                if group.open or group.positions:
                    group.settle_hold()
                else:
                    group.hold(0, 0)
                    del partition.groups[group.uid]
        store.placements.update(self.placements)
        store.partitions.update(self.partitions)
        return store.n

    def abandon(self, store: TagStore) -> None:
        """Nothing comes of it: the blocks that came are dead."""
        for placement in self.placements.values():
            placement.positions = ()
            store.dead.append(placement)
        self.placements = {}
        self.partitions = {}


# -- what travelled


def _map(value: object) -> dict[str, Any]:
    if type(value) is not dict:
        raise InvalidRequest(f"a map is wanted, not {value!r:.80}")
    return cast("dict[str, Any]", value)


def saved_schema(schema: object) -> dict[str, FieldSchema]:
    """What a partition had fixed for its fields. InvalidRequest if it is no such thing."""
    return {name: _field(name, parts) for name, parts in _map(schema).items()}


def _field(name: object, parts: Any) -> FieldSchema:
    """What a partition had fixed for a field."""
    dtype, rank, ragged_dim = parts
    if (
        type(name) is not str
        or dtype not in ITEM_BYTES
        or type(rank) is not int
        or not 0 <= rank <= MAX_RANK
        or (
            ragged_dim is not None
            and (type(ragged_dim) is not int or ragged_dim not in range(rank))
        )
    ):
        raise InvalidRequest(f"field {name!r:.80} cannot be {list(parts)!r:.80}")
    return FieldSchema(dtype, rank, ragged_dim)


def packed_ints(packed: object, count: int, kind: type[np.integer[Any]] = np.int64) -> list[int]:
    """So many packed integers."""
    if type(packed) is not bytes or len(packed) != np.dtype(kind).itemsize * count:
        raise InvalidRequest(f"{count} packed integers are wanted")
    return np.frombuffer(packed, kind).tolist()
