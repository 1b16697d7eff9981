"""What a fault proxy does to bytes, between sockets of the test: no plane is needed for that."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from dataplane.errors import InvalidRequest
from dataplane.testing import FaultProxy
from dataplane.wire.address import Address
from dataplane.wire.frames import frame
from tests.deadline import eventually

SOON_S = 5.0
NEVER_S = 0.05

ASK = frame("list", 1, ["p"])
PUT = frame("put_block", 2, ["p"], 10) + b"0123456789"
ANSWER = frame(0, 1, "done")


class Wire:
    """A client's socket, the server's end of its connection, and the proxy in between."""

    def __init__(self, stack: ExitStack, *, unix: str | None = None) -> None:
        if unix is None:
            self.listener = socket.create_server(("127.0.0.1", 0))
            address = Address(None, self.listener.getsockname())
        else:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(unix)
            self.listener.listen()
            address = Address(unix)
        self.listener.settimeout(SOON_S)
        stack.enter_context(self.listener)
        self.proxy = stack.enter_context(FaultProxy(address))
        self.stack = stack
        self.client, self.server = self.connect()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        return self.dial(), self.accept()

    def dial(self) -> socket.socket:
        assert self.proxy.address.tcp is not None
        client = socket.create_connection(self.proxy.address.tcp, SOON_S)
        return self.stack.enter_context(client)

    def accept(self) -> socket.socket:
        server, _ = self.listener.accept()
        server.settimeout(SOON_S)
        return self.stack.enter_context(server)


@pytest.fixture
def wire() -> Iterator[Wire]:
    with ExitStack() as stack:
        yield Wire(stack)


def got(sock: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or all there are until the end."""
    data = b""
    while len(data) < nbytes:
        try:
            piece = sock.recv(nbytes - len(data))
        except ConnectionResetError:
            piece = b""
        if not piece:
            return data
        data += piece
    return data


def is_silent(sock: socket.socket) -> bool:
    sock.settimeout(NEVER_S)
    try:
        sock.recv(1)
        return False
    except TimeoutError:
        return True
    finally:
        sock.settimeout(SOON_S)


def was_reset(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) is None
    except ConnectionResetError:
        return True


