"""Handlers behind the guard: nothing of a call is read before it is known who makes it.

Owns what is around each handler while it runs: the count of calls under way, which goes down
however they end; credentials that are looked at again with each message; and errors of the package,
which become statuses.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final, NoReturn, cast

import grpc
from google.protobuf.message import DecodeError

from dataplane.errors import DataplaneError, InvalidRequest
from dataplane.gateway.access.caller import Caller
from dataplane.gateway.access.limits import Throttle
from dataplane.metrics.calls import note_refusal
from dataplane.protocol.status import code_of, trailers_of

Handler = Any
"""gRPC's RpcMethodHandler."""
Context = Any
"""gRPC's ServicerContext."""
Enter = Callable[[Context], Caller]
"""Finds who makes a call, and raises a DataplaneError if it may not."""

_EOF: Final = cast(Any, grpc.aio).EOF
"""What `read` gives at the end of a stream."""


async def _refuse(context: Context, error: DataplaneError) -> NoReturn:
    note_refusal(error)
    await context.abort(code_of(error), error.message, trailers_of(error))
    raise error  # not reached: a call that is aborted ends there


def refusing(why: DataplaneError | Enter) -> Handler:
    """A handler that ends any call without reading a message of it: with an error, or with what
    `enter` raises, or else because there is no such method."""

    async def refuse(requests: Any, context: Context) -> None:
        if isinstance(why, DataplaneError):
            await _refuse(context, why)
        try:
            why(context)
        except DataplaneError as error:
            await _refuse(context, error)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    return _stream_handler(refuse)


def guarded_handler(handler: Handler, enter: Enter, *, looks: bool) -> Handler:
    """The handler with the guard around each of its calls: first it is asked who calls, then its
    messages are read."""
    behaviour = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    generates = inspect.isasyncgenfunction(behaviour)
    if not (generates or inspect.iscoroutinefunction(behaviour)):
        raise TypeError(f"the guard stands before async handlers only, not {behaviour!r}")

    async def answer(context: Context, who: Caller) -> None:
        checked = _Checked(context, who)
        if handler.request_streaming:
            request = _Requests(checked)
        else:
            request = await checked.read()
            if request is _EOF:
                raise InvalidRequest("the call ended before its request was sent")
        if generates:
            # Written here, and not handed on, so that it is closed with the call and not when the
            # garbage collector comes by.
            async with aclosing(behaviour(request, checked)) as responses:
                async for response in responses:
                    await checked.write(response)
            return
        response = await behaviour(request, checked)
        if handler.response_streaming:
            return
        if looks:
            who.check()
        if context.code() in (None, grpc.StatusCode.OK):
            await context.write(response)

    async def guarded(requests: AsyncIterator[Any], context: Context) -> None:
        opened: Throttle | None = None
        try:
            who = enter(context)
            who.throttle.open_stream()
            opened = who.throttle
            await answer(context, who)
        except DataplaneError as error:
            await _refuse(context, error)
        finally:
            if opened is not None:
                opened.close_stream()

    return _stream_handler(guarded, handler.request_deserializer, handler.response_serializer)


# A stream, whatever the call is: a message of any other kind is read before its handler is called.
_stream_handler: Final = cast(Any, grpc.stream_stream_rpc_method_handler)


class _Checked:
    """The context of a call, which reads and writes as long as the credentials hold."""

    __slots__ = ("_context", "_who")

    def __init__(self, context: Context, who: Caller) -> None:
        self._context = context
        self._who = who

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`. InvalidRequest if it is none."""
        try:
            message = await self._context.read()
        except DecodeError as error:
            raise InvalidRequest(f"this is no message of the call: {error}") from None
        self._who.check()
        return message

    async def write(self, message: Any) -> None:
        """Send a message."""
        self._who.check()
        await self._context.write(message)


class _Requests:
    """The messages of a stream, as long as the credentials hold."""

    __slots__ = ("_context",)

    def __init__(self, context: _Checked) -> None:
        self._context = context

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await self._context.read()
        if message is _EOF:
            raise StopAsyncIteration
        return message
