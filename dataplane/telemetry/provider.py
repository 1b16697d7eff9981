"""Where spans go: to the tracer provider of the process, or to one made from OTEL_… variables."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any, Final

from dataplane.release import release

log = logging.getLogger("dataplane.telemetry")

SCOPE: Final = "dataplane"
SERVICE: Final = "rl-dataplane"
"""Name of the service where OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say none."""

_lock = threading.Lock()  # guards what follows
_missing_said = False


def tracer() -> Any:
    """The tracer of this process; None where OpenTelemetry is not installed, which is said once.

    A provider that the program has set is used as it is. Otherwise one is set, which exports by
    OTLP over HTTP, or as OTEL_TRACES_EXPORTER says (`otlp`, `console` or `none`).
    """
    global _missing_said
    with _lock:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.trace import TracerProvider
        except ImportError:
            if not _missing_said:
                log.warning(
                    "OpenTelemetry is not installed, so nothing is traced: "
                    "pip install 'rl-dataplane[otel]'"
                )
            _missing_said = True
            return None
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            provider = TracerProvider(resource=_resource())
            for processor in _processors():
                provider.add_span_processor(processor)
            trace.set_tracer_provider(provider)
        made = trace.get_tracer(SCOPE, release())
        own: Any = made
        ids = getattr(own, "id_generator", None)
        if ids is not None and not isinstance(ids, Ids):
            own.id_generator = Ids(ids)
        return made


def _resource() -> Any:
    from opentelemetry.sdk.resources import Resource

    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    return Resource.create({} if named else {"service.name": SERVICE})


def _processors() -> list[Any]:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    names = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    found: list[Any] = []
    if "otlp" in names:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        found.append(BatchSpanProcessor(OTLPSpanExporter()))
    if "console" in names:
        found.append(BatchSpanProcessor(ConsoleSpanExporter()))
    return found


class Ids:
    """The ids of spans as their provider makes them, but where a span is to have given ones."""

    def __init__(self, others: Any) -> None:
        self._others = others
        self._given = threading.local()

    def give(self, trace_id: int, span_id: int) -> None:
        """The next span of this thread that begins a trace has these."""
        self._given.trace_id, self._given.span_id = trace_id, span_id

    def generate_trace_id(self) -> int:
        """The id of a trace that begins."""
        given = self._given.__dict__.pop("trace_id", None)
        return self._others.generate_trace_id() if given is None else given

    def generate_span_id(self) -> int:
        """The id of a span."""
        given = self._given.__dict__.pop("span_id", None)
        return self._others.generate_span_id() if given is None else given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)
