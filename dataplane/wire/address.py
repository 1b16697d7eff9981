"""Where a server listens and how it is reached: unix socket first, TCP (TLS) otherwise."""

from __future__ import annotations

import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),
)
"""A connection to a machine that is gone or cut off ends within a minute, whether this side sends
or waits; by the kernel's own defaults it takes hours. For a stopped process the kernel answers."""


def prepare_tcp(sock: socket.socket) -> None:
    """Settings of every TCP connection: small frames leave at once, half-open ones end."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for level, option, value in _KEEPALIVE:
        sock.setsockopt(level, option, value)


@dataclass(frozen=True, slots=True)
class Address:
    """The places of one server; `unix` is usable on its own node only."""

    unix: str | None
    tcp: tuple[str, int] | None = None

    def to_wire(self) -> list[Any]:
        return [self.unix, list(self.tcp) if self.tcp else None]

    @classmethod
    def from_wire(cls, wire: Any) -> Address:
        unix, tcp = wire
        return cls(unix, (str(tcp[0]), int(tcp[1])) if tcp else None)

    def is_here(self) -> bool:
        """Whether the unix socket can be seen from this process."""
        return self.unix is not None and os.path.exists(self.unix)

    def __str__(self) -> str:
        places = [f"unix:{self.unix}"] if self.unix else []
        if self.tcp:
            places.append(f"tcp:{self.tcp[0]}:{self.tcp[1]}")
        return " or ".join(places)


@dataclass(frozen=True, slots=True)
class Tls:
    """Files that wrap TCP connections of a plane; both sides show a certificate."""

    cert: Path
    key: Path
    ca: Path

    def refused(self, address: Address) -> str:
        """What it means that a server closed the connection as soon as it was wrapped."""
        return (
            f"TLS with {address} failed: it does not accept the certificate {self.cert}, or it "
            "has just ended"
        )

    def server(self) -> ssl.SSLContext:
        """The context of a listening side; it asks for the client's certificate."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.ca)
        context.load_cert_chain(self.cert, self.key)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self) -> ssl.SSLContext:
        """The context of a connecting side. Names are not checked: planes are addressed by IP,
        and the plane's secret and id say who answers."""
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca)
        context.check_hostname = False
        context.load_cert_chain(self.cert, self.key)
        return context


def whereabouts(label: str = "") -> str:
    """Where this process runs, as it introduces itself, after what it is called: for messages,
    nothing is decided by it."""
    place = f"pid {os.getpid()} on {socket.gethostname()}"
    return f"{label} ({place})" if label else place
