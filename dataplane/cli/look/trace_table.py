"""A trace as a table for people: who it is, what happened key by key, and what to make of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dataplane.cli.output import Column, print_table, width
from dataplane.cli.shown import ABSENT, count_text, value_text, visible
from dataplane.lineage.rows import KEY, PLANE, TAGS

if TYPE_CHECKING:
    from dataplane.lineage.rows import Trace, TraceRow

WIDE: Final = 118
"""From so many letters on, producer and consumer, lengths and versions have columns of their
own."""
SHOWN_REFUSALS: Final = 20
"""Refused requests that are told in words."""
SHOWN_TAGS: Final = ("status", "advantage", "score", "is_padding", "finish_reason", "error_msg")
"""Tags that are worth a word in a narrow table, the first of them that was written."""


class By(StrEnum):
    """What a table is ordered by first."""

    KEY = "key"
    STAGE = "stage"


class _Line(NamedTuple):
    """One line of the table: a row, or several reads of one request together."""

    row: TraceRow
    fields: int
    """How many fields it stands for."""


def print_trace(
    trace: Trace, rows: Sequence[TraceRow], by: By, *, whole: bool, check: bool, preview: bool
) -> None:
    """Print a trace. `whole`: every field that was read on a line of its own; `check`: what could
    not be judged too."""
    _say(_head(trace))
    lines = list(rows_together(rows, apart=whole or preview))
    begin = rows[0].ts if rows else 0.0
    wide = width() >= WIDE
    titles: dict[str, list[_Line]] = {}
    for line in lines:
        titles.setdefault(_title(line.row, by), []).append(line)
    for title, mine in titles.items():
        _say("", title)
        print_table(
            [_cells(line, begin, preview=preview) for line in mine],
            _columns(by, wide=wide, preview=preview),
        )
    _say("", *_foot(trace, check=check))


def rows_together(rows: Iterable[TraceRow], *, apart: bool = False) -> Iterable[_Line]:
    """Rows as lines: what one request read of a key is one line, and tags that came with fields
    are none, unless they are to be apart."""
    listed = list(rows)
    wrote = {(row.number, row.key) for row in listed if row.op == "put" and row.field != TAGS}
    read: dict[tuple[int, str], int] = {}
    for row in listed:
        if row.op == "get":
            read[row.number, row.key] = read.get((row.number, row.key), 0) + 1
    for row in listed:
        place = (row.number, row.key)
        if apart:
            yield _Line(row, 1)
        elif row.op == "get":
            fields = read.pop(place, 0)
            if fields:
                yield _Line(row, fields)
        elif row.field != TAGS or place not in wrote:
            yield _Line(row, 1)


def moment(at: float) -> str:
    """A time of the day in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S.%f")[:-3]


# -- head and foot ---------------------------------------------------------------------------


def _head(trace: Trace) -> str:
    said = [f"uid {trace.uid}" if trace.uid is not None else f"key {trace.key}"]
    if trace.partition_id:
        said.append(f"partition {trace.partition_id}")
    steps = [row.global_steps for row in trace.rows if row.global_steps is not None]
    if steps:
        said.append(f"submitted step {steps[0]}")
    if trace.uid is not None:
        here, due = trace.sessions
        of = f"{here}/{due}" if due is not None else str(here)
        said.append(f"status {trace.status or 'unknown'} ({of} sessions)")
    oldest = [row.min_global_steps for row in trace.rows if row.min_global_steps is not None]
    newest = [row.max_global_steps for row in trace.rows if row.max_global_steps is not None]
    if oldest and newest:
        said.append(f"policy versions {min(oldest)}..{max(newest)}")
    return visible("  ".join(said))


