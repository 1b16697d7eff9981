"""From gRPC's calls to their handlers: one table, and what every call has in common.

Owns what is done around each handler: errors become statuses with their details, less what the
caller may not see; whatever else goes wrong becomes INTERNAL and is logged; and nobody waits for a
caller who has gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from dataplane.errors import DataplaneError, InternalError, InvalidRequest
from dataplane.gateway.access.unseen import without_unseen
from dataplane.gateway.call import Call
from dataplane.metrics.calls import note_refusal
from dataplane.protocol.chunks import MALFORMED, parse_put
from dataplane.protocol.status import code_of, trailers_of
from dataplane.v1 import dataplane_pb2 as pb

log = logging.getLogger("dataplane.gateway")

SERVICE = pb.DESCRIPTOR.services_by_name["DataPlaneService"]
NAME: str = SERVICE.full_name

Unary: TypeAlias = Callable[[Any, Call], Awaitable[Any]]
"""A request to a response."""
Answers: TypeAlias = Callable[[Any, Call], AsyncIterator[Any]]
"""A request to a stream of responses."""
Parts: TypeAlias = Callable[[AsyncIterator[Any], Call], Awaitable[Any]]
"""A stream of requests to a response."""
Handler: TypeAlias = Unary | Answers | Parts


def generic_handler(
    handlers: Mapping[str, Handler], call_of: Callable[[Any], Call]
) -> grpc.GenericRpcHandler:
    """The service as gRPC takes it. KeyError names the calls of the protocol that lack a handler.

    `call_of` makes the call of a context.
    """
    missing = {method.name for method in SERVICE.methods} ^ set(handlers)
    if missing:
        raise KeyError(f"calls and handlers differ: {sorted(missing)}")
    methods: dict[str, Any] = {}
    for method in SERVICE.methods:
        request = _parser(method.input_type.name)
        response = _serialize
        handler: Any = handlers[method.name]
        if method.server_streaming:
            methods[method.name] = grpc.unary_stream_rpc_method_handler(
                _streaming(handler, call_of, method.name), request, response
            )
        elif method.client_streaming:
            methods[method.name] = grpc.stream_unary_rpc_method_handler(
                _unary(handler, call_of, method.name), request, response
            )
        else:
            methods[method.name] = grpc.unary_unary_rpc_method_handler(
                _unary(handler, call_of, method.name), request, response
            )
    return grpc.method_handlers_generic_handler(NAME, methods)


def _parser(name: str) -> Callable[[bytes], Any]:
    """What makes requests of bytes; of those that are none, something that says so: gRPC would
    print where it met them, and tell the caller nothing."""
    if name == "PutRowsRequest":
        return parse_put
    parse = getattr(pb, name).FromString

    def request_of(message: bytes) -> Any:
        try:
            return parse(message)
        except DecodeError:
            return MALFORMED

    return request_of


def _serialize(response: Any) -> bytes:
    """A response as it travels; a chunk is made as that."""
    return response if type(response) is bytes else response.SerializeToString()


def _unary(handler: Any, call_of: Callable[[Any], Call], name: str) -> Any:
    async def handle(request: Any, context: Any) -> Any:
        call: Call | None = None
        try:
            _check_request(request, name)
            call = call_of(context)
            return await handler(request, call)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            await _refuse(context, name, error, call)

    return handle


def _streaming(handler: Any, call_of: Callable[[Any], Call], name: str) -> Any:
    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
        call: Call | None = None
        answers: Any = None
        try:
            _check_request(request, name)
            call = call_of(context)
            answers = handler(request, call)
            async for answer in answers:
                yield answer
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            await _refuse(context, name, error, call)
        finally:
            if answers is not None:
                await answers.aclose()

    return handle


def _check_request(request: Any, name: str) -> None:
    if request is MALFORMED:
        raise InvalidRequest(f"the request of {name} is not the message of the protocol")


async def _refuse(context: Any, name: str, error: BaseException, call: Call | None) -> None:
    if not isinstance(error, DataplaneError):
        log.error("%s failed", name, exc_info=error, extra={"verb": name})
        # What an exception of ours says may hold what the caller is not to see.
        error = InternalError(f"{name} failed by a fault of the gateway; its log says more")
    if call is not None:
        error = without_unseen(error, call.principal)
    note_refusal(error)
    await context.abort(code_of(error), error.message, trailers_of(error))
