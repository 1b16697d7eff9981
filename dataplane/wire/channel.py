"""An asyncio connection to a server: many requests at once, answers in any order.

For asyncio clients, and for a value store that publishes to its tag store.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from dataplane.errors import DataplaneError, InternalError, Unauthenticated, Unreachable, from_wire
from dataplane.wire import auth
from dataplane.wire.address import Address, Tls, prepare_tcp, whereabouts
from dataplane.wire.frames import (
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
from dataplane.wire.sockets import made, made_for

RECEIVE_BYTES = 256 << 10
CLOSED = "the connection was closed"


class Broken(ConnectionError):
    """The connection ended while a request was under way; whether it had an effect is open."""


class Refused(Broken):
    """Nobody listens there now, so nothing was sent."""


class Answer(NamedTuple):
    body: Body
    payload: memoryview


class Channel(asyncio.BufferedProtocol):
    """One connection of one event loop. Requests not answered when it ends raise `Broken`."""

    def __init__(self, on_request: Callable[[Channel, Header], None] | None = None) -> None:
        self.closed = False
        self.greeting: Body = None
        self.plane_id = ""
        self.peer = "the server"
        """Who answers here, for messages."""
        self._on_request = on_request
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._partial = bytearray()
        self._header: Header | None = None
        self._payload: memoryview | None = None
        self._payload_at = 0
        self._dropping = 0
        """Bytes to come of a payload that nobody waits for; no memory is taken for them."""
        self._number = 0
        self._waiting: dict[int, tuple[asyncio.Future[Answer], _Alloc | None, str]] = {}
        self._challenge: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.on_lost: Callable[[], None] | None = None
        """Told when it ends, unless this side has closed it."""
        self._left = False
        self.received = 0
        """Whole frames that have come."""
        self.local = True
        """Over a unix socket, whose end cannot go unnoticed."""

    @classmethod
    async def connect(
        cls,
        address: Address,
        secret: bytes,
        *,
        client_id: str,
        role: str = "client",
        plane_id: str | None = None,
        tls: Tls | None = None,
        local: bool = True,
        on_request: Callable[[Channel, Header], None] | None = None,
        label: str = "",
        stage: str = "",
    ) -> Channel:
        """A greeted connection. Errors of the socket pass as OSError."""
        loop = asyncio.get_running_loop()
        if local and address.unix is not None:
            sock = made(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            await _connected(loop, sock, address.unix)
            _, channel = await loop.create_unix_connection(lambda: cls(on_request), sock=sock)
        elif address.tcp is not None:
            sock = made_for(address.tcp[0])
            prepare_tcp(sock)
            await _connected(loop, sock, address.tcp)
            context = tls.client() if tls else None
            name = address.tcp[0] if tls else None
            try:
                _, channel = await loop.create_connection(
                    lambda: cls(on_request), sock=sock, ssl=context, server_hostname=name
                )
            except ssl.SSLError as error:
                raise Unauthenticated(f"TLS with {address} failed: {error}") from error
            channel.local = False
        else:
            raise Unreachable(f"no way from here to {address}")
        try:
            try:
                challenge = await channel._challenge
            except Broken as error:
                if tls is None or local:
                    raise
                raise Unauthenticated(tls.refused(address)) from error
            mine = os.urandom(auth.CHALLENGE_BYTES)
            proof = auth.client_proof(secret, challenge, mine)
            hello = [client_id, role, plane_id, mine, proof, whereabouts(label), stage]
            answer = await channel.call("hello", hello)
            shown, channel.plane_id, channel.greeting = auth.greeting_in(answer.body)
            if not auth.matches(shown, auth.server_proof(secret, challenge, mine)):
                raise Unauthenticated(f"the server at {address} does not know the plane's secret")
        except BaseException:
            channel.close()
            raise
        return channel

    async def call(
        self,
        verb: str,
        body: Body,
        payload: Sequence[Any] = (),
        payload_bytes: int = 0,
        into: _Alloc | None = None,
    ) -> Answer:
        """The answer to a request, or its error. `into` gives memory for the answer's payload."""
        return await self.send(verb, body, payload, payload_bytes, into)

    def send(
        self,
        verb: str,
        body: Body,
        payload: Sequence[Any] = (),
        payload_bytes: int = 0,
        into: _Alloc | None = None,
    ) -> asyncio.Future[Answer]:
        """Send a request now; its answer comes with the future."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self.closed:
            future.set_exception(Broken(CLOSED))
            return future
        self._number += 1
        self._waiting[self._number] = (future, into, verb)
        head = frame(verb, self._number, body, payload_bytes)
        if payload_bytes:
            self._transport.writelines([head, *payload])
        else:
            self._transport.write(head)
        return future

    def tell(self, verb: str, body: Body) -> None:
        """Send a request that has no answer."""
        if not self.closed:
            self._transport.write(frame(verb, 0, body))

    def answer(self, number: int, body: Body) -> None:
        """Answer a request that the server asked of this side."""
        if not self.closed:
            self._transport.write(frame(OK, number, body))

    def refuse(self, number: int, error: DataplaneError) -> None:
        """Answer a request that the server asked of this side with an error."""
        if not self.closed:
            self._transport.write(failure(number, error))

    def close(self) -> None:
        self.closed = self._left = True
        if self._transport is not None:  # pyright: ignore[reportUnnecessaryComparison]
            self._transport.close()

    def is_sending(self) -> bool:
        """Whether some bytes have not left for the kernel yet."""
        return self._transport.get_write_buffer_size() > 0

    def abort(self) -> None:
        """Close at once, without the bytes that have not left yet."""
        self.closed = True
        self._transport.abort()

    def fileno(self) -> int:
        """The socket's descriptor, so that a forked child can close its copy."""
        raw: Any = self._transport.get_extra_info("socket")
        return -1 if raw is None else int(raw.fileno())

    # -- asyncio -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        # What the peer may not send, it may not be asked to send again.
        error = exc if isinstance(exc, DataplaneError) else Broken(str(exc) if exc else CLOSED)
        if not self._challenge.done():
            self._challenge.set_exception(error)
            self._challenge.exception()  # a connect that was given up does not look
        for future, _, _ in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()
        if self.on_lost is not None and not self._left:
            self.on_lost()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._payload is not None:
            return self._payload[self._payload_at :]
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._payload is not None:
                self._payload_at += nbytes
                if self._payload_at == len(self._payload):
                    self._finish()
                return
            if self._partial:
                self._partial += self._buffer[:nbytes]
                data, self._partial = self._partial, bytearray()
                self._feed(memoryview(data))
            else:
                self._feed(self._buffer[:nbytes])
        except DataplaneError as error:
            self._end_of(error)
        except (TypeError, ValueError, IndexError, KeyError) as error:
            # A malformed body ends here, as it does on the other side.
            self._end_of(InternalError(f"{self.peer} sent what is none of its messages: {error}"))

    def _end_of(self, error: DataplaneError) -> None:
        self._transport.abort()
        self.connection_lost(error)

    def _feed(self, data: memoryview) -> None:
        at, end = 0, len(data)
        while True:
            dropped = min(self._dropping, end - at)
            self._dropping -= dropped
            at += dropped
            if end - at < PREFIX.size:
                break
            header_bytes, payload_bytes = parse_prefix(data[at:], MAX_HEADER_BYTES)
            begin = at + PREFIX.size
            if end - begin < header_bytes:
                break
            self._header = parse_header(data[begin : begin + header_bytes])
            at = begin + header_bytes
            if payload_bytes and not self._is_awaited(self._header):
                self._dropping, payload_bytes = payload_bytes, 0
            self._payload = self._memory(self._header, payload_bytes)
            self._payload_at = min(payload_bytes, end - at)
            if self._payload_at:
                self._payload[: self._payload_at] = data[at : at + self._payload_at]
                at += self._payload_at
            if self._payload_at < payload_bytes:
                return
            self._finish()
        if at < end:
            self._partial += data[at:]

    def _is_awaited(self, header: Header) -> bool:
        """Whether it answers somebody who still waits."""
        waiting = self._waiting.get(header.number)
        return type(header.kind) is int and waiting is not None and not waiting[0].done()

    def _memory(self, header: Header, nbytes: int) -> memoryview:
        if not nbytes:
            return memoryview(b"")
        _, into, _ = self._waiting[header.number]
        if into is None:
            raise InternalError("the server answered with a payload where none was asked for")
        return into(header.body, nbytes)

    def _finish(self) -> None:
        header, payload = self._header, self._payload
        assert header is not None
        assert payload is not None
        self.received += 1
        self._header = self._payload = None
        kind, number, body = header
        if type(kind) is str:
            if kind == "challenge":
                if not self._challenge.done():
                    self._challenge.set_result(auth.challenge_in(body))
            elif self._on_request is not None:
                self._on_request(self, header)
            return
        future, _, verb = self._waiting.pop(number, (None, None, ""))
        if kind != OK and number == 0:
            # The server says why it closes the connection.
            error = from_wire(body)
            for waiting, _, _ in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(error)
            if not self._challenge.done():
                self._challenge.set_exception(error)
        if future is None or future.done():
            if kind == OK and verb in _GIVE_BACK:
                # Who asked was cancelled; what it was given would be held as long as we are.
                self.tell(_GIVE_BACK[verb], [body[0]])
            return
        if kind == OK:
            future.set_result(Answer(body, payload))
        else:
            future.set_exception(from_wire(body))


async def _connected(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, target: str | tuple[str, int]
) -> None:
    """Connect a socket, or close it."""
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise


_Alloc = Callable[[Body, int], memoryview]

_GIVE_BACK = {"reserve": "abort", "pin": "unpin"}
"""The verb that gives back what another one granted: the first part of its answer."""
