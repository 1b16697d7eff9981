"""Where no provider was set, spans go where the standard variables say, by OTLP over HTTP."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import dataplane
from dataplane.telemetry.identity import followed

PUTS: Final = """
import json, sys, dataplane
client = dataplane.connect("exporting", config=json.loads(sys.argv[1]))
client.kv_put("u", "p", tags={"uid": "u", "is_prompt": True})
client.kv_clear(["u"], "p")
"""


def test_spans_are_exported_by_the_standard_variables(plane_settings: dict[str, Any]) -> None:
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
    settings = {**plane_settings, "host": "embedded"}
    try:
        with dataplane.init(settings, name="exporting") as client:
            environment = {
                **os.environ,
                "DATAPLANE_OTEL": "true",
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
                "OTEL_SERVICE_NAME": "rollouts",
            }
            done = subprocess.run(
                [sys.executable, "-c", PUTS, json.dumps(settings)],
                env=environment, capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            of = followed(client.plane_id, "p", "u")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
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
