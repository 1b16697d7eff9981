"""The port: paths and formats, a loop that does not answer, callers that keep connections."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from dataplane.errors import InvalidRequest
from dataplane.metrics import endpoint as module
from dataplane.metrics.endpoint import MAX_CONNECTIONS, Endpoint
from dataplane.metrics.reading import Reading
from tests.dataplane.metrics.scraping import ACCEPTS_OPENMETRICS, Scrape, ask


class Served:
    """An endpoint of an event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.unready: str | None = None
        self.reads = 0
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.endpoint = Endpoint(
            self.read, host="127.0.0.1", port=0, loop=self.loop, unready=lambda: self.unready,
            targets=lambda: [{"targets": ["a:1"], "labels": {}}],
        )  # fmt: skip

    @property
    def target(self) -> str:
        return self.endpoint.target

    async def read(self) -> Reading:
        self.reads += 1
        reading = Reading()
        reading.set("clients", 3)
        reading.set("partition_rows", 1, 'hostile"\\\n{x="y"}')
        return reading

    def end_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        if not self.loop.is_closed():
            self.loop.close()

    def close(self) -> None:
        self.endpoint.close()
        if self.thread.is_alive():
            self.end_loop()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


def test_a_scrape_is_text_that_prometheus_reads(served: Served) -> None:
    scrape = Scrape(served.target)
    assert scrape.value("dataplane_clients") == 3
    assert scrape.value("dataplane_loop_delay_seconds") >= 0
    assert scrape.value("process_resident_memory_bytes") > 0


def test_who_accepts_openmetrics_gets_it(served: Served) -> None:
    page = ask(served.target, accept=ACCEPTS_OPENMETRICS)
    assert page.kind.startswith("application/openmetrics-text")
    assert page.body.endswith("# EOF\n")
    assert Scrape(served.target, accept=ACCEPTS_OPENMETRICS).value("dataplane_clients") == 3


def test_a_hostile_name_is_one_label(served: Served) -> None:
    # A line break cannot be printed, and is replaced before it is anything else.
    assert Scrape(served.target).labels("dataplane_partition_rows", "partition") == {
        'hostile"\\?{x="y"}'
    }


def test_probes(served: Served) -> None:
    assert ask(served.target, "/healthz").status == 200
    assert ask(served.target, "/readyz").status == 200
    served.unready = "the tag store is away"
    page = ask(served.target, "/readyz")
    assert (page.status, page.body) == (503, "the tag store is away\n")
    assert ask(served.target, "/healthz").status == 200


def test_other_paths_and_methods_are_refused(served: Served) -> None:
    assert ask(served.target, "/targets").body == '[{"targets": ["a:1"], "labels": {}}]'
    assert ask(served.target, "/").status == 404
    assert ask(served.target, "/metrics/../etc/passwd").status == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(served.target, method=method).status == 405
    head = ask(served.target, "/healthz", method="HEAD")
    assert (head.status, head.body) == (200, "")


def test_a_loop_that_is_held_up_is_told_of_and_not_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SCRAPE_S", 0.2)
    monkeypatch.setattr(module, "PROBE_S", 0.2)
    let_go, held = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        let_go.wait(30)

    served.loop.call_soon_threadsafe(hold)
    held.wait(10)
    try:
        for _ in range(3):
            page = ask(served.target)
            assert page.status == 503
            assert "did not answer within 0.2 s" in page.body
        assert ask(served.target, "/healthz").status == 503
        assert ask(served.target, "/readyz").status == 503
    finally:
        let_go.set()
    # However often it was asked, the loop has one reading to do when it comes to it.
    monkeypatch.setattr(module, "SCRAPE_S", 10.0)
    assert ask(served.target).status == 200
    assert served.reads <= 2


def test_a_loop_that_has_ended_is_told_of(served: Served) -> None:
    served.end_loop()
    page = ask(served.target)
    assert (page.status, page.body) == (503, "the event loop has ended\n")


def test_an_error_of_a_reading_is_no_scrape(served: Served) -> None:
    async def broken() -> Reading:
        raise ValueError("secret detail")

    served.endpoint._read = broken
    page = ask(served.target)
    assert page.status == 500
    assert "secret" not in page.body


def test_connections_that_say_nothing_keep_nobody_away(served: Served) -> None:
    host, port = served.endpoint.address
    with ExitStack() as stack:
        for _ in range(3 * MAX_CONNECTIONS):
            silent = stack.enter_context(socket.create_connection((host, port), timeout=10))
            silent.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert ask(served.target, "/healthz").status == 200
        assert threading.active_count() < 3 * MAX_CONNECTIONS


@pytest.mark.parametrize(
    "sent",
    [b"\x00" * 100, b"GET", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 70_000, b"\r\n" * 1000],
    ids=["zeros", "cut", "version", "long", "empty"],
)
def test_what_is_no_request_harms_nobody(served: Served, sent: bytes) -> None:
    with socket.create_connection(served.endpoint.address, timeout=10) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    assert ask(served.target, "/healthz").status == 200


def test_a_port_that_is_taken_is_passed_over(served: Served) -> None:
    _, port = served.endpoint.address
    other = Endpoint(served.read, host="127.0.0.1", port=port, loop=served.loop)
    try:
        assert other.address[1] != port
        assert ask(other.target, "/healthz").status == 200
        assert ask(other.target, "/targets").status == 404
    finally:
        other.close()


def test_a_host_that_is_not_here_is_refused(served: Served) -> None:
    with pytest.raises(InvalidRequest, match="metrics_host"):
        Endpoint(served.read, host="203.0.113.1", port=0, loop=served.loop)


def test_closing_gives_the_port_back_at_once(served: Served) -> None:
    began = time.monotonic()
    served.endpoint.close()
    served.endpoint.close()
    assert time.monotonic() - began < 5
    with socket.socket() as again:
        again.bind(served.endpoint.address)


def test_a_forked_child_lets_go_of_the_port(served: Served) -> None:
    child = os.fork()
    if not child:
        code = 1
        try:
            code = int(served.endpoint._server.socket.fileno() != -1)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(served.target, "/healthz").status == 200
