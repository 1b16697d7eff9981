"""A connection of which the test writes every byte: what no client of ours would send."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Sequence
from typing import Any

from dataplane.client.core import Joined
from dataplane.codec.encode import encode_row
from dataplane.errors import from_wire
from dataplane.wire import auth
from dataplane.wire.frames import FAILED, OK, PREFIX, Header, frame, parse_header, parse_prefix
from dataplane.wire.messages import PutMeta

ANSWER_S = 10.0


class Raw:
    """A socket to a plane's port, and the frames that come back."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(ANSWER_S)
        self.socket = sock
        self.number = 0

    @classmethod
    def to(cls, joined: Joined, *, tcp: bool = False, tls: ssl.SSLContext | None = None) -> Raw:
        """Connected, and silent."""
        if tcp:
            assert joined.tags.tcp is not None
            sock = socket.create_connection(joined.tags.tcp, ANSWER_S)
            return cls(tls.wrap_socket(sock) if tls else sock)
        assert joined.tags.unix is not None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(ANSWER_S)
        sock.connect(joined.tags.unix)
        return cls(sock)

    @classmethod
    def greeted(
        cls, joined: Joined, *, role: str = "client", tcp: bool = False, client_id: str = ""
    ) -> Raw:
        """Connected as a client that knows the plane's secret; a new one where none is named."""
        raw = cls.to(joined, tcp=tcp)
        raw.hello(joined.secret, role=role, plane_id=joined.plane_id, client_id=client_id)
        return raw

    def challenge(self) -> bytes:
        header = self.receive()
        assert header.kind == "challenge"
        return header.body[0]

    def hello(
        self,
        secret: bytes,
        *,
        role: str = "client",
        plane_id: str | None = None,
        client_id: str = "",
    ) -> Any:
        """Greet, as a client never seen before if it is not named; what the server said."""
        client_id = client_id or os.urandom(8).hex()
        mine = os.urandom(auth.CHALLENGE_BYTES)
        proof = auth.client_proof(secret, self.challenge(), mine)
        return self.ask("hello", [client_id, role, plane_id, mine, proof])

    # -- out

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def request(self, verb: str | int, body: object, payload_bytes: int = 0) -> int:
        """Send the head of a request; its number."""
        self.number += 1
        self.send(frame(verb, self.number, body, payload_bytes))
        return self.number

    def ask(self, verb: str, body: object, payload: bytes = b"") -> Any:
        """The body of the answer, or the error that it says."""
        number = self.request(verb, body, len(payload))
        if payload:
            self.send(payload)
        return self.answer(number)

    # -- in

    def answer(self, number: int) -> Any:
        header = self.receive()
        assert header.number == number, header
        if header.kind == FAILED:
            raise from_wire(header.body)
        assert header.kind == OK
        return header.body

    def receive(self) -> Header:
        """The next frame's header; its payload is dropped."""
        head = self._exactly(PREFIX.size)
        header_bytes, payload_bytes = parse_prefix(head, 1 << 30)
        header = parse_header(self._exactly(header_bytes))
        self._exactly(payload_bytes)
        return header

    def refusal(self) -> Exception:
        """The error that the server says before it closes the connection, and that it does."""
        header = self.receive()
        while header.kind == "challenge":
            header = self.receive()
        assert header.kind == FAILED, header
        assert self.ended()
        return from_wire(header.body)

    def ended(self) -> bool:
        """Wait for the end of the stream; False if something else comes."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def _exactly(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            piece = self.socket.recv(nbytes - len(data))
            if not piece:
                raise ConnectionResetError(f"the stream ended after {data!r}")
            data += piece
        return data

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def meta(partition: object, keys: object, number: int = 1, flags: int = 0) -> bytes:
    """A put's meta as a first try packs it."""
    return PutMeta(partition, keys, flags, number, 0, None, None).pack()  # pyright: ignore[reportArgumentType]


def block(fields: dict[str, object]) -> tuple[list[Any], bytes]:
    """What follows meta and tags in a put of one row, and the payload."""
    encoded = encode_row("raw", fields)
    head = [encoded.template.blob, encoded.rows, encoded.lengths]
    return head, b"".join(bytes(memoryview(piece).cast("B")) for piece in _pieces(encoded.pieces))


def _pieces(pieces: Sequence[Any]) -> Sequence[Any]:
    return pieces
