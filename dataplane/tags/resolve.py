"""From keys to places: which blocks a get must read, as arrays. Pure.

The answer is columnar, so that a thousand rows from one block and a thousand rows from a thousand
blocks are both a handful of arrays on the wire and a handful of numpy calls in the client.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.codec.shapes import Column
from dataplane.errors import FieldNotFound, KeyNotFound, SchemaMismatch, quote
from dataplane.tags.layers import Layers
from dataplane.tags.lost import lost_of, value_lost
from dataplane.tags.partition import Partition
from dataplane.tags.placement import Placement
from dataplane.tags.rows import SHARDS, Row
from dataplane.types import FieldSchema

Answer = list[Any]
"""[keys | None, fields, schema, stores, templates, blocks, groups] as `wire.messages` documents."""


def resolve(
    partition: Partition,
    keys: Sequence[str],
    fields: list[str] | None,
    *,
    drop_missing: bool,
    common: bool = False,
) -> Answer:
    """Where the fields of these keys lie, at one moment.

    With `fields` None: every field that any of the rows has, or had and lost. KeyNotFound,
    ValueLost and FieldNotFound name all that is missing, or with `drop_missing` such keys are left
    out. With `common` it is fields that are left out where a row lacks them, and keys only where
    they do not exist; what is lost is an error.
    """
    drop_lost, drop_missing = drop_missing and not common, drop_missing or common
    shards = partition.index.shards
    slots = partition.slots
    rows: list[Row] = []
    missing: list[str] = []
    at = slots.at
    for key in keys:
        position = shards[hash(key) & (SHARDS - 1)].get(key)
        row = None if position is None else at(position)
        if type(row) is Row:
            rows.append(row)
        else:
            missing.append(key)
    kept: list[str] | None = None
    if missing:
        if not drop_missing:
            raise KeyNotFound(
                f"partition {partition.partition_id!r} has no key {quote(missing)}: they were "
                "cleared or never put; list it again, or pass on_missing='drop'",
                partition_id=partition.partition_id,
                keys=list(dict.fromkeys(missing)),
            )
        kept = [row.key for row in rows]
    lost = lost_of(rows, fields)
    if lost:
        if not drop_lost:
            raise value_lost(
                partition.partition_id, lost, fields,
                "clear these rows, and produce them anew; on_missing='drop' leaves them out",
            )  # fmt: skip
        gone = set(map(id, lost))
        rows = [row for row in rows if id(row) not in gone]
        kept = [row.key for row in rows]
    signatures = _signatures(rows)
    if fields is None:
        names: dict[str, None] = {}
        for layers in signatures.values():
            for placement in layers[::2]:
                names.update(dict.fromkeys(placement.template.names))
        fields = sorted(names)
    lacking = {
        signature: absent
        for signature, layers in signatures.items()
        if (absent := [name for name in fields if _layer(layers, name) < 0])
    }
    if lacking and common:
        absent = {name for names in lacking.values() for name in names}
        fields = [name for name in fields if name not in absent]
    elif lacking:
        bad = [row for row in rows if _signature(row.layers) in lacking]
        if not drop_missing:
            absent = {name for names in lacking.values() for name in names}
            shown = [name for name in fields if name in absent]
            bad_keys = list(dict.fromkeys(row.key for row in bad))
            raise FieldNotFound(
                f"partition {partition.partition_id!r} has no field {quote(shown)} for key "
                f"{quote(bad_keys)}: select the fields that all keys have, or wait until they "
                "are produced",
                partition_id=partition.partition_id,
                keys=bad_keys,
                fields=shown,
            )
        rows = [row for row in rows if _signature(row.layers) not in lacking]
        kept = [row.key for row in rows]
        signatures = _signatures(rows)
    known = partition.schema
    schema = [list(known[name]) if name in known else None for name in fields]
    if partition.open_schema and rows:
        schema = [list(_one_schema(partition, name, rows, signatures)) for name in fields]
    return [kept, fields, schema, *_places(rows, fields, signatures)]


def tag_of_each(partition: Partition, keys: Sequence[str], name: str) -> list[Any]:
    """What each of these keys, which are there, has as this tag; None for those without it."""
    shards, at = partition.index.shards, partition.slots.at
    rows = (at(shards[hash(key) & (SHARDS - 1)][key]) for key in keys)
    return [row.tags.get(name) if type(row) is Row else None for row in rows]


def _one_schema(
    partition: Partition,
    name: str,
    rows: Sequence[Row],
    signatures: Mapping[tuple[int, ...], Layers],
) -> FieldSchema:
    """What a field of these rows is where it may change. SchemaMismatch if it did: a container
    holds one dtype and rank."""
    found: dict[tuple[str, int], FieldSchema] = {}
    for layers in signatures.values():
        schema = _schema_at(layers, name, partition)
        found.setdefault(schema[:2], schema)
    one, *others = found.values()
    if not others:
        return one
    odd = next(row for row in rows if _schema_at(row.layers, name, partition)[:2] != one[:2])
    other = _schema_at(odd.layers, name, partition)
    raise SchemaMismatch(
        f"field {name!r} of partition {partition.partition_id!r} holds {one.dtype} of rank "
        f"{one.rank} in some of these rows, and {other.dtype} of rank {other.rank} in key "
        f"{quote([odd.key])}: get them apart, or put them anew",
        partition_id=partition.partition_id,
        keys=[odd.key],
        fields=[name],
    )


def _schema_at(layers: Layers, name: str, partition: Partition) -> FieldSchema:
    template = layers[_layer(layers, name)].template
    return schema_of(template.columns[template.index[name]], partition.schema)


def schema_of(column: Column, schema: Mapping[str, FieldSchema]) -> FieldSchema:
    """What a column's rows are to a reader: as the schema has it, unless they are of another
    dtype or rank, which only an open schema allows."""
    rank = len(column.dims)
    known = schema.get(column.name)
    if known is not None and (known.dtype, known.rank) == (column.dtype, rank):
        return known
    return FieldSchema(column.dtype, rank, column.ragged_dim)


def _signature(layers: Layers) -> tuple[int, ...]:
    """Which templates a row's layers have; rows of one signature find a field in the same layer."""
    if len(layers) == 2:
        return (id(layers[0].template),)
    return tuple(id(placement.template) for placement in layers[::2])


