"""The certificate that a gateway shows, and whom it asks for one; renewed while connections live.

Files are looked at before each new connection. A pair that is new is taken up if it is whole: the
key fits the certificate, and the authority can be read. Otherwise the last good one is shown, and
the log says what is wrong: a certificate and its key are seldom replaced at one moment. What is
connected already stays as it is.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from dataplane.errors import InvalidRequest

log = logging.getLogger("dataplane.gateway")

MAX_FILE_BYTES: Final = 1 << 20

_State = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The files of a gateway's TLS."""

    cert: Path
    """Its certificate, followed by those between it and the authority; PEM."""
    key: Path
    """The private key, without a passphrase; PEM."""
    client_ca: Path | None = None
    """Authorities that clients' certificates come from; without it, clients are asked for none."""

    def __post_init__(self) -> None:
        for path in self.files():
            if not isinstance(path, Path):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidRequest(f"a file of TLS is a path, not {path!r:.80}")

    def files(self) -> tuple[Path, ...]:
        return (self.cert, self.key) if self.client_ca is None else (
            self.cert, self.key, self.client_ca
        )  # fmt: skip


class Certificates:
    """The present certificates of a gateway, as gRPC asks for them. Thread-safe."""

    def __init__(self, tls: ServerTls) -> None:
        """InvalidRequest if the files cannot be used."""
        self.tls = tls
        self._lock = threading.Lock()
        self._state = self._look()
        self._first = _read(tls)
        self.reloads = 0
        """How often new files were taken up."""
        if _others_read(tls.key):
            log.warning(
                "others than its owner can read the private key %s: `chmod 600` it", tls.key
            )

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials of a port, which ask here at each new connection."""
        return grpc.dynamic_ssl_server_credentials(
            self._first, self.renewed, require_client_authentication=self.tls.client_ca is not None
        )

    def renewed(self) -> Any:
        """The configuration of files that have changed since the last call; None if they have not,
        or cannot be used. gRPC calls it from threads of its own. Never raises."""
        # One reads, and the others go on with what there is.
        if not self._lock.acquire(blocking=False):
            return None
        try:
            state = self._look()
            if state == self._state:
                return None
            # Noted before they are read: should they change meanwhile, they are read once more.
            self._state = state
            configuration = _read(self.tls)
        except InvalidRequest as error:
            log.error("%s; the last good certificate is still shown", error.message)
            return None
        except Exception:
            # An exception that gRPC meets here would end this connection, and say nothing.
            log.exception("the new certificate cannot be used; the last good one is still shown")
            return None
        finally:
            self._lock.release()
        self.reloads += 1
        log.info("new certificate: %s", self.tls.cert)
        return configuration

    def _look(self) -> _State:
        return tuple(_state_of(path) for path in self.tls.files())


def _read(tls: ServerTls) -> Any:
    """The configuration that the files make. InvalidRequest says which of them is wrong."""
    cert, key = _pem(tls.cert, "certificate"), _pem(tls.key, "private key")
    ca = None if tls.client_ca is None else _pem(tls.client_ca, "authority")
    _check_pair(cert, key, tls)
    if ca is not None:
        _check_authority(ca, tls)
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)


def _pem(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"the {what} {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequest(f"the {what} {path} is larger than {MAX_FILE_BYTES} bytes")
    return data


def _check_pair(cert: bytes, key: bytes, tls: ServerTls) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # From memory, in the form of a file: what was read is what is checked and used, and the key is
    # on no disk that it was not on before.
    fd = os.memfd_create("dataplane-certificate", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(key + b"\n" + cert)
        # A passphrase would be asked for on the terminal, and waited for.
        context.load_cert_chain(f"/proc/self/fd/{fd}", password=lambda: b"")
    except ssl.SSLError as error:
        reason = "the key does not fit the certificate"
        if error.reason != "KEY_VALUES_MISMATCH":
            reason = f"{error.reason or 'not PEM'} (is it PEM, and the key without a passphrase?)"
        raise InvalidRequest(
            f"the certificate {tls.cert} and the private key {tls.key} cannot be used: {reason}"
        ) from None
    finally:
        os.close(fd)


def _check_authority(ca: bytes, tls: ServerTls) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise InvalidRequest(f"the authority {tls.client_ca} has no certificates in PEM") from None


def _state_of(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _others_read(path: Path) -> bool:
    try:
        return bool(os.stat(path).st_mode & (stat.S_IROTH | stat.S_IWOTH))
    except OSError:
        return False
