"""A `BatchMeta` from the controller: rows that a task may have, all rows, new rows, rows of keys;
each verb is one text for threads and event loops.

Owns what the controller is asked, and how its answer becomes a `BatchMeta`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from operator import index as as_index
from typing import Any

import numpy as np

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.groups import GRACE_S
from dataplane.client.retry import seconds_left
from dataplane.errors import InvalidRequest
from dataplane.wire.frames import pack

from ..control.answers import Answer
from ..control.asking import Controller
from ..control.registry import keyless
from ..metadata import BatchMeta
from .row_fields import placeholder, schema_of
from .row_values import READ, new_rows

MODES = ("fetch", "force_fetch", "insert")


def get_meta(
    core: Core,
    deadline: float,
    *,
    controller: Controller,
    fields: list[str],
    count: int,
    partition_id: str,
    mode: str,
    task: str | None,
    sampling: Mapping[str, Any] | None,
) -> Verb[BatchMeta]:
    """The batch that the controller answers a `get_meta` with."""
    if mode not in MODES:
        raise InvalidRequest(f"mode {mode!r:.80} is none of {', '.join(MODES)}")
    count = as_index(count)
    if count < 1 and mode != "force_fetch":
        raise InvalidRequest(f"batch_size is a number of rows, 1 or more, not {count}")
    if mode == "insert":
        indexes = yield from new_rows(core, deadline, controller, partition_id, count, None)
        schema = {name: placeholder() for name in fields}
        keys = [keyless(index) for index in indexes]
        return BatchMeta(indexes, [partition_id] * count, schema, _row_keys=keys)
    if mode == "force_fetch":
        told = yield from controller.ask(core, "force_fetch", [partition_id], deadline)
        return (yield from _described(core, deadline, partition_id, Answer(*told), fields))
    if task is None:
        raise InvalidRequest("get_meta in mode 'fetch' needs a task_name: whose the rows become")
    request = f"{core.client_id}/{secrets.token_hex(6)}"
    arguments = {name: as_plain(value) for name, value in (sampling or {}).items()}

    def body(again: bool) -> list[Any]:
        wait_s = seconds_left(deadline - GRACE_S)
        return [partition_id, fields, count, task, arguments, wait_s, request, again]

    told = yield from controller.ask(core, "fetch", body, deadline)
    return (yield from _described(core, deadline, partition_id, Answer(*told), fields, ready=True))


def meta_of_keys(
    core: Core,
    deadline: float,
    *,
    controller: Controller,
    keys: list[str],
    partition_id: str,
    create: bool,
) -> Verb[BatchMeta]:
    """The batch of these keys, with the fields that all of them have."""
    body = [keys, partition_id, create]
    told = Answer(*(yield from controller.ask(core, "meta_of_keys", body, deadline)))
    return (yield from _described(core, deadline, partition_id, told, told.names))


def _described(
    core: Core,
    deadline: float,
    partition_id: str,
    told: Answer,
    fields: Sequence[str],
    *,
    ready: bool = False,
) -> Verb[BatchMeta]:
    """The batch of the controller's answer, with what the plane knows of its fields."""
    if not told.indexes:
        return BatchMeta()
    known = set(told.names)
    wanted = [name for name in dict.fromkeys(fields) if name in known]
    schema = yield from schema_of(
        core, deadline, partition_id=partition_id, told=told, fields=wanted
    )
    # Fields that no row of the partition has had do not count against a row.
    full = [ready or bool(wanted and set(wanted) <= set(have)) for have in told.sets]
    return BatchMeta(
        told.indexes,
        [partition_id] * len(told.indexes),
        schema,
        np.array([full[code] for code in told.codes], np.int8),
        custom_meta=told.tags,
        _custom_backend_meta=[{READ: pack(row)} if row else {} for row in told.tags],
        _row_keys=told.keys,
    )


def as_plain(value: Any) -> Any:
    """A setting as it travels: scalars of numpy and torch become Python's."""
    return value.item() if hasattr(value, "item") else value
