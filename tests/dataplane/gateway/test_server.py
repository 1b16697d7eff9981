"""A gateway as a whole: where it listens, what it says of itself, how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dataplane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OutOfRange,
    PermissionDenied,
    PlaneLost,
    RateLimited,
    Unauthenticated,
    Unreachable,
)
from dataplane.gateway import health
from dataplane.gateway.access.token_disk import change_records
from dataplane.gateway.access.token_records import (
    Grant,
    Limits,
    grant_record,
    limits_record,
    token_record,
)
from dataplane.gateway.access.tokens import NewToken, new_token
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.server import GatewayServer
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.gateways import (
    Caller,
    Callers,
    Serve,
    header_of,
    parts_of,
    plane_error,
    raised,
)
from tests.deadline import until
from tests.faults import planes
from tests.faults.planes import Plane

ROW: dict[str, dict[str, object]] = {"a": {"x": np.arange(3)}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def granted(partition: str, *verbs: str, fields: tuple[str, ...] | None = None) -> Grant:
    return grant_record(partition=partition, roles=(), verbs=verbs, fields=fields)


def add_token(path: Path, principal: str, *grants: Grant, limits: Limits | None = None) -> NewToken:
    """A token in the file, which it makes where there is none."""
    token = new_token()
    record = token_record(
        token_id=token.id,
        sha256=token.sha256,
        principal=principal,
        created_s=time.time(),
        expires_s=None,
        grants=grants,
        limits=limits or limits_record(),
    )
    change_records(path, lambda records: (records.with_token(record), None))
    return token


async def is_serving(channel: Any) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(
        health_pb2.HealthCheckRequest(service="dataplane.v1.DataPlaneService")
    )
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def target_of(server: GatewayServer, number: int = 0) -> str:
    scheme, _, place = server.addresses[number].partition("://")
    return f"unix:{place}" if scheme == "grpc+unix" else place


# -- where it listens ------------------------------------------------------------------------


async def test_it_listens_everywhere_it_is_told_to(
    serve: Serve, callers: Callers, roots: dict[str, Path], partition: str
) -> None:
    path = roots["runtime_dir"] / "both.sock"
    server = await serve(listen=(f"unix:{path}", "127.0.0.1:0", "localhost:0"))
    unix, first, second = server.addresses
    assert unix == f"grpc+unix://{path}"
    assert first.startswith("grpc://127.0.0.1:")
    assert second.startswith("grpc://localhost:")
    assert not first.endswith(":0")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    for number in range(3):
        async with grpc.aio.insecure_channel(target_of(server, number)) as channel:
            assert await is_serving(channel)


async def test_a_port_that_is_taken_is_refused_and_nothing_is_left(
    serve: Serve, plane: Plane
) -> None:
    server = await serve(listen=("127.0.0.1:0",))
    taken, other = target_of(server), f"127.0.0.1:{free_port()}"
    late = GatewayServer(plane.joined, GatewayConfig(listen=(other, taken)), plane.config)
    with pytest.raises(InvalidRequest, match=f"cannot listen on '{taken}'"):
        await late.start()
    await late.stop()
    with socket.socket() as again:
        again.bind(("127.0.0.1", int(other.rpartition(":")[2])))


async def test_a_socket_that_another_gateway_has_is_not_taken_away(
    serve: Serve, roots: dict[str, Path]
) -> None:
    path = roots["runtime_dir"] / "mine.sock"
    server = await serve(listen=(f"unix:{path}",))
    with pytest.raises(InvalidRequest, match="somebody else does already"):
        await serve(listen=(f"unix:{path}",))
    async with grpc.aio.insecure_channel(target_of(server)) as channel:
        assert await is_serving(channel)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"listen": ("0.0.0.0:0",)}, "insecure_allow_anyone"),
        ({"listen": ("127.0.0.1:0", "[::]:0")}, "insecure_allow_anyone"),
        ({"listen": ("0.0.0.0:0",), "insecure_allow_plain_text": True}, "insecure_allow_anyone"),
    ],
)
def test_it_stays_on_this_machine_without_credentials(
    plane: Plane, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        GatewayServer(plane.joined, GatewayConfig(**settings), plane.config)


@pytest.mark.parametrize(
    "settings",
    [
        {"tls_cert": "c.pem"},
        {"tls_client_ca": "ca.pem"},
        {"listen": ()},
        {"listen": ("0.0.0.0",)},
        {"listen": ("unix-abstract:x",)},
        {"max_put_bytes": 800 << 20},
        {"chunk_bytes": 16 << 20},
        {"no_such": 1},
        {"resume_s": float("nan")},
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        GatewayConfig(**settings)


def test_the_environment_fills_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_GATEWAY_LISTEN", "127.0.0.1:1, unix:/x")
    monkeypatch.setenv("DATAPLANE_GATEWAY_RESUME_S", "7")
    assert GatewayConfig().listen == ("127.0.0.1:1", "unix:/x")
    assert GatewayConfig(listen=("[::1]:3",)).listen == ("[::1]:3",)
    assert GatewayConfig().resume_s == 7.0


# -- who may call ----------------------------------------------------------------------------


async def test_tokens_say_which_partitions_and_fields(
    serve: Serve, callers: Callers, tmp_path: Path, partition: str
) -> None:
    path = tmp_path / "tokens.json"
    token = add_token(
        path,
        "worker",
        granted(partition, "put", fields=("x",)),
        granted(partition, "read", "list", fields=("x",)),
        limits=limits_record(clients=1),
    )
    server = await serve(token_file=path)
    stranger, worker = await callers(server), await callers(server, token=token.text)
    for rpc in (stranger.put_rows(partition, ROW), stranger.get_rows(partition, ["a"])):
        with pytest.raises(Unauthenticated):
            await rpc
    await worker.put_rows(partition, ROW)
    await worker.get_rows(partition, ["a"])
    with pytest.raises(PermissionDenied, match="fields 'y'"):
        await worker.put_rows(partition, {"a": {"x": np.arange(3), "y": np.arange(3)}})
    with pytest.raises(PermissionDenied):
        await worker.get_rows(partition, ["a"], ["y"])
    for elsewhere in ("nowhere", ""):
        with pytest.raises(PermissionDenied):
            await worker.put_rows(elsewhere, ROW)
        with pytest.raises(PermissionDenied):
            await worker.get_rows(elsewhere, ["a"])
    with pytest.raises(PermissionDenied):
        await worker.progress("nowhere", worker.request(1))
    second = await callers(server, token=token.text)
    with pytest.raises(RateLimited) as many:
        await second.put_rows(partition, ROW)
    assert many.value.limit == "clients"
    assert server.rows.budget.used_bytes == 0


async def test_a_get_of_all_fields_is_refused_if_one_may_not_be_read(
    serve: Serve, callers: Callers, plane: Plane, tmp_path: Path, partition: str
) -> None:
    path = tmp_path / "tokens.json"
    token = add_token(path, "reader", granted(partition, "read", fields=("x",)))
    caller = await callers(await serve(token_file=path), token=token.text)
    plane.client.kv_put("a", partition, {"x": np.arange(2), "secret": np.arange(2)})
    with pytest.raises(PermissionDenied, match="'secret'"):
        await caller.get_rows(partition, ["a"])
    header, _ = await caller.get_rows(partition, ["a"], ["x"])
    assert [column.name for column in header.columns] == ["x"]


async def test_through_tls_only_who_shows_a_certificate_of_the_authority_comes_in(
    serve: Serve, callers: Callers, plane: Plane, tmp_path: Path, partition: str
) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    shown = authority.issue_cert("localhost")
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    shown.private_key_pem.write_to_path(str(key))
    cert.write_bytes(b"".join(blob.bytes() for blob in shown.cert_chain_pems))
    authority.cert_pem.write_to_path(str(ca))
    key.chmod(0o600)
    server = await serve(
        listen=("localhost:0",), tls_cert=cert, tls_key=key, tls_client_ca=ca, handshake_s=2.0
    )
    assert server.addresses[0].startswith("grpcs://localhost:")

    async def caller_of(issuer: trustme.CA | None) -> Caller:
        own = None if issuer is None else issuer.issue_cert("worker@example.org")
        credentials = grpc.ssl_channel_credentials(
            ca.read_bytes(),
            None if own is None else own.private_key_pem.bytes(),
            None if own is None else own.cert_chain_pems[0].bytes(),
        )
        return await callers(server, credentials=credentials)

    await (await caller_of(authority)).put_rows(partition, ROW)
    assert plane.client.kv_list(partition).keys == ["a"]
    for wrong in (await caller_of(stranger), await caller_of(None), await callers(server)):
        with pytest.raises((Unreachable, DeadlineExceeded)):
            await wrong.put_rows(partition, {"b": ROW["a"]}, timeout=3)
    assert plane.client.kv_list(partition).keys == ["a"]


# -- what it says of itself ------------------------------------------------------------------


async def test_it_shows_its_services(gateway: GatewayServer) -> None:
    async with grpc.aio.insecure_channel(target_of(gateway)) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([question])):
            names = {service.name for service in answer.list_services_response.service}
            assert {"dataplane.v1.DataPlaneService", "grpc.health.v1.Health"} <= names


async def test_health_follows_the_plane(
    serve: Serve, roots: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "LOOK_S", 0.02)
    monkeypatch.setattr(health, "ANSWER_S", 0.2)
    with ExitStack() as stack:
        own = planes.start(stack, "followed", timeout_s=20, **roots)
        server = await serve(own)
        async with grpc.aio.insecure_channel(target_of(server)) as channel:
            assert await is_serving(channel)
            os.kill(own.pid, signal.SIGSTOP)
            try:
                await until(lambda: not server.health.serving)
                assert not await is_serving(channel)
            finally:
                os.kill(own.pid, signal.SIGCONT)
            await until(lambda: server.health.serving)
            assert await is_serving(channel)
            own.kill()  # another process goes on, and so does the gateway
            await until(lambda: server.health.serving)
            assert own.host is not None
            await asyncio.to_thread(own.host.stop)
            await asyncio.wait_for(server.health.gone.wait(), 10)
            assert not await is_serving(channel)


async def test_only_so_many_may_watch_its_health(
    gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "MAX_WATCHERS", 1)
    async with grpc.aio.insecure_channel(target_of(gateway)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        first = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await first.read()).status == health_pb2.HealthCheckResponse.SERVING
        second = stub.Watch(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await second.read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()


async def test_a_gateway_without_a_plane_does_not_come_up(
    serve: Serve, roots: dict[str, Path]
) -> None:
    with ExitStack() as stack:
        gone = planes.start(stack, "gone", timeout_s=20, **roots)
        assert gone.host is not None
        gone.host.stop()
        with pytest.raises(PlaneLost):
            await serve(gone)


# -- what is no call -------------------------------------------------------------------------


@pytest.mark.parametrize("rpc", ["PutTags", "GetRows", "PutRows", "List", "Watch"])
async def test_bytes_that_are_no_message_are_a_wrong_request(
    gateway: GatewayServer, rpc: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc.aio.insecure_channel(target_of(gateway)) as channel:
        path = f"/dataplane.v1.DataPlaneService/{rpc}"
        with raised(), pytest.raises(grpc.aio.AioRpcError) as refused:
            if rpc == "PutRows":
                await channel.stream_unary(path)(iter([b"\xff\xff"]), timeout=10)
            elif rpc in ("GetRows", "Watch"):
                await channel.unary_stream(path)(b"\xff\xff", timeout=10).read()
            else:
                await channel.unary_unary(path)(b"\xff\xff", timeout=10)
    assert type(plane_error(refused.value)) is InvalidRequest
    assert not caplog.records


async def test_more_calls_than_it_takes_are_refused(
    serve: Serve, callers: Callers, partition: str
) -> None:
    server = await serve(max_streams=1)
    caller = await callers(server)
    header, cells = header_of(partition, ROW, request=caller.request())
    call = caller.put()
    first, *rest = parts_of(header, cells)
    await call.write(first)
    await until(lambda: len(server.rows.uploads) == 1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await caller.stub.Describe(pb.DescribeRequest(), timeout=10)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for part in rest:
        await call.write(part)
    await call.done_writing()
    await call
    await caller.call("Describe", pb.DescribeRequest())


# -- how it ends -----------------------------------------------------------------------------


async def test_a_drain_lets_calls_end_and_takes_no_more(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    server = await serve(drain_s=15)
    caller, late = await callers(server), await callers(server)
    await late.call("Describe", pb.DescribeRequest())
    header, cells = header_of(partition, ROW, request=caller.request())
    call = caller.put()
    first, *rest = parts_of(header, cells, 8)
    await call.write(first)
    await until(lambda: len(server.rows.uploads) == 1)
    ending = asyncio.create_task(server.stop())
    await until(lambda: not server.health.serving)
    with pytest.raises(Unreachable):
        await late.put_rows(partition, {"b": ROW["a"]})
    assert not ending.done()
    for part in rest:
        await call.write(part)
    await call.done_writing()
    assert (await call).revision.n
    await asyncio.wait_for(ending, 10)  # and not after the 15 s
    assert plane.client.kv_list(partition).keys == ["a"]


async def test_what_has_not_ended_by_then_is_cancelled_and_leaves_nothing(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    server = await serve()
    caller = await callers(server)
    header, cells = header_of(partition, ROW, request=caller.request())
    call = caller.put()
    for part in parts_of(header, cells, 8)[:2]:
        await call.write(part)
    await until(lambda: len(server.rows.uploads) == 1)
    await asyncio.wait_for(server.stop(0.1), 10)
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)) as ended:
        await call
    assert isinstance(ended.value, grpc.aio.AioRpcError)
    assert type(plane_error(ended.value)) is Unreachable
    assert server.rows.budget.used_bytes == 0
    assert not len(server.rows.uploads)
    assert partition not in plane.client.kv_list_partitions()
    # Nothing of it is elsewhere: there it begins anew, with the same number.
    again = await callers(await serve(), client_id=caller.client_id)
    header.resume_offset = 8
    with pytest.raises(OutOfRange) as nothing:
        await again.put_parts(parts_of(header, cells, 8, 8))
    assert nothing.value.offset == 0
    header.resume_offset = 0
    header.request.retry = True
    await again.put_parts(parts_of(header, cells))
    assert plane.client.kv_list(partition).keys == ["a"]