def has_ended(sock: socket.socket) -> bool:
    """With a reset or without: what was sent meanwhile may have had the error."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def passes(client: socket.socket, server: socket.socket) -> None:
    client.sendall(ASK)
    assert got(server, len(ASK)) == ASK
    server.sendall(ANSWER)
    assert got(client, len(ANSWER)) == ANSWER


def test_everything_passes_and_is_counted(wire: Wire) -> None:
    passes(wire.client, wire.server)
    wire.client.sendall(PUT + ASK)
    assert got(wire.server, len(PUT + ASK)) == PUT + ASK
    assert wire.proxy.frames == (3, 1)
    eventually(lambda: wire.proxy.nbytes == (len(ASK + PUT + ASK), len(ANSWER)), "all is counted")
    assert (wire.proxy.connections, wire.proxy.open) == (1, 1)
    passes(*wire.connect())
    assert (wire.proxy.connections, wire.proxy.open) == (2, 2)


def test_much_passes_in_both_directions_at_once(wire: Wire) -> None:
    data = os.urandom(1 << 20) * 8
    sending = [
        threading.Thread(target=sock.sendall, args=(frame("x", 1, 0, len(data)) + data,))
        for sock in (wire.client, wire.server)
    ]
    for thread in sending:
        thread.start()
    head = len(frame("x", 1, 0, len(data)))
    received: dict[socket.socket, bytes] = {}

    def receive(sock: socket.socket) -> None:
        received[sock] = got(sock, head + len(data))

    receiving = [threading.Thread(target=receive, args=(s,)) for s in (wire.client, wire.server)]
    for thread in (*receiving, *sending):
        if thread in receiving:
            thread.start()
    for thread in (*receiving, *sending):
        thread.join(20)
    assert [all_of[head:] == data for all_of in received.values()] == [True, True]


def test_an_end_is_passed_on_with_what_came_before(wire: Wire) -> None:
    wire.client.sendall(ASK)
    wire.client.close()
    assert got(wire.server, 1000) == ASK
    client, server = wire.connect()
    server.sendall(ANSWER)
    server.close()
    assert got(client, 1000) == ANSWER
    client.close()
    wire.server.close()
    eventually(lambda: not wire.proxy.open, "the connections are closed")


def test_the_last_word_of_a_server_reaches_a_client_that_is_still_sending(wire: Wire) -> None:
    wire.server.sendall(ANSWER)
    wire.server.close()
    wire.client.sendall(PUT)
    wire.client.sendall(PUT)
    assert got(wire.client, 1000) == ANSWER


def test_a_unix_socket_can_be_behind_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="dataplane-") as folder, ExitStack() as stack:
        passes(*_ends(Wire(stack, unix=f"{folder}/s")))


def _ends(wire: Wire) -> tuple[socket.socket, socket.socket]:
    return wire.client, wire.server


def test_delay(wire: Wire) -> None:
    wire.proxy.delay(0.1, of="requests")
    began = time.monotonic()
    wire.client.sendall(ASK)
    assert got(wire.server, len(ASK)) == ASK
    assert time.monotonic() - began >= 0.1
    began = time.monotonic()
    wire.server.sendall(ANSWER)
    assert got(wire.client, len(ANSWER)) == ANSWER
    assert time.monotonic() - began < 0.1
    wire.proxy.heal()
    began = time.monotonic()
    passes(wire.client, wire.server)
    assert time.monotonic() - began < 0.1


def test_throttle(wire: Wire) -> None:
    wire.proxy.throttle(100_000)
    data = frame("x", 1, 0, 20_000) + bytes(20_000)
    began = time.monotonic()
    wire.client.sendall(data)
    assert got(wire.server, len(data)) == data
    assert 0.15 < time.monotonic() - began < 2.0


def test_what_is_dropped_arrives_when_it_heals(wire: Wire) -> None:
    wire.proxy.drop("requests")
    wire.client.sendall(ASK)
    wire.server.sendall(ANSWER)
    assert got(wire.client, len(ANSWER)) == ANSWER
    assert is_silent(wire.server)
    wire.proxy.heal()
    assert got(wire.server, len(ASK)) == ASK


def test_half_open_is_silent_and_ends_with_a_reset(wire: Wire) -> None:
    untouched = wire.connect()
    wire.proxy.half_open()
    wire.client.sendall(ASK)
    wire.server.sendall(ANSWER)
    assert is_silent(wire.server)
    assert is_silent(wire.client)
    new = wire.dial()
    new.sendall(ASK)
    assert is_silent(new)
    wire.proxy.heal()
    for sock in (wire.client, wire.server, new):
        assert was_reset(sock)
    passes(*untouched)


def test_half_open_tells_no_end(wire: Wire) -> None:
    wire.proxy.half_open()
    wire.client.close()
    assert is_silent(wire.server)
    wire.proxy.heal()
    assert was_reset(wire.server)


def test_cut_resets_and_later_connections_pass(wire: Wire) -> None:
    passes(wire.client, wire.server)
    wire.proxy.cut()
    assert was_reset(wire.client)
    assert was_reset(wire.server)
    assert wire.proxy.open == 0
    passes(*wire.connect())


def test_refuse_until_it_heals(wire: Wire) -> None:
    passes(wire.client, wire.server)
    wire.proxy.refuse()
    assert was_reset(wire.client)
    with pytest.raises(ConnectionResetError):
        wire.dial().recv(1)
    wire.proxy.heal()
    passes(*wire.connect())


@pytest.mark.parametrize(
    ("frames", "part", "byte", "arrives"),
    [
        (0, "prefix", 0, b""),
        (0, "prefix", 7, PUT[:7]),
        (0, "header", 0, PUT[:16]),
        (0, "header", -1, PUT[: len(PUT) - 11]),
        (0, "payload", 0, PUT[: len(PUT) - 10]),
        (0, "payload", 4, PUT[: len(PUT) - 6]),
        (0, "payload", -1, PUT[:-1]),
        (1, "prefix", 0, PUT),
        (1, "header", 0, PUT + ASK[:16]),
    ],
)
@pytest.mark.parametrize("slowly", [False, True])
def test_cut_after(
    wire: Wire, frames: int, part: str, byte: int, arrives: bytes, slowly: bool
) -> None:
    wire.proxy.cut_after(frames, part=part, byte=byte)  # pyright: ignore[reportArgumentType]
    for piece in [PUT[i : i + 1] for i in range(len(PUT))] if slowly else [PUT]:
        try:
            wire.client.sendall(piece)
        except OSError:
            break  # it has heard of the cut
    if len(arrives) > len(PUT):
        wire.client.sendall(ASK)
    assert got(wire.server, 1000) == arrives
    assert has_ended(wire.client)
    passes(*wire.connect())


def test_cut_after_of_answers(wire: Wire) -> None:
    wire.proxy.cut_after(part="header", byte=2, of="answers")
    wire.client.sendall(ASK)
    wire.server.sendall(ANSWER)
    assert got(wire.client, 1000) == ANSWER[:18]
    passes(*wire.connect())


@pytest.mark.parametrize(
    ("frame_", "part", "byte", "at"),
    [
        (1, "prefix", 0, 0), (1, "prefix", -1, 15), (2, "header", 3, len(ASK) + 19),
        (2, "payload", 0, len(ASK + PUT) - 10), (2, "payload", -1, len(ASK + PUT) - 1),
        (1, "payload", 0, None), (3, "prefix", 0, None),
    ],
)  # fmt: skip
def test_corrupt(wire: Wire, frame_: int, part: str, byte: int, at: int | None) -> None:
    wire.proxy.corrupt(frame_, part=part, byte=byte, mask=0x80)  # pyright: ignore[reportArgumentType]
    expected = bytearray(ASK + PUT)
    if at is not None:
        expected[at] ^= 0x80
    wire.client.sendall(ASK + PUT)
    assert got(wire.server, len(expected)) == expected


def test_a_byte_is_damaged_once(wire: Wire) -> None:
    wire.proxy.corrupt(1, part="header", byte=0, of="answers")
    for expected in (False, True):
        wire.server.sendall(ANSWER)
        assert (got(wire.client, len(ANSWER)) == ANSWER) is expected
    wire.proxy.corrupt(1, part="header", byte=0)
    wire.proxy.heal()
    passes(wire.client, wire.server)


def test_duplicate_doubles_requests_and_takes_out_the_second_answer(wire: Wire) -> None:
    hello = frame("hello", 1, [])
    tell = frame("unpin", 0, [3])
    second = frame("list", 3, ["q"])
    wire.proxy.duplicate()
    wire.client.sendall(hello + tell + PUT + second)
    expected = hello + tell + PUT + PUT + second + second
    assert got(wire.server, len(expected)) == expected
    refused, answered = frame(1, 2, "no"), frame(0, 3, "q", 3) + b"abc"
    more = frame("free", 4, [1])
    wire.server.sendall(refused + answered + refused + more + answered + ANSWER)
    passed = refused + answered + more + ANSWER
    assert got(wire.client, len(passed)) == passed
    wire.proxy.heal()
    wire.client.sendall(PUT)
    assert got(wire.server, len(PUT)) == PUT
    wire.server.sendall(refused + refused)
    assert got(wire.client, 2 * len(refused)) == refused + refused


def test_a_server_that_is_not_there_is_a_connection_that_is_reset() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = Address(None, listener.getsockname())
    listener.close()
    with FaultProxy(address) as proxy:
        assert proxy.address.tcp is not None
        with (
            pytest.raises(ConnectionResetError),
            socket.create_connection(proxy.address.tcp, SOON_S) as client,
        ):
            client.recv(1)
        eventually(lambda: not proxy.open, "it is closed")


def test_closing_leaves_nothing() -> None:
    def once() -> None:
        with ExitStack() as stack:
            wire = Wire(stack)
            passes(*_ends(wire))
            wire.connect()
            wire.proxy.half_open()
            wire.dial().sendall(ASK)
            wire.client.sendall(ASK)
            wire.proxy.close()
            wire.proxy.close()
            assert was_reset(wire.client)
            with pytest.raises(InvalidRequest):
                wire.proxy.heal()

    once()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        once()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_keeps_no_connection_open(wire: Wire) -> None:
    ready, go = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(go)
        wire.client.close()
        wire.server.close()
        wire.proxy.close()
        os.read(ready, 1)
        os._exit(0)
    try:
        passes(wire.client, wire.server)
        wire.client.close()
        assert got(wire.server, 1) == b""
    finally:
        os.close(ready)
        os.close(go)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda proxy: proxy.delay(0),
        lambda proxy: proxy.throttle(-1),
        lambda proxy: proxy.drop("nothing"),
        lambda proxy: proxy.corrupt(mask=0),
        lambda proxy: proxy.cut_after(of="both"),
    ],
)
def test_what_makes_no_sense_is_refused(wire: Wire, wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(InvalidRequest):
        wrong(wire.proxy)
    passes(wire.client, wire.server)


def test_an_address_without_a_place_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        FaultProxy(Address(None))
