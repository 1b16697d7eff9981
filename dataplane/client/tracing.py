"""Traces as a client asks for them, the stage that it is at, and what it says of values.

Values are hashed, and their first elements noted, only where the plane's setting `lineage` asks for
it.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from dataplane.client.core import Core
from dataplane.client.effects import Run, Verb
from dataplane.client.reading import ReadPlan
from dataplane.client.retry import ask_again
from dataplane.errors import DataplaneError
from dataplane.lineage.assemble import assemble
from dataplane.lineage.rows import Trace
from dataplane.lineage.values import Noted, note_of_block, note_of_column
from dataplane.tags.lineage.lineage import HASHES, OFF, PREVIEWS
from dataplane.tags.lineage.question import MAX_LIMIT, Question
from dataplane.types import Revision

if TYPE_CHECKING:
    from dataplane.client.memory import Bytes
    from dataplane.codec.encoded import Encoded
    from dataplane.codec.foreign import Foreign

STAGE_S: Final = 5.0
"""How long it may take to tell the plane of a stage."""
NOTE_S: Final = 5.0
"""How long it may take to tell it of values."""
TAIL_ROWS: Final = 1000
"""Rows of a trace of everything, where it is not said how many."""


def trace(
    core: Core,
    partition_id: str | None,
    uid: str | None,
    key: str | None,
    since: int,
    limit: int | None,
    deadline: float,
    among: Sequence[str] | None = None,
) -> Verb[Trace]:
    """What happened. `among`: the only partitions that are spoken of."""
    answer = yield from ask_trace(core, partition_id, uid, key, since, limit, deadline, among)
    return assemble(answer, partition_id, uid, key, since=since)


def ask_trace(
    core: Core,
    partition_id: str | None,
    uid: str | None,
    key: str | None,
    since: int,
    limit: int | None,
    deadline: float,
    among: Sequence[str] | None = None,
) -> Verb[dict[str, Any]]:
    """What the tag store knows, all parts of its answer joined. The life of a row is told from its
    begin, whatever `since` is: rows before it are left out when it is put together."""
    everything = uid is None and key is None
    most = (TAIL_ROWS if everything else MAX_LIMIT) if limit is None else limit
    begin = since if everything else 0
    Question.checked(partition_id, uid, key, since, most)
    whole: dict[str, Any] | None = None
    while True:
        body: list[Any] = [partition_id, uid, key, begin, most]
        if among is not None:
            body.append(list(among))
        answer: dict[str, Any] = (yield from ask_again(core, "trace", body, deadline)).body
        core.see(answer["revision"])
        if whole is None:
            whole = answer
        else:
            whole["entries"] += answer["entries"]
            whole["clients"] |= answer["clients"]
            whole |= {name: answer[name] for name in ("present", "next", "more", "gone")}
        most -= sum(
            max(1, len(entry.get("rows", ())), len(entry.get("keys", ())))
            for entry in answer["entries"]
        )
        begin = answer["next"]
        if not answer["more"] or most <= 0:
            return whole


def enter_stage(core: Core, stage: str, deadline: float) -> Verb[None]:
    """Be at a stage from now on; at none with an empty name."""
    core.stage = stage
    if core.lineage != OFF:
        yield from ask_again(core, "stage", [stage], deadline)


def notes_values(core: Core) -> bool:
    """Whether the plane wants to know more of values than their lengths."""
    return core.lineage in (HASHES, PREVIEWS)


def note_put(
    core: Core, partition_id: str, keys: list[str], encoded: Encoded | Foreign, revision: Revision
) -> Verb[None]:
    """Tell what was put."""
    work = partial(note_of_block, encoded, previews=core.lineage == PREVIEWS)
    noted: Noted = yield Run(work, encoded.nbytes)
    yield from _note(core, "put", revision.n, partition_id, keys, noted)


def note_get(
    core: Core, partition_id: str, plan: ReadPlan, data: list[Bytes], cut: Container[str]
) -> Verb[None]:
    """Tell what was got, as it lay in the store: without the padding of the container. Nothing is
    said of fields that were cut, which are other bytes than were put."""
    previews = core.lineage == PREVIEWS

    def work() -> Noted:
        noted = Noted([], [], [])
        for rows, column in zip(plan.fields, data, strict=True):
            if rows.name in cut:
                continue
            hashes, shown = note_of_column(
                rows.schema.dtype, memoryview(cast("Any", column)), rows.nbytes, previews=previews
            )
            noted.add(rows.name, hashes, shown)
        return noted

    noted: Noted = yield Run(work, sum(map(len, data)))
    yield from _note(core, "get", plan.revision.n, partition_id, plan.keys, noted)


def _note(
    core: Core, verb: str, n: int, partition_id: str, keys: list[str], noted: Noted
) -> Verb[None]:
    body = [verb, n, partition_id, keys, noted.fields, noted.hashes, noted.previews]
    try:
        yield from ask_again(core, "note", body, time.monotonic() + NOTE_S)
    except DataplaneError:
        pass  # what it is about has happened, and is not undone for the want of a note
