"""Strangers at the port: what does not prove the plane's secret is refused, and harms nobody.

A live plane, on its unix socket and on TCP, plain and in TLS. What clients that are known send
is in `test_hostile_requests`.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import random
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import trustme

import dataplane
from dataplane.client.aio import AsyncClient
from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.errors import (
    DataplaneError,
    InvalidRequest,
    PlaneLost,
    Unauthenticated,
    Unreachable,
)
from dataplane.server import connection as server_connection
from dataplane.wire import auth
from dataplane.wire.address import Address
from dataplane.wire.frames import MAGIC, OK, PREFIX, frame
from tests.deadline import eventually
from tests.faults import planes
from tests.faults.planes import MiB, Plane
from tests.faults.raw import Raw

ROW = {"x": torch.arange(1000)}


class Canary:
    """A pickle of this makes a file when somebody loads it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def plane(roots: dict[str, Path]) -> Generator[Plane]:
    with ExitStack() as stack:
        plane = planes.start(stack, "port", tcp_host="127.0.0.1", timeout_s=20, **roots)
        plane.client.kv_put("A", "p", ROW, {"n": 1})
        plane.client.kv_batch_put(
            [f"k{i}" for i in range(3000)], "wide", None, [{"n": 1, "text": "x" * 20}] * 3000
        )
        yield plane


@pytest.fixture(params=["unix", "tcp"])
def tcp(request: pytest.FixtureRequest) -> bool:
    return request.param == "tcp"


@pytest.fixture(autouse=True)
def nobody_is_harmed(plane: Plane) -> Generator[None]:
    """Whatever a test does to the port: the same rows and sizes are there after it, the process
    is the same, and a client that was there before goes on."""

    def sizes() -> dict[str, Any]:
        status = plane.client.status()
        for changing in ("worst_slice_ms", "clients", "kept", "uptime_s", "time_s", "totals"):
            status.pop(changing, None)
        return status

    before = sizes()
    yield
    # What connections that are cut off had under way ends within moments.
    eventually(lambda: sizes() == before, f"the plane is as before: {before}")
    assert plane.reads("A", "p") == list(range(1000))
    with plane.another() as late:
        assert late.kv_list("p").tags == [{"n": 1}]


def refusal(plane: Plane, data: bytes, *, tcp: bool) -> Exception:
    with Raw.to(plane.joined, tcp=tcp) as raw:
        raw.send(data)
        return raw.refusal()


def prefixed(header_bytes: int, payload_bytes: int, magic: bytes = MAGIC) -> bytes:
    return PREFIX.pack(magic, header_bytes, payload_bytes)


def hello(*parts: object) -> bytes:
    return frame("hello", 1, list(parts))


NONCE = b"n" * auth.CHALLENGE_BYTES

STREAMS: list[tuple[str, bytes, type[DataplaneError], str]] = [
    ("random bytes", random.Random(0).randbytes(100_000), InvalidRequest, "are not a frame"),
    ("http", b"GET / HTTP/1.1\r\nHost: plane\r\n\r\n", InvalidRequest, "are not a frame"),
    ("a pickle", pickle.dumps(list(range(100))), InvalidRequest, "are not a frame"),
    ("no magic", prefixed(10, 0, b"XYZ\1") + b"x" * 10, InvalidRequest, "are not a frame"),
    ("another version", prefixed(10, 0, b"DPF\x63"), InvalidRequest, "version 99"),
    ("header of 4 GiB", prefixed(2**32 - 1, 0), InvalidRequest, "at most 4096 are accepted"),
    ("header of 5 kB", prefixed(5000, 0), InvalidRequest, "header of 5000 bytes"),
    ("payload of 2^63", prefixed(10, 2**63), InvalidRequest, f"payload of {2**63} bytes"),
    ("no msgpack", prefixed(3, 0) + b"\xc1\xc1\xc1", InvalidRequest, "not msgpack"),
    ("an open end", prefixed(3, 0) + b"\x93\x93\x93", InvalidRequest, "not msgpack"),
    ("more than one value", prefixed(3, 0) + b"\x01\x02\x03", InvalidRequest, "not msgpack"),
    ("a map", prefixed(1, 0) + b"\x80", InvalidRequest, r"\[kind, number, body\]"),
    ("a list of two", prefixed(3, 0) + b"\x92\x01\x02", InvalidRequest, r"\[kind, number"),
    ("negative number", frame("hello", -1, []), InvalidRequest, r"\[kind, number, body\]"),
    ("a kind of none", frame(cast("Any", None), 1, []), InvalidRequest, r"\[kind, number"),
    ("payload first", prefixed(10, 1), Unauthenticated, "secret first"),
    ("a verb first", frame("status", 1, []), Unauthenticated, "is its greeting"),
    ("a put first", frame("put_tags", 1, [b"", b""]), Unauthenticated, "is its greeting"),
    ("no body", frame("hello", 1, None), Unauthenticated, "is its greeting"),
    ("four parts", hello("c", "client", None, NONCE), Unauthenticated, "is its greeting"),
    ("no client", hello("", "client", None, NONCE, NONCE), Unauthenticated, "malformed"),
    ("long client", hello("c" * 65, "client", None, NONCE, NONCE), Unauthenticated, "malformed"),
    ("client of bytes", hello(b"c", "client", None, NONCE, NONCE), Unauthenticated, "malformed"),
    ("unknown role", hello("c", "admin", None, NONCE, NONCE), Unauthenticated, "malformed"),
    ("role of a list", hello("c", ["client"], None, NONCE, NONCE), Unauthenticated, "malformed"),
    ("short nonce", hello("c", "client", None, b"n", NONCE), Unauthenticated, "malformed"),
    ("nonce of text", hello("c", "client", None, "n" * 32, NONCE), Unauthenticated, "malformed"),
    ("proof of text", hello("c", "client", None, NONCE, "p" * 32), Unauthenticated, "malformed"),
    ("empty proof", hello("c", "client", None, NONCE, b""), Unauthenticated, "proof"),
    ("a wrong proof", hello("c", "client", None, NONCE, NONCE), Unauthenticated, "proof"),
]


