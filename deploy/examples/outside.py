"""The quickstart with its agent loops outside: they reach the plane by a gateway and nothing else.

    python deploy/examples/outside.py [options of `trainer run`]

What a site with rollout workers in another network does, on one machine. A plane is served; a
gateway in front of it listens with TLS and knows one token; the trainer joins the plane itself, and
its worker process is told only the gateway's address, the token and who signed the certificate. The
token allows the partitions that the worker writes, and to read weights.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from dataplane.gateway.access.token_disk import change_records
from dataplane.gateway.access.token_records import grant_record, limits_record, token_record
from dataplane.gateway.access.tokens import new_token

EXAMPLES = Path(__file__).parent
COMMANDS = Path(sys.executable).parent
CAPACITY_BYTES = 256 << 20
DAY_S = 86_400.0

PRODUCES = ("put", "put_tags", "group", "list", "read", "clear")
READS = ("list", "read")
GRANTS = {"train": PRODUCES, "val": PRODUCES, "weights@*": READS}
"""What the worker may do, by partition. Demonstrations are made by the trainer's own process."""


async def make_certificate(folder: Path) -> None:
    """A key and a certificate that vouches for itself: `gateway.key` and `gateway.pem`.

    A site has an authority that signs the gateway's certificate, and gives workers that one's.
    """
    openssl = await asyncio.create_subprocess_exec(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-nodes", "-days", "1", "-subj", "/CN=localhost",
        "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout", str(folder / "gateway.key"), "-out", str(folder / "gateway.pem"),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await openssl.communicate()
    if openssl.returncode:
        raise SystemExit(f"openssl made no certificate: {said.decode()}")


def make_token(folder: Path) -> None:
    """A token for one day: the gateway keeps its hash in `tokens.json`, the worker gets
    `worker.token`."""
    token = new_token()
    now = time.time()
    record = token_record(
        token_id=token.id,
        sha256=token.sha256,
        principal="worker",
        created_s=now,
        expires_s=now + DAY_S,
        grants=tuple(
            grant_record(partition=partition, roles=(), verbs=verbs, fields=None)
            for partition, verbs in GRANTS.items()
        ),
        limits=limits_record(),
    )
    change_records(folder / "tokens.json", lambda records: (records.with_token(record), None))
    file = folder / "worker.token"
    file.touch(mode=0o600)
    file.write_text(token.text)


def serve(folder: Path) -> AbstractAsyncContextManager[str]:
    """A plane; the address of its unix socket."""
    return _running(
        "serve", "--name", "outside", "--runtime-dir", str(folder),
        "--capacity-bytes", str(CAPACITY_BYTES),
    )  # fmt: skip


def gateway(folder: Path, plane: str) -> AbstractAsyncContextManager[str]:
    """A gateway of the plane, with TLS and the token; its address."""
    return _running(
        "gateway", "--address", plane, "--listen", "127.0.0.1:0",
        "--tls-cert", str(folder / "gateway.pem"), "--tls-key", str(folder / "gateway.key"),
        "--token-file", str(folder / "tokens.json"),
    )  # fmt: skip


@asynccontextmanager
async def _running(*command: str) -> AsyncGenerator[str]:
    """A `dataplane` command that runs until it is told to end; the address that it serves at."""
    process = await asyncio.create_subprocess_exec(
        COMMANDS / "dataplane", *command, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode()
        address = said.rpartition(" at ")[2].strip()
        if not address:
            raise SystemExit(f"dataplane {command[0]} did not come up: {said}")
        yield address
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def settings(folder: Path, plane: str, address: str) -> list[str]:
    """What is set beside the quickstart's file: where the trainer joins, and where its worker."""
    worker = {
        "address": address,
        "settings.token_file": folder / "worker.token",
        "settings.ca_file": folder / "gateway.pem",
    }
    return [
        "name=outside",
        f"plane.address={plane}",
        *(f"rollout.workers.plane.{name}={value}" for name, value in worker.items()),
    ]


async def main(options: list[str]) -> int:
    """The trainer's exit status."""
    with tempfile.TemporaryDirectory(prefix="outside-") as name:
        folder = Path(name)  # only its owner may look into it
        await make_certificate(folder)
        make_token(folder)
        async with serve(folder) as plane, gateway(folder, plane) as address:
            print(f"agent loops join at {address}, and the trainer at {plane}", flush=True)
            trainer = await asyncio.create_subprocess_exec(
                COMMANDS / "trainer", "run", EXAMPLES / "quickstart.yaml",
                *(part for each in settings(folder, plane, address) for part in ("--set", each)),
                *options,
            )  # fmt: skip
            return await trainer.wait()


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(sys.argv[1:])))
