"""A small server behind a guard: every call of the protocol, answered with nothing and noted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import _async as reflection
from grpc_reflection.v1alpha import reflection_pb2_grpc

from dataplane.gateway.access.guard import Guard, caller, throttle
from dataplane.gateway.access.token_disk import change_records
from dataplane.gateway.access.token_records import (
    Grant,
    Limits,
    grant_record,
    limits_record,
    token_record,
)
from dataplane.gateway.access.tokens import NewToken, new_token
from dataplane.v1 import dataplane_pb2 as pb
from dataplane.v1 import dataplane_pb2_grpc as pb_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["DataPlaneService"]
RPCS = {method.name: method for method in SERVICE.methods}

LOCAL_POOL = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
"""Without it channels to one address share a connection."""


class Service:
    """What the handlers saw, and what they are to do."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """Calls that reached a handler, with the name of who made them."""
        self.received = 0
        """Messages of request streams."""
        self.open_streams: list[int] = []
        self.ended = 0
        self.ticks: asyncio.Queue[bool] | None = None
        """If set, streams of answers go on, one for each; until False."""
        self.wait: asyncio.Event | None = None
        """If set, `Wait` answers when it is."""
        self.error: Exception | None = None
        """If set, what handlers of single requests raise."""

    def servicer(self) -> pb_grpc.DataPlaneServiceServicer:
        cls = type("Servicer", (pb_grpc.DataPlaneServiceServicer,), {})
        for method in SERVICE.methods:
            setattr(cls, method.name, staticmethod(self._handler(method)))
        return cls()

    def _handler(self, method: Any) -> Any:
        response = getattr(pb, method.output_type.name)
        name = method.name

        def note() -> None:
            self.calls.append((name, caller().name))
            self.open_streams.append(throttle().open_streams)

        async def unary(request: Any, context: Any) -> Any:
            note()
            if self.error is not None:
                raise self.error
            if name == "Wait" and self.wait is not None:
                await self.wait.wait()
            return response()

        async def parts(requests: Any, context: Any) -> Any:
            note()
            try:
                async for _ in requests:
                    self.received += 1
            finally:
                self.ended += 1
            return response()

        async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
            note()
            try:
                yield response()
                while self.ticks is not None and await self.ticks.get():
                    yield response()
            finally:
                self.ended += 1

        async def writing(request: Any, context: Any) -> None:
            note()
            await context.write(response())
            while self.ticks is not None and await self.ticks.get():
                await context.write(response())

        if method.client_streaming:
            return parts
        if method.server_streaming:
            return writing if name == "Attend" else answers
        return unary


@asynccontextmanager
async def serving(
    guard: Guard, service: Service, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[str]:
    """The address of a server with this guard."""
    server = grpc.aio.server(interceptors=[guard], options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_DataPlaneServiceServicer_to_server(service.servicer(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    names = (SERVICE.full_name, "grpc.reflection.v1alpha.ServerReflection")
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        reflection.ReflectionServicer(names), server
    )
    other = grpc.unary_unary_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("other.Service", {"List": other}),
            grpc.method_handlers_generic_handler(SERVICE.full_name, {"Unlisted": other}),
        )
    )
    if credentials is None:
        port = server.add_insecure_port("localhost:0")
    else:
        port = server.add_secure_port("localhost:0", credentials)
    await server.start()
    try:
        yield f"localhost:{port}"
    finally:
        await server.stop(0)


async def _echo(request: bytes, context: Any) -> bytes:
    return request


def bearer(token: NewToken | str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token if isinstance(token, str) else token.text}"),)


def add_token(
    path: Path,
    principal: str,
    *roles: str,
    partition: str = "*",
    expires_s: float | None = None,
    **limits: float,
) -> NewToken:
    """A token in the file, which it makes where there is none."""
    token = new_token()
    record = token_record(
        token_id=token.id,
        sha256=token.sha256,
        principal=principal,
        created_s=1.0,
        expires_s=expires_s,
        grants=grants_of(roles, partition),
        limits=limits_of(**limits),
    )
    change_records(path, lambda records: (records.with_token(record), None))
    return token


def grants_of(roles: Iterable[str], partition: str = "*") -> tuple[Grant, ...]:
    return (grant_record(partition=partition, roles=tuple(roles), verbs=(), fields=None),)


def limits_of(**limits: float) -> Limits:
    return limits_record(**limits)


async def ask(
    channel: grpc.aio.Channel, name: str, metadata: Any = (), messages: int = 1
) -> tuple[grpc.StatusCode, str, tuple[Any, ...]]:
    """How a call of the protocol ends: code, details and trailers."""
    stub = pb_grpc.DataPlaneServiceStub(channel)
    method = RPCS[name]
    request = getattr(pb, method.input_type.name)()
    call: Any = getattr(stub, name)
    try:
        if method.client_streaming:
            call = call(iter([request] * messages), metadata=metadata, timeout=20)
            await call
        elif method.server_streaming:
            call = call(request, metadata=metadata, timeout=20)
            async for _ in call:
                pass
        else:
            call = call(request, metadata=metadata, timeout=20)
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or "", tuple(error.trailing_metadata() or ())
    return grpc.StatusCode.OK, "", tuple(await call.trailing_metadata())
