"""Gets: resolve at the tag store, pin at the value stores, copy, let go.

Owns the arguments of a read and the steps that a get and a view have in common. Changes nothing in
the plane, so whatever breaks half-way is simply done again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from dataplane.client.core import Core, StoreView
from dataplane.client.effects import Ask, Done, Open, Run, Tell, Verb
from dataplane.client.memory import Bytes
from dataplane.client.put import as_keys, list_of, refresh_stores
from dataplane.client.reading import FieldRows, ReadPlan, Runs, merge, plan_read
from dataplane.client.results import Rows
from dataplane.client.retry import FIRST_PAUSE_S, ask_again, before_next_try
from dataplane.client.tracing import note_get, notes_values
from dataplane.errors import (
    InvalidRequest,
    KeyNotFound,
    PartitionNotFound,
    Unreachable,
    quote,
)
from dataplane.fields import pad_value
from dataplane.telemetry.verbs import spanned
from dataplane.wire.channel import Broken, Refused
from dataplane.wire.messages import LONGEST_WAIT_S

if TYPE_CHECKING:
    import torch

    from dataplane.codec.containers import FieldData

Layout = Literal["nested", "padded", "list", "packed"]
LAYOUTS = ("nested", "padded", "list", "packed")
Pad = bool | int | float

TRIES = 3
"""How often a get starts again when blocks vanish between resolving and pinning."""
BULK_BYTES = 1 << 20
"""Runs from this size on are copied with the interpreter lock released."""


class GetOptions:
    """Layout of a get and what goes with it, checked once."""

    __slots__ = ("layout", "out", "pad", "total", "trim")

    def __init__(
        self,
        layout: str,
        pad: Pad | Mapping[str, Pad] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        total: int | None = None,
        trim: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        if layout not in LAYOUTS:
            raise InvalidRequest(f"layout {layout!r:.80} is none of {', '.join(LAYOUTS)}")
        if layout != "packed" and (out is not None or total is not None):
            raise InvalidRequest("out= and total= go with layout='packed'")
        if total is not None and (type(total) is not int or total < 0):
            raise InvalidRequest(f"total is a number of entries, not {total!r:.80}")
        for what, given in (("out", out), ("trim", trim)):
            if given is not None and not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
                raise InvalidRequest(f"{what} is a mapping of fields, not {type(given).__name__}")
        for name, cut in (trim or {}).items():
            if not (
                isinstance(cut, Sequence)  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
                and len(cut) == 2
                and all(type(n) is int and n >= 0 for n in cut)
            ):
                raise InvalidRequest(f"trim of field {name!r} is (head, tail), not {cut!r:.80}")
        self.layout = layout
        self.pad = pad
        self.out = dict(out or {})
        self.total = total
        self.trim = dict(trim or {})

    def pad_of(self, name: str) -> Pad:
        """The padding value of a field: as given, else as the table of fields has it."""
        pad = self.pad.get(name) if isinstance(self.pad, Mapping) else self.pad
        return pad_value(name) if pad is None else pad


@spanned("kv_batch_get")
def get_batch(
    core: Core,
    keys: Sequence[str],
    partition_id: str,
    select_fields: Sequence[str] | None,
    options: GetOptions,
    on_missing: str,
    deadline: float,
) -> Verb[Rows]:
    """Copies of the rows' fields."""
    keys = as_keys(keys)
    fields = field_names(select_fields)
    drop = drops(on_missing)
    try:
        plan, data = yield from read_batch(
            core, keys, partition_id, fields, drop, deadline, options.trim
        )
    except PartitionNotFound:
        if keys:
            raise
        return Rows([], {})  # nothing of nothing, as clearing no keys of it is no error
    if notes_values(core):
        yield from note_get(core, partition_id, plan, data, options.trim)
    return (yield Run(partial(rows_of, plan, data, options), 0))


