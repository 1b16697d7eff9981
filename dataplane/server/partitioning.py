"""Partitions at the tag store: created with settings, listed, sealed, dropped; their versions.

A version is a partition named `family@number`. How many are kept is a setting of the family, the
partition without a number; sealing a version drops those that are too many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from dataplane.codec.shapes import ITEM_BYTES, MAX_RANK, OBJECT
from dataplane.errors import InvalidRequest, PartitionNotFound, quote
from dataplane.fields import ragged_dim
from dataplane.server.connection import Connection, Verb
from dataplane.server.slices import Slices
from dataplane.tags import journal as j
from dataplane.tags.keys import check_name
from dataplane.tags.partition import Partition
from dataplane.tags.quota import check_fits
from dataplane.tags.requests import CREATE, DROP, SEAL
from dataplane.tags.rows import Row
from dataplane.types import FieldSchema, Quota, Retention
from dataplane.wire.frames import Body

if TYPE_CHECKING:
    from dataplane.server.tag_service import TagService

OPEN = "open"
"""The schema of a partition whose fields may change."""
MAX_FIELDS = 4096
RELEASE_ROWS = 128


class Partitioning:
    """The verbs about whole partitions."""

    def __init__(self, service: TagService) -> None:
        self._service = service
        self._store = service.store
        self.verbs: dict[str, Verb] = {
            CREATE: self._create,
            "partitions": self._list,
            SEAL: self._seal,
            DROP: self._drop,
        }

    def _create(self, connection: Connection, number: int, body: Body) -> None:
        partition_id, schema, quota, retention, request, settled = body
        repeats = self._service.repeats
        answered = repeats.answered(connection.client_id, request, settled, CREATE)
        if answered is None:
            if type(partition_id) is not str:
                raise InvalidRequest(f"a partition_id is a string, not {partition_id!r:.80}")
            check_name(partition_id, "partition name")
            fields = _schema(schema)
            limits = None if quota is None else Quota.of(_mapping(quota, "quota"))
            keep = None if retention is None else Retention.of(_mapping(retention, "retention"))
            store = self._store
            there = store.partitions.get(partition_id)
            if there is not None:
                _check_schema(there, fields, schema)
                if limits is not None:
                    check_fits(limits, there)
            declared = schema if schema in (None, OPEN) else fields
            asked = (connection.client_id, request, settled)
            change = ("create", partition_id, declared, quota, retention, *asked)
            n = store.n + (there is None)
            now = self._service.clock()
            self._service.journal.append(j.PARTITION, n, now, change)
            partition = store.apply_create(partition_id, now)
            if schema is not None:
                partition.declare(fields, opened=schema == OPEN)
            if limits is not None:
                partition.quota = limits if limits.limits() else None
            if keep is not None:
                partition.retention = keep
            answered = (store.epoch, partition.revision)
            repeats.remember(connection.client_id, request, CREATE, answered)
            if limits is not None:
                self._service.admission.run(partition, everyone=True)
        connection.reply(number, answered)

    def _list(self, connection: Connection, number: int, body: Body) -> None:
        waiting = self._service.admission.waiting
        connection.reply(
            number,
            {
                partition_id: {**about(partition), "waiting": waiting(partition_id)}
                for partition_id, partition in self._store.partitions.items()
            },
        )

    def _seal(self, connection: Connection, number: int, body: Body) -> None:
        partition_id, request, settled = body
        repeats = self._service.repeats
        answered = repeats.answered(connection.client_id, request, settled, SEAL)
        if answered is None:
            partition = self._store.partition(partition_id)
            now = self._service.clock()
            surplus = self._surplus(partition_id)
            change = ("seal", partition_id, surplus, connection.client_id, request, settled)
            after = self._store.n + (not partition.sealed) + len(surplus)
            self._service.journal.append(j.PARTITION, after, now, change)
            n = self._store.apply_seal(partition, now)
            self.take(surplus, now)
            answered = [(self._store.epoch, n), surplus]
            repeats.remember(connection.client_id, request, SEAL, answered)
            self._service.admission.run(partition, everyone=True)
        connection.reply(number, answered)

    def _surplus(self, partition_id: str) -> list[str]:
        """Versions that the sealing of this one will leave over."""
        family, version = version_of(partition_id)
        settings = self._store.partitions.get(family)
        if version is None or settings is None or settings.retention is None:
            return []
        versions = sorted(
            (number, p.partition_id)
            for p in self._store.partitions.values()
            if (p.sealed or p.partition_id == partition_id)
            and (number := _number_in(p.partition_id, family)) is not None
        )
        return [name for _, name in versions[: -settings.retention.versions]]

    def _drop(self, connection: Connection, number: int, body: Body) -> None:
        partition_id, older_than, request, settled = body
        repeats = self._service.repeats
        answered = repeats.answered(connection.client_id, request, settled, DROP)
        if answered is None:
            if older_than is None:
                names = [self._store.partition(partition_id).partition_id]
            else:
                names = self._older(partition_id, older_than)
            self._write_drop(names, connection.client_id, request, settled)
            answered = [names, self._store.revision()]
            repeats.remember(connection.client_id, request, DROP, answered)
        connection.reply(number, answered)

    def _write_drop(self, names: Sequence[str], client_id: str, request: int, settled: int) -> None:
        now = self._service.clock()
        change = ("drop", names, client_id, request, settled)
        self._service.journal.append(j.PARTITION, self._store.n + len(names), now, change)
        self.take(names, now)

    def _older(self, family: object, older_than: object) -> list[str]:
        if type(family) is not str or "@" in family:
            raise InvalidRequest(
                f"older_than goes with the name of a family, without a version, not {family!r:.80}"
            )
        if type(older_than) is not int:
            raise InvalidRequest(f"older_than is a version number, not {older_than!r:.80}")
        numbers = {p: _number_in(p, family) for p in self._store.partitions}
        if all(n is None for n in numbers.values()) and family not in numbers:
            raise PartitionNotFound(
                f"there is no partition {family!r} and no version of it", partition_id=family
            )
        return sorted(p for p, n in numbers.items() if n is not None and n < older_than)

    def drop(self, partition_id: str) -> None:
        """Take a partition away that nobody asked to drop."""
        self._write_drop([self._store.partition(partition_id).partition_id], "", 0, 0)

    def take(self, names: Iterable[str], now: float) -> None:
        """Take partitions away, which is journaled already; their bytes are given back in the
        background."""
        store = self._store
        partitions = [store.partition(name) for name in names]
        gone = [(partition, store.apply_drop(partition, now)) for partition in partitions]
        for partition, rows in gone:  # all are gone before anybody who waits is told of one
            self._service.dropped(partition)
            self._release(partition, rows)

    def _release(self, partition: Partition, rows: Iterator[Sequence[Row]]) -> None:
        service, store = self._service, self._store

        async def release() -> None:
            slices = Slices(service.worst)
            for piece in rows:
                for at in range(0, len(piece), RELEASE_ROWS):
                    store.release_rows(partition, piece[at : at + RELEASE_ROWS])
                    await slices.breathe()
                await slices.breathe()
            service.freeing.run()
            service.grouping.keeping.tell()  # and nothing is left to remember of its groups

        service.in_background(release())


def about(partition: Partition) -> dict[str, Any]:
    """A partition as `partitions` lists it."""
    quota, retention = partition.quota, partition.retention
    return {
        "keys": len(partition),
        "revision": partition.revision,
        "sealed": partition.sealed,
        "schema": {name: tuple(schema) for name, schema in partition.schema.items()},
        "open_schema": partition.open_schema,
        "used_bytes": partition.account.extent_bytes + partition.tag_bytes,
        "held_bytes": partition.account.held_bytes,
        "quota": None if quota is None else quota.limits(),
        "retention": None if retention is None else {"versions": retention.versions},
        "groups": sum(group.open for group in partition.groups.values()),
    }


def version_of(partition_id: str) -> tuple[str, int | None]:
    """Family and version number of a partition's name: `weights@17` is version 17 of `weights`."""
    family, _, number = partition_id.rpartition("@")
    # One way of writing each number, so that no two partitions are the same version.
    if family and number.isascii() and number.isdigit() and str(int(number)) == number:
        return family, int(number)
    return partition_id, None


