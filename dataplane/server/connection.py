"""One accepted connection: greeting, frames in, answers out. It knows no verb.

Data arrive in one receive buffer that all connections of a loop share: a read is consumed before
the next one starts, so ten thousand idle clients hold no buffers. The payload of a put skips that
buffer and lands in the memory that its service names (`Service.accept`).

Nothing is believed before the greeting: no payload, headers of 4 KiB, and five seconds to prove
the plane's secret.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from time import perf_counter
from typing import Any, Protocol, cast

from dataplane.errors import (
    DataplaneError,
    InternalError,
    InvalidRequest,
    PlaneLost,
    Unauthenticated,
    from_wire,
)
from dataplane.metrics.timing import Begun, Meter
from dataplane.wire import auth
from dataplane.wire.frames import (
    MAX_GREETING_BYTES,
    MAX_HEADER_BYTES,
    OK,
    PREFIX,
    Body,
    Header,
    failure,
    frame,
    parse_header,
    parse_prefix,
)

log = logging.getLogger("dataplane.server")

GREETING_S = 5.0
LAST_WORD_S = 1.0
"""How long the reason for closing a connection may take to leave."""
RECEIVE_BYTES = 256 << 10
MAX_LABEL = 200
"""Characters by which a client may say where it runs."""

Verb = Callable[["Connection", int, Body], "Coroutine[Any, Any, None] | None"]


class Payload(Protocol):
    """Where the payload of one frame goes."""

    memory: memoryview

    def complete(self) -> None:
        """All of it has arrived."""
        ...

    def lost(self) -> None:
        """The connection ended first."""
        ...

    def started(self) -> None:
        """The header is here and the rest is still on its way."""
        ...


class Service(Protocol):
    """What stands behind the connections of a process."""

    plane_id: str
    secret: bytes
    verbs: dict[str, Verb]
    meter: Meter | None
    """Measures requests, where somebody wants to know."""

    def served(self, connection: Connection, /) -> None:
        """Something was read from a connection and acted on."""
        ...

    def greet(self, connection: Connection) -> Body:
        """What a new client is told; it may refuse by raising."""
        ...

    def accept(
        self, connection: Connection, header: Header, nbytes: int
    ) -> Payload | asyncio.Future[Payload]:
        """Memory for a payload, now or when there is room. Errors refuse the request."""
        ...

    def gone(self, connection: Connection, *, stopped: bool) -> None:
        """The connection ended; `stopped` is False if the peer may go on using what it held:
        it is on this node, and this side cut it off."""
        ...


_outliving: set[asyncio.Task[None]] = set()
"""Work that no connection ends; a loop itself holds its tasks weakly."""

_shared: dict[int, memoryview] = {}


def _receive_buffer() -> memoryview:
    """The receive buffer of this thread's loop."""
    thread = threading.get_ident()
    buffer = _shared.get(thread)
    if buffer is None:
        buffer = _shared[thread] = memoryview(bytearray(RECEIVE_BYTES))
    return buffer


