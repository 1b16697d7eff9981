"""Where spans go: to the tracer provider of the process, or to one made from OTEL_… variables."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from dataplane.release import release

log = logging.getLogger("dataplane.telemetry")

SCOPE: Final = "dataplane"
SERVICE: Final = "rl-dataplane"
"""Name of the service where OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say none."""

FLUSH_S: Final = 2.0
"""Longest time that the end of a client is held up by spans that were not sent yet."""

_lock = threading.Lock()  # guards what follows
_said = False
_own: Any = None
"""The provider that was made here, if the program has set none."""


def tracer() -> Any:
    """The tracer of this process; None where nothing can be traced, and why is logged once.

    A provider that the program has set is used as it is. Otherwise one is set, which exports by
    OTLP over HTTP, or as OTEL_TRACES_EXPORTER says (`otlp`, `console` or `none`).
    """
    global _said
    with _lock:
        try:
            return _tracer()
        except ImportError as error:
            why = f"OpenTelemetry is not installed ({error}): pip install 'rl-dataplane[otel]'"
        except Exception as error:
            # Of variables that OpenTelemetry cannot read: no reason to fail who connects.
            why = f"OpenTelemetry cannot be set up: {type(error).__name__}: {error}"
        if not _said:
            log.warning("nothing is traced: %s", why)
        _said = True
        return None


def flush() -> None:
    """Send what was not sent yet, where the provider is one of ours. At most FLUSH_S are waited."""
    own = _own
    if own is None:
        return
    # A collector that does not answer would be waited for until its own timeout.
    sending = threading.Thread(target=own.force_flush, name="dataplane-spans", daemon=True)
    sending.start()
    sending.join(FLUSH_S)


def _tracer() -> Any:
    global _own
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        processors = _processors()
        _own = TracerProvider(resource=_resource())
        for processor in processors:
            _own.add_span_processor(processor)
        trace.set_tracer_provider(_own)
    # One of our own: a provider makes another for whoever asks.
    made: Any = trace.get_tracer(SCOPE, release())
    ids = getattr(made, "id_generator", None)
    if ids is not None:
        made.id_generator = Ids(ids)
    return made


def _resource() -> Any:
    from opentelemetry.sdk.resources import Resource

    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    return Resource.create({} if named else {"service.name": SERVICE})


def _processors() -> list[Any]:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    named = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"  # empty is not set, by the standard
    names = {name.strip() for name in named.split(",")}
    unknown = names - {"otlp", "console", "none"}
    if unknown:
        raise ValueError(
            f"OTEL_TRACES_EXPORTER is of otlp, console and none, not {', '.join(sorted(unknown))}"
        )
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

    @contextmanager
    def given(self, trace_id: int, span_id: int) -> Generator[None]:
        """The span that this thread begins within has these, if it begins a trace."""
        self._given.trace_id, self._given.span_id = trace_id, span_id
        try:
            yield
        finally:
            self._given.__dict__.clear()

    def generate_trace_id(self) -> int:
        """The id of a trace that begins."""
        given = getattr(self._given, "trace_id", None)
        return self._others.generate_trace_id() if given is None else given

    def generate_span_id(self) -> int:
        """The id of a span."""
        given = getattr(self._given, "span_id", None)
        return self._others.generate_span_id() if given is None else given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)
