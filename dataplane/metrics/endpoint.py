"""One HTTP port of a process, in a thread: what is scraped, and what probes ask.

    /metrics    text or OpenMetrics, as the scraper accepts      503 where the loop does not answer
    /healthz    200 while the event loop answers                 503
    /readyz     200 while the process can do its work            503, and why
    /targets    the endpoints of the plane, for http_sd_configs  where this process knows them

Owns the thread and its patience: a loop that is held up or has ended costs whoever asks a bounded
time, and the loop one callback, however often it is asked. Nothing is changed through this port,
and nobody is asked who he is: names of partitions and tasks can be read on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, Final, TypeVar, cast
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import ThreadingWSGIServer, choose_encoder

from dataplane.errors import InvalidRequest
from dataplane.metrics.reading import Joint, Reading

log = logging.getLogger("dataplane.metrics")

SCRAPE_S: Final = 5.0
"""How long a scrape waits for the loop; scrapers give up after 10 s by default."""
PROBE_S: Final = 1.0
"""How long a probe does; a kubelet's own patience is as long."""
SOCKET_S: Final = 5.0
"""How long a connection may say nothing."""
MAX_CONNECTIONS: Final = 16
"""At once; one more ends the oldest, so that nobody can keep scrapers away by holding them."""
STOP_S: Final = 2.0
POLL_S: Final = 0.25
"""Between two looks at whether to stop."""

Answer = TypeVar("Answer")


class NotAnswering(Exception):
    """The event loop did not answer in time, or has ended."""