@pytest.mark.parametrize(
    ("data", "kind", "says"),
    [pytest.param(data, kind, says, id=name) for name, data, kind, says in STREAMS],
)
def test_a_stranger_is_told_what_is_wrong_and_closed(
    plane: Plane, tcp: bool, data: bytes, kind: type[DataplaneError], says: str
) -> None:
    error = refusal(plane, data, tcp=tcp)
    assert type(error) is kind
    assert says.replace("\\", "") in str(error)


def test_a_pickle_is_never_loaded(plane: Plane, tcp: bool, tmp_path: Path) -> None:
    path = tmp_path / "executed"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(Canary(str(path)), protocol)
        assert isinstance(refusal(plane, data.ljust(16, b"."), tcp=tcp), InvalidRequest)
        assert isinstance(refusal(plane, prefixed(len(data), 0) + data, tcp=tcp), InvalidRequest)
        greeting = hello("c", "client", data, NONCE, data)
        assert isinstance(refusal(plane, greeting, tcp=tcp), Unauthenticated)
    assert not path.exists()
    pickle.loads(data)  # noqa: S301 (the canary does sing)
    assert path.exists()


# -- proofs ----------------------------------------------------------------------------------


def test_a_recorded_greeting_is_useless_on_another_connection(plane: Plane, tcp: bool) -> None:
    joined = plane.joined
    with Raw.to(joined, tcp=tcp) as first:
        mine = os.urandom(auth.CHALLENGE_BYTES)
        proof = auth.client_proof(joined.secret, first.challenge(), mine)
        recorded = hello("c", "client", joined.plane_id, mine, proof)
        first.send(recorded)
        first.answer(1)
        with Raw.to(joined, tcp=tcp) as second:
            second.send(recorded)
            error = second.refusal()
    assert isinstance(error, Unauthenticated)
    assert "proof" in str(error)


def test_what_a_server_shows_is_no_proof_of_a_client(plane: Plane, tcp: bool) -> None:
    joined = plane.joined
    with Raw.to(joined, tcp=tcp) as raw:
        challenge = raw.challenge()
        shown = auth.server_proof(joined.secret, challenge, NONCE)
        raw.send(hello("c", "client", joined.plane_id, NONCE, shown))
        assert isinstance(raw.refusal(), Unauthenticated)


def test_a_client_with_another_secret_is_refused_at_once(plane: Plane, tcp: bool) -> None:
    tags = plane.joined.tags if not tcp else Address(None, plane.joined.tags.tcp)
    stranger = replace(plane.joined, secret=b"s" * auth.SECRET_BYTES, tags=tags)
    with Client(stranger, plane.config) as client, pytest.raises(Unauthenticated):
        client.kv_list("p")


async def test_an_asyncio_client_with_another_secret_is_refused_at_once(plane: Plane) -> None:
    client = AsyncClient(replace(plane.joined, secret=b"s" * 32), plane.config)
    with pytest.raises(Unauthenticated):
        await client.kv_list("p")
    await client.close()


