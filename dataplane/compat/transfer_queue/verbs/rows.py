"""Rows by key: put, get and clear as TransferQueue's verbs have them, each in one text for threads
and event loops.

Owns what this face forgives: keys that do not exist and fields that not all rows have are left
out, a field may come with another dtype and row length. Never talks to the controller. Letters: B
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from dataplane.client.core import Core
from dataplane.client.effects import Run, Verb
from dataplane.client.get import field_data, read_batch, resolve
from dataplane.client.memory import Bytes
from dataplane.client.put import put_batch, put_row
from dataplane.client.reading import ReadPlan
from dataplane.client.tags import clear_rows
from dataplane.codec.columns import is_non_tensor
from dataplane.codec.containers import Offsets, as_list
from dataplane.errors import InvalidRequest, PartitionNotFound, SchemaMismatch, quote
from dataplane.wire.messages import COMMON, MUST_EXIST, RETURN_TAGS

from ..metadata import KVBatchMeta
from ..names import RESERVED_TAG, refuse_keys, refuse_partition, refuse_tags
from .containers import batch, joined, leaf
from .leaves import as_columns, kept

Tags = dict[str, Any]
Parser = Callable[[Any], Any] | None

NOT_FOUND = "keys or partition were not found!"
NOT_READY = "Some fields are not ready in all the requested keys!"


def put_one(
    core: Core,
    deadline: float,
    *,
    key: str,
    partition_id: str,
    fields: Mapping[str, Any] | None,
    tag: Mapping[str, Any] | None,
) -> Verb[KVBatchMeta]:
    """Write one row; see `put`."""
    meta = yield from put_row(core, key, partition_id, fields, tag, RETURN_TAGS, deadline)
    return KVBatchMeta.of([key], shown(meta.tags), partition_id, meta.fields)


def put(
    core: Core,
    deadline: float,
    *,
    keys: list[str],
    partition_id: str,
    fields: TensorDictBase | None,
    tags: Sequence[Mapping[str, Any]] | None,
    must_exist: bool = False,
) -> Verb[KVBatchMeta]:
    """Write rows, all or none; the batch with whole tags and the fields that all of them have."""
    flags = RETURN_TAGS | (MUST_EXIST if must_exist else 0)
    columns = None if fields is None else as_columns(fields, len(keys))
    meta = yield from put_batch(core, keys, partition_id, columns, tags, flags, deadline)
    return KVBatchMeta.of(keys, shown(meta.tags), partition_id, meta.fields)


def shown(tags: list[Tags]) -> list[Tags]:
    """Tags without what the controller keeps among them; in place, of maps that nobody else has."""
    for tag in tags:
        tag.pop(RESERVED_TAG, None)
    return tags


def get(
    core: Core, deadline: float, *, keys: list[str], partition_id: str, select: list[str] | None
) -> Verb[TensorDict]:
    """Copies of the rows that exist, in the order asked for: the fields that all of them have.

    Raises ValueError if none of the keys exists, or if nothing was selected and they have no field
    in common.
    """
    names = None if select is None else sorted(set(select))
    try:
        parts = yield from _read(core, keys, partition_id, names, deadline)
    except PartitionNotFound:
        parts = []
    rows = sum(len(plan.keys) for plan, _ in parts)
    if not rows:
        raise InvalidRequest(
            f"{NOT_FOUND} Partition {partition_id!r} has no {quote(keys)}: they were cleared or "
            "never put"
        )
    common = {field.name for field in parts[0][0].fields}
    for plan, _ in parts[1:]:
        common &= {field.name for field in plan.fields}
    unready = not common
    if unready and names is not None:
        unready = not (yield from _share_any(core, keys, partition_id, deadline))
    if unready:
        raise InvalidRequest(
            f"{NOT_READY} Keys {quote(keys)} of partition {partition_id!r} have no field in common"
        )
    order = sorted(common)
    size = sum(len(buffer) for _, data in parts for buffer in data)
    return (yield Run(partial(_as_batch, parts, order, rows), size if len(parts) > 1 else 0))


def _share_any(core: Core, keys: list[str], partition_id: str, deadline: float) -> Verb[bool]:
    """Whether there is any field that all of the keys that exist have."""
    plan = yield from resolve(core, keys, partition_id, None, COMMON, deadline)
    return bool(plan.fields)


Part = tuple[ReadPlan, list[Bytes]]


def _read(
    core: Core, keys: list[str], partition_id: str, names: list[str] | None, deadline: float
) -> Verb[list[Part]]:
    """The rows in one part, or in several where a field changed its kind among them."""
    try:
        return [(yield from read_batch(core, keys, partition_id, names, COMMON, deadline))]
    except SchemaMismatch:
        if len(keys) < 2:
            raise
    half = len(keys) // 2
    first = yield from _read(core, keys[:half], partition_id, names, deadline)
    rest = yield from _read(core, keys[half:], partition_id, names, deadline)
    return [part for part in (*first, *rest) if part[0].keys]


def _as_batch(parts: Sequence[Part], names: Sequence[str], rows: int) -> TensorDict:
    leaves: dict[str, Any] = {}
    if len(parts) == 1:
        ((plan, data),) = parts
        offsets: Offsets = {}
        for field, buffer in zip(plan.fields, data, strict=True):
            leaves[field.name] = leaf(field_data(field, buffer), offsets)
        return batch(leaves, rows)
    for name in names:
        values: list[Any] = []
        for plan, data in parts:
            number = next(i for i, field in enumerate(plan.fields) if field.name == name)
            values += as_list(field_data(plan.fields[number], data[number]))
        leaves[name] = joined(values)
    return batch(leaves, rows)


def clear(core: Core, deadline: float, *, keys: Sequence[str], partition_id: str) -> Verb[int]:
    """Remove rows; how many there were. Keys and partitions that do not exist are no error."""
    try:
        return (yield from clear_rows(core, keys, partition_id, None, False, deadline))
    except PartitionNotFound:
        return 0


# -- what callers gave -----------------------------------------------------------------------


def refuse_parser(data_parser: Parser) -> None:
    """InvalidRequest for a parser, on whatever call it comes."""
    if data_parser is not None:
        raise InvalidRequest(
            "data_parser ships code that a server would run, which this plane never does: call "
            "the parser yourself and put what it returns"
        )


def checked_keys(keys: object) -> list[str]:
    """The keys of a call. ValueError if there are none, TypeError if they are no list of str."""
    if type(keys) is not list:
        raise TypeError(f"keys are a list of str, not {type(keys).__name__}")
    listed = cast("list[Any]", keys)
    if not listed:
        raise InvalidRequest("keys are empty: name at least one")
    if set(map(type, listed)) != {str}:
        odd = next(key for key in listed if type(key) is not str)
        raise TypeError(f"a key is a str, not {type(odd).__name__}: {odd!r:.80}")
    return listed


def new_keys(keys: object, partition_id: object) -> list[str]:
    """The keys of a put: as `checked_keys`, and none of the drop-in's own."""
    listed = checked_keys(keys)
    refuse_partition(partition_id)
    refuse_keys(listed)
    return listed


