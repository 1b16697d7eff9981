"""The spans of a client that is to trace, where OpenTelemetry is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dataplane.telemetry.provider import tracer

if TYPE_CHECKING:
    from dataplane.telemetry.spans import Spans


def open_spans(plane_id: Callable[[], str], sample: float) -> Spans | None:
    """What makes a client's spans; None where OpenTelemetry is not installed."""
    made = tracer()
    if made is None:
        return None
    from dataplane.telemetry.spans import Spans

    return Spans(made, plane_id, sample)
