"""A producer at a gateway with TLS and tokens: what it has to show, and what it is told without."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import trustme

from dataplane.errors import InvalidRequest, PermissionDenied, Unauthenticated, Unreachable
from dataplane.gateway.server import GatewayServer
from dataplane.producer import AsyncProducer
from tests.dataplane.gateway.gateways import serving
from tests.dataplane.gateway.guarded import add_token
from tests.faults.planes import Plane


class Files:
    """Who signs, and what each side has of it."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("me@example.org")
        self.ca, self.tokens, self.token = folder / "ca.pem", folder / "tokens", folder / "token"
        self.server_cert, self.server_key = folder / "server.pem", folder / "server.key"
        self.cert, self.key = folder / "client.pem", folder / "client.key"
        authority.cert_pem.write_to_path(str(self.ca))
        for chain, cert, key in (
            (server, self.server_cert, self.server_key), (client, self.cert, self.key),
        ):  # fmt: skip
            chain.cert_chain_pems[0].write_to_path(str(cert))
            chain.private_key_pem.write_to_path(str(key))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest_asyncio.fixture
async def guarded(plane: Plane, roots: dict[str, Path], files: Files) -> AsyncIterator[str]:
    """The address of a gateway with TLS, which knows one token."""
    files.token.write_text(add_token(files.tokens, "lab", "producer", partition="lab").text)
    async with serving(
        plane, roots["runtime_dir"], listen=("127.0.0.1:0",), tls_cert=files.server_cert,
        tls_key=files.server_key, token_file=files.tokens,
    ) as server:  # fmt: skip
        yield local(server)


def local(server: GatewayServer) -> str:
    return f"grpcs://127.0.0.1:{server.addresses[0].rpartition(':')[2]}"


async def test_with_its_token_it_writes_where_it_may(guarded: str, files: Files) -> None:
    async with AsyncProducer(guarded, token_file=files.token, ca_file=files.ca) as producer:
        await producer.kv_put("a", "lab", tags={"n": 1})
        with pytest.raises(PermissionDenied):
            await producer.kv_put("a", "another", tags={"n": 1})


async def test_without_it_nothing_is_told(guarded: str, files: Files) -> None:
    for token in (None, "dpt_aaaaaaaaaaaa_" + "A" * 43):
        async with AsyncProducer(guarded, token=token, ca_file=files.ca) as producer:
            with pytest.raises(Unauthenticated) as caught:
                await producer.kv_put("a", "lab", tags={"n": 1})
            assert "dpt_" not in str(caught.value)


async def test_a_gateway_that_somebody_else_vouches_for_is_not_spoken_to(
    guarded: str, files: Files, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Files(tmp_path / "other")
    async with AsyncProducer(guarded, token_file=files.token, ca_file=other.ca) as producer:
        with pytest.raises(Unreachable, match=r"(?i)certificate"):
            await producer.kv_put("a", "lab", tags={"n": 1}, timeout=1.0)


async def test_plain_text_to_the_port_of_tls_is_not_answered(guarded: str) -> None:
    async with AsyncProducer(guarded.replace("grpcs", "grpc")) as producer:
        with pytest.raises(Unreachable):
            await producer.kv_put("a", "lab", tags={"n": 1}, timeout=1.0)


async def test_a_certificate_of_its_own_is_shown_where_it_is_asked_for(
    plane: Plane, roots: dict[str, Path], files: Files
) -> None:
    files.token.write_text(add_token(files.tokens, "lab", "producer").text)
    async with serving(
        plane, roots["runtime_dir"], listen=("127.0.0.1:0",), tls_cert=files.server_cert,
        tls_key=files.server_key, tls_client_ca=files.ca, token_file=files.tokens,
    ) as server:  # fmt: skip
        common = {"token_file": files.token, "ca_file": files.ca}
        async with AsyncProducer(
            local(server), cert_file=files.cert, key_file=files.key, **common
        ) as producer:
            await producer.kv_put("a", "lab", tags={"n": 1})
        async with AsyncProducer(local(server), **common) as producer:
            with pytest.raises(Unreachable):
                await producer.kv_put("a", "lab", tags={"n": 1}, timeout=1.0)


def test_files_that_are_not_there_are_named() -> None:
    with pytest.raises(InvalidRequest, match="key"):
        AsyncProducer("grpcs://localhost:1", cert_file="x")
    with pytest.raises(InvalidRequest, match="not both"):
        AsyncProducer("grpcs://localhost:1", token="a", token_file="b")


async def test_a_file_that_cannot_be_read_is_named_when_it_is_wanted(tmp_path: Path) -> None:
    async with AsyncProducer("grpcs://localhost:1", ca_file=tmp_path / "none.pem") as producer:
        with pytest.raises(InvalidRequest, match=r"ca_file.*none\.pem"):
            await producer.kv_put("a", "p", tags={})
