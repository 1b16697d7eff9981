"""Views: rows looked at where they lie in shared memory, for as long as a tensor over them lives.

Owns when a view's pins end. Never copies a value that has a tensor's form: what cannot be shown in
place is refused, and says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from dataplane.client.core import Core
from dataplane.client.effects import Done, Hold, Open, Verb
from dataplane.client.get import (
    TRIES,
    GetOptions,
    field_data,
    field_names,
    places_of,
    resolve,
    stores_of,
    vanished,
)
from dataplane.client.memory import Bytes
from dataplane.client.put import as_keys
from dataplane.client.reading import ReadPlan, merge
from dataplane.client.results import Rows
from dataplane.client.retry import FIRST_PAUSE_S, before_next_try
from dataplane.errors import InvalidRequest
from dataplane.telemetry.verbs import spanned
from dataplane.wire.channel import Broken


@spanned("kv_view")
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
    fields = field_names(select_fields)
    pause_s = FIRST_PAUSE_S
    tries = 0
    while True:
        plan = yield from resolve(core, keys, partition_id, fields, False, deadline)
        views: list[_View] = []
        gone: list[int] = []
        try:
            spans: dict[int, _Span] = {}
            for number, store in enumerate((yield from stores_of(core, plan))):
                lane = yield Open(store)
                yield Done(lane)
                if store.mappings is None:
                    raise InvalidRequest(
                        "some of these rows lie on another node; a view needs them on this one: "
                        "use kv_batch_get"
                    )
                ids = plan.block_ids[plan.block_store == number]
                release, missing = yield Hold(store, ids.tobytes())
                gone += places_of(plan, number, missing)
                if release is None:
                    break
                view = _View(release)
                views.append(view)
                for segment in np.unique(plan.block_segment[plan.block_store == number]).tolist():
                    spans[number << 32 | segment] = view.span(store.mappings.readable(segment))
            if not gone:
                return _rows_in_place(plan, spans, options), partial(_close_all, views)
        except Broken as error:
            # As in a get: nothing was changed, so it is simply done again.
            _close_all(views)
            pause_s = yield from before_next_try(error, pause_s, deadline)
            continue
        except BaseException:
            _close_all(views)
            raise
        _close_all(views)
        tries += 1
        if tries == TRIES:
            raise vanished(partition_id, plan, gone)


def _close_all(views: Sequence[_View]) -> None:
    for view in views:
        view.close()


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
            result.fields[rows.name] = containers.as_list(field_data(rows, joined))
            continue
        if len(pieces) == 1:
            field = field_data(rows, pieces[0])
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
                plan.block_store[rows.block].astype(np.int64) << 32 | plan.block_segment[rows.block]
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