def read_batch(
    core: Core,
    keys: list[str],
    partition_id: str,
    fields: list[str] | None,
    drop: bool | str,
    deadline: float,
    trim: Mapping[str, tuple[int, int]] | None = None,
) -> Verb[tuple[ReadPlan, list[Bytes]]]:
    """Where the rows lie and, field by field, their bytes back to back. `drop` leaves out keys that
    are not there or lack fields; as `COMMON` it leaves out fields that not all of them have."""
    pause_s = FIRST_PAUSE_S
    tries = 0
    while True:
        plan = trimmed((yield from resolve(core, keys, partition_id, fields, drop, deadline)), trim)
        data = [core.recycler.take(int(rows.nbytes.sum())) for rows in plan.fields]
        try:
            gone = yield from fetch(core, plan, data, deadline)
        except Broken as error:
            # A read changes nothing, so it is simply done again.
            pause_s = yield from before_next_try(error, pause_s, deadline)
            continue
        if not gone:
            return plan, data
        tries += 1
        if tries == TRIES:
            raise vanished(partition_id, plan, gone)


# -- steps -----------------------------------------------------------------------------------


def field_names(select_fields: Sequence[str] | None) -> list[str] | None:
    """The fields of a read as a list; None for all of them."""
    if select_fields is None:
        return None
    if isinstance(select_fields, str):
        raise InvalidRequest(f"select_fields is a list; give [{select_fields!r:.80}] for one")
    names = list_of(select_fields, "select_fields")
    if len(set(names)) != len(names):
        raise InvalidRequest(f"select_fields names a field twice: {quote(names)}")
    return names


def drops(on_missing: str) -> bool:
    """Whether rows that are missing are left out. InvalidRequest if that is not what it says."""
    if on_missing not in ("raise", "drop"):
        raise InvalidRequest(f"on_missing is 'raise' or 'drop', not {on_missing!r:.80}")
    return on_missing == "drop"


def resolve(
    core: Core,
    keys: list[str],
    partition_id: str,
    fields: list[str] | None,
    drop: bool | str,
    deadline: float,
) -> Verb[ReadPlan]:
    """Where the rows lie, as the tag store says."""
    body: list[Any] = [partition_id, keys, fields, drop]
    if core.spans is not None:
        body.append("uid")
    answer = (yield from ask_again(core, "resolve", body, deadline)).body
    uids = answer.pop() if core.spans is not None else ()
    plan = plan_read(keys, answer)
    core.see(plan.revision)
    if core.spans is not None:
        core.spans.learn(partition_id, plan.keys, uids)
    return plan


def stores_of(core: Core, plan: ReadPlan) -> Verb[list[StoreView]]:
    """The value stores of a plan, in its order."""
    if any(store_id not in core.stores for store_id in plan.stores):
        yield from refresh_stores(core)
    unknown = [store_id for store_id in plan.stores if store_id not in core.stores]
    if unknown:
        # It was given up after the rows were looked up: they say so themselves now.
        raise Refused(f"the value store {quote(unknown)} is not known any more")
    return [core.stores[store_id] for store_id in plan.stores]


def trimmed(plan: ReadPlan, trim: Mapping[str, tuple[int, int]] | None) -> ReadPlan:
    """The plan, less what `trim` cuts from the rows of its fields."""
    if not trim:
        return plan
    unknown = set(trim) - {rows.name for rows in plan.fields}
    if unknown:
        raise InvalidRequest(f"trim names fields that were not selected: {quote(sorted(unknown))}")
    from dataplane.codec.containers import trim_rows

    fields: list[FieldRows] = []
    for rows in plan.fields:
        cut = trim.get(rows.name)
        if cut is None:
            fields.append(rows)
            continue
        if rows.schema.ragged_dim != 0 or rows.schema.dtype == "object":
            raise InvalidRequest(
                f"field {rows.name!r} is not ragged in its first dimension and cannot be trimmed "
                "while it is read"
            )
        shape = rows.shape.copy()
        offset, nbytes, shape[:, 0] = trim_rows(
            rows.name, plan.keys, rows.offset, rows.nbytes, rows.shape[:, 0], *cut
        )
        fields.append(rows._replace(offset=offset, nbytes=nbytes, shape=shape))
    return plan._replace(fields=fields)


