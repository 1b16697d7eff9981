"""Verbs about rows, through a gateway: puts, gets, views, clears.

Arguments, results and errors are those of `dataplane.Client`, whose docstrings say what each means.
Owns what differs outside: a view is a copy; with `select_fields` None the fields come that all of
the rows have; Python values and tags are what the protocol carries, so integers have 64 bits, keys
of maps are strings, an array within a value comes back as a tensor, and a number of numpy as one of
Python's. An error names as many keys as its trailers have room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from dataplane.client.get import GetOptions, Layout, Pad, drops, field_names, rows_of, trimmed
from dataplane.client.put import ToPut, as_keys, batch_to_put, flags_of, row_to_put
from dataplane.client.results import Rows
from dataplane.client.tags import Where, plain_where
from dataplane.codec.tags import as_stored
from dataplane.errors import InvalidRequest, quote
from dataplane.outside.reach import Reach, Steps
from dataplane.protocol.values import tags_from, tags_to, to_value
from dataplane.tags.keys import check_keys, check_name
from dataplane.telemetry.verbs import spanned
from dataplane.types import KVBatchMeta, Revision, Tags
from dataplane.v1 import dataplane_pb2 as pb
from dataplane.wire.messages import (
    IF_ABSENT,
    MUST_EXIST,
    RETURN_TAGS,
    is_attempt,
    is_revision,
)

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


@spanned("kv_put")
def kv_put(
    reach: Reach,
    key: str,
    partition_id: str,
    fields: Mapping[str, object] | None = None,
    tags: Mapping[str, object] | None = None,
    *,
    attempt: int | None = None,
    must_exist: bool = False,
    if_absent: bool = False,
    return_tags: bool = False,
    timeout: float | None = None,
) -> Steps[KVBatchMeta]:
    """One row, all of it or nothing."""
    flags = flags_of(must_exist=must_exist, if_absent=if_absent, return_tags=return_tags)
    seconds = reach.seconds(timeout)
    return (
        yield from _put(reach, row_to_put(key, fields, tags), partition_id, flags, attempt, seconds)
    )


@spanned("kv_batch_put")
def kv_batch_put(
    reach: Reach,
    keys: Sequence[str],
    partition_id: str,
    fields: Mapping[str, object] | Sequence[Mapping[str, object]] | TensorDict | None = None,
    tags: Sequence[Mapping[str, object]] | None = None,
    *,
    attempt: int | None = None,
    must_exist: bool = False,
    if_absent: bool = False,
    return_tags: bool = False,
    timeout: float | None = None,
) -> Steps[KVBatchMeta]:
    """Many rows, all or none."""
    flags = flags_of(must_exist=must_exist, if_absent=if_absent, return_tags=return_tags)
    seconds = reach.seconds(timeout)
    return (
        yield from _put(
            reach, batch_to_put(keys, fields, tags), partition_id, flags, attempt, seconds
        )
    )


@spanned("kv_batch_get")
def kv_batch_get(
    reach: Reach,
    keys: Sequence[str],
    partition_id: str,
    select_fields: Sequence[str] | None = None,
    *,
    layout: Layout = "nested",
    pad: Pad | Mapping[str, Pad] | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
    total: int | None = None,
    trim: Mapping[str, tuple[int, int]] | None = None,
    on_missing: str = "raise",
    timeout: float | None = None,
) -> Steps[Rows]:
    """Copies of rows, all of one moment."""
    options = GetOptions(layout, pad, out, total, trim)
    return (
        yield from _get(
            reach, as_keys(keys), partition_id, field_names(select_fields), options,
            drop=drops(on_missing), seconds=reach.seconds(timeout),
        )
    )  # fmt: skip


@spanned("kv_view")
def kv_view(
    reach: Reach,
    keys: Sequence[str],
    partition_id: str,
    select_fields: Sequence[str] | None = None,
    *,
    layout: Layout = "nested",
    timeout: float | None = None,
) -> Steps[Rows]:
    """Copies of rows: from outside there is nothing to look at in place."""
    options = GetOptions(layout)
    if layout == "padded":
        raise InvalidRequest("a view cannot be padded without a copy: use kv_batch_get")
    return (
        yield from _get(
            reach, as_keys(keys), partition_id, field_names(select_fields), options,
            drop=False, seconds=reach.seconds(timeout),
        )
    )  # fmt: skip


@spanned("kv_clear")
def kv_clear(
    reach: Reach,
    keys: Sequence[str] | None,
    partition_id: str,
    *,
    where: Where | None = None,
    retire: bool = False,
    until: Revision | None = None,
    timeout: float | None = None,
) -> Steps[int]:
    """Remove rows; how many there were."""
    seconds = reach.seconds(timeout)
    if (keys is None) == (where is None):
        raise InvalidRequest("clear names keys, or where= for all rows that match; not both")
    check_partition(partition_id)
    message = pb.ClearRequest(partition_id=partition_id, retire=bool(retire))
    if keys is not None:
        names = list(dict.fromkeys(as_keys(keys)))
        if not names:
            return 0
        message.keys.extend(check_keys(names))
    else:
        message.where.CopyFrom(where_of(where))
    if until is not None:
        message.until.CopyFrom(revision_to(until, "until"))
    answer = yield lambda transport: transport.effect("Clear", message, seconds)
    return answer.removed


def check_partition(partition_id: object) -> None:
    """InvalidRequest unless it is a name."""
    if type(partition_id) is not str:
        raise InvalidRequest(f"a partition_id is a string, not {type(partition_id).__name__}")
    check_name(partition_id, "partition_id")


def check_text(text: object, what: str) -> str:
    """A string that can travel. InvalidRequest says what is wrong with it."""
    if type(text) is not str:
        raise InvalidRequest(f"{what} is a string, not {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} {quote([text])} is not valid Unicode") from None
    return text


def where_of(where: Where | None) -> pb.Value:
    """A predicate as it travels."""
    return to_value(plain_where(where), "where")


def revision_to(revision: object, what: str) -> pb.Revision:
    """A revision as it travels. InvalidRequest if it is none."""
    if not isinstance(revision, tuple) or not is_revision(tuple(revision)):  # pyright: ignore[reportUnknownArgumentType] (user input)
        raise InvalidRequest(f"{what} is the revision of an earlier answer, not {revision!r:.80}")
    epoch, n = Revision(*revision)
    return pb.Revision(epoch=epoch, n=n)


def _put(
    reach: Reach,
    brought: ToPut,
    partition_id: str,
    flags: int,
    attempt: int | None,
    seconds: float,
) -> Steps[KVBatchMeta]:
    if attempt is not None and not is_attempt(attempt):
        raise InvalidRequest(f"an attempt is what begin_group answered, not {attempt!r:.80}")
    check_partition(partition_id)
    keys, encoded, packed, tags = brought
    if not keys:
        return KVBatchMeta(partition_id, [], [], [], None)
    check_keys(keys)
    names = [] if encoded is None else sorted(encoded.template.names)
    cells = None
    if encoded is not None and names:
        from dataplane.outside.cells import cells_of_block

        cells = cells_of_block(keys, encoded)
    messages: list[pb.Tags] | None = None
    if packed is not None:
        messages = [
            tags_to(each, f"tags of key {key!r:.200}")
            for key, each in zip(keys, as_stored(tags, packed), strict=True)
        ]
    elif cells is None:
        messages = [pb.Tags() for _ in keys]
    if attempt is not None:
        reach.note_attempt(attempt, partition_id)
    mode = (
        pb.PUT_MODE_MUST_EXIST
        if flags & MUST_EXIST
        else pb.PUT_MODE_IF_ABSENT
        if flags & IF_ABSENT
        else pb.PUT_MODE_UNSPECIFIED
    )
    returns = bool(flags & RETURN_TAGS)
    answer = yield lambda transport: transport.put_rows(
        partition_id,
        keys,
        messages,
        cells,
        mode=mode,
        attempt=attempt or 0,
        return_tags=returns,
        timeout=seconds,
    )
    sent: list[Tags] = cast("list[Any]", list(tags))
    if returns:
        sent = [tags_from(each) for each in answer.tags]
        names = list(answer.fields)
    elif packed is None:
        sent = [{} for _ in keys]
    return KVBatchMeta.checked(partition_id, keys, sent, names, reach.see(answer.revision))


def _get(
    reach: Reach,
    keys: list[str],
    partition_id: str,
    fields: list[str] | None,
    options: GetOptions,
    *,
    drop: bool,
    seconds: float,
) -> Steps[Rows]:
    from dataplane.outside.cells import empty_shape, gather, plan_of

    check_partition(partition_id)
    if not keys:
        return Rows([], {})
    check_keys(keys, unique=False)
    if fields is not None and not all(type(name) is str for name in fields):
        raise InvalidRequest("select_fields is a list of field names")
    for name in fields or ():
        check_text(name, "the field name")
    # No names stand for all fields there: who wants none of them is given none.
    header, shape, data = yield lambda transport: transport.get_rows(
        partition_id, keys, fields or [], drop_missing=drop, timeout=seconds
    )
    if not header.keys:
        shape = empty_shape(header.columns)
    plan, sources = plan_of(list(header.keys), reach.see(header.revision), shape, data)
    if fields is not None:
        places = {rows.name: i for i, rows in enumerate(plan.fields)}
        order = [places[name] for name in fields if name in places]
        plan = plan._replace(fields=[plan.fields[i] for i in order])
        sources = [sources[i] for i in order]
    plan = trimmed(plan, options.trim)
    return rows_of(plan, gather(plan, sources), options)