def test_a_client_of_another_plane_is_told_so(plane: Plane, tcp: bool) -> None:
    with Raw.to(plane.joined, tcp=tcp) as raw:
        with pytest.raises(PlaneLost, match=plane.joined.plane_id):
            raw.hello(plane.joined.secret, plane_id="0" * 16)
        assert raw.ended()


def test_nobody_is_a_store_of_a_plane_whose_store_is_in_its_own_process(
    plane: Plane, tcp: bool
) -> None:
    with Raw.to(plane.joined, tcp=tcp) as raw:
        with pytest.raises(dataplane.PermissionDenied):
            raw.hello(plane.joined.secret, role="store", plane_id=plane.joined.plane_id)
        assert raw.ended()


@pytest.fixture
def impostor(tmp_path: Path) -> Generator[Callable[[bytes], Joined]]:
    """A server that does not know the secret: it answers every greeting as given."""
    path = str(tmp_path / "s")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()

    answers: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                sock.sendall(frame("challenge", 0, [NONCE]))
                if sock.recv(4096):
                    sock.sendall(answers[0])
                sock.recv(4096)

    thread = threading.Thread(target=serve)
    thread.start()

    def answering(answer: bytes) -> Joined:
        answers[:] = [answer]
        return Joined("fake", "0" * 16, b"s" * 32, Address(path))

    yield answering
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (frame(0, 1, [NONCE, "0" * 16, {}]), Unauthenticated),
        (frame(0, 1, [b"", "0" * 16, {}]), Unauthenticated),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", InvalidRequest),
        (prefixed(2**32 - 1, 0), InvalidRequest),
        (prefixed(10, 2**63), InvalidRequest),
    ],
    ids=["wrong proof", "no proof", "http", "header of 4 GiB", "payload of 2^63"],
)
def test_a_server_that_does_not_know_the_secret_gets_nothing_from_a_client(
    impostor: Callable[[bytes], Joined], plane: Plane, answer: bytes, kind: type[DataplaneError]
) -> None:
    with Client(impostor(answer), plane.config) as client, pytest.raises(kind):
        client.kv_put("A", "p", ROW, timeout=5)

    async def asyncio_client() -> None:
        client = AsyncClient(impostor(answer), plane.config)
        with pytest.raises(kind):
            await client.kv_put("A", "p", ROW, timeout=5)
        await client.close()

    asyncio.run(asyncio_client())


# -- slow and silent -------------------------------------------------------------------------


def test_a_greeting_may_come_byte_by_byte(plane: Plane, tcp: bool) -> None:
    joined = plane.joined
    with Raw.to(joined, tcp=tcp) as raw:
        mine = os.urandom(auth.CHALLENGE_BYTES)
        proof = auth.client_proof(joined.secret, raw.challenge(), mine)
        for byte in hello("c", "client", joined.plane_id, mine, proof):
            raw.send(bytes([byte]))
        assert raw.answer(1)[1] == joined.plane_id
        for byte in frame("list", 2, ["p", None, None, None, None]):
            raw.send(bytes([byte]))
        assert raw.answer(2)[0] == list(plane.client.kv_list("p").revision)


@pytest.mark.parametrize("sends", [b"", MAGIC, hello("c")[:-1]], ids=["nothing", "magic", "most"])
def test_who_does_not_greet_in_time_is_closed(
    monkeypatch: pytest.MonkeyPatch, roots: dict[str, Path], sends: bytes
) -> None:
    monkeypatch.setattr(server_connection, "GREETING_S", 0.1)
    with planes.in_thread("slow", tcp_host="127.0.0.1", **roots) as slow:
        slow.client.status()
        for tcp in (False, True):
            with Raw.to(slow.joined, tcp=tcp) as raw:
                raw.send(sends)
                error = raw.refusal()
            assert isinstance(error, Unauthenticated)
            assert "no greeting within 0.1 s" in str(error)
        slow.client.status()  # who greeted stays, however long ago that was


def test_who_is_closed_and_does_not_read_the_reason_is_still_closed(
    monkeypatch: pytest.MonkeyPatch, roots: dict[str, Path]
) -> None:
    """Its answers fill the socket; the reason for the close cannot leave any more."""
    monkeypatch.setattr(server_connection, "LAST_WORD_S", 0.1)
    with planes.in_thread("deaf", **roots) as deaf, Raw.greeted(deaf.joined) as raw:
        # Small enough to be read in one piece: what would come after is not read any more.
        raw.send(frame("status", 1, []) * 1200 + b"\0" * 64)
        eventually(lambda: deaf.client.status()["clients"] == 1, "the server lets go of it")