def _signatures(rows: Sequence[Row]) -> dict[tuple[int, ...], Layers]:
    found: dict[tuple[int, ...], Layers] = {}
    last: Any = None
    for row in rows:
        layers = row.layers
        # Rows of one put follow each other and share a template.
        if len(layers) == 2 and layers[0] is last:
            continue
        found.setdefault(_signature(layers), layers)
        last = layers[0] if len(layers) == 2 else None
    return found


def _layer(layers: Layers, name: str) -> int:
    for k in range(0, len(layers), 2):
        if name in layers[k].template.index:
            return k
    return -1


def _places(
    rows: Sequence[Row], fields: Sequence[str], signatures: dict[tuple[int, ...], Layers]
) -> list[Any]:
    plans = {
        signature: tuple(_layer(layers, name) for name in fields)
        for signature, layers in signatures.items()
    }
    table = _BlockTable()
    groups: list[list[Any]] = []
    if not fields or not rows:
        return [*table.wire(), [[list(range(len(fields))), b"", b""]] if fields else []]
    if len(set(plans.values())) == 1:
        plan = next(iter(plans.values()))
        for k in dict.fromkeys(plan):
            members = [i for i, layer in enumerate(plan) if layer == k]
            groups.append([members, *table.assign(rows, k)])
    else:
        plan_of = [plans[_signature(row.layers)] for row in rows]
        for i in range(len(fields)):
            groups.append([[i], *table.assign_each(rows, [plan[i] for plan in plan_of])])
    return [*table.wire(), groups]


