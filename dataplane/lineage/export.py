"""A trace for other programs: JSON lines, Chrome's trace viewer, spans. Pure.

A stage's work on a key ends when it writes, and begins where the record before it of the same key
ends, or of its group's prompt for the first: what a span shows is how long a trajectory waited for
each stage and went through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from typing import Any, Final, NamedTuple, cast

from dataplane.errors import InvalidRequest
from dataplane.lineage.rows import PLANE, Trace, TraceRow

_COLUMNS: Final = frozenset(each.name for each in fields(TraceRow))


class Span(NamedTuple):
    """One stage of one key."""

    stage: str
    key: str
    uid: str
    start: float
    """Seconds since 1970."""
    end: float
    attributes: dict[str, Any]


def spans(trace: Trace) -> Iterator[Span]:
    """Every stage of every key of a trace, in the order in which they ended."""
    ends: dict[tuple[str, str], float] = {}
    prompt_at: float | None = None
    runs: dict[tuple[str, str], list[TraceRow]] = {}
    done: list[Span] = []

    def close(place: tuple[str, str]) -> None:
        run = runs.pop(place)
        first, last = run[0], run[-1]
        start = ends.get(place, prompt_at if prompt_at is not None else first.ts)
        ends[place] = last.ts
        done.append(
            Span(
                _stage(first), first.key, first.uid or trace.uid or "", min(start, first.ts),
                last.ts, _attributes(run),
            )
        )  # fmt: skip

    for row in trace.rows:
        if row.field == PLANE:
            continue
        place = (row.partition, row.key)
        run = runs.get(place)
        if run is not None and _stage(run[0]) != _stage(row):
            close(place)
        runs.setdefault(place, []).append(row)
        if row.key == trace.uid and row.op in ("tag", "begin"):
            prompt_at = row.ts
    for place in list(runs):
        close(place)
    yield from sorted(done, key=lambda span: (span.end, span.start, span.key))


def _stage(row: TraceRow) -> str:
    return row.stage or row.op


def _attributes(run: list[TraceRow]) -> dict[str, Any]:
    """What a span says besides: of who, how much, and how it came out."""
    last = run[-1]
    said = {
        "partition": last.partition,
        "session_id": last.session_id,
        "index": last.index,
        "ops": list(dict.fromkeys(row.op for row in run)),
        "fields": list(dict.fromkeys(r.field for r in run if not r.field.startswith("*"))),
        "bytes": sum(row.bytes or 0 for row in run),
        "producer": next((row.producer for row in run if row.producer), None),
        "consumer": next((row.consumer for row in run if row.consumer), None),
        "mask_sum": last.mask_sum,
        "global_steps": last.global_steps,
        "min_global_steps": last.min_global_steps,
        "max_global_steps": last.max_global_steps,
        "is_padding": last.is_padding,
        "revision": last.n,
        "error": next((row.status for row in run if row.status != "ok"), None),
    }
    return {name: value for name, value in said.items() if value not in (None, [], "")}


def chrome(trace: Trace) -> dict[str, Any]:
    """The trace as Chrome's viewer and Perfetto load it: a process per partition, a line per key,
    a bar per stage."""
    processes: dict[str, int] = {}
    lines: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    for span in spans(trace):
        partition = str(span.attributes.get("partition", ""))
        if partition not in processes:
            processes[partition] = len(processes) + 1
            events.append(_named("process_name", processes[partition], 0, f"partition {partition}"))
        pid = processes[partition]
        if (partition, span.key) not in lines:
            lines[partition, span.key] = len(lines) + 1
            events.append(_named("thread_name", pid, lines[partition, span.key], span.key))
        events.append(
            {
                "ph": "X",
                "name": span.stage,
                "cat": "error" if "error" in span.attributes else "stage",
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "pid": pid,
                "tid": lines[partition, span.key],
                "args": {"uid": span.uid, **span.attributes},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def rows_as_data(rows: Iterable[TraceRow]) -> Iterator[dict[str, Any]]:
    """Rows as JSON lines carry them: one object each, under the columns' names."""
    return (asdict(row) for row in rows)


def row_from_data(data: object, line: int) -> TraceRow:
    """The row of a JSON line. InvalidRequest if it is none."""
    if isinstance(data, dict):
        given = cast("dict[str, Any]", data)
        known: dict[str, Any] = {name: given[name] for name in _COLUMNS if name in given}
        if {"number", "n", "ts", "stage", "op"} <= known.keys():
            return TraceRow(**known)
    raise InvalidRequest(f"line {line} is no row of a trace: give what `trace export` wrote")
