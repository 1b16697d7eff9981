"""Many connections to a gateway in a process of its own, and what that process holds for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

from tests.faults.planes import Plane

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""How a connection of HTTP/2 begins: with this, and settings, of which there are none."""


@dataclass(frozen=True)
class Served:
    """A gateway that runs."""

    process: subprocess.Popen[str]
    address: str
    ca: Path | None = None
    """Who signed its certificate; None where it speaks plain text."""

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.address.rpartition(":")[2])

    @property
    def descriptors(self) -> int:
        """How many the process has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def threads(self) -> int:
        """How many it has."""
        return len(os.listdir(f"/proc/{self.process.pid}/task"))


@contextlib.contextmanager
def served(plane: Plane, folder: Path, *, tls: bool) -> Iterator[Served]:
    """A gateway of a plane, by its command."""
    arguments: list[str] = []
    ca = None
    if tls:
        authority = trustme.CA()
        certificate = authority.issue_cert("localhost", "127.0.0.1")
        ca, cert, key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        authority.cert_pem.write_to_path(ca)
        certificate.cert_chain_pems[0].write_to_path(cert)
        certificate.private_key_pem.write_to_path(key)
        arguments = ["--tls-cert", str(cert), "--tls-key", str(key)]
    child = subprocess.Popen(
        [
            sys.executable, "-m", "dataplane.cli.main", "gateway",
            "--address", str(plane.folders.runtime), "--listen", "127.0.0.1:0", *arguments,
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DATAPLANE_GATEWAY_ABSENCE_S": "1"},  # who has left holds nothing
    )  # fmt: skip
    try:
        assert child.stdout is not None
        yield Served(child, child.stdout.readline().split()[-1], ca)
    finally:
        child.terminate()
        child.wait(30)
        child.stdout.close()


@contextlib.asynccontextmanager
async def idle(port: int, count: int, at_once: int = 200) -> AsyncIterator[None]:
    """So many connections on which HTTP/2 has begun, and nothing follows."""
    writers: list[asyncio.StreamWriter] = []
    limit = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with limit:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(PREFACE)
            await reader.readexactly(9)  # its settings: it is served

    try:
        await asyncio.gather(*(one() for _ in range(count)))
        yield
    finally:
        for writer in writers:
            writer.close()
        for writer in writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def storm(port: int, per_s: float, seconds: float, tls: ssl.SSLContext | None) -> int:
    """Connect so often and hang up at once; how many connections that were."""
    began = time.monotonic()
    made = 0
    under_way: set[asyncio.Task[None]] = set()
    arguments: dict[str, Any] = {} if tls is None else {"ssl": tls, "server_hostname": "localhost"}

    async def one() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, **arguments)
        writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()

    while (now := time.monotonic() - began) < seconds:
        while made < per_s * now and len(under_way) < 100:
            task = asyncio.create_task(one())
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            made += 1
        await asyncio.sleep(0.002)
    await asyncio.gather(*under_way)
    return made


def trusting(ca: Path) -> ssl.SSLContext:
    """Whoever this authority has signed."""
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols(["h2"])
    return context
