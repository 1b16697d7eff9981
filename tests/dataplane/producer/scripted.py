"""A gateway that a test tells what to do: it answers, refuses, and breaks off as it is told."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from dataplane.errors import DataplaneError
from dataplane.protocol.status import code_of, trailers_of
from dataplane.v1 import dataplane_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["DataPlaneService"]
PLANE = "plane-1"

Act = Callable[[Any, Any], Awaitable[Any]]
"""What is done with a request (for streams: with what comes of it) in a context."""


def refuse(error: DataplaneError) -> Act:
    """Says no, with all that is known of why."""

    async def act(request: Any, context: Any) -> Any:
        await context.abort(code_of(error), error.message, trailers_of(error))

    return act


def break_off(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> Act:
    """Ends the call as a broken connection does: nobody says anything of it."""

    async def act(request: Any, context: Any) -> Any:
        await context.abort(code, "the connection broke")

    return act


def answer(message: Any) -> Act:
    """Answers."""

    async def act(request: Any, context: Any) -> Any:
        return message

    return act


class ScriptedGateway:
    """What it is to do with the next calls of an RPC stands in `script`; then it does as usual."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.script: dict[str, deque[Act]] = defaultdict(deque)
        self.requests: dict[str, list[Any]] = defaultdict(list)
        """Of each RPC what came: a message, or of a stream the list of them."""
        self.metadata: list[dict[str, str]] = []
        self.limits = pb.Limits(
            max_message_bytes=1 << 20, max_put_bytes=64 << 20, max_get_bytes=64 << 20,
            chunk_bytes=1 << 10, max_rows=65_536, max_page_size=1000,
        )  # fmt: skip
        self.plane_id = PLANE
        self.revision = 0
        self.held: dict[int, bytearray] = {}
        """Bytes of each put that has not come whole."""
        self.applied: dict[int, Any] = {}
        """By number, what had its effect."""
        self.drop_after: deque[int] = deque()
        """How many bytes of the next puts are taken before the stream breaks."""
        self._server: Any = None

    @property
    def address(self) -> str:
        """Where producers reach it."""
        return f"grpc+unix://{self.socket}"

    async def __aenter__(self) -> ScriptedGateway:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen."""
        self.socket.unlink(missing_ok=True)
        self._server = grpc.aio.server()
        handlers: dict[str, Any] = {}
        for method in SERVICE.methods:
            parse = getattr(pb, method.input_type.name).FromString
            write = getattr(pb, method.output_type.name).SerializeToString
            if method.server_streaming:
                kind, handle = grpc.unary_stream_rpc_method_handler, self._stream(method.name)
            elif method.client_streaming:
                kind, handle = grpc.stream_unary_rpc_method_handler, self._parts
            else:
                kind, handle = grpc.unary_unary_rpc_method_handler, self._unary(method.name)
            handlers[method.name] = kind(handle, parse, write)
        service = grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)
        self._server.add_generic_rpc_handlers([service])
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()

    async def stop(self) -> None:
        """End at once."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    # -- what it does as usual ---------------------------------------------------------------

    def _next(self, rpc: str) -> Act | None:
        return self.script[rpc].popleft() if self.script[rpc] else None

    def _unary(self, rpc: str) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            self.requests[rpc].append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            act = self._next(rpc)
            if act is not None:
                told = await act(request, context)
                if told is not None:
                    return told
            return getattr(self, f"_{rpc}", self._effect)(request)

        return handle

    def _stream(self, rpc: str) -> Any:
        async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
            self.requests[rpc].append(request)
            act = self._next(rpc)
            told = [] if act is None else await act(request, context)
            for one in told:
                yield one
            if rpc == "Attend":
                await asyncio.Event().wait()

        return handle

    async def _parts(self, parts: Any, context: Any) -> Any:
        got: list[Any] = []
        self.requests["PutRows"].append(got)
        header = None
        limit = self.drop_after.popleft() if self.drop_after else None
        data = bytearray()
        async for part in parts:
            got.append(part)
            if header is None:
                header = part.header
                data = self.held.setdefault(header.request.number, bytearray())
                if header.resume_offset != len(data):
                    await context.abort(grpc.StatusCode.OUT_OF_RANGE, "not where it ended")
                continue
            assert part.chunk.offset == len(data)
            data += part.chunk.data
            if limit is not None and len(data) >= limit:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        assert header is not None
        act = self._next("PutRows")
        if act is not None:
            told = await act(header, context)
            if told is not None:
                return told
        assert len(data) == header.total_bytes
        return self._effect(header)

    def _effect(self, request: Any) -> Any:
        number = request.request.number
        if number not in self.applied:
            self.revision += 1
            self.applied[number] = self._answer(request)
        return self.applied[number]

    def _answer(self, request: Any) -> Any:
        now = pb.Revision(epoch=1, n=self.revision)
        if isinstance(request, pb.PutTrajectoriesRequest):
            keys = [f"{one.uid}_{one.session_id}_{one.index}" for one in request.trajectories]
            return pb.PutTrajectoriesResponse(
                revision=now, results=[pb.TrajectoryResult(key=key) for key in keys]
            )
        if isinstance(request, pb.BeginGroupRequest):
            return pb.BeginGroupResponse(attempt=self.revision)
        if isinstance(request, pb.ClearRequest):
            return pb.ClearResponse(removed=len(request.keys))
        name = type(request).__name__.removesuffix("Request").removesuffix("Header")
        return getattr(pb, name + "Response")(revision=now)

    def _Describe(self, request: Any) -> Any:
        return pb.DescribeResponse(
            plane_id=self.plane_id, revision=pb.Revision(epoch=1, n=self.revision),
            version="test", principal="anyone", limits=self.limits,
        )  # fmt: skip

    def _GetPutProgress(self, request: Any) -> Any:
        held = self.held.get(request.request.number)
        if held is None:
            return pb.GetPutProgressResponse(state=pb.PUT_STATE_NOT_HELD)
        return pb.GetPutProgressResponse(state=pb.PUT_STATE_RECEIVING, offset=len(held))

    def _GetOutcome(self, request: Any) -> Any:
        applied = pb.Value(bool_value=request.number in self.applied)
        return pb.GetOutcomeResponse(outcome=pb.MapValue(entries={"applied": applied}))

    def _Claim(self, request: Any) -> Any:
        rows = [pb.Row(key=f"row{i}") for i in range(request.count)]
        return pb.ClaimResponse(claim_id=7, rows=rows, deliveries=[1] * len(rows))
