"""A blocking connection to a server: one request at a time, in the calling thread.

No thread stands between caller and socket: a hand-over costs more than the whole round trip.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from dataplane.client.core import Core, StoreView
from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InternalError,
    Unauthenticated,
    Unreachable,
    from_wire,
)
from dataplane.wire import auth
from dataplane.wire.address import Address, Tls, prepare_tcp, whereabouts
from dataplane.wire.channel import CLOSED, Answer, Broken
from dataplane.wire.frames import (
    MAX_HEADER_BYTES,
    OK,
    PREFIX,
    Body,
    Header,
    frame,
    parse_header,
    parse_prefix,
)
from dataplane.wire.sockets import made, made_for

CONNECT_PAUSE_S = 0.02
LONGEST_CONNECT_PAUSE_S = 0.25
NOBODY_LISTENS = (ConnectionRefusedError, FileNotFoundError)
RECEIVE_BYTES = 64 << 10
MAX_REST = 256
"""Calls that do not spin after spinning was in vain, at most."""
BATCH_BYTES = 16 << 20
"""Sent in one go; in between it is heard whether the rest is refused."""
MAX_PIECES = 512
"""Buffers per sendmsg; the kernel takes 1024."""

Alloc = Callable[[Body, int], memoryview]


class Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.greeting: Body = None
        self.plane_id = ""
        self.peer = "the server"
        """Who answers here, for messages."""
        self.local = sock.family == socket.AF_UNIX
        self._socket = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._armed_s = 0.0
        self.spin_s = 0.0
        """How long to look for an answer before sleeping until it comes."""
        self._pause = 0
        self._rest = 0
        if not self._tls:
            sock.settimeout(None)  # the kernel keeps the time, see `_arm`
        self._buffer = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._number = 0
        self.pool: deque[Connection] = deque()
        """Where it rests between calls."""
        self.usable = True
        """False once a request ended half-way: the stream's state is unknown."""
        self._place_lost = False
        """Whether more came than was asked for: the server's reason to close, or damage."""

    @classmethod
    def connect(
        cls,
        address: Address,
        secret: bytes,
        *,
        client_id: str,
        plane_id: str | None,
        tls: Tls | None,
        local: bool,
        deadline: float,
        label: str = "",
        stage: str = "",
    ) -> Connection:
        """A greeted connection. Errors of the socket pass as OSError."""
        if local and address.unix is not None:
            sock = made(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            target: Any = address.unix
        elif address.tcp is not None:
            sock = made_for(address.tcp[0])
            prepare_tcp(sock)
            target = address.tcp
        else:
            raise Unreachable(f"no way from here to {address}")
        try:
            sock.settimeout(_left(deadline))
            sock.connect(target)
            if tls is not None and sock.family != socket.AF_UNIX:
                context, plain = tls.client(), sock
                wrapped = made(lambda: context.wrap_socket(plain, do_handshake_on_connect=False))
                sock = wrapped
                try:
                    wrapped.do_handshake()
                except ssl.SSLError as error:
                    raise Unauthenticated(f"TLS with {address} failed: {error}") from error
            connection = cls(sock)
            connection.peer = f"the server at {address}"
            try:
                challenge = connection._challenge(deadline)
            except (ssl.SSLError, ConnectionError) as error:
                if tls is None or connection.local:
                    raise
                raise Unauthenticated(tls.refused(address)) from error
            mine = os.urandom(auth.CHALLENGE_BYTES)
            proof = auth.client_proof(secret, challenge, mine)
            hello = [client_id, "client", plane_id, mine, proof, whereabouts(label), stage]
            answer = connection.call("hello", hello, deadline)
            shown, connection.plane_id, connection.greeting = auth.greeting_in(answer.body)
            if not auth.matches(shown, auth.server_proof(secret, challenge, mine)):
                raise Unauthenticated(f"the server at {address} does not know the plane's secret")
        except BaseException:
            sock.close()
            raise
        return connection

    def _challenge(self, deadline: float) -> bytes:
        header, _ = self._receive(deadline, None)
        if header.kind != "challenge":
            raise Unauthenticated("the server does not speak this protocol")
        return auth.challenge_in(header.body)

    def call(
        self,
        verb: str,
        body: Body,
        deadline: float,
        payload: Sequence[Any] = (),
        payload_bytes: int = 0,
        into: Alloc | None = None,
    ) -> Answer:
        """The answer to a request, or its error. `into` gives memory for the answer's payload.

        Raises `Broken` if the connection ends first, DeadlineExceeded at the deadline; the
        connection is not usable after either.
        """
        self._number += 1
        started = time.monotonic()
        try:
            whole = self._send(frame(verb, self._number, body, payload_bytes), payload, deadline)
            header, data = self._receive(deadline, into)
            self.usable = whole and not self._place_lost
        except (TimeoutError, BlockingIOError):
            self.usable = False
            raise unanswered(self.peer, verb, time.monotonic() - started) from None
        except (OSError, ssl.SSLError) as error:
            self.usable = False
            raise Broken(str(error)) from error
        except BaseException:
            self.usable = False
            raise
        if header.number != self._number:
            self.usable = False
            if header.number == 0 and header.kind != OK:
                raise from_wire(header.body)
            raise InternalError("the server answered another request than the one asked")
        if header.kind != OK:
            raise from_wire(header.body)
        return Answer(header.body, data)

    def tell(self, verb: str, body: Body, deadline: float) -> None:
        """Send a request that has no answer."""
        try:
            self._send(frame(verb, 0, body), (), deadline)
        except OSError as error:
            self.usable = False
            raise Broken(str(error)) from error

    def is_quiet(self) -> bool:
        """Whether an idle connection is open: at its end, the socket has something to say."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def wait_for_end(self) -> None:
        """Wait until the other side closes it, or `end` does. Nothing may be asked meanwhile."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()

    def end(self) -> None:
        """End it in both directions; who waits on it in another thread is told."""
        self.usable = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.usable = False
        self._socket.close()

    def close_in_child(self) -> None:
        """Close a forked child's copy without a word on the wire."""
        self.usable = False
        fd = self._socket.detach()
        if fd >= 0:
            os.close(fd)

    def _send(self, head: bytes, payload: Sequence[Any], deadline: float) -> bool:
        """Whether all of it was sent: not if an answer comes before, which can but refuse."""
        sock = self._socket
        self._arm(deadline)
        if not payload:
            sock.sendall(head)
            return True
        pieces = deque([head, *payload])
        while True:
            batch, left = _batch(pieces)
            if self._tls:
                for piece in batch:
                    sock.sendall(piece)
            else:
                sent = sock.sendmsg(batch)
                while sent < sum(map(len, batch)):
                    # The deadline's part of the kernel's time is over, or a signal came.
                    batch = _rest(batch, sent)
                    self._arm(deadline)
                    sent = sock.sendmsg(batch)
            if not left:
                return True
            if not self.is_quiet():
                return False
            self._arm(deadline)

    def _receive(self, deadline: float, into: Alloc | None) -> tuple[Header, memoryview]:
        view = self._view
        have = self._spin(view) or self._more(view, deadline)
        while have < PREFIX.size:
            have += self._more(view[have:], deadline)
        header_bytes, payload_bytes = parse_prefix(view, MAX_HEADER_BYTES)
        end = PREFIX.size + header_bytes
        if end > len(view):
            whole = memoryview(bytearray(end))
            whole[:have] = view[:have]
            view = whole
        while have < end:
            have += self._more(view[have:], deadline)
        header = parse_header(view[PREFIX.size : end])
        if not payload_bytes:
            return header, view[:0]
        if into is None:
            raise InternalError("the server answered with a payload where none was asked for")
        data = into(header.body, payload_bytes)
        early = min(have - end, payload_bytes)
        if have - end > payload_bytes:
            self._place_lost = True
        if early:
            data[:early] = view[end : end + early]
        while early < payload_bytes:
            early += self._more(data[early:], deadline)
        return header, data

    def _spin(self, view: memoryview) -> int:
        """Look for the answer for a moment before sleeping until it comes; bytes received.

        Falling asleep and being woken costs more than most answers take. Where they take longer,
        or the cores are busy, looking does not help: then it is tried more and more rarely.
        """
        if self._tls or not self.spin_s:
            return 0
        if self._rest:
            self._rest -= 1
            return 0
        until = time.perf_counter() + self.spin_s
        receive = self._socket.recv_into
        while True:
            try:
                got = receive(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if time.perf_counter() < until:
                    continue
                self._pause = self._rest = min(2 * self._pause + 4, MAX_REST)
                return 0
            self._pause = 0
            return got

    def _more(self, view: memoryview, deadline: float) -> int:
        while True:
            self._arm(deadline)
            try:
                got = self._socket.recv_into(view)
            except BlockingIOError:
                continue  # armed for less than is left, or the deadline: `_arm` tells
            if not got:
                raise ConnectionResetError(CLOSED)
            return got

    def _arm(self, deadline: float) -> None:
        """Let the next system call end near the deadline; TimeoutError if it has passed.

        Python's own timeouts cost two more system calls each. The kernel's are set once and stay
        while they fit: calls mostly have the same deadline.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if self._tls:
            self._socket.settimeout(left)
        elif not 0.5 * left < self._armed_s <= 1.01 * left + 0.01:
            # At least a microsecond, since 0 is no limit; a million of them the kernel refuses.
            value = _TIMEVAL.pack(int(left), min(int(left % 1 * 1e6) + 1, 999_999))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            self._armed_s = left


_TIMEVAL = struct.Struct("ll")


def _batch(pieces: deque[Any]) -> tuple[list[Any], int]:
    """The next buffers to send, taken from the pieces; how many pieces are left."""
    batch: list[Any] = []
    room = BATCH_BYTES
    while pieces and room and len(batch) < MAX_PIECES:
        piece = pieces.popleft()
        if len(piece) > room:
            view = memoryview(piece)
            pieces.appendleft(view[room:])
            piece = view[:room]
        room -= len(piece)
        batch.append(piece)
    return batch, len(pieces)


def _rest(batch: list[Any], sent: int) -> list[Any]:
    """What of the buffers follows the first bytes."""
    rest: list[Any] = []
    for piece in batch:
        if sent < len(piece):
            rest.append(memoryview(piece)[sent:] if sent else piece)
            sent = 0
        else:
            sent -= len(piece)
    return rest


def peer_of(store: StoreView | None, address: Address) -> str:
    """What to call who answers at an address: the tag store with None."""
    return f"the {'tag store' if store is None else f'value store {store.store_id}'} at {address}"


def unanswered(peer: str, verb: str, waited_s: float) -> DeadlineExceeded:
    """The error of who waited in vain for a server's answer."""
    return DeadlineExceeded(
        f"{verb} was not answered within {waited_s:.3f} s",
        waited_s=waited_s,
        explanation=f"{peer} has not answered {verb!r} for {waited_s:.1f} s: it is stopped or "
        "overloaded, or it cannot be reached from here any more",
    )


def connect(core: Core, store: StoreView | None, deadline: float) -> Connection:
    """A new connection to a store, or with None to the tag store.

    Raises:
        PlaneLost: the plane has ended.
        Refused: nobody listens where the value store was: the tag store knows where it is now.
        Unreachable: nobody answered before the deadline.
    """
    pause_s = CONNECT_PAUSE_S
    while True:
        address = core.tags if store is None else store.address
        try:
            connection = Connection.connect(
                address,
                core.joined.secret,
                client_id=core.client_id,
                plane_id=core.joined.plane_id,
                tls=core.config.tls,
                local=core.is_local(store, address),
                deadline=deadline,
                label=core.config.label,
                stage=core.stage,
            )
            connection.peer = peer_of(store, address)
            connection.spin_s = core.config.spin_s
            break
        except (DataplaneError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, DataplaneError):
                raise Unreachable(f"{address} did not answer in time") from None
            reason = look_again(core, store, error)
        if reason is None:
            continue
        if time.monotonic() + pause_s >= deadline:
            raise not_reached(store, address, reason) from reason
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_CONNECT_PAUSE_S)
    greeting = connection.greeting
    if "revision" in greeting:
        core.see(greeting["revision"])
        core.lineage = greeting.get("lineage", "off")
    if store is not None:
        core.probe(store, greeting)
    return connection


def look_again(
    core: Core, store: StoreView | None, error: DataplaneError | OSError
) -> OSError | None:
    """After a try to connect: why to wait and try again, or None to try at once elsewhere. Raises
    what another try would not mend. Blocks, for it may ask the plane's host."""
    if isinstance(error, DataplaneError):
        if store is not None:
            core.not_there(store)  # what is there may be something else by now
        elif core.has_moved():
            return None
        raise error
    if isinstance(error, ConnectionError | FileNotFoundError):
        if store is not None:
            raise core.not_there(store) from error
        if isinstance(error, NOBODY_LISTENS):
            core.find_tags()
        else:
            core.has_moved()
    return error


def not_reached(store: StoreView | None, address: Address, reason: OSError) -> Unreachable:
    """The error of who could not connect before the deadline."""
    return Unreachable(
        f"{peer_of(store, address)} cannot be reached: {reason}; if its process died, it is "
        "started again, and this may be repeated"
    )


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
