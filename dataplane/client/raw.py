"""Rows as they lie, without containers: for who sends them on rather than computes with them.

Looking up and reading are apart, so that memory can be found for a read whose size is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dataplane.client.core import Core
from dataplane.client.get import fetch, resolve
from dataplane.client.retry import FIRST_PAUSE_S, before_next_try
from dataplane.wire.channel import Broken
from dataplane.wire.messages import COMMON

if TYPE_CHECKING:
    from dataplane.client.effects import Verb
    from dataplane.client.memory import Bytes
    from dataplane.client.reading import ReadPlan


@dataclass(frozen=True, slots=True)
class Read:
    """What came of a read."""

    data: list[Bytes] | None
    """Field by field the rows' bytes back to back; None if it has to be looked up again."""
    gone: list[int]
    """The plan's blocks that are not there any more."""


def look_up(
    core: Core,
    keys: list[str],
    partition_id: str,
    fields: Sequence[str] | None,
    drop: bool,
    deadline: float,
) -> Verb[ReadPlan]:
    """Where rows lie, and how large they are. With `fields` None: the fields that all of them have.

    KeyNotFound, FieldNotFound and ValueLost name all that is missing; with `drop` it is left out.
    """
    if fields is not None:
        return (yield from resolve(core, keys, partition_id, list(fields), drop, deadline))
    plan = yield from resolve(core, keys, partition_id, None, COMMON, deadline)
    if drop or len(plan.keys) == len(keys):
        return plan
    names = [field.name for field in plan.fields]
    return (yield from resolve(core, keys, partition_id, names, False, deadline))


def read(core: Core, plan: ReadPlan, deadline: float) -> Verb[Read]:
    """The bytes of rows that were looked up. Unreachable if there is no way to them in time."""
    data = [core.recycler.take(int(rows.nbytes.sum())) for rows in plan.fields]
    try:
        gone = yield from fetch(core, plan, data, deadline)
    except Broken as error:
        yield from before_next_try(error, FIRST_PAUSE_S, deadline)
        return Read(None, [])
    return Read(None if gone else data, gone)