def _check_schema(partition: Partition, fields: dict[str, FieldSchema], schema: object) -> None:
    """A field that has been written keeps its schema, unless all of them are opened. What was
    opened stays so, because rows that differ may be there."""
    if partition.open_schema and schema not in (None, OPEN) and partition.schema:
        raise InvalidRequest(
            f"the schema of partition {partition.partition_id!r} is open, and rows were put to it: "
            "drop the partition to declare one"
        )
    changed = [
        name
        for name, declared in fields.items()
        if name in partition.schema and partition.schema[name] != declared
    ]
    if changed:
        raise InvalidRequest(
            f"fields {quote(changed)} of partition {partition.partition_id!r} have another schema "
            "already: drop the partition, or use other field names"
        )


def _number_in(partition_id: str, family: str) -> int | None:
    of, number = version_of(partition_id)
    return number if of == family else None


def _mapping(value: object, what: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise InvalidRequest(f"a partition's {what} is a mapping, not {value!r:.80}")
    return cast("dict[Any, Any]", value)


def _schema(schema: object) -> dict[str, FieldSchema]:
    """The fields that a schema declares, checked."""
    if schema is None or schema == OPEN:
        return {}
    fields: dict[str, FieldSchema] = {}
    given = _mapping(schema, "schema, unless it is 'open',")
    if len(given) > MAX_FIELDS:
        raise InvalidRequest(f"a schema declares at most {MAX_FIELDS} fields, not {len(given)}")
    for name, parts in given.items():
        if type(name) is not str or type(parts) not in (list, tuple) or len(parts) != 3:
            raise InvalidRequest(
                f"field {name!r:.80} of a schema is declared as (dtype, rank, ragged_dim)"
            )
        fields[name] = _field(name, *parts)
    return fields


def _field(name: str, dtype: Any, rank: Any, ragged: Any) -> FieldSchema:
    """A declared field. Its ragged dimension is the usual one for its name, if none is given."""
    if type(dtype) is str and dtype in ITEM_BYTES and type(rank) is int and 0 <= rank <= MAX_RANK:
        if dtype == OBJECT:
            # Any Python value: its packed bytes are what is ragged.
            if (rank, ragged) in ((1, 0), (1, None)):
                return FieldSchema(dtype, 1, 0)
        elif ragged is None:
            return FieldSchema(dtype, rank, ragged_dim(name, rank))
        elif type(ragged) is int and 0 <= ragged < rank:
            return FieldSchema(dtype, rank, ragged)
    raise InvalidRequest(
        f"field {name!r:.80} of a schema: dtype is a name such as 'int64', rank 0 to {MAX_RANK} "
        "(1 for 'object'), ragged_dim below the rank or None for the usual one; not "
        f"{[dtype, rank, ragged]!r:.80}"
    )