@pytest.mark.parametrize(
    ("verb", "body"), [("status", []), ("list", ["wide", None, None, None, None])]
)
def test_who_does_not_take_its_answers_is_stopped_from_asking(
    plane: Plane, tcp: bool, verb: str, body: list[Any]
) -> None:
    with Raw.greeted(plane.joined, tcp=tcp) as raw:
        raw.socket.settimeout(0.5)
        ask = frame(verb, 1, body) * 1000
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 64 * MiB:
                sent += raw.socket.send(ask)
        assert plane.client.kv_list("p").keys == ["A"]
        # When it takes them it goes on.
        raw.socket.settimeout(10)
        for _ in range(100):
            assert raw.receive().kind == OK


# -- TLS -------------------------------------------------------------------------------------


class Certificates:
    """An authority, and files that it signed for one side."""

    def __init__(self, folder: Path, name: str) -> None:
        authority = trustme.CA()
        leaf = authority.issue_cert("127.0.0.1")
        self.settings = {
            "tls_cert": folder / f"{name}.pem",
            "tls_key": folder / f"{name}.key",
            "tls_ca": folder / f"{name}-ca.pem",
        }
        leaf.cert_chain_pems[0].write_to_path(str(self.settings["tls_cert"]))
        leaf.private_key_pem.write_to_path(str(self.settings["tls_key"]))
        authority.cert_pem.write_to_path(str(self.settings["tls_ca"]))

    def context(self, *, certificate: bool = True) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.settings["tls_ca"])
        context.check_hostname = False
        if certificate:
            context.load_cert_chain(self.settings["tls_cert"], self.settings["tls_key"])
        return context


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"), "theirs")


@pytest.fixture(scope="module")
def wrapped(roots: dict[str, Path], ours: Certificates) -> Generator[Plane]:
    """A plane whose TCP port speaks TLS, as its clients of other nodes see it."""
    with ExitStack() as stack:
        plane = planes.start(
            stack, "tls", tcp_host="127.0.0.1", timeout_s=10, **roots, **ours.settings
        )
        plane.joined = replace(plane.joined, tags=Address(None, plane.joined.tags.tcp))
        yield plane


def far_settings(wrapped: Plane) -> Any:
    """A client's settings that keep it off the unix socket, as another node's would be."""
    return wrapped.config.model_copy(update={"same_node_reads": False})


def test_a_client_with_a_certificate_puts_and_gets_through_tls(wrapped: Plane) -> None:
    large = torch.randint(0, 256, (8 * MiB,), dtype=torch.uint8)
    with Client(wrapped.joined, far_settings(wrapped)) as client:
        client.kv_put("A", "p", ROW, {"n": 1})
        client.kv_put("L", "p", {"y": large})
        assert torch.equal(client.kv_batch_get(["L"], "p", layout="list").fields["y"][0], large)
        assert client.kv_list("p").keys == ["A", "L"]
        assert client.kv_clear(["L"], "p") == 1


async def test_an_asyncio_client_with_a_certificate_puts_and_gets_through_tls(
    wrapped: Plane,
) -> None:
    large = torch.randint(0, 256, (8 * MiB,), dtype=torch.uint8)
    client = AsyncClient(wrapped.joined, far_settings(wrapped))
    await client.kv_put("L", "q", {"y": large})
    rows = await client.kv_batch_get(["L"], "q", layout="list")
    assert torch.equal(rows.fields["y"][0], large)
    assert await client.kv_clear(["L"], "q") == 1
    await client.close()


@pytest.mark.parametrize("which", ["none", "theirs"])
def test_without_the_right_certificate_a_tls_port_lets_nobody_in(
    wrapped: Plane, ours: Certificates, theirs: Certificates, which: str
) -> None:
    context = ours.context(certificate=False)
    if which == "theirs":
        context.load_cert_chain(theirs.settings["tls_cert"], theirs.settings["tls_key"])
    with pytest.raises((ssl.SSLError, ConnectionError)):  # noqa: SIM117
        with Raw.to(wrapped.joined, tcp=True, tls=context) as raw:
            raw.challenge()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(lambda ours, theirs: theirs.settings, id="of another authority"),
        pytest.param(
            lambda ours, theirs: {**theirs.settings, "tls_ca": ours.settings["tls_ca"]},
            id="signed by another authority",
        ),
    ],
)
def test_a_client_with_a_wrong_certificate_is_told_at_once(
    wrapped: Plane,
    ours: Certificates,
    theirs: Certificates,
    settings: Callable[[Certificates, Certificates], dict[str, Path]],
) -> None:
    wrong = far_settings(wrapped).model_copy(update=settings(ours, theirs))
    began = time.monotonic()
    with Client(wrapped.joined, wrong) as client, pytest.raises(Unauthenticated, match="TLS"):
        client.kv_list("p")

    async def asyncio_client() -> None:
        client = AsyncClient(wrapped.joined, wrong)
        with pytest.raises(Unauthenticated, match="TLS"):
            await client.kv_list("p")
        await client.close()

    asyncio.run(asyncio_client())
    assert time.monotonic() - began < 5


