"""Spans of a process as lines of JSON in a file, written when each ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult


class Lines(SpanExporter):
    """Appends each span to a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with Path(self._path).open("a") as file:
            for span in spans:
                file.write(json.dumps(_plain(span)) + "\n")
        return SpanExportResult.SUCCESS


def _plain(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    return {
        "name": span.name,
        "trace": context.trace_id,
        "span": context.span_id,
        "parent": None if span.parent is None else span.parent.span_id,
        "links": [[link.context.trace_id, link.context.span_id] for link in span.links],
        "start": span.start_time,
        "end": span.end_time,
        "status": span.status.status_code.name,
        "attributes": {
            k: v if type(v) is not tuple else list(v) for k, v in (span.attributes or {}).items()
        },
    }


def export_to(path: str) -> None:
    """Set this process's tracer provider to one that writes there, as a program of its own may."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Lines(path)))
    trace.set_tracer_provider(provider)


def spans_in(path: Path) -> list[dict[str, Any]]:
    """What was written there, in the order of starts."""
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda span: span["start"])