class Connection(asyncio.BufferedProtocol):
    def __init__(self, service: Service, *, local: bool) -> None:
        self.service = service
        self.local = local
        """Over a unix socket: the peer is on this node and may map segments, and its end closes
        when it stops."""
        self.client_id = ""
        self.role = ""
        self.label = ""
        """What the peer says of itself: where it runs."""
        self.stage = ""
        """And at which stage of training it is."""
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._receive = _receive_buffer()
        self._partial = bytearray()
        self._needed = 0
        """Bytes of `_partial` from which on it is worth a look: a frame's head may come slowly."""
        self._payload: Payload | None = None
        self._payload_at = 0
        self._dropping = 0
        self._waiting = False
        self._cut = False
        self._challenge = os.urandom(auth.CHALLENGE_BYTES)
        self._greeting: asyncio.TimerHandle | None = None
        self._drained: asyncio.Event | None = None
        self._streams = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: dict[int, asyncio.Future[Body]] = {}
        self._number = 0
        self._meter = service.meter
        self.begun: Begun = {}
        """Requests that are not answered yet, where they are measured."""
        self.closed = False

    # -- asyncio -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        loop = asyncio.get_running_loop()
        self._greeting = loop.call_later(GREETING_S, self._greeting_late)
        self.transport.write(frame("challenge", 0, [self._challenge]))

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._payload is not None:
            return self._payload.memory[self._payload_at :]
        return self._receive

    def buffer_updated(self, nbytes: int) -> None:
        if self._payload is not None:
            self._payload_at += nbytes
            if self._payload_at == len(self._payload.memory):
                self._complete()
        elif self._partial:
            self._partial += self._receive[:nbytes]
            if len(self._partial) >= self._needed:
                data = self._partial
                self._partial = bytearray()
                self._feed(memoryview(data))
        else:
            self._feed(self._receive[:nbytes])
        self.service.served(self)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._greeting is not None:
            self._greeting.cancel()
        if self._drained is not None:
            self._drained.set()
        payload, self._payload = self._payload, None
        if payload is not None:
            payload.lost()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(ConnectionResetError("the connection was lost"))
        self._asked.clear()
        if self._meter is not None:
            self._meter.abandon(self.begun)
        for task in list(self._tasks):
            task.cancel()
        if self.client_id:
            self.service.gone(self, stopped=not (self.local and self._cut))

    def pause_writing(self) -> None:
        self._drained = asyncio.Event()
        # Who does not take its answers may not ask for more.
        if not self.closed:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._drained is not None:
            self._drained.set()
            self._drained = None
            if not self.closed and not self._waiting:
                self.transport.resume_reading()

    # -- frames in ---------------------------------------------------------------------------

    def _feed(self, data: memoryview) -> None:
        at, end = 0, len(data)
        self._needed = PREFIX.size
        while at < end and not self.closed:
            if self._dropping:
                drop = min(self._dropping, end - at)
                self._dropping -= drop
                at += drop
                continue
            if end - at < PREFIX.size:
                break
            try:
                limit = MAX_HEADER_BYTES if self.client_id else MAX_GREETING_BYTES
                header_bytes, payload_bytes = parse_prefix(data[at:], limit)
                if payload_bytes and not self.client_id:
                    raise Unauthenticated("prove the plane's secret first")
                if end - at < PREFIX.size + header_bytes:
                    self._needed = PREFIX.size + header_bytes
                    break
                begin = at + PREFIX.size
                header = parse_header(data[begin : begin + header_bytes])
            except DataplaneError as error:
                self.cut(error)
                return
            at = begin + header_bytes
            if not payload_bytes:
                self._dispatch(header)
            else:
                at += self._begin_payload(header, payload_bytes, data[at:])
            if self._waiting or self._payload is not None:
                break
        if at < end and not self.closed:
            # The buffer is shared: what is left of it must be kept before the next read.
            self._partial += data[at:]

    def _begin_payload(self, header: Header, nbytes: int, data: memoryview) -> int:
        """Start taking a payload; how much of `data` belongs to it and was taken."""
        if self._meter is not None and header.number:
            self.begun[header.number] = cast("str", header.kind), perf_counter()
        try:
            place = self.service.accept(self, header, nbytes)
        except Exception as error:
            self._refuse(header, nbytes, error)
            return 0
        if isinstance(place, asyncio.Future):
            self._waiting = True
            self.transport.pause_reading()
            place.add_done_callback(lambda done: self._granted(header, nbytes, done))
            return 0
        return self._fill(place, data)

    def _fill(self, place: Payload, data: memoryview) -> int:
        take = min(len(data), len(place.memory))
        place.memory[:take] = data[:take]
        self._payload, self._payload_at = place, take
        if take == len(place.memory):
            self._complete()
        else:
            place.started()
        return take

    def _granted(self, header: Header, nbytes: int, done: asyncio.Future[Payload]) -> None:
        self._waiting = False
        if self.closed:
            if not done.cancelled() and done.exception() is None:
                done.result().lost()
            return
        data, self._partial = memoryview(self._partial), bytearray()
        error = done.exception()
        if error is not None:
            self._refuse(header, nbytes, error)
        else:
            data = data[self._fill(done.result(), data) :]
        if len(data) and self._payload is None:
            self._feed(data)
        if not self.closed and not self._waiting and self._drained is None:
            self.transport.resume_reading()

    def _complete(self) -> None:
        payload, self._payload = self._payload, None
        assert payload is not None
        payload.complete()

    def _refuse(self, header: Header, nbytes: int, error: BaseException) -> None:
        # The payload is read and dropped, however large: closing with bytes unread would take the
        # reason back from the peer, which would send all of it again. It stops when it hears it.
        self._dropping = nbytes
        self.fail(header.number, self._typed(header.kind, error))

    def _dispatch(self, header: Header) -> None:
        kind, number, body = header
        if type(kind) is int:
            future = self._asked.pop(number, None)
            if future is not None and not future.done():
                if kind == OK:
                    future.set_result(body)
                else:
                    future.set_exception(from_wire(body))
            return
        if not self.client_id:
            self._hello(kind, number, body)
            return
        name = cast("str", kind)
        if self._meter is not None and number:
            self.begun[number] = name, perf_counter()
        verb = self.service.verbs.get(name)
        try:
            if verb is None:
                raise InvalidRequest(f"there is no verb {kind!r:.80}")
            waiting = verb(self, number, body)
        except Exception as error:
            self.fail(number, self._typed(kind, error))
            return
        if waiting is not None:
            task = asyncio.get_running_loop().create_task(self._run(kind, number, waiting))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            # The task may end before it begins, when the connection is lost at once.
            task.add_done_callback(lambda _: waiting.close())

    def outlive(self, kind: str, number: int, work: Coroutine[Any, Any, None]) -> None:
        """Do this work to its end even if the connection is lost; its answer goes nowhere then."""
        task = asyncio.get_running_loop().create_task(self._run(kind, number, work))
        _outliving.add(task)
        task.add_done_callback(_outliving.discard)

    async def _run(self, kind: str | int, number: int, waiting: Coroutine[Any, Any, None]) -> None:
        try:
            await waiting
        except Exception as error:
            self.fail(number, self._typed(kind, error))

    def _typed(self, kind: str | int, error: BaseException) -> DataplaneError:
        if isinstance(error, DataplaneError):
            return error
        if isinstance(error, (TypeError, ValueError, IndexError, KeyError)):
            # A malformed body of a known verb ends here: the verbs unpack what they are given.
            about = {"client": self.client_id, "verb": kind}
            log.warning("malformed %r from %s", kind, self.client_id, exc_info=error, extra=about)
            return InvalidRequest(f"malformed request {kind!r:.80}: {error}")
        about = {"client": self.client_id, "verb": kind}
        log.error("%r from %s failed", kind, self.client_id, exc_info=error, extra=about)
        return InternalError(f"{kind!r:.80} failed: {type(error).__name__}: {error}")

    # -- greeting ----------------------------------------------------------------------------

    def _hello(self, kind: str | int, number: int, body: list[Any]) -> None:
        try:
            if kind != "hello" or type(body) is not list or not 5 <= len(body) <= 7:
                raise Unauthenticated("the first request of a connection is its greeting")
            client_id, role, plane_id, challenge, proof, *about = body
            if not (
                type(client_id) is str and 0 < len(client_id) <= 64
                and role in ("client", "store")
                and type(challenge) is bytes and len(challenge) == auth.CHALLENGE_BYTES
                and type(proof) is bytes
                and all(type(said) is str and len(said) <= MAX_LABEL for said in about)
            ):  # fmt: skip
                raise Unauthenticated("malformed greeting")
            expected = auth.client_proof(self.service.secret, self._challenge, challenge)
            if not auth.matches(proof, expected):
                raise Unauthenticated("the proof of the plane's secret is wrong")
            if plane_id not in (None, self.service.plane_id):
                raise PlaneLost(
                    f"this address now belongs to plane {self.service.plane_id}, not to the "
                    f"plane {plane_id!r:.80} that was joined: connect again"
                )
            self.client_id, self.role = client_id, role
            self.label, self.stage, *_ = *map(_printable, about), "", ""
            answer = self.service.greet(self)
        except DataplaneError as error:
            self.client_id = ""
            self.cut(error, number)
            return
        assert self._greeting is not None
        self._greeting.cancel()
        proof = auth.server_proof(self.service.secret, self._challenge, challenge)
        self.reply(number, [proof, self.service.plane_id, answer])

    def _greeting_late(self) -> None:
        if not self.client_id:
            self.cut(Unauthenticated(f"no greeting within {GREETING_S:g} s"))

    # -- frames out --------------------------------------------------------------------------

    def reply(self, number: int, body: Body) -> None:
        """Answer a request that wants an answer."""
        if number and not self.closed:
            self.transport.write(frame(OK, number, body))
            if self._meter is not None:
                self._meter.end(self.begun, number)

    def fail(self, number: int, error: DataplaneError) -> None:
        """Answer a request with an error."""
        if number and not self.closed:
            self.transport.write(failure(number, error))
            if self._meter is not None:
                self._meter.fail(self.begun, number, error)

    def fail_with(self, number: int, error: BaseException) -> None:
        """Answer a request with whatever went wrong with it, as a typed error."""
        self.fail(number, self._typed("request", error))

    async def reply_with(
        self, number: int, body: Body, payload: Sequence[Any], nbytes: int
    ) -> None:
        """Answer with a payload; returns when it has left for the kernel or the peer is gone.

        The buffers are not copied, so they must stay as they are until then.
        """
        self._streams += 1
        if self._streams == 1:
            # Any byte that the kernel does not take at once pauses writing until it has.
            self.transport.set_write_buffer_limits(high=0)
        try:
            # One call, so that no other answer comes between the header and its payload.
            self.transport.writelines([frame(OK, number, body, nbytes), *payload])
            while self._drained is not None and not self.closed:
                await self._drained.wait()
        finally:
            self._streams -= 1
            if not self._streams and not self.closed:
                self.transport.set_write_buffer_limits()
            if self._meter is not None:
                self._meter.end(self.begun, number)

    def ask(self, kind: str, body: Body) -> asyncio.Future[Body]:
        """Ask the peer something; used by the tag store towards value stores."""
        future: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        if self.closed:
            future.set_exception(ConnectionResetError("the connection was lost"))
            return future
        self._number += 1
        self._asked[self._number] = future
        self.transport.write(frame(kind, self._number, body))
        return future

    def cut(self, error: DataplaneError, number: int = 0) -> None:
        """Say what is wrong and close from this side."""
        if self.closed:
            return
        self._cut = True
        who = self.client_id or "no greeting"
        log.info("closing a connection (%s): %s", who, error, extra={"client": self.client_id})
        self.transport.write(failure(number, error))
        self.transport.close()
        self.closed = True
        # A peer that does not read would keep the connection, and what is on its way, for ever.
        asyncio.get_running_loop().call_later(LAST_WORD_S, self.transport.abort)

    def abort(self, why: str) -> None:
        """Close from this side at once: nothing more of what was written leaves this process."""
        if self.closed:
            return
        self._cut = True
        who = self.client_id or "no greeting"
        log.info("aborting a connection (%s): %s", who, why, extra={"client": self.client_id})
        self.transport.abort()
        self.closed = True


def _printable(said: str) -> str:
    """What a peer says of itself, as it can be shown."""
    return "".join(c if c.isprintable() else "?" for c in said)
