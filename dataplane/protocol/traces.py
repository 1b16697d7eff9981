"""Traces as messages, and back: a summary, and rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from dataplane.lineage.rows import Finding, Trace, TraceRow
from dataplane.protocol.reports import plain
from dataplane.protocol.values import tags_from, tags_to
from dataplane.v1 import dataplane_pb2 as pb

_PLAIN: Final = tuple(
    field.name for field in pb.TraceRow.DESCRIPTOR.fields if field.message_type is None
)
"""What a row and its message have by the same names."""
_INT64: Final = 1 << 63


def summary_to(trace: Trace) -> pb.TraceSummary:
    """The message of all of a trace but its rows."""
    sessions, due = trace.sessions
    return pb.TraceSummary(
        partition_id=trace.partition_id,
        findings=[
            pb.Finding(
                rule=each.rule, name=each.name, status=each.status, text=each.text,
                records=each.records,
            )
            for each in trace.findings
        ],
        never_read=trace.never_read,
        read_by_several=trace.read_by_several,
        open_keys=trace.open_keys,
        present=trace.present,
        status=trace.status,
        sessions=sessions,
        sessions_due=due,
        gone=trace.gone,
        partial=trace.partial,
        next=trace.next,
        detail=trace.detail,
    )  # fmt: skip


def row_to(row: TraceRow) -> pb.TraceRow:
    """The message of a row."""
    return pb.TraceRow(
        **{name: _carried(getattr(row, name)) for name in _PLAIN},
        shape=None if row.shape is None else pb.ShapeReport(sizes=row.shape),
        tags=None if row.tags is None else tags_to(row.tags),
    )


def _carried(value: Any) -> Any:
    """A value that a message can hold: of a number that is too large nothing is said."""
    if type(value) is int and not -_INT64 <= value < _INT64:
        return None
    return value


def trace_from(
    message: pb.TraceSummary, rows: Iterable[pb.TraceRow], uid: str | None, key: str | None
) -> Trace:
    """The trace of its messages."""
    told = plain(message)
    sessions, due = told.pop("sessions"), told.pop("sessions_due")
    return Trace(
        **told,
        uid=uid,
        key=key,
        rows=[row_from(row) for row in rows],
        findings=[Finding(**plain(each)) for each in message.findings],
        read_by_several=dict(sorted(message.read_by_several.items())),
        sessions=(sessions, due),
    )


def row_from(message: pb.TraceRow) -> TraceRow:
    """The row of a message."""
    return TraceRow(
        **plain(message),
        shape=list(message.shape.sizes) if message.HasField("shape") else None,
        tags=tags_from(message.tags) if message.HasField("tags") else None,
    )