def fetch(core: Core, plan: ReadPlan, data: Sequence[Bytes], deadline: float) -> Verb[list[int]]:
    """Fill `data` with the rows of each field; which of the plan's blocks were gone, if any."""
    if not len(plan.block_ids):
        return []
    stores = yield from stores_of(core, plan)
    alone = len(stores) == 1
    for number, store in enumerate(stores):
        lane = yield Open(store)
        try:
            mine = None if alone else number
            if store.mappings is not None:
                gone = yield from _copy_local(plan, data, lane, store, mine)
            else:
                gone = yield from _copy_remote(core, plan, data, lane, mine, deadline)
        finally:
            yield Done(lane)
        if gone:
            return places_of(plan, number, gone)
    return []


def _copy_local(
    plan: ReadPlan, data: Sequence[Bytes], lane: Any, store: StoreView, mine: int | None
) -> Verb[list[int]]:
    blocks = slice(None) if mine is None else plan.block_store == mine
    answer = yield Ask(lane, "pin", [plan.block_ids[blocks].tobytes()])
    handle, gone = answer.body
    if gone:
        return gone
    mappings = store.mappings
    assert mappings is not None
    try:
        segments: dict[int, Bytes] = {
            segment: mappings.readable(segment)
            for segment in np.unique(plan.block_segment[blocks]).tolist()
        }
        total = sum(len(buffer) for buffer in data)
        yield Run(lambda: _copy_rows(plan, data, segments, mine), total)
    except Unreachable:
        store.mappings = None
        raise Broken("the store's segments cannot be mapped from here") from None
    finally:
        yield Tell(lane, "unpin", [handle])
    return []


def _copy_rows(
    plan: ReadPlan, data: Sequence[Bytes], segments: Mapping[int, Bytes], mine: int | None
) -> None:
    views = {segment: array.data for segment, array in segments.items()}
    for rows, target in zip(plan.fields, data, strict=True):
        runs, places = _runs(plan, rows, mine)
        memory = target.data
        segment = plan.block_segment[runs.block]
        start = plan.block_offset[runs.block] + runs.offset
        for s, at, to, n in zip(
            segment.tolist(), start.tolist(), places, runs.nbytes.tolist(), strict=True
        ):
            if n >= BULK_BYTES:
                copy_bytes(segments[s][at : at + n], target[to : to + n])
            else:
                memory[to : to + n] = views[s][at : at + n]


def copy_bytes(source: Bytes, target: Bytes) -> None:
    """Copy without the interpreter lock, in this thread: a memory copy is no faster in many, and
    handing parts to a pool costs milliseconds where cores are busy."""
    np.copyto(target, source)


def _runs(plan: ReadPlan, rows: FieldRows, mine: int | None) -> tuple[Runs, list[int]]:
    """The runs of a field (of one store) and where each goes in the field's buffer."""
    if mine is None:
        runs = merge(rows)
        ends = np.cumsum(runs.nbytes)
        return runs, (ends - runs.nbytes).tolist()
    ends = np.cumsum(rows.nbytes)
    own = plan.block_store[rows.block] == mine
    runs = Runs(rows.block[own], rows.offset[own], rows.nbytes[own])
    return runs, (ends - rows.nbytes)[own].tolist()


