"""TLS and mutual TLS of a real server: who is let in, and certificates that change meanwhile."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from dataplane.errors import InvalidRequest
from dataplane.gateway.access.caller import REFUSED
from dataplane.gateway.access.guard import Guard
from dataplane.gateway.access.limits import Throttles
from dataplane.gateway.access.roles import ANYONE
from dataplane.gateway.access.tls import Certificates, ServerTls
from dataplane.gateway.access.tokens import TokenFile
from dataplane.v1 import dataplane_pb2 as pb
from dataplane.v1 import dataplane_pb2_grpc as pb_grpc
from tests.dataplane.gateway.guarded import (
    LOCAL_POOL,
    Service,
    add_token,
    ask,
    bearer,
    serving,
)
from tests.deadline import until

Code = grpc.StatusCode


class Files:
    """The files of a gateway's TLS, which a test may replace."""

    def __init__(self, folder: Path, ca: trustme.CA, client_ca: trustme.CA | None = None) -> None:
        self.folder = folder
        self.tls = ServerTls(
            folder / "tls.crt", folder / "tls.key", None if client_ca is None else folder / "ca.crt"
        )
        self.show(ca)
        if client_ca is not None and self.tls.client_ca is not None:
            client_ca.cert_pem.write_to_path(str(self.tls.client_ca))

    def show(self, ca: trustme.CA) -> bytes:
        """A new certificate from this authority takes the place of the last; its DER."""
        pair = ca.issue_cert("localhost")
        self.replace(self.tls.cert, b"".join(blob.bytes() for blob in pair.cert_chain_pems))
        self.replace(self.tls.key, pair.private_key_pem.bytes())
        return ssl.PEM_cert_to_DER_cert(pair.cert_chain_pems[0].bytes().decode())

    def replace(self, path: Path, data: bytes) -> None:
        aside = path.with_suffix(".new")
        aside.touch(0o600)
        aside.write_bytes(data)
        os.replace(aside, path)


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def other_ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, ca: trustme.CA) -> Files:
    return Files(tmp_path, ca)


def trusting(*authorities: trustme.CA, pair: trustme.LeafCert | None = None) -> Any:
    roots = b"".join(authority.cert_pem.bytes() for authority in authorities)
    if pair is None:
        return grpc.ssl_channel_credentials(roots)
    chain = b"".join(blob.bytes() for blob in pair.cert_chain_pems)
    return grpc.ssl_channel_credentials(roots, pair.private_key_pem.bytes(), chain)


def connect(address: str, credentials: Any) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(address, credentials, options=LOCAL_POOL)


