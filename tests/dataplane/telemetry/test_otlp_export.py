"""Where no provider was set, spans go where the standard variables say, by OTLP over HTTP."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import dataplane
from dataplane.telemetry.identity import followed

PUTS: Final = """
import json, sys, dataplane
client = dataplane.connect("exporting", config=json.loads(sys.argv[1]))
client.kv_put("u", "p", tags={"uid": "u", "is_prompt": True})
client.kv_clear(["u"], "p")
"""

AND_DIES: Final = """
import os
client.close()
os._exit(0)
"""


@contextmanager
def collector() -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
    """Where a collector listens, and what it is sent: paths and bodies."""
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            packed = self.headers.get("content-encoding") == "gzip"
            received.append((self.path, gzip.decompress(body) if packed else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port, received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def traced(
    code: str, settings: dict[str, Any], **environment: str
) -> subprocess.CompletedProcess[str]:
    """What a process that traces says."""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(settings)],
        env={**os.environ, "DATAPLANE_OTEL": "true", **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def plane(plane_settings: dict[str, Any]) -> Iterator[dataplane.Client]:
    with dataplane.init({**plane_settings, "host": "embedded"}, name="exporting") as client:
        yield client
        client.close(destroy=True)


@pytest.mark.parametrize("end", ["", AND_DIES], ids=["ends", "dies once its client is closed"])
def test_spans_are_exported_by_the_standard_variables(
    plane: dataplane.Client, plane_settings: dict[str, Any], end: str
) -> None:
    with collector() as (port, received):
        traced(
            PUTS + end, plane_settings,
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}", OTEL_SERVICE_NAME="rollouts",
        )  # fmt: skip
    of = followed(plane.plane_id, "p", "u")
    assert {path for path, _ in received} == {"/v1/traces"}
    spans: dict[str, Any] = {}
    for _, body in received:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert named["service.name"] == "rollouts"
            for scope in resource.scope_spans:
                assert scope.scope.name == "dataplane"
                spans |= {span.name: span for span in scope.spans}
    assert set(spans) == {"dataplane.kv_put", "dataplane.kv_clear"}
    put, clear = spans["dataplane.kv_put"], spans["dataplane.kv_clear"]
    assert {int.from_bytes(span.trace_id, "big") for span in spans.values()} == {of.trace_id}
    assert (int.from_bytes(put.span_id, "big"), put.parent_span_id) == (of.root_id, b"")
    assert int.from_bytes(clear.parent_span_id, "big") == of.root_id


def test_a_collector_that_is_not_there_fails_nothing(
    plane: dataplane.Client, plane_settings: dict[str, Any]
) -> None:
    done = traced(PUTS + AND_DIES, plane_settings, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert "Traceback" not in done.stderr


def test_what_cannot_be_set_up_is_said_and_fails_nothing(
    plane: dataplane.Client, plane_settings: dict[str, Any]
) -> None:
    done = traced(PUTS, plane_settings, OTEL_TRACES_EXPORTER="zipkin")
    assert done.stderr.count("nothing is traced: OpenTelemetry cannot be set up") == 1
    assert "zipkin" in done.stderr
