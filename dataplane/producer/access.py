"""How a producer reaches a gateway and says who it is: address, certificates, token.

Secrets are read from files when they are wanted, and again when those change; they are never part
of a repr or of an error.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import grpc

from dataplane.errors import InvalidRequest

TLS, PLAIN, UNIX = "grpcs", "grpc", "grpc+unix"
MAX_TOKEN_BYTES: Final = 4096
MAX_FILE_BYTES: Final = 1 << 20
"""Of certificates and keys."""

Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where a gateway listens."""

    scheme: str
    target: str
    """As gRPC names it."""
    is_here: bool
    """What is sent there does not leave this machine."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.target.removeprefix('unix:')}"


def gateway_of(address: str) -> Gateway:
    """The gateway of `grpcs://host:port` (TLS), `grpc://host:port` (plain text) or
    `grpc+unix:///path`. InvalidRequest if the address is none of them."""
    wrong = InvalidRequest(
        "a gateway's address is grpcs://host:port (TLS), grpc://host:port (plain text) or "
        f"grpc+unix:///path, not {address!r:.200}"
    )
    if type(address) is not str:
        raise wrong
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise wrong from None
    if parts.query or parts.fragment or parts.username or parts.password:
        raise wrong
    if parts.scheme == UNIX:
        if parts.netloc or not parts.path.startswith("/"):
            raise wrong
        return Gateway(UNIX, f"unix:{parts.path}", is_here=True)
    if parts.scheme not in (TLS, PLAIN) or not host or not port or parts.path not in ("", "/"):
        raise wrong
    name = f"[{host}]" if ":" in host else host
    return Gateway(parts.scheme, f"{name}:{port}", _is_loopback(host))


@dataclass(frozen=True, slots=True)
class Access:
    """What a gateway asks of a caller. Each part may be left out."""

    token: str | None = field(default=None, repr=False)
    token_file: str | os.PathLike[str] | None = None
    """A file with nothing but the token; read again when it changes."""
    ca_file: str | os.PathLike[str] | None = None
    """Who may have signed the gateway's certificate (PEM); None for the system's authorities."""
    cert_file: str | os.PathLike[str] | None = None
    key_file: str | os.PathLike[str] | None = None
    """This producer's own certificate and its key (PEM), where the gateway asks for one."""
    server_name: str | None = None
    """The name in the gateway's certificate, where it is not the host of the address."""
    token_in_plain_text: bool = False
    """Send the token over `grpc://` to another machine: whoever sees the packets has it."""

    def __post_init__(self) -> None:
        if self.token is not None and self.token_file is not None:
            raise InvalidRequest("give a token or a token_file, not both")
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidRequest("a certificate needs its key: give cert_file and key_file")
        if self.token is not None:
            _check_token(self.token, "the token")

    def check(self, gateway: Gateway) -> None:
        """InvalidRequest if something secret would be sent in plain text, or files are no use."""
        has_token = self.token is not None or self.token_file is not None
        plain = gateway.scheme == PLAIN and not gateway.is_here
        if has_token and plain and not self.token_in_plain_text:
            raise InvalidRequest(
                f"a token does not go to {gateway} in plain text: use grpcs://, or say "
                "token_in_plain_text=True if the way there is safe by other means"
            )
        if gateway.scheme != TLS and (self.ca_file or self.cert_file):
            raise InvalidRequest(f"certificates are for grpcs:// addresses, not {gateway}")

    def read_token(self) -> str | None:
        """The token as it is now. InvalidRequest, without its text, if the file has none."""
        if self.token_file is None:
            return self.token
        text = _read(self.token_file, "token_file", MAX_TOKEN_BYTES)
        token = text.decode("ascii", "replace").strip()
        _check_token(token, f"token_file {os.fspath(self.token_file)!r}")
        return token

    def credentials(self) -> grpc.ChannelCredentials:
        """What a TLS channel is made with, from the files as they are now."""
        return grpc.ssl_channel_credentials(
            *(
                None if path is None else _read(path, name, MAX_FILE_BYTES)
                for name, path in (
                    ("ca_file", self.ca_file),
                    ("key_file", self.key_file),
                    ("cert_file", self.cert_file),
                )
            )
        )

    def signature(self) -> Signature:
        """Changes when a file does that a channel was made from."""
        return tuple(_signature(p) for p in (self.ca_file, self.cert_file, self.key_file) if p)


class Token:
    """The token of one access, read again when its file changes."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._read_at: tuple[int, int, int] | None = None
        self._text: str | None = None

    def metadata(self) -> Sequence[tuple[str, str]]:
        """What every call carries."""
        path = self._access.token_file
        now = None if path is None else _signature(path)
        if self._text is None or now != self._read_at:
            self._text = self._access.read_token()
            self._read_at = now
        return () if self._text is None else (("authorization", f"Bearer {self._text}"),)

    def changed(self) -> bool:
        """Whether the file is another one than was read."""
        path = self._access.token_file
        return path is not None and _signature(path) != self._read_at

    def __repr__(self) -> str:
        return "Token(...)"


def _check_token(token: str, what: str) -> None:
    if not token or len(token) > MAX_TOKEN_BYTES or not token.isascii() or not token.isprintable():
        raise InvalidRequest(f"{what} is not a token: one line of printable characters is due")


def _read(path: str | os.PathLike[str], what: str, limit: int) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise InvalidRequest(
            f"{what} {os.fspath(path)!r} cannot be read: {error.strerror}"
        ) from error
    if len(data) > limit:
        raise InvalidRequest(f"{what} {os.fspath(path)!r} has more than {limit} bytes")
    return data


def _signature(path: str | os.PathLike[str]) -> tuple[int, int, int]:
    try:
        stat = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