def one_or_many(names: object) -> Any:
    """A list where a lone string was given."""
    return [names] if isinstance(names, str) else names


def one_row(fields: object) -> dict[str, Any] | None:
    """The fields of a single put, by name."""
    if fields is None:
        return None
    if isinstance(fields, TensorDictBase):
        size = fields.batch_size
        if not size or size[0] != 1:
            raise InvalidRequest(
                f"the fields of one key are a TensorDict of batch size 1, not {[*size]}; many keys "
                "are a kv_batch_put"
            )
        columns = cast("Any", as_columns(fields, 1))
        return {name: _only(value) for name, value in columns.items()}
    if not isinstance(fields, dict):
        raise InvalidRequest(f"`fields` are a dict or a TensorDict, not {type(fields).__name__}")
    named = cast("dict[str, Any]", fields)
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise InvalidRequest(
                f"field {name!r} is a nested tensor, which holds many rows: use kv_batch_put"
            )
    if any(isinstance(value, np.ndarray) for value in named.values()):
        return {name: kept(value) for name, value in named.items()}
    return named


def one_tag(tag: object) -> Mapping[str, Any] | None:
    """The tag of a single put."""
    if tag is None:
        return None
    if not isinstance(tag, Mapping):
        raise InvalidRequest(f"a tag is a mapping, not {type(tag).__name__}")
    named = cast("Mapping[str, Any]", tag)
    refuse_tags([named])
    return named


def _only(column: Any) -> Any:
    """The one row of a column."""
    if isinstance(column, torch.Tensor):
        return column.unbind()[0] if column.is_nested else column[0]
    return column.tolist()[0] if is_non_tensor(column) else column[0]


def many_rows(fields: object, keys: Sequence[str]) -> TensorDictBase | None:
    """The fields of a batch put, checked against its keys."""
    if fields is None:
        return None
    if not isinstance(fields, TensorDictBase):
        raise InvalidRequest(
            f"`fields` of many keys are a TensorDict, not {type(fields).__name__}: wrap them as "
            f"TensorDict(…, batch_size={len(keys)})"
        )
    size = fields.batch_size
    if not size or size[0] != len(keys):
        raise InvalidRequest(
            f"{len(keys)} keys, and `fields` of batch size {[*size]}: one row per key"
        )
    return fields


def checked_tags(tags: object, keys: Sequence[str]) -> Sequence[Mapping[str, Any]] | None:
    """The tags of a batch put, one mapping per key."""
    if tags is None:
        return None
    listed: list[Any] = list(cast("Iterable[Any]", tags))
    if len(listed) != len(keys):
        raise InvalidRequest(f"{len(keys)} keys and {len(listed)} tags: one mapping per key")
    if not set(map(type, listed)) <= {dict}:
        for tag in listed:
            if not isinstance(tag, Mapping):
                raise InvalidRequest(f"a tag is a mapping, not {type(tag).__name__}: {tag!r:.80}")
    refuse_tags(listed)
    return listed
