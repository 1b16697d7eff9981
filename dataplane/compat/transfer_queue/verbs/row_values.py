"""The values and tags of a batch's rows: read, written and cleared by index, each in one text for
threads and event loops.

Owns how a batch's rows become rows of the plane: by the keys that the batch carries, else by a
question to the controller. Values never pass the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index as as_index
from typing import Any, cast

import msgpack
import torch
from tensordict import TensorDict, TensorDictBase

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.get import resolve
from dataplane.client.put import put_batch
from dataplane.errors import FieldNotFound, InvalidRequest, PartitionNotFound, quote
from dataplane.wire.messages import MUST_EXIST

from ..control.asking import Controller
from ..control.registry import keyless, reserved
from ..errors import StorageKeyNotFoundError
from ..metadata import BatchMeta
from ..names import refuse_tags
from . import rows
from .containers import batch as as_batch
from .containers import joined
from .leaves import as_columns

READ = "_tags"
"""The entry of a batch's private row metadata that has the row's tags as they were read."""


def get_data(
    core: Core, deadline: float, *, controller: Controller, meta: BatchMeta
) -> Verb[TensorDict]:
    """The values of a batch's fields, in the order of its rows.

    Raises:
        StorageKeyNotFoundError: rows were cleared since.
        FieldNotFound: not all of the rows have all of the fields.
    """
    if not meta or not meta.size or not meta.field_names:
        return TensorDict({}, batch_size=0)
    parts: list[tuple[list[int], TensorDict]] = []
    for partition_id, places in _by_partition(meta).items():
        keys = yield from _keys(core, deadline, controller, meta, partition_id, places)
        part = yield from _values(core, deadline, partition_id, keys, meta.field_names)
        if len(places) == meta.size:
            return part
        parts.append((places, part))
    leaves: dict[str, Any] = {}
    for name in meta.field_names:
        values: list[Any] = [None] * meta.size
        for places, part in parts:
            for place, value in zip(places, _listed(cast("Any", part).get(name)), strict=True):
                values[place] = value
        leaves[name] = joined(values)
    return as_batch(leaves, meta.size)


def _values(
    core: Core, deadline: float, partition_id: str, keys: list[str], fields: list[str]
) -> Verb[TensorDict]:
    try:
        found = yield from rows.get(
            core, deadline, keys=keys, partition_id=partition_id, select=fields
        )
    except InvalidRequest:
        found = TensorDict({}, batch_size=0)  # none of the rows is there
    got: set[str] = set(cast("Any", found).keys())
    left = [name for name in fields if name not in got]
    if not left and found.batch_size[0] == len(keys):
        return found
    gone = yield from _gone(core, deadline, partition_id, keys)
    if gone:
        raise StorageKeyNotFoundError(
            f"partition {partition_id!r} has no row {quote(gone)} any more: it was cleared",
            partition_id=partition_id,
            keys=gone,
        )
    raise FieldNotFound(
        f"not all of these rows of partition {partition_id!r} have field {quote(left)}: wait until "
        "it is produced, or select_fields of the batch",
        partition_id=partition_id,
        keys=keys,
        fields=left,
    )


def _gone(core: Core, deadline: float, partition_id: str, keys: list[str]) -> Verb[list[str]]:
    try:
        plan = yield from resolve(core, keys, partition_id, [], True, deadline)
    except PartitionNotFound:
        return keys
    left = set(plan.keys)
    return [key for key in keys if key not in left]


def put(
    core: Core,
    deadline: float,
    *,
    controller: Controller,
    data: TensorDictBase,
    meta: BatchMeta | None,
    partition_id: str | None,
) -> Verb[BatchMeta]:
    """Write values to a batch's rows, or to new rows of a partition; the batch with those fields.

    Rows of one partition are written all or none. Tags that the batch was given since it was read
    are written with them; those that it only read are not, which others may have changed since.
    """
    if meta is None:
        if partition_id is None:
            raise InvalidRequest("partition_id must be given where there is no metadata")
        return (yield from _put_new(core, deadline, controller, data, partition_id))
    if not meta.size:
        raise InvalidRequest("metadata cannot be empty: it says which rows are written")
    if [*data.batch_size[:1]] != [meta.size]:
        raise InvalidRequest(f"{[*data.batch_size]} rows of data for {meta.size} rows of metadata")
    columns = as_columns(data, meta.size)
    parts = _by_partition(meta)
    for pid, places in parts.items():
        keys = yield from _keys(core, deadline, controller, meta, pid, places)
        own: Any = columns
        if len(parts) > 1:
            listed = {name: _listed(column) for name, column in cast("Any", columns).items()}
            own = {name: [column[at] for at in places] for name, column in listed.items()}
        tags = [_changed(meta, place) for place in places]
        yield from put_batch(
            core, keys, pid, own, tags if any(tags) else None, MUST_EXIST, deadline
        )
    return meta.add_fields(data)  # pyright: ignore[reportArgumentType]


def _put_new(
    core: Core, deadline: float, controller: Controller, data: TensorDictBase, partition_id: str
) -> Verb[BatchMeta]:
    count = data.batch_size[0] if data.batch_size else 0
    if not count:
        raise InvalidRequest("data has no rows: its batch size says how many are put")
    columns = as_columns(data, count)
    indexes = yield from new_rows(core, deadline, controller, partition_id, count, columns)
    keys = [keyless(index) for index in indexes]
    meta = BatchMeta(indexes, [partition_id] * count, _row_keys=keys)
    return meta.add_fields(data)  # pyright: ignore[reportArgumentType]


def new_rows(
    core: Core,
    deadline: float,
    controller: Controller,
    partition_id: str,
    count: int,
    columns: Any,
) -> Verb[list[int]]:
    """New rows without a key: their indexes."""
    indexes = yield from controller.ask(core, "reserve", [partition_id, count], deadline)
    # Values, and what the controller knows of the rows, in one change: no row without values.
    tags = [reserved(index) for index in indexes]
    keys = [keyless(index) for index in indexes]
    yield from put_batch(core, keys, partition_id, columns, tags, 0, deadline)
    return indexes


def set_custom_meta(
    core: Core, deadline: float, *, controller: Controller, meta: BatchMeta
) -> Verb[None]:
    """Merge the batch's custom meta into its rows' tags; of each partition all or none."""
    refuse_tags(meta.custom_meta)
    for pid, places in _by_partition(meta).items():
        places = [place for place in places if meta.custom_meta[place]]
        if places:
            keys = yield from _keys(core, deadline, controller, meta, pid, places)
            tags = [meta.custom_meta[place] for place in places]
            yield from put_batch(core, keys, pid, None, tags, MUST_EXIST, deadline)


def clear_samples(
    core: Core, deadline: float, *, controller: Controller, meta: BatchMeta
) -> Verb[None]:
    """Remove a batch's rows; those that are gone are no error."""
    for pid, places in _by_partition(meta).items():
        keys = yield from _keys(core, deadline, controller, meta, pid, places, missing_ok=True)
        yield from rows.clear(core, deadline, keys=keys, partition_id=pid)