def _copy_remote(
    core: Core, plan: ReadPlan, data: Sequence[Bytes], lane: Any, mine: int | None, deadline: float
) -> Verb[list[int]]:
    """The bytes through the socket: straight into place if all come from one store."""
    blocks = (
        np.arange(len(plan.block_ids)) if mine is None else np.flatnonzero(plan.block_store == mine)
    )
    number = np.zeros(len(plan.block_ids), np.int32)
    number[blocks] = np.arange(len(blocks), dtype=np.int32)
    all_runs = [_runs(plan, rows, mine) for rows in plan.fields]
    which = np.concatenate([number[runs.block] for runs, _ in all_runs] or [np.zeros(0, np.int32)])
    starts = np.concatenate([runs.offset for runs, _ in all_runs] or [np.zeros(0, np.int64)])
    sizes = np.concatenate([runs.nbytes for runs, _ in all_runs] or [np.zeros(0, np.int64)])
    total = int(sizes.sum())
    whole = core.recycler.take(total)

    def into(body: Any, nbytes: int) -> memoryview:
        if nbytes != total:
            raise InvalidRequest(f"the store sent {nbytes} bytes where {total} were asked for")
        return whole.data

    answer = yield Ask(
        lane,
        "read",
        [
            plan.block_ids[blocks].tobytes(),
            which.astype(np.int32).tobytes(),
            starts.tobytes(),
            sizes.tobytes(),
            min(max(deadline - time.monotonic(), 0.0), LONGEST_WAIT_S),
        ],
        into=into,
    )
    (gone,) = answer.body
    if gone:
        return gone

    def place() -> None:
        at = 0
        for (runs, places), target in zip(all_runs, data, strict=True):
            size = int(runs.nbytes.sum())
            if size == len(target):
                copy_bytes(whole[at : at + size], target)
                at += size
                continue
            for to, n in zip(places, runs.nbytes.tolist(), strict=True):
                target[to : to + n] = whole[at : at + n]
                at += n

    yield Run(place, total)
    return []


def places_of(plan: ReadPlan, number: int, ids: Sequence[int]) -> list[int]:
    """Where a plan has these blocks of its store `number`; another store may use the same ids."""
    found = (plan.block_store == number) & np.isin(plan.block_ids, ids)
    return np.flatnonzero(found).tolist()


def vanished(partition_id: str, plan: ReadPlan, gone: Sequence[int]) -> KeyNotFound:
    """The error of a read whose blocks went away each time."""
    keys = _keys_of_blocks(plan, np.array(gone))
    return KeyNotFound(
        f"the values of {quote(keys)} in partition {partition_id!r} were cleared or overwritten "
        f"{TRIES} times while they were read: list the partition and ask for what is there",
        partition_id=partition_id,
        keys=keys,
    )


def _keys_of_blocks(plan: ReadPlan, blocks: npt.NDArray[Any]) -> list[str]:
    rows: set[int] = set()
    for field in plan.fields:
        rows.update(np.flatnonzero(np.isin(field.block, blocks)).tolist())
    return [plan.keys[i] for i in sorted(rows)]


# -- containers ------------------------------------------------------------------------------


def field_data(rows: FieldRows, buffer: Bytes) -> FieldData:
    """A field's rows, whose bytes lie back to back in a buffer, as containers are made of them."""
    from dataplane.codec.containers import FieldData

    return FieldData(
        rows.name, rows.schema.dtype, rows.schema.rank, rows.schema.ragged_dim, buffer, rows.shape
    )


def rows_of(plan: ReadPlan, data: Sequence[Bytes], options: GetOptions) -> Rows:
    """Containers over the fields' bytes, in the layout asked for."""
    from dataplane.codec import containers
    from dataplane.codec.dtypes import from_numpy

    unknown = set(options.out) - {rows.name for rows in plan.fields}
    if unknown:
        raise InvalidRequest(f"out= names fields that were not selected: {quote(sorted(unknown))}")
    result = Rows(plan.keys, {}, revision=plan.revision)
    offsets: containers.Offsets = {}
    for rows, buffer in zip(plan.fields, data, strict=True):
        field = field_data(rows, buffer)
        name, pad = rows.name, options.pad_of(rows.name)
        if options.layout == "nested":
            container: Any = containers.nested(field, offsets)
        elif options.layout == "padded":
            container, _ = containers.padded(field, pad)
        elif options.layout == "list":
            container = containers.as_list(field)
        else:
            container, starts = containers.packed(
                field, total=options.total, out=options.out.get(name), pad=pad
            )
            if starts is not None:
                result.cu_seqlens[name] = starts
        result.fields[name] = container
        if rows.schema.ragged_dim is not None and rows.schema.dtype != "object":
            result.lengths[name] = from_numpy(field.lengths.astype(np.int32))
    return result