def _foot(trace: Trace, *, check: bool) -> Iterable[str]:
    if trace.findings:
        counts = {
            status: sum(each.status == status for each in trace.findings)
            for status in ("ok", "failed", "not judged")
        }
        yield "checks: " + ", ".join(f"{count} {status}" for status, count in counts.items())
        for each in trace.findings:
            if each.status == "failed":
                yield visible(f"  {each.rule}. {each.name}: FAILED: {each.text}")
            elif check:
                text = f" ({each.text})" if each.text else ""
                yield visible(f"  {each.rule}. {each.name}: {each.status}{text}")
    refused = {row.number: row for row in trace.rows if row.op == "refuse"}
    if refused:
        yield f"refused: {count_text(len(refused))}"
        for row in list(refused.values())[:SHOWN_REFUSALS]:
            yield visible(f"  #{row.number} {row.status}: {row.detail}")
    yield visible(f"fields never read: {', '.join(trace.never_read) or 'none'}")
    if trace.read_by_several:
        several = ", ".join(f"{name} ({n})" for name, n in trace.read_by_several.items())
        yield visible(f"fields read by several: {several}")
    if trace.uid is not None:
        yield visible(f"keys open after clear: {', '.join(trace.open_keys) or 'none'}")
    if trace.gone:
        yield f"older requests are gone: {count_text(trace.gone)}"
    if trace.partial:
        yield "rows may be older than what is remembered: a snapshot or checkpoint was loaded"


# -- lines -----------------------------------------------------------------------------------


def _title(row: TraceRow, by: By) -> str:
    if row.field == PLANE:
        return "the plane"
    if by is By.STAGE:
        return visible(f"stage {row.stage or ABSENT}")
    said = [row.key]
    if row.session_id is not None:
        said.append(f"session {row.session_id} index {row.index}")
    if row.is_padding:
        said.append(f"padding of {row.uid}")
    return visible("  ".join(said))


def _columns(by: By, *, wide: bool, preview: bool) -> list[Column]:
    text: Callable[[Any], str] = value_text
    columns = [Column("number", "#", text, right=True), Column("time", show=text, right=True)]
    if by is By.KEY:
        columns.append(Column("stage"))
    else:
        columns.append(Column("key"))
    columns += [Column("op"), Column("field")]
    if wide:
        columns += [
            Column("producer"), Column("consumer"), Column("value"), Column("len", right=True),
            Column("mask", right=True), Column("steps"), Column("pad"),
        ]  # fmt: skip
    else:
        columns += [Column("who"), Column("value"), Column("mask", right=True)]
    if preview:
        columns += [Column("hash"), Column("preview")]
    return columns


def _cells(line: _Line, begin: float, *, preview: bool) -> dict[str, Any]:
    row = line.row
    cells: dict[str, Any] = {
        "number": row.number,
        "time": f"+{row.ts - begin:.3f}",
        "stage": row.stage or None,
        "key": row.key,
        "op": row.op,
        "field": row.field if line.fields == 1 else f"({line.fields} fields)",
        "producer": row.producer or None,
        "consumer": row.consumer or None,
        "who": (row.consumer if row.op in ("get", "claim", "commit", "release") else "")
        or row.producer
        or row.consumer
        or None,
        "value": _value(row) if line.fields == 1 else None,
        "len": row.len if line.fields == 1 else None,
        "mask": row.mask_sum,
        "steps": _steps(row),
        "pad": "yes" if row.is_padding else None,
    }
    if preview:
        cells |= {"hash": row.hash[:8] or None, "preview": row.preview or None}
    return cells


def _value(row: TraceRow) -> str | None:
    """The value, or what else the row is about, in few letters."""
    if row.status != "ok":
        return row.status
    if row.shape is not None:
        return f"{row.dtype}({','.join(map(str, row.shape))})"
    if row.dtype:
        return row.dtype
    if row.tags:
        for name in SHOWN_TAGS:
            if name in row.tags:
                return f"{name}={value_text(row.tags[name])}"
        return f"{len(row.tags)} tags"
    if row.op in ("claim", "commit", "release"):
        return row.detail.partition(" of ")[0]
    return row.detail if row.field in (KEY, PLANE) else None


def _steps(row: TraceRow) -> str | None:
    if row.global_steps is None:
        return None
    if row.min_global_steps is None:
        return str(row.global_steps)
    return f"{row.global_steps} ({row.min_global_steps}..{row.max_global_steps})"


def _say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
