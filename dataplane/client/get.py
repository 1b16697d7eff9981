"""Gets and views: resolve at the tag store, pin at the value stores, copy or look, let go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from dataplane.client.core import Core, StoreView
from dataplane.client.effects import Ask, Done, Hold, Open, Pause, Run, Tell, Verb
from dataplane.client.memory import Bytes
from dataplane.client.put import FIRST_PAUSE_S, LAST_PAUSE_S, as_keys, list_of, refresh_stores
from dataplane.client.reading import FieldRows, ReadPlan, Runs, merge, plan_read
from dataplane.client.results import Rows
from dataplane.errors import (
    InvalidRequest,
    KeyNotFound,
    PartitionNotFound,
    Unreachable,
    ValueLost,
    quote,
)
from dataplane.fields import pad_value
from dataplane.wire.channel import Broken
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
    fields = _names(select_fields)
    drop = _drops(on_missing)
    for attempt in range(TRIES):
        try:
            plan = yield from _resolve(core, keys, partition_id, fields, drop, deadline)
        except PartitionNotFound:
            if keys:
                raise
            return Rows([], {})  # nothing of nothing, as clearing no keys of it is no error
        plan = _trimmed(plan, options)
        data = [
            core.recycler.take(int(rows.nbytes.sum())) for rows in plan.fields
        ]
        try:
            gone = yield from _fetch(core, plan, data, deadline)
        except Broken as error:
            # A read changes nothing, so it is simply done again.
            if attempt == TRIES - 1:
                raise Unreachable(f"the connection broke {TRIES} times: {error}") from error
            continue
        if not gone:
            return (yield Run(partial(_rows, plan, data, options), 0))
    raise _vanished(partition_id, plan, gone)  # pyright: ignore[reportPossiblyUnboundVariable]


def view_batch(
    core: Core,
    keys: Sequence[str],
    partition_id: str,
    select_fields: Sequence[str] | None,
    layout: str,
    deadline: float,
) -> Verb[tuple[Rows, Callable[[], None]]]:
    """The rows in place, and what ends the look at them."""
    options = GetOptions(layout)
    if layout == "padded":
        raise InvalidRequest("a view cannot be padded without a copy: use kv_batch_get")
    keys = as_keys(keys)
    fields = _names(select_fields)
    for _ in range(TRIES):
        plan = yield from _resolve(core, keys, partition_id, fields, False, deadline)
        views: list[_View] = []
        gone: list[int] = []
        try:
            spans: dict[int, _Span] = {}
            for number, store in enumerate((yield from _stores_of(core, plan))):
                lane = yield Open(store)
                yield Done(lane)
                if store.mappings is None:
                    raise InvalidRequest(
                        "some of these rows lie on another node; a view needs them on this one: "
                        "use kv_batch_get"
                    )
                ids = plan.block_ids[plan.block_store == number]
                release, missing = yield Hold(store, ids.tobytes())
                gone += _places(plan, number, missing)
                if release is None:
                    break
                view = _View(release)
                views.append(view)
                for segment in np.unique(plan.block_segment[plan.block_store == number]).tolist():
                    spans[number << 32 | segment] = view.span(store.mappings.readable(segment))
            if not gone:
                return _rows_in_place(plan, spans, options), partial(_close_all, views)
        except BaseException:
            for view in views:
                view.close()
            raise
        for view in views:
            view.close()
    raise _vanished(partition_id, plan, gone)  # pyright: ignore[reportPossiblyUnboundVariable]


def _close_all(views: Sequence[_View]) -> None:
    for view in views:
        view.close()


# -- steps -----------------------------------------------------------------------------------


def _names(select_fields: Sequence[str] | None) -> list[str] | None:
    if select_fields is None:
        return None
    if isinstance(select_fields, str):
        raise InvalidRequest(f"select_fields is a list; give [{select_fields!r:.80}] for one")
    names = list_of(select_fields, "select_fields")
    if len(set(names)) != len(names):
        raise InvalidRequest(f"select_fields names a field twice: {quote(names)}")
    return names


def _drops(on_missing: str) -> bool:
    if on_missing not in ("raise", "drop"):
        raise InvalidRequest(f"on_missing is 'raise' or 'drop', not {on_missing!r:.80}")
    return on_missing == "drop"


def _resolve(
    core: Core,
    keys: list[str],
    partition_id: str,
    fields: list[str] | None,
    drop: bool,
    deadline: float,
) -> Verb[ReadPlan]:
    pause = FIRST_PAUSE_S
    while True:
        try:
            answer = yield Ask(None, "resolve", [partition_id, keys, fields, drop])
            break
        except Broken as error:
            if time.monotonic() + pause >= deadline:
                raise Unreachable(f"the connection broke and time is up: {error}") from error
        yield Pause(pause)
        pause = min(2 * pause, LAST_PAUSE_S)
    plan = plan_read(keys, answer.body)
    core.see(plan.revision)
    return plan


def _stores_of(core: Core, plan: ReadPlan) -> Verb[list[StoreView]]:
    if any(store_id not in core.stores for store_id in plan.stores):
        yield from refresh_stores(core)
    lost = [store_id for store_id in plan.stores if store_id not in core.stores]
    if lost:
        which = np.isin(plan.block_store, [plan.stores.index(store_id) for store_id in lost])
        keys = _keys_of_blocks(plan, np.flatnonzero(which))
        raise ValueLost(
            f"the value store {quote(lost)} that held {quote(keys)} is not known any more",
            partition_id=None,
            keys=keys,
        )
    return [core.stores[store_id] for store_id in plan.stores]


def _trimmed(plan: ReadPlan, options: GetOptions) -> ReadPlan:
    if not options.trim:
        return plan
    unknown = set(options.trim) - {rows.name for rows in plan.fields}
    if unknown:
        raise InvalidRequest(f"trim names fields that were not selected: {quote(sorted(unknown))}")
    from dataplane.codec.containers import trim_rows

    fields: list[FieldRows] = []
    for rows in plan.fields:
        cut = options.trim.get(rows.name)
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


def _fetch(
    core: Core, plan: ReadPlan, data: Sequence[Bytes], deadline: float
) -> Verb[list[int]]:
    """Fill `data` with the rows of each field; which of the plan's blocks were gone, if any."""
    if not len(plan.block_ids):
        return []
    stores = yield from _stores_of(core, plan)
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
            return _places(plan, number, gone)
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
    """Copy with torch's threads and without the interpreter lock."""
    from dataplane.codec.dtypes import from_numpy

    from_numpy(target).copy_(from_numpy(source))


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
    blocks = np.arange(len(plan.block_ids)) if mine is None else np.flatnonzero(
        plan.block_store == mine
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


def _places(plan: ReadPlan, number: int, ids: Sequence[int]) -> list[int]:
    """Where a plan has these blocks of its store `number`; another store may use the same ids."""
    found = (plan.block_store == number) & np.isin(plan.block_ids, ids)
    return np.flatnonzero(found).tolist()


def _vanished(partition_id: str, plan: ReadPlan, gone: Sequence[int]) -> KeyNotFound:
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


def _field_data(rows: FieldRows, buffer: Bytes) -> FieldData:
    from dataplane.codec.containers import FieldData

    return FieldData(
        rows.name, rows.schema.dtype, rows.schema.rank, rows.schema.ragged_dim, buffer, rows.shape
    )


def _rows(plan: ReadPlan, data: Sequence[Bytes], options: GetOptions) -> Rows:
    from dataplane.codec import containers
    from dataplane.codec.dtypes import from_numpy

    unknown = set(options.out) - {rows.name for rows in plan.fields}
    if unknown:
        raise InvalidRequest(f"out= names fields that were not selected: {quote(sorted(unknown))}")
    result = Rows(plan.keys, {}, revision=plan.revision)
    offsets: containers.Offsets = {}
    for rows, buffer in zip(plan.fields, data, strict=True):
        field = _field_data(rows, buffer)
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


def _rows_in_place(plan: ReadPlan, spans: Mapping[int, _Span], options: GetOptions) -> Rows:
    from dataplane.codec import containers
    from dataplane.codec.dtypes import as_tensor, from_numpy

    result = Rows(plan.keys, {}, revision=plan.revision)
    offsets: containers.Offsets = {}
    for rows in plan.fields:
        runs = merge(rows)
        span_of = (
            plan.block_store[runs.block].astype(np.int64) << 32 | plan.block_segment[runs.block]
        )
        start = plan.block_offset[runs.block] + runs.offset
        pieces = [
            spans[s].array[at : at + n]
            for s, at, n in zip(span_of.tolist(), start.tolist(), runs.nbytes.tolist(), strict=True)
        ]
        if rows.schema.dtype == "object" or not len(rows.nbytes):
            # Python values are made anew in any layout; there is nothing to look at in place.
            joined = np.concatenate(pieces) if pieces else np.zeros(0, np.uint8)
            result.fields[rows.name] = containers.as_list(_field_data(rows, joined))
            continue
        if len(pieces) == 1:
            field = _field_data(rows, pieces[0])
            if options.layout == "list":
                result.fields[rows.name] = containers.as_list(field)
            elif rows.schema.ragged_dim not in (None, 0):
                raise InvalidRequest(
                    f"field {rows.name!r} is ragged in dimension {rows.schema.ragged_dim}, so its "
                    "rows cannot be joined without a copy: use layout='list' or kv_batch_get"
                )
            elif options.layout == "nested":
                result.fields[rows.name] = containers.nested(field, offsets)
            else:
                container, starts = containers.packed(field)
                result.fields[rows.name] = container
                if starts is not None:
                    result.cu_seqlens[rows.name] = starts
        elif options.layout != "list":
            raise InvalidRequest(
                f"the rows of field {rows.name!r} do not lie side by side in this order, so they "
                "cannot be joined without a copy: use layout='list' or kv_batch_get"
            )
        else:
            # Not merged: every row is a tensor of its own.
            span_of = (
                plan.block_store[rows.block].astype(np.int64) << 32
                | plan.block_segment[rows.block]
            )
            start = plan.block_offset[rows.block] + rows.offset
            result.fields[rows.name] = [
                as_tensor(spans[s].array[at : at + n], rows.schema.dtype).view(shape)
                for s, at, n, shape in zip(
                    span_of.tolist(), start.tolist(), rows.nbytes.tolist(), rows.shape.tolist(),
                    strict=True,
                )
            ]  # fmt: skip
        if rows.schema.ragged_dim is not None:
            lengths = rows.shape[:, rows.schema.ragged_dim].astype(np.int32)
            result.lengths[rows.name] = from_numpy(lengths)
    return result


# -- views -----------------------------------------------------------------------------------


class _View:
    """One pin of a view: released when the view is closed and the last tensor over it is gone."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        # Guards the count. Finalizers run in any thread, and within this very lock too.
        self._lock = threading.RLock()
        self._users = 1

    def span(self, segment: Bytes) -> _Span:
        """A segment as this view shows it."""
        with self._lock:
            self._users += 1
        return _Span(segment, self.close)

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._release()


class _Span:
    """A segment under an array of its own, whose end says that no tensor lies over it any more."""

    def __init__(self, segment: Bytes, ended: Callable[[], None]) -> None:
        self.array: Bytes = np.asarray(_Lender(segment, ended))


class _Lender:
    """Base of a view's arrays. numpy keeps it alive under every slice and tensor."""

    def __init__(self, segment: Bytes, ended: Callable[[], None]) -> None:
        self._segment = segment
        self._ended = ended
        self.__array_interface__ = dict(segment.__array_interface__)

    def __del__(self) -> None:
        self._ended()