def shown_by(address: str) -> bytes:
    """The certificate that a new connection is shown; DER."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=host) as wrapped,
    ):
        return wrapped.getpeercert(binary_form=True) or b""


def anyone() -> Guard:
    return Guard(None, anyone=ANYONE, throttles=Throttles(lambda: 0.0))


def tokens_guard(path: Path) -> Guard:
    return Guard(TokenFile(path), anyone=None, throttles=Throttles(lambda: 0.0))


@contextmanager
def bound(tmp_path: Path, **principals: str) -> Iterator[Path]:
    """A token file that binds certificates: principals by subject, where _ is a dot."""
    path = tmp_path / "tokens.json"
    grants = [{"partition": "*", "roles": ["reader"]}]
    path.write_text(
        json.dumps(
            {
                "certificates": [
                    {"subject": subject.replace("_", "."), "principal": name, "grants": grants}
                    for subject, name in principals.items()
                ]
            }
        )
    )
    path.chmod(0o600)
    yield path


# ---- TLS --------------------------------------------------------------------------------------


async def test_a_token_goes_through_tls(files: Files, ca: trustme.CA, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token = add_token(path, "who", "reader")
    service = Service()
    credentials = Certificates(files.tls).credentials()
    async with (
        serving(tokens_guard(path), service, credentials) as address,
        connect(address, trusting(ca)) as channel,
    ):
        assert (await ask(channel, "List", bearer(token)))[0] == Code.OK
        assert (await ask(channel, "List"))[:2] == (Code.UNAUTHENTICATED, REFUSED)
    assert service.calls == [("List", "who")]


async def test_a_client_does_not_take_another_authority_s_server(
    files: Files, other_ca: trustme.CA
) -> None:
    service = Service()
    async with (
        serving(anyone(), service, Certificates(files.tls).credentials()) as address,
        connect(address, trusting(other_ca)) as channel,
    ):
        assert (await ask(channel, "List"))[0] == Code.UNAVAILABLE
    assert service.calls == []


async def test_plain_text_to_the_tls_port_is_refused_and_said_nowhere(
    files: Files,
    ca: trustme.CA,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "tokens.json"
    token = add_token(path, "who", "reader")
    service = Service()
    async with serving(
        tokens_guard(path), service, Certificates(files.tls).credentials()
    ) as address:
        async with grpc.aio.insecure_channel(address, options=LOCAL_POOL) as plain:
            code, details, _ = await ask(plain, "List", bearer(token))
            assert code == Code.UNAVAILABLE
            assert await ask(plain, "List", bearer("nonsense")) == (code, details, ())
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET /{token.text} HTTP/1.1\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert b"HTTP" not in answer
        async with connect(address, trusting(ca)) as channel:
            assert (await ask(channel, "List", bearer(token)))[0] == Code.OK
    assert service.calls == [("List", "who")]
    output = capfd.readouterr()
    for text in (caplog.text, output.out, output.err):
        assert token.text.split("_", 2)[2] not in text


# ---- mutual TLS -------------------------------------------------------------------------------


async def test_a_certificate_stands_for_a_principal(tmp_path: Path, ca: trustme.CA) -> None:
    files = Files(tmp_path, ca, client_ca=ca)
    service = Service()
    ended: dict[str, tuple[Any, ...]] = {}
    with bound(tmp_path, judge_example_org="judge", plain="by-common-name") as path:
        token = add_token(path, "token", "reader")
        async with serving(
            tokens_guard(path), service, Certificates(files.tls).credentials()
        ) as address:
            for name, pair, metadata in (
                ("alternative", ca.issue_cert("judge.example.org"), ()),
                ("common", ca.issue_cert(common_name="plain"), ()),
                ("hidden", ca.issue_cert("x.example.org", common_name="plain"), ()),
                ("unbound", ca.issue_cert("x.example.org"), ()),
                ("token", ca.issue_cert("x.example.org"), bearer(token)),
                ("wrong", ca.issue_cert("judge.example.org"), bearer("nonsense")),
            ):
                async with connect(address, trusting(ca, pair=pair)) as channel:
                    for rpc in ("List", "Watch"):
                        ended[name, rpc] = await ask(channel, rpc, metadata)
    codes = {key: value[0] for key, value in ended.items()}
    for rpc in ("List", "Watch"):
        assert {name: codes[name, rpc] for name, each in ended if each == rpc} == {
            "alternative": Code.OK,
            "common": Code.OK,
            # Its common name is not what it is known by.
            "hidden": Code.UNAUTHENTICATED,
            "unbound": Code.UNAUTHENTICATED,
            "token": Code.OK,
            # Who shows something that does not hold is not let in by what else there is.
            "wrong": Code.UNAUTHENTICATED,
        }
    assert len({value for value in ended.values() if value[0] != Code.OK}) == 1
    assert service.calls == [
        (rpc, name) for name in ("judge", "by-common-name", "token") for rpc in ("List", "Watch")
    ]


async def test_a_wrong_certificate_or_none_does_not_reach_the_server(
    tmp_path: Path, ca: trustme.CA, other_ca: trustme.CA
) -> None:
    files = Files(tmp_path, ca, client_ca=ca)
    service = Service()
    with bound(tmp_path, judge_example_org="judge") as path:
        token = add_token(path, "who", "reader")
        async with serving(
            tokens_guard(path), service, Certificates(files.tls).credentials()
        ) as address:
            for pair in (None, other_ca.issue_cert("judge.example.org")):
                async with connect(address, trusting(ca, pair=pair)) as channel:
                    code, details, _ = await ask(channel, "List", bearer(token))
                    assert code == Code.UNAVAILABLE
                    assert (await ask(channel, "List", bearer("x")))[:2] == (code, details)
            good = trusting(ca, pair=ca.issue_cert("judge.example.org"))
            async with connect(address, good) as channel:
                assert (await ask(channel, "List"))[0] == Code.OK
    assert service.calls == [("List", "judge")]


async def test_where_anyone_may_call_an_unbound_certificate_may_not(
    tmp_path: Path, ca: trustme.CA
) -> None:
    service = Service()
    with bound(tmp_path, judge_example_org="judge") as path:
        guard = Guard(TokenFile(path), anyone=ANYONE, throttles=Throttles(lambda: 0.0))
        mutual = Certificates(Files(tmp_path, ca, client_ca=ca).tls)
        async with serving(guard, service, mutual.credentials()) as address:
            for name, code in (
                ("judge.example.org", Code.OK), ("x.example.org", Code.UNAUTHENTICATED),
            ):  # fmt: skip
                async with connect(address, trusting(ca, pair=ca.issue_cert(name))) as channel:
                    assert (await ask(channel, "List"))[0] == code
        one_sided = Certificates(Files(tmp_path, ca).tls)
        async with (
            serving(guard, service, one_sided.credentials()) as address,
            connect(address, trusting(ca)) as channel,
        ):
            assert (await ask(channel, "List"))[0] == Code.OK
    assert service.calls == [("List", "judge"), ("List", "anyone")]


async def test_no_message_of_an_unbound_certificate_is_read(tmp_path: Path, ca: trustme.CA) -> None:
    files = Files(tmp_path, ca, client_ca=ca)
    with bound(tmp_path, judge_example_org="judge") as path:
        async with (
            serving(
                tokens_guard(path), Service(), Certificates(files.tls).credentials()
            ) as address,
            connect(address, trusting(ca, pair=ca.issue_cert("x.example.org"))) as channel,
        ):
            # More than the receive limit: who reads it first ends with RESOURCE_EXHAUSTED.
            call: Any = channel.unary_unary("/dataplane.v1.DataPlaneService/PutTags")
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await call(pb.PutTagsRequest(partition_id="x" * (5 << 20)).SerializeToString())
            assert told.value.code() == Code.UNAUTHENTICATED
            nope: Any = channel.unary_unary("/dataplane.v1.DataPlaneService/Nope")
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await nope(b"")
            assert told.value.code() == Code.UNAUTHENTICATED


async def test_a_stream_ends_when_its_certificate_is_unbound(
    tmp_path: Path, ca: trustme.CA
) -> None:
    files = Files(tmp_path, ca, client_ca=ca)
    service = Service()
    ticks = service.ticks = asyncio.Queue()
    now = [0.0]
    with bound(tmp_path, judge_example_org="judge", plain="x") as path:
        tokens = TokenFile(path, monotonic=lambda: now[0])
        guard = Guard(tokens, anyone=None, throttles=Throttles(lambda: 0.0))
        pair = ca.issue_cert("judge.example.org")
        async with (
            serving(guard, service, Certificates(files.tls).credentials()) as address,
            connect(address, trusting(ca, pair=pair)) as channel,
        ):
            stub: Any = pb_grpc.DataPlaneServiceStub(channel)
            watch = stub.Watch(pb.WatchRequest(), timeout=20)
            await watch.read()
            ticks.put_nowait(True)
            await watch.read()
            with bound(tmp_path, plain="x"):
                now[0] += 1
            ticks.put_nowait(True)
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await watch.read()
            assert told.value.code() == Code.UNAUTHENTICATED


# ---- certificates that change -----------------------------------------------------------------


async def test_new_connections_get_the_new_certificate_and_old_streams_live(
    files: Files, ca: trustme.CA, other_ca: trustme.CA
) -> None:
    service = Service()
    ticks = service.ticks = asyncio.Queue()
    certificates = Certificates(files.tls)
    ended: list[grpc.StatusCode] = []
    stop = False

    async def knock(address: str) -> None:
        while not stop:
            async with connect(address, trusting(ca, other_ca)) as channel:
                ended.append((await ask(channel, "List"))[0])

    async with serving(anyone(), service, certificates.credentials()) as address:
        first = await asyncio.to_thread(shown_by, address)
        async with connect(address, trusting(ca)) as channel:
            stub: Any = pb_grpc.DataPlaneServiceStub(channel)
            watch = stub.Watch(pb.WatchRequest(), timeout=60)
            await watch.read()
            knocking = [asyncio.create_task(knock(address)) for _ in range(3)]
            await until(lambda: len(ended) > 5)
            latest = first
            for authority in (other_ca, ca, other_ca):
                # The certificate first, then its key: for a moment they do not fit.
                latest = files.show(authority)
                reloads, seen = certificates.reloads, len(ended)
                await until(lambda n=seen: len(ended) > n + 5)
                assert certificates.reloads >= reloads
                ticks.put_nowait(True)
                await watch.read()
            assert latest != first
            assert await asyncio.to_thread(shown_by, address) == latest
            stop = True
            await asyncio.gather(*knocking)
            ticks.put_nowait(True)
            await watch.read()
            assert (await ask(channel, "List"))[0] == Code.OK  # its old connection
        async with connect(address, trusting(ca)) as channel:
            assert (await ask(channel, "List"))[0] == Code.UNAVAILABLE
        async with connect(address, trusting(other_ca)) as channel:
            assert (await ask(channel, "List"))[0] == Code.OK
    assert set(ended) == {Code.OK}


@pytest.mark.parametrize("kind", ["no key", "no PEM", "other key", "gone", "passphrase", "empty"])
async def test_a_broken_pair_leaves_the_old_one_and_says_so(
    files: Files, ca: trustme.CA, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    good = files.tls.key.read_bytes()
    service = Service()
    certificates = Certificates(files.tls)
    async with serving(anyone(), service, certificates.credentials()) as address:
        first = await asyncio.to_thread(shown_by, address)
        if kind == "no key":
            files.replace(files.tls.key, files.tls.cert.read_bytes())
        elif kind == "no PEM":
            files.replace(files.tls.cert, b"hello")
        elif kind == "other key":
            files.replace(files.tls.key, ca.issue_cert("localhost").private_key_pem.bytes())
        elif kind == "gone":
            files.tls.cert.unlink()
        elif kind == "passphrase":
            files.replace(files.tls.key, _locked(good))
        else:
            files.replace(files.tls.key, b"")
        for _ in range(3):
            assert await asyncio.to_thread(shown_by, address) == first
        told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert len(told) == 1
        assert "the last good certificate is still shown" in told[0]
        assert str(files.folder) in told[0]
        assert good.splitlines()[1].decode() not in caplog.text
        latest = files.show(ca)
        assert await asyncio.to_thread(shown_by, address) == latest


def _locked(key: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization

    found = serialization.load_pem_private_key(key, None)
    return found.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )


async def test_a_new_authority_lets_in_its_clients_and_no_others(
    tmp_path: Path, ca: trustme.CA, other_ca: trustme.CA
) -> None:
    files = Files(tmp_path, ca, client_ca=ca)
    assert files.tls.client_ca is not None
    service = Service()
    mine, theirs = ca.issue_cert("a.example"), other_ca.issue_cert("a.example")

    async def code(address: str, pair: trustme.LeafCert) -> grpc.StatusCode:
        async with connect(address, trusting(ca, pair=pair)) as channel:
            return (await ask(channel, "List"))[0]

    async with serving(anyone(), service, Certificates(files.tls).credentials()) as address:
        assert [await code(address, pair) for pair in (mine, theirs)] == [
            Code.OK, Code.UNAVAILABLE
        ]  # fmt: skip
        files.replace(files.tls.client_ca, b"-----BEGIN CERTIFICATE-----\n")
        assert await code(address, mine) == Code.OK
        files.replace(files.tls.client_ca, other_ca.cert_pem.bytes())
        assert [await code(address, pair) for pair in (mine, theirs)] == [
            Code.UNAVAILABLE, Code.OK
        ]  # fmt: skip


def test_a_gateway_does_not_start_with_files_that_it_cannot_use(
    files: Files, ca: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidRequest, match=r"the private key .* cannot be read: No such file"):
        Certificates(ServerTls(files.tls.cert, files.folder / "absent"))
    with pytest.raises(InvalidRequest, match="has no certificates in PEM"):
        Certificates(ServerTls(files.tls.cert, files.tls.key, files.tls.key))
    with pytest.raises(InvalidRequest, match="cannot be used"):
        Certificates(ServerTls(files.tls.key, files.tls.key))
    key = files.tls.key.read_bytes()
    files.show(ca)
    files.replace(files.tls.key, key)
    with pytest.raises(InvalidRequest, match="the key does not fit the certificate"):
        Certificates(files.tls)
    assert "others than its owner" not in caplog.text
    files.show(ca)
    files.tls.key.chmod(0o644)
    Certificates(files.tls)
    assert "others than its owner can read the private key" in caplog.text


def test_files_are_read_only_when_they_have_changed(
    files: Files, ca: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = Certificates(files.tls)
    assert [certificates.renewed() for _ in range(10)] == [None] * 10
    shutil.copy(files.tls.cert, files.folder / "copy")
    assert certificates.renewed() is None
    files.show(ca)
    assert certificates.renewed() is not None
    assert certificates.renewed() is None
    assert certificates.reloads == 1

    def fails(tls: ServerTls) -> Any:
        raise RuntimeError("a fault")

    monkeypatch.setattr("dataplane.gateway.access.tls._read", fails)
    files.show(ca)
    assert certificates.renewed() is None