def locate(rows: Sequence[Row], schema: Mapping[str, FieldSchema]) -> list[Any]:
    """Where every field of these rows lies, each field in those of the rows that have it.

    [fields, stores, templates, blocks, groups]; a field is [name, dtype, rank, ragged_dim, numbers
    of its rows as int32, or None for all]. Where the schema is open, a field is there once for
    each dtype and rank.
    """
    fields: dict[tuple[Any, ...], int] = {}
    layers_of = {
        signature: _columns(layers, schema, fields)
        for signature, layers in _signatures(rows).items()
    }
    table = _BlockTable()
    groups: list[list[Any]] = []
    numbers: list[bytes | None] = [None] * len(fields)
    if len(layers_of) == 1:
        (columns,) = layers_of.values()
        for k in dict.fromkeys(columns.values()):
            members = [number for number, layer in columns.items() if layer == k]
            groups.append([members, *table.assign(rows, k)])
    else:
        of_row = [layers_of[_signature(row.layers)] for row in rows]
        for number in fields.values():
            having = [i for i, columns in enumerate(of_row) if number in columns]
            layers = [of_row[i][number] for i in having]
            groups.append([[number], *table.assign_each([rows[i] for i in having], layers)])
            if len(having) < len(rows):
                numbers[number] = array("i", having).tobytes()
    found = [[*field, numbers[number]] for field, number in fields.items()]
    return [found, *table.wire(), groups]


def _columns(
    layers: Layers, schema: Mapping[str, FieldSchema], fields: dict[tuple[Any, ...], int]
) -> dict[int, int]:
    """The fields of rows with such layers, as numbers in `fields`, and the layer that has each."""
    columns: dict[int, int] = {}
    seen: set[str] = set()
    for k in range(0, len(layers), 2):
        placement: Placement = layers[k]
        for column in placement.template.columns:
            if column.name in seen:
                continue
            seen.add(column.name)
            field = (column.name, *schema_of(column, schema))
            columns[fields.setdefault(field, len(fields))] = k
    return columns


class _BlockTable:
    """The blocks of one answer, each once, as parallel arrays."""

    def __init__(self) -> None:
        self.number: dict[Placement, int] = {}

    def assign(self, rows: Sequence[Row], k: int) -> tuple[bytes, bytes]:
        number = self.number
        blocks: list[int] = []
        places: list[int] = []
        last: Any = None
        index = 0
        for row in rows:
            placement = row.layers[k]
            if placement is not last:
                last = placement
                index = number.setdefault(last, len(number))
            blocks.append(index)
            places.append(row.layers[k + 1])
        return array("i", blocks).tobytes(), array("i", places).tobytes()

    def assign_each(self, rows: Sequence[Row], layer_of: Sequence[int]) -> tuple[bytes, bytes]:
        number = self.number
        blocks: list[int] = []
        places: list[int] = []
        for row, k in zip(rows, layer_of, strict=True):
            placement: Placement = row.layers[k]
            blocks.append(number.setdefault(placement, len(number)))
            places.append(row.layers[k + 1])
        return array("i", blocks).tobytes(), array("i", places).tobytes()

    def wire(self) -> list[Any]:
        stores: dict[str, int] = {}
        templates: dict[bytes, int] = {}
        store_of = array("H")
        template_of = array("I")
        ids = array("q")
        segments = array("I")
        offsets = array("q")
        rows = array("i")
        lengths: list[bytes] = []
        for p in self.number:
            store_of.append(stores.setdefault(p.store, len(stores)))
            template_of.append(templates.setdefault(p.template.blob, len(templates)))
            ids.append(p.block)
            segments.append(p.segment)
            offsets.append(p.offset)
            rows.append(p.rows)
            lengths.append(p.lengths)
        return [
            list(stores),
            list(templates),
            [
                store_of.tobytes(), template_of.tobytes(), ids.tobytes(), segments.tobytes(),
                offsets.tobytes(), rows.tobytes(), b"".join(lengths),
            ],
        ]  # fmt: skip
