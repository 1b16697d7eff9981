"""One connection to a gateway, of one event loop: made, lost, made again; calls on it, once each.

Owns gRPC's channel and what becomes of its errors. Tries nothing again: `Failed` says whether the
gateway itself said no, or nobody knows how far a call came.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc
import grpc.aio

from dataplane.errors import DataplaneError, InvalidRequest, PlaneLost, Unreachable
from dataplane.producer.access import TLS, Access, Gateway, Token
from dataplane.protocol.status import ERROR_KEY, error_of
from dataplane.v1 import dataplane_pb2 as pb

SERVICE: Final = pb.DESCRIPTOR.services_by_name["DataPlaneService"]

MAX_MESSAGE_BYTES: Final = 64 << 20
"""Of what is received; what is sent is held to what the gateway takes."""
REASON_S: Final = 1.0
"""How long it may take to learn why nobody answers."""

OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # A connection that died without a word is noticed in this time, while a call is under way.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Of this client alone: what others of the process do to their connections is no matter.
    ("grpc.use_local_subchannel_pool", 1),
    # Only the transport knows what may be repeated: gRPC itself repeats what was never sent, or was
    # refused before anybody saw it, and nobody else can tell it to do more.
    ("grpc.service_config_disable_resolution", 1),
)


class Failed(Exception):
    """A call that failed."""

    def __init__(self, error: DataplaneError, code: grpc.StatusCode | None, *, told: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.code = code
        self.told = told
        """The gateway said so. Otherwise the call may or may not have arrived."""


class Channel:
    """A connection to one gateway."""

    def __init__(self, gateway: Gateway, access: Access, options: Sequence[tuple[str, Any]]):
        self.gateway = gateway
        self._access = access
        self._token = Token(access)
        self._options = [*OPTIONS, *options]
        if access.server_name is not None:
            self._options.append(("grpc.ssl_target_name_override", access.server_name))
        self._channel: Any = None
        self._made_from: Any = None
        self._calls: dict[str, Any] = {}
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    async def reach(self, deadline: float, reach_s: float | None = None) -> None:
        """Be connected. Unreachable, with the reason, if that takes longer than to the deadline, or
        than `reach_s`. PlaneLost if this was closed."""
        until = deadline
        if reach_s is not None:
            until = min(deadline, time.monotonic() + reach_s)
        while (channel := self._open()).get_state() is not grpc.ChannelConnectivity.READY:
            if self._access.signature() != self._made_from:
                await self._drop()  # certificates have changed
                continue
            if self._watching is None or self._watching.done():
                self._watching = asyncio.get_running_loop().create_task(_connect(channel))
            watching = self._watching
            done, _ = await asyncio.wait({watching}, timeout=max(0.0, until - time.monotonic()))
            if not done:
                raise Unreachable(f"no gateway answers at {self.gateway}: {await self._reason()}")
            if not watching.cancelled():  # it is, where the channel was dropped meanwhile
                watching.result()

    async def unary(self, rpc: str, message: Any, deadline: float) -> Any:
        """The answer to one message."""
        try:
            return await self._call(rpc)(message, **self._with(deadline))
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None

    async def parts(self, rpc: str, messages: AsyncIterator[Any], deadline: float) -> Any:
        """The answer to a stream of messages, some of which may be bytes already."""
        try:
            return await self._call(rpc)(messages, **self._with(deadline))
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None

    async def answers(self, rpc: str, message: Any, deadline: float) -> AsyncIterator[Any]:
        """The stream of answers to one message."""
        call = self._call(rpc)(message, **self._with(deadline))
        try:
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None
        finally:
            call.cancel()

    def token_changed(self) -> bool:
        """Whether another token would be sent than the last call carried."""
        return self._token.changed()

    async def close(self) -> None:
        """End all calls, and the connection. Repeatable."""
        self._closed = True
        await self._drop()

    def _open(self) -> Any:
        if self._closed:
            raise PlaneLost("this client was closed; make another")
        if self._channel is None:
            _check_process()
            self._made_from = self._access.signature()
            target = self.gateway.target
            if self.gateway.scheme == TLS:
                credentials = self._access.credentials()
                self._channel = grpc.aio.secure_channel(target, credentials, self._options)
            else:
                self._channel = grpc.aio.insecure_channel(target, self._options)
        return self._channel

    async def _drop(self) -> None:
        channel, self._channel, self._calls = self._channel, None, {}
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.wait({watching})
        if channel is not None:
            await channel.close()

    def _with(self, deadline: float) -> dict[str, Any]:
        left = max(0.001, deadline - time.monotonic())
        return {"timeout": left, "metadata": self._token.metadata()}

    def _call(self, rpc: str) -> Any:
        channel = self._open()
        call = self._calls.get(rpc)
        if call is None:
            method: Any = SERVICE.methods_by_name[rpc]
            kind = "stream" if method.client_streaming else "unary"
            kind += "_stream" if method.server_streaming else "_unary"
            call = self._calls[rpc] = getattr(channel, kind)(
                f"/{SERVICE.full_name}/{rpc}",
                request_serializer=_serialize,
                response_deserializer=getattr(pb, method.output_type.name).FromString,
            )
        return call

    async def _reason(self) -> str:
        """Why nobody answers, in the words of who tried."""
        try:
            deadline = time.monotonic() + REASON_S
            await self.unary("Describe", pb.DescribeRequest(), deadline)
        except Failed as failed:
            if failed.code is grpc.StatusCode.UNAVAILABLE:
                return failed.error.message
        return "it does not take connections"


_used_in: set[int] = set()
"""The processes, this one and those it was forked from, in which a channel was made."""


def _check_process() -> None:
    """InvalidRequest in a process that was forked when gRPC was in use: its threads did not come
    along, and every call would wait for them until its deadline."""
    others = _used_in - {os.getpid()}
    if others:
        raise InvalidRequest(
            f"this process was forked from {max(others)} after gRPC was used there, and gRPC does "
            "not work in such a process: fork before the first call, or start processes by the "
            "methods 'spawn' or 'forkserver'"
        )
    _used_in.add(os.getpid())


async def _connect(channel: Any) -> None:
    """Returns when the channel is connected."""
    while True:
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return
        await channel.wait_for_state_change(state)


def _serialize(message: Any) -> bytes:
    return message if type(message) is bytes else message.SerializeToString()


def _failed(status: grpc.aio.AioRpcError) -> Failed:
    trailers: Any = status.trailing_metadata() or ()
    told = any(name == ERROR_KEY for name, _ in trailers)
    error = error_of(status.code(), status.details(), tuple(trailers))
    return Failed(error, status.code(), told=told)
