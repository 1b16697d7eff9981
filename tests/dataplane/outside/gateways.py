"""Gateways in a thread of this process, in front of planes that are there; certificates, tokens."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trustme

from dataplane.gateway.access.guard import caller
from dataplane.gateway.access.token_disk import change_records
from dataplane.gateway.access.token_records import grant_record, limits_record, token_record
from dataplane.gateway.access.tokens import new_token
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.server import GatewayServer
from dataplane.session import join, settings_of
from tests.contract.planes import running_loop


class Counting(GatewayServer):
    """Counts the calls that reach their handlers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: Counter[tuple[str, str]] = Counter()
        """By principal and call."""

    def _handlers(self) -> dict[str, Any]:
        return {name: self._counted(name, call) for name, call in super()._handlers().items()}

    def _counted(self, name: str, handler: Any) -> Any:
        def handle(request: Any, call: Any) -> Any:
            self.calls[caller().name, name] += 1
            return handler(request, call)

        return handle


@contextmanager
def gateway(name: str, settings: Mapping[str, Any], **config: Any) -> Iterator[Counting]:
    """A gateway of the plane of this name; `addresses` say where it listens."""
    plane_config = settings_of(settings)
    made = GatewayConfig(**{"drain_s": 0.0, **config})
    with running_loop() as loop:
        server = Counting(join(name, None, plane_config), made, plane_config)
        try:
            asyncio.run_coroutine_threadsafe(server.start(), loop).result(30.0)
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30.0)


class Authority:
    """Certificates of one authority, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self.ca_file = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca_file)
        served = self._authority.issue_cert("localhost", "127.0.0.1")
        self.cert_file, self.key_file = folder / "gateway.pem", folder / "gateway.key"
        served.private_key_pem.write_to_path(self.key_file)
        for i, pem in enumerate(served.cert_chain_pems):
            pem.write_to_path(self.cert_file, append=bool(i))

    @property
    def settings(self) -> dict[str, Any]:
        """What a gateway is told of it."""
        return {"tls_cert": self.cert_file, "tls_key": self.key_file}


def token_for(
    folder: Path, principal: str, grants: Mapping[str, Sequence[str]], *, expires_in_s: float = 3600
) -> Path:
    """The file of a new token with these verbs by partition; `tokens.json` beside it knows it."""
    token = new_token()
    now = time.time()
    record = token_record(
        token_id=token.id,
        sha256=token.sha256,
        principal=principal,
        created_s=now,
        expires_s=now + expires_in_s,
        grants=tuple(
            grant_record(partition=partition, roles=(), verbs=tuple(verbs), fields=None)
            for partition, verbs in grants.items()
        ),
        limits=limits_record(
            calls_per_s=None,
            bytes_per_s=None,
            open_streams=None,
            clients=None,
            inflight_bytes=None,
        ),
    )
    change_records(folder / "tokens.json", lambda records: (records.with_token(record), None))
    path = folder / f"{principal}.token"
    path.write_text(token.text + "\n")
    path.chmod(0o600)
    return path