# -- steps -----------------------------------------------------------------------------------


def _by_partition(meta: BatchMeta) -> dict[str, list[int]]:
    """The places of each partition's rows in a batch."""
    places: dict[str, list[int]] = {}
    for place, partition_id in enumerate(meta.partition_ids):
        places.setdefault(partition_id, []).append(place)
    return places


def _keys(
    core: Core,
    deadline: float,
    controller: Controller,
    meta: BatchMeta,
    partition_id: str,
    places: Sequence[int],
    *,
    missing_ok: bool = False,
) -> Verb[list[str]]:
    """The keys of rows: those that the batch carries, else as the controller says."""
    known = meta._row_keys  # pyright: ignore[reportPrivateUsage]
    keys: list[str | None] = [known[place] for place in places]
    if None in keys:
        indexes = [as_index(meta.global_indexes[place]) for place in places]
        told = yield from controller.ask(core, "keys_of", [indexes, partition_id, False], deadline)
        keys = [key or other for key, other in zip(keys, told, strict=True)]
        unknown = [index for index, key in zip(indexes, keys, strict=True) if key is None]
        if unknown and not missing_ok:
            raise StorageKeyNotFoundError(
                f"partition {partition_id!r} has no row with index {quote(unknown)}: it was "
                "cleared, or never put",
                partition_id=partition_id,
                keys=[],
            )
    return [key for key in keys if key is not None]


def _changed(meta: BatchMeta, place: int) -> dict[str, Any]:
    """The tags of a row that are others than were read."""
    tags = meta.custom_meta[place]
    refuse_tags([tags])
    packed = meta._custom_backend_meta[place].get(READ)  # pyright: ignore[reportPrivateUsage]
    if not tags or packed is None:
        return tags
    read: dict[str, Any] = msgpack.unpackb(packed)
    return {name: value for name, value in tags.items() if name not in read or read[name] != value}


def _listed(column: Any) -> list[Any]:
    """A column's rows one by one."""
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    return column.tolist() if hasattr(column, "tolist") else list(column)