class Endpoint:
    """The endpoint of one event loop, or of a process that has none (`loop` None)."""

    def __init__(
        self,
        read: Callable[[], Awaitable[Reading]],
        *,
        host: str,
        port: int,
        loop: asyncio.AbstractEventLoop | None,
        unready: Callable[[], str | None] | None = None,
        targets: Callable[[], list[Any]] | None = None,
    ) -> None:
        """Listen, and serve until `close`.

        Args:
            read: makes a reading, on the loop.
            port: 0 for any. One that is taken is not waited for: another one is listened on, and
                the log says so, because no plane is to stay down for its metrics.
            unready: why the process cannot do its work now, asked on the loop; None if it can.
            targets: what `/targets` says, asked on the loop.

        Raises:
            InvalidRequest: there is no such host here.
        """
        self._read = read
        self._loop = loop
        self._unready = unready
        self._targets = targets
        self._lock = threading.Lock()  # guards what is asked of the loop, and the delay
        self._asked: dict[str, Future[Any]] = {}
        self._working: set[asyncio.Task[Any]] = set()
        self._delay_s = 0.0
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._process = registry
        self._server = _bound(host, port, self._serve)
        self.address: tuple[str, int] = (host, int(self._server.server_port))
        """Where it listens."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="dataplane-metrics", daemon=True
        )
        self._thread.start()
        _endpoints.add(self)

    @property
    def target(self) -> str:
        """Host and port, as Prometheus takes them."""
        return target_of(*self.address)

    def close(self) -> None:
        """Stop listening. Repeatable."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(STOP_S)
        self._server.server_close()

    def close_in_child(self) -> None:
        """Let go of a forked child's copy of the port."""
        with contextlib.suppress(OSError):
            self._server.socket.close()

    # -- HTTP --------------------------------------------------------------------------------

    def _serve(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        status, kind, body = self._answer(
            str(environ.get("REQUEST_METHOD", "")),
            str(environ.get("PATH_INFO", "")),
            str(environ.get("HTTP_ACCEPT", "")),
        )
        headers = [("Content-Type", kind), ("Cache-Control", "no-store")]
        if status.startswith("405"):
            headers.append(("Allow", "GET, HEAD"))
        start(status, headers)
        return [body]

    def _answer(self, method: str, path: str, accept: str) -> tuple[str, str, bytes]:
        if method not in ("GET", "HEAD"):
            return _text("405 Method Not Allowed", "only GET and HEAD are answered here")
        try:
            if path == "/metrics":
                encode, kind = choose_encoder(accept)
                return "200 OK", kind, encode(self._scrape())
            if path == "/healthz":
                self.ask("health", _nothing, PROBE_S)
                return _text("200 OK", "the event loop answers")
            if path == "/readyz":
                why = self.ask("ready", self._why_unready, PROBE_S)
                return _text("503 Service Unavailable", why) if why else _text("200 OK", "ready")
            if path == "/targets" and self._targets is not None:
                told = json.dumps(self.ask("targets", self._all_targets, PROBE_S))
                return "200 OK", "application/json", told.encode()
        except NotAnswering as error:
            return _text("503 Service Unavailable", str(error))
        except Exception:
            log.exception("%s could not be answered", path)
            return _text("500 Internal Server Error", "a fault of this endpoint; its log says more")
        here = "/metrics, /healthz, /readyz" + (", /targets" if self._targets else "")
        return _text("404 Not Found", f"there are {here}")

    def _scrape(self) -> Joint:
        reading: Reading = self.ask("scrape", self._read_here, SCRAPE_S)
        if self._loop is not None:
            reading.set("loop_delay_seconds", self._delay_s)
        return Joint(self._process, reading)

    # -- what is asked of the loop -----------------------------------------------------------

    async def _read_here(self) -> Reading:
        return await self._read()

    async def _why_unready(self) -> str | None:
        return None if self._unready is None else self._unready()

    async def _all_targets(self) -> list[Any]:
        assert self._targets is not None
        return self._targets()

    def ask(
        self, what: str, work: Callable[[], Coroutine[Any, Any, Answer]], timeout_s: float
    ) -> Answer:
        """The answer of the loop. `NotAnswering` if there is none in time; what was asked before
        and is not answered yet is not asked once more."""
        loop = self._loop
        if loop is None:
            return asyncio.run(work())
        with self._lock:
            answer = self._asked.get(what)
            if answer is None:
                answer = self._asked[what] = Future()
                try:
                    loop.call_soon_threadsafe(self._begin, what, work, answer, time.monotonic())
                except RuntimeError:
                    del self._asked[what]
                    raise NotAnswering("the event loop has ended") from None
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            raise NotAnswering(f"the event loop did not answer within {timeout_s:g} s") from None

    def _begin(
        self,
        what: str,
        work: Callable[[], Coroutine[Any, Any, Any]],
        answer: Future[Any],
        asked_at: float,
    ) -> None:
        self._delay_s = time.monotonic() - asked_at
        task = asyncio.get_running_loop().create_task(work())
        self._working.add(task)  # a loop itself holds its tasks weakly

        def ended(task: asyncio.Task[Any]) -> None:
            self._working.discard(task)
            with self._lock:
                self._asked.pop(what, None)
            if task.cancelled():
                answer.set_exception(NotAnswering("the event loop is ending"))
            elif (error := task.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

        task.add_done_callback(ended)


class _Handler(WSGIRequestHandler):
    """Says nothing of requests, and waits for none of their bytes for ever."""

    timeout = SOCKET_S
    server_version = "dataplane"
    sys_version = ""

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s %s", self.address_string(), format % args)

    def handle(self) -> None:
        # Who hangs up, or is cut off, is no event.
        with contextlib.suppress(OSError):
            super().handle()


class _Server(ThreadingWSGIServer):
    """Has a bounded number of connections: one more ends the oldest."""

    request_queue_size = MAX_CONNECTIONS

    def __init__(self, *args: Any, **named: Any) -> None:
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._open_lock = threading.Lock()
        super().__init__(*args, **named)

    def server_bind(self) -> None:
        # HTTPServer asks for the host's full name here, which may wait for a name server.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        host, port, *_ = cast("tuple[Any, ...]", self.server_address)
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        oldest = None
        with self._open_lock:
            if len(self._open) >= MAX_CONNECTIONS:
                _, oldest = self._open.popitem(last=False)
            self._open[id(request)] = request
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection to the endpoint failed", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _bound(host: str, port: int, app: Any) -> _Server:
    kind = _Server6 if ":" in host else _Server
    try:
        try:
            return make_server(host, port, app, kind, _Handler)
        except OSError as error:
            if not port:
                raise
            log.warning("port %d of %s cannot be had for metrics: %s", port, host, error)
            return make_server(host, 0, app, kind, _Handler)
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(
            f"metrics cannot be served on host {host!r:.120}: {error}; set metrics_host to an "
            "address of this machine"
        ) from None


def target_of(host: str, port: int) -> str:
    """Host and port in one, as Prometheus takes them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _text(status: str, text: str) -> tuple[str, str, bytes]:
    return status, "text/plain; charset=utf-8", text.encode() + b"\n"


async def _nothing() -> None:
    return None


_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


def _after_fork() -> None:
    for endpoint in list(_endpoints):
        endpoint.close_in_child()


os.register_at_fork(after_in_child=_after_fork)