def test_a_client_without_tls_gets_nowhere_at_a_tls_port(wrapped: Plane) -> None:
    plain = far_settings(wrapped).model_copy(
        update={"tls_cert": None, "tls_key": None, "tls_ca": None}
    )
    with Client(wrapped.joined, plain) as client, pytest.raises(Unreachable):
        client.kv_list("p", timeout=0.5)


def test_a_client_with_tls_is_told_at_once_that_a_port_has_none(
    plane: Plane, ours: Certificates
) -> None:
    joined = replace(plane.joined, tags=Address(None, plane.joined.tags.tcp))
    config = plane.config.model_copy(update={**ours.settings, "same_node_reads": False})
    began = time.monotonic()
    with Client(joined, config) as client, pytest.raises(Unauthenticated, match="TLS"):
        client.kv_list("p")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", frame("hello", 1, [])])
def test_plain_text_to_a_tls_port_is_cut_off(wrapped: Plane, data: bytes) -> None:
    with Raw.to(wrapped.joined, tcp=True) as raw:
        raw.send(data)
        answer = b""
        with pytest.raises(ConnectionError):
            while True:
                piece = raw.socket.recv(4096)
                if not piece:
                    raise ConnectionResetError
                answer += piece
        assert MAGIC[:3] not in answer  # not even a challenge in plain


# -- the secret ------------------------------------------------------------------------------

SERVE = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
from dataplane.config import Config
from dataplane.host.embedded import serve_until_signalled
config = Config(runtime_dir=Path(sys.argv[1]), shm_dir=Path(sys.argv[2]), tcp_host="127.0.0.1")
serve_until_signalled("quiet", config, lambda text: print(text, flush=True))
"""


def test_the_secret_is_in_no_log_no_process_list_and_no_file_for_others(
    roots: dict[str, Path],
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(roots["runtime_dir"]), str(roots["shm_dir"])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        settings = {"host": "embedded", **{name: str(path) for name, path in roots.items()}}
        with dataplane.connect("quiet", config=settings) as client:
            joined = client._core.joined
            secret = joined.secret
            client.kv_put("A", "p", ROW, {"n": 1})
            for tcp in (False, True):
                with Raw.to(joined, tcp=tcp) as raw:
                    raw.send(hello("c", "client", None, NONCE, NONCE))
                    raw.refusal()
                with Raw.greeted(joined, tcp=tcp) as raw, pytest.raises(InvalidRequest):
                    raw.ask("list", 7)
            status = client.status()
            seen = [repr(client), repr(joined), str(joined.tags), repr(status)]
            with pytest.raises(DataplaneError) as error:
                client.kv_list("none")
            seen.append(repr(error.value))
            proc = [
                Path(f"/proc/{pid}/{name}").read_bytes()
                for pid in (process.pid, status["pid"], os.getpid())
                for name in ("cmdline", "environ")
            ]
            folder = roots["runtime_dir"] / joined.plane_id
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            holding = [
                path
                for path in folder.iterdir()
                if path.is_file() and secret.hex().encode() in path.read_bytes().lower()
            ]
            assert [path.name for path in holding] == ["secret"]
            assert stat.S_IMODE(holding[0].stat().st_mode) == 0o600
            sockets = [path for path in folder.iterdir() if path.is_socket()]
            assert [stat.S_IMODE(path.stat().st_mode) for path in sockets] == [0o600]
    finally:
        process.terminate()
        out, err = process.communicate(timeout=10)
    assert b"malformed" in err
    everything = b"\n".join([said, out, err, *proc, *(text.encode() for text in seen)])
    for form in (secret, secret.hex().encode(), base64.b64encode(secret), repr(secret).encode()):
        assert form not in everything
        assert form.upper() not in everything
