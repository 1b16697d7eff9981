"""The guard, before real servers: who calls, what they may, and what strangers learn (nothing)."""

from __future__ import annotations

import asyncio
import gc
import hmac
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dataplane.errors import InternalError, InvalidRequest, KeyNotFound, RateLimited, Unreachable
from dataplane.gateway.access.caller import REFUSED
from dataplane.gateway.access.guard import Guard, caller, throttle
from dataplane.gateway.access.limits import Throttles
from dataplane.gateway.access.roles import ANYONE, METHODS, ROLES
from dataplane.gateway.access.token_disk import change_records
from dataplane.gateway.access.token_records import Records
from dataplane.gateway.access.tokens import NewToken, TokenFile
from dataplane.protocol.status import error_of
from dataplane.v1 import dataplane_pb2 as pb
from dataplane.v1 import dataplane_pb2_grpc as pb_grpc
from tests.dataplane.gateway.guarded import (
    LOCAL_POOL,
    RPCS,
    Service,
    add_token,
    ask,
    bearer,
    serving,
)
from tests.deadline import until

Code = grpc.StatusCode


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class World:
    """A server with tokens, a guard, and clocks that the test moves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.service = Service()
        self.wall = Clock(1000.0)
        self.time = Clock(0.0)
        self.throttles = Throttles(self.time)
        self.good = add_token(path, "good", "admin")
        self.expired = add_token(path, "expired", "admin", expires_s=999.0)
        self.channel: grpc.aio.Channel
        self.address = ""

    def start(self) -> Guard:
        self.tokens = TokenFile(self.path, clock=self.wall, monotonic=self.time)
        return Guard(self.tokens, anyone=None, throttles=self.throttles, clock=self.time)

    def revoke(self, token: NewToken) -> None:
        change_records(self.path, lambda records: records.without(frozenset({token.id})))
        self.time.now += 1

    async def ask(self, name: str, token: Any = None, **how: Any) -> grpc.StatusCode:
        return (await ask(self.channel, name, () if token is None else bearer(token), **how))[0]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "tokens.json")
    async with (
        serving(world.start(), world.service) as world.address,
        grpc.aio.insecure_channel(world.address, options=LOCAL_POOL) as world.channel,
    ):
        yield world


# ---- every call, every role -------------------------------------------------------------------

_LOOK = {
    "List", "ListPartitions", "GetRows", "Wait", "Watch", "Explain", "GetStatus", "Inspect",
    "Tally", "GetStats", "ListClaims", "ListWaiters", "FindRevision", "Trace",
}  # fmt: skip
_OWN = {"Describe", "Attend", "GetOutcome", "EnterStage"}
_CLAIM = {"Claim", "Commit", "Release"}
_PUT = {
    "PutRows", "GetPutProgress", "PutTags", "PutTrajectories", "BeginGroup", "EndGroup",
}  # fmt: skip
_ADMIN = {"Clear", "CreatePartition", "SealPartition", "DropPartition", "ListHoldings", "GetRecord"}
MAY = {
    "none": set[str](),
    "reader": _OWN | _LOOK,
    "consumer": _OWN | _LOOK | _CLAIM,
    "producer": _OWN | _LOOK | _CLAIM | _PUT,
    "admin": _OWN | _LOOK | _CLAIM | _PUT | _ADMIN,
}
"""Written out, so that a verb which moves to another call is noticed."""


def test_the_table_has_every_call_and_every_role() -> None:
    assert set(MAY) == {"none", *ROLES}
    assert MAY["admin"] == set(RPCS) == set(METHODS)


@pytest.mark.parametrize("role", MAY)
async def test_every_call_under_every_role_and_none(tmp_path: Path, role: str) -> None:
    world = World(tmp_path / "tokens.json")
    token = None if role == "none" else add_token(world.path, "who", role, partition="train")
    refused = Code.UNAUTHENTICATED if token is None else Code.PERMISSION_DENIED
    async with (
        serving(world.start(), world.service) as address,
        grpc.aio.insecure_channel(address, options=LOCAL_POOL) as world.channel,
    ):
        ended = {name: await world.ask(name, token) for name in RPCS}
    assert ended == {name: Code.OK if name in MAY[role] else refused for name in RPCS}
    assert set(world.service.calls) == {(name, "who") for name in MAY[role]}


async def test_a_call_without_a_row_is_refused_to_everybody(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for method in ("/dataplane.v1.DataPlaneService/Unlisted", "/other.Service/List"):
        echo: Any = world.channel.unary_unary(method)
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await echo(b"x", metadata=bearer(world.good))
            assert told.value.code() == Code.PERMISSION_DENIED
    told_once = [r.getMessage() for r in caplog.records if "has no row in METHODS" in r.message]
    assert [line.split()[0] for line in told_once] == [
        "/dataplane.v1.DataPlaneService/Unlisted", "/other.Service/List",
    ]  # fmt: skip


# ---- strangers --------------------------------------------------------------------------------


async def test_strangers_are_all_told_the_same(world: World) -> None:
    good = world.good.text
    shown: list[Any] = [
        (),
        bearer(world.expired),
        bearer(good[:-4] + "AAAA"),
        bearer("dpt_" + "a" * 12 + "_" + "A" * 43),
        bearer(""),
        bearer("nonsense"),
        (("authorization", good),),
        (("authorization", f"Basic {good}"),),
        (("authorization", f"Bearer {good} {good}"),),
        (*bearer(good), *bearer(good)),
        (("authorization-bin", f"Bearer {good}".encode()),),
        (("x-authorization", f"Bearer {good}"),),
    ]
    ended = {await ask(world.channel, name, how) for how in shown for name in ("List", "PutRows")}
    (only,) = ended
    assert only[:2] == (Code.UNAUTHENTICATED, REFUSED)
    assert "Unauthenticated" in str(error_of(*only).__class__)
    assert world.service.calls == []
    assert await world.ask("List", world.good) == Code.OK
    assert (await ask(world.channel, "List", (("authorization", f"bearer  {good}"),)))[0] == Code.OK


async def test_strangers_all_cost_the_same_work(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    compare = hmac.compare_digest

    def counting(one: Any, other: Any) -> bool:
        compared.append(len(one))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    good = world.good.text
    for shown in ((), bearer("x"), bearer(world.expired), bearer(good[:-4] + "AAAA"), bearer(good)):
        compared.clear()
        await ask(world.channel, "List", shown)
        assert compared == [64]


async def test_strangers_do_not_learn_which_calls_there_are(world: World) -> None:
    async def code(method: str, metadata: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await world.channel.unary_unary(method)(b"", metadata=metadata)
        return told.value.code()

    for method in ("/dataplane.v1.DataPlaneService/Nope", "/nope.Nope/Nope", "/x"):
        assert await code(method, ()) == Code.UNAUTHENTICATED
        assert await code(method, bearer(world.expired)) == Code.UNAUTHENTICATED
        assert await code(method, bearer(world.good)) == Code.UNIMPLEMENTED


async def test_no_message_of_a_stranger_is_read(world: World) -> None:
    # More than the receive limit of the server: who reads it first ends with RESOURCE_EXHAUSTED.
    big = pb.PutTagsRequest(partition_id="x" * (5 << 20)).SerializeToString()
    call: Any = world.channel.unary_unary("/dataplane.v1.DataPlaneService/PutTags")
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await call(big)
    assert told.value.code() == Code.UNAUTHENTICATED


async def test_what_is_no_message_is_refused_and_fills_no_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    unary, stream = world.channel.unary_unary, world.channel.stream_unary
    for method, make, sent, said in (
        ("List", unary, b"\xff\xff\xff", "no message of the call"),
        ("PutRows", stream, iter([b"\xff\xff\xff"]), "no message of the call"),
        ("List", stream, iter(()), "ended before its request was sent"),
    ):
        call: Any = make(f"/dataplane.v1.DataPlaneService/{method}")
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await call(sent, metadata=bearer(world.good))
        assert told.value.code() == Code.INVALID_ARGUMENT
        assert said in str(told.value.details())
    assert "Traceback" not in caplog.text
    assert await world.ask("List", world.good) == Code.OK


async def test_health_is_open_and_reflection_is_not(world: World) -> None:
    check: Any = health_pb2_grpc.HealthStub(world.channel).Check
    answer = await check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING

    async def reflect(metadata: Any) -> list[str]:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(world.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        return [
            service.name
            async for answer in stub.ServerReflectionInfo(iter([request]), metadata=metadata)
            for service in answer.list_services_response.service
        ]

    with pytest.raises(grpc.aio.AioRpcError) as told:
        await reflect(())
    assert told.value.code() == Code.UNAUTHENTICATED
    assert "dataplane.v1.DataPlaneService" in await reflect(bearer(world.good))


async def test_tokens_are_in_no_log_no_error_and_no_repr(
    world: World, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = world.good.text[:-6] + "BBBBBB"
    seen: list[str] = []
    world.service.error = ValueError("a fault of a handler")
    for shown in (world.good, world.expired, wrong, "dpt_" + world.good.text[4:20]):
        for name in ("List", "PutRows", "Watch"):
            stub: Any = pb_grpc.DataPlaneServiceStub(world.channel)
            request: Any = getattr(pb, RPCS[name].input_type.name)()
            how = {"metadata": bearer(shown), "timeout": 20}
            try:
                if name == "Watch":
                    seen += [repr(answer) async for answer in stub.Watch(request, **how)]
                elif name == "PutRows":
                    seen.append(repr(await stub.PutRows(iter([request]), **how)))
                else:
                    await stub.List(request, **how)
            except grpc.aio.AioRpcError as error:
                seen += [str(error), repr(error), error.debug_error_string()]
    principal = world.tokens.find(world.good.text)
    seen += [repr(x) for x in (world.tokens, principal, world.good, world.throttles)]
    seen.append(repr(Records.parse(world.path.read_bytes(), "x")))
    output = capfd.readouterr()
    seen += [caplog.text, output.out, output.err]
    assert "a fault of a handler" in caplog.text
    assert "calls without credentials that hold" in caplog.text
    for token in (world.good.text, world.expired.text, wrong):
        secret = token[17:]
        for text in seen:
            assert secret[:12] not in text
            assert secret[-12:] not in text


async def test_refused_calls_are_logged_now_and_then(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dataplane.gateway")  # to refuse somebody is no trouble
    for _ in range(5):
        await world.ask("List")
    world.time.now += 10
    await world.ask("List")
    told = [r.getMessage() for r in caplog.records if "credentials" in r.getMessage()]
    assert told == [
        "calls without credentials that hold: 1, all refused",
        "calls without credentials that hold: 5, all refused",
    ]


# ---- who calls --------------------------------------------------------------------------------


async def test_handlers_find_who_calls_and_calls_side_by_side_do_not_mix(world: World) -> None:
    names = [f"p{i}" for i in range(8)]
    tokens = [add_token(world.path, name, "reader") for name in names]
    world.time.now += 1
    world.service.wait = asyncio.Event()
    asked = [asyncio.create_task(world.ask("Wait", token)) for token in tokens]
    await until(lambda: len(world.service.calls) == len(names))
    world.service.wait.set()
    assert set(await asyncio.gather(*asked)) == {Code.OK}
    assert sorted(world.service.calls) == [("Wait", name) for name in names]


def test_outside_a_call_there_is_no_caller() -> None:
    for question in (caller, throttle):
        with pytest.raises(InternalError, match="no call of the gateway is under way"):
            question()


async def test_without_credentials_everybody_is_anyone() -> None:
    service = Service()
    guard = Guard(None, anyone=ANYONE, throttles=Throttles(Clock(0.0)))
    async with (
        serving(guard, service) as address,
        grpc.aio.insecure_channel(address, options=LOCAL_POOL) as channel,
    ):
        for name in RPCS:
            assert (await ask(channel, name))[0] == Code.OK
        assert (await ask(channel, "List", bearer("whatever")))[0] == Code.OK
    assert set(service.calls) == {(name, "anyone") for name in RPCS}


async def test_where_anyone_may_call_what_is_shown_must_still_hold(tmp_path: Path) -> None:
    world = World(tmp_path / "tokens.json")
    tokens = TokenFile(world.path, clock=world.wall)
    guard = Guard(tokens, anyone=ANYONE, throttles=world.throttles)
    async with (
        serving(guard, world.service) as address,
        grpc.aio.insecure_channel(address, options=LOCAL_POOL) as world.channel,
    ):
        assert await world.ask("List") == Code.OK
        assert await world.ask("List", world.good) == Code.OK
        assert await world.ask("List", world.expired) == Code.UNAUTHENTICATED
    assert world.service.calls == [("List", "anyone"), ("List", "good")]


def test_a_guard_that_would_let_in_nobody_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nobody could call"):
        Guard(None, anyone=None, throttles=Throttles(Clock(0.0)))


# ---- limits -----------------------------------------------------------------------------------


async def test_calls_that_come_too_fast_are_told_when_to_come_again(world: World) -> None:
    token = add_token(world.path, "fast", "admin", calls_per_s=2)
    world.time.now += 1
    for _ in range(2):
        assert await world.ask("List", token) == Code.OK
    for name in ("List", "PutRows", "Watch"):
        code, details, trailers = await ask(world.channel, name, bearer(token))
        assert code == Code.RESOURCE_EXHAUSTED
        error = error_of(code, details, trailers)
        assert isinstance(error, RateLimited)
        assert (error.retry_after_s, error.limit) == (0.5, "calls_per_s")
        assert _retry_delay_s(trailers) == 0.5
    assert len(world.service.calls) == 2
    assert await world.ask("List", world.good) == Code.OK  # others are not concerned
    world.time.now += 0.5
    assert await world.ask("List", token) == Code.OK


def _retry_delay_s(trailers: Any) -> float | None:
    from google.rpc import error_details_pb2, status_pb2

    status: Any = status_pb2.Status.FromString(dict(trailers)["grpc-status-details-bin"])
    retry: Any = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(retry):
            return retry.retry_delay.ToNanoseconds() / 1e9
    return None


async def test_calls_under_way_are_counted_and_given_back_however_they_end(world: World) -> None:
    token = add_token(world.path, "few", "admin", open_streams=2)
    world.time.now += 1
    service = world.service
    service.ticks = asyncio.Queue()
    stub: Any = pb_grpc.DataPlaneServiceStub(world.channel)
    watches = [stub.Watch(pb.WatchRequest(), metadata=bearer(token)) for _ in range(2)]
    for watch in watches:
        await watch.read()
    assert max(service.open_streams) == 2
    for name in ("List", "PutRows", "Watch"):
        code, details, trailers = await ask(world.channel, name, bearer(token))
        error = error_of(code, details, trailers)
        assert isinstance(error, RateLimited)
        assert error.limit == "open_streams"
    watches[0].cancel()
    await until(lambda: service.ended == 1, "a call that was cancelled ends")
    assert await world.ask("List", token) == Code.OK
    service.error = ValueError("a fault")
    for _ in range(5):
        assert await world.ask("List", token) == Code.UNKNOWN
    service.error = KeyNotFound("no such key", partition_id="p", keys=["k"])
    assert await world.ask("List", token) == Code.NOT_FOUND
    service.error = None
    for _ in range(5):
        assert await world.ask("PutRows", token, messages=3) == Code.OK
    service.ticks.put_nowait(False)
    assert await watches[1].read() is grpc.aio.EOF
    await until(lambda: service.ended == 7, "all ended")
    limits = world.tokens.find(token.text)
    assert limits is not None
    await until(lambda: world.throttles.of("few", limits.limits).open_streams == 0)


async def test_a_stream_that_is_left_alone_is_closed_without_the_garbage_collector(
    world: World,
) -> None:
    world.service.ticks = asyncio.Queue()
    stub: Any = pb_grpc.DataPlaneServiceStub(world.channel)
    gc.disable()
    try:
        for n in range(1, 4):
            watch = stub.Watch(pb.WatchRequest(), metadata=bearer(world.good))
            await watch.read()
            watch.cancel()
            await until(lambda n=n: world.service.ended == n, "its generator is closed")
    finally:
        gc.enable()


# ---- calls that last --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Watch", "Attend"])
@pytest.mark.parametrize("how", ["revoked", "expired", "changed"])
async def test_a_stream_of_answers_ends_with_its_credentials(
    world: World, name: str, how: str
) -> None:
    token = add_token(world.path, "who", "admin", expires_s=2000.0)
    world.time.now += 1
    ticks = world.service.ticks = asyncio.Queue()
    stub: Any = pb_grpc.DataPlaneServiceStub(world.channel)
    request: Any = getattr(pb, RPCS[name].input_type.name)()
    stream = getattr(stub, name)(request, metadata=bearer(token), timeout=20)
    await stream.read()
    ticks.put_nowait(True)
    await stream.read()
    if how == "expired":
        world.wall.now = 2000.0
    elif how == "revoked":
        world.revoke(token)
    else:
        document = world.path.read_text()
        head, _, tail = document.rpartition('"admin"')
        world.path.write_text(f'{head}"reader"{tail}')
        world.time.now += 1
    ticks.put_nowait(True)
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await stream.read()
    if how == "changed":
        error = error_of(told.value.code(), "", tuple(told.value.trailing_metadata() or ()))
        assert isinstance(error, Unreachable)
        assert await world.ask("List", token) == Code.OK
        assert await world.ask("Clear", token) == Code.PERMISSION_DENIED
    else:
        assert (told.value.code(), told.value.details()) == (Code.UNAUTHENTICATED, REFUSED)


async def test_a_stream_of_requests_ends_with_its_credentials(world: World) -> None:
    token = add_token(world.path, "who", "producer")
    world.time.now += 1
    stub: Any = pb_grpc.DataPlaneServiceStub(world.channel)
    put = stub.PutRows(metadata=bearer(token), timeout=20)
    await put.write(pb.PutRowsRequest())
    await until(lambda: world.service.received == 1)
    world.revoke(token)
    await put.write(pb.PutRowsRequest())
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await put
    assert told.value.code() == Code.UNAUTHENTICATED
    assert world.service.received == 1


async def test_an_answer_that_waited_longer_than_its_credentials_is_not_given(world: World) -> None:
    token = add_token(world.path, "who", "reader")
    world.time.now += 1
    world.service.wait = asyncio.Event()
    asked = asyncio.create_task(world.ask("Wait", token))
    await until(lambda: world.service.calls)
    world.revoke(token)
    world.service.wait.set()
    assert await asked == Code.UNAUTHENTICATED
