"""What a gateway measures of its calls: an interceptor around all others.

It stands before the guard, so that refused calls count; it reads no message, and the bytes of each
are counted where they are parsed and serialised anyway. Of one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container
from contextvars import ContextVar
from time import perf_counter
from typing import Any, Final

import grpc

from dataplane.metrics.reading import Reading
from dataplane.metrics.timing import UNKNOWN, Histogram

Handler = Any
"""gRPC's RpcMethodHandler."""

_stream_handler: Final[Any] = grpc.stream_stream_rpc_method_handler
_refusal: ContextVar[list[str] | None] = ContextVar("_refusal", default=None)


def note_refusal(error: BaseException) -> None:
    """The call under way ends with an error."""
    noted = _refusal.get()
    if noted is not None:
        noted.append(type(error).__name__)


class CallMeter(grpc.aio.ServerInterceptor):
    """Counts calls, their time and their bytes. To be the first of a server's interceptors."""

    def __init__(self, service: str, methods: Container[str]) -> None:
        """`methods`: of the service; whoever calls may make up any number of others."""
        self._service = service
        self._methods = methods
        self.open_calls = 0
        self.calls: dict[tuple[str, str], int] = {}
        """By method and status."""
        self.durations: dict[str, Histogram] = {}
        self.bytes_in: dict[str, int] = {}
        self.bytes_out: dict[str, int] = {}
        self.refusals: dict[str, int] = {}
        """By the class of the error."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of a call, with a clock around it."""
        handler = await continuation(handler_call_details)
        # Probes and reflection come with their own; what the guard answers is a stream.
        if handler is None or handler.stream_stream is None:
            return handler
        service, _, method = handler_call_details.method.removeprefix("/").partition("/")
        if service != self._service or method not in self._methods:
            method = UNKNOWN
        return self._measured(handler, method)

    def _measured(self, handler: Handler, method: str) -> Handler:
        behaviour: Any = handler.stream_stream
        parse, serialize = handler.request_deserializer, handler.response_serializer

        async def measured(requests: Any, context: Any) -> None:
            began = perf_counter()
            noted: list[str] = []
            _refusal.set(noted)
            self.open_calls += 1
            code = "UNKNOWN"
            try:
                await behaviour(requests, context)
                code = _code_of(context)
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
            except BaseException:
                code = _code_of(context, "UNKNOWN")
                raise
            finally:
                self.open_calls -= 1
                self._count(method, code, perf_counter() - began, noted)

        def parsed(message: bytes) -> Any:
            self.bytes_in[method] = self.bytes_in.get(method, 0) + len(message)
            return message if parse is None else parse(message)

        def serialized(response: Any) -> bytes:
            message: bytes = response if serialize is None else serialize(response)
            self.bytes_out[method] = self.bytes_out.get(method, 0) + len(message)
            return message

        return _stream_handler(measured, parsed, serialized)

    def _count(self, method: str, code: str, seconds: float, noted: list[str]) -> None:
        key = method, code
        self.calls[key] = self.calls.get(key, 0) + 1
        histogram = self.durations.get(method)
        if histogram is None:
            histogram = self.durations[method] = Histogram()
        histogram.add(seconds)
        if noted:
            self.refusals[noted[-1]] = self.refusals.get(noted[-1], 0) + 1

    def read(self, reading: Reading) -> None:
        """Add what was counted."""
        reading.counts("gateway_calls_total", self.calls.items())
        reading.counts("gateway_call_duration_seconds", ())
        for method, histogram in self.durations.items():
            reading.set("gateway_call_duration_seconds", histogram.copy(), method)
        reading.set("gateway_open_calls", self.open_calls)
        for name, counts in (
            ("gateway_received_bytes_total", self.bytes_in),
            ("gateway_sent_bytes_total", self.bytes_out),
            ("gateway_refused_total", self.refusals),
        ):
            reading.counts(name, (((label,), n) for label, n in counts.items()))


def _code_of(context: Any, otherwise: str = "OK") -> str:
    """The status that a call ended with."""
    code: Any = context.code()
    if code is None or code == 0:
        return otherwise
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _NAMES.get(code, otherwise)


_NAMES: Final = {status.value[0]: status.name for status in grpc.StatusCode}
