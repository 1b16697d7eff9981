"""Gateways in the process of a test, and callers that speak to one in plain messages."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from dataplane.errors import DataplaneError
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.server import GatewayServer
from dataplane.protocol.cells import Cells, cells_of
from dataplane.protocol.status import error_of
from dataplane.protocol.values import tags_to
from dataplane.v1 import dataplane_pb2 as pb
from dataplane.v1 import dataplane_pb2_grpc
from tests.faults.planes import Plane

CALL_S = 20.0
_sockets = itertools.count(1)
_clients = itertools.count(1)


@asynccontextmanager
async def serving(
    plane: Plane, folder: Path, *, listen: Sequence[str] = (), **settings: Any
) -> AsyncGenerator[GatewayServer]:
    """A gateway of a plane, on a unix socket unless it is said where; it ends at once."""
    listen = listen or (f"unix:{folder}/gateway-{next(_sockets)}.sock",)
    settings = {"listen": tuple(listen), "drain_s": 0.0, **settings}
    config = GatewayConfig(**settings)
    server = GatewayServer(plane.joined, config, plane.config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@dataclass
class Caller:
    """One client id at a gateway. Its calls raise the plane's errors."""

    stub: Any
    client_id: str
    metadata: tuple[tuple[str, str], ...] = ()
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def request(self, number: int | None = None, **parts: Any) -> pb.Request:
        """The next effect of this client."""
        if number is None:
            number = next(self.numbers)
        return pb.Request(client_id=self.client_id, number=number, settled=number - 1, **parts)

    async def call(self, rpc: str, message: Any, timeout: float = CALL_S) -> Any:
        """A call with one message each way."""
        with raised():
            return await getattr(self.stub, rpc)(message, timeout=timeout, metadata=self.metadata)

    def put(self, timeout: float = CALL_S) -> Any:
        """A put, to which parts are written one by one."""
        return self.stub.PutRows(timeout=timeout, metadata=self.metadata)

    async def put_rows(
        self,
        partition_id: str,
        rows: Mapping[str, Mapping[str, object]],
        *,
        chunk: int = 1 << 20,
        timeout: float = CALL_S,
        **header: Any,
    ) -> pb.PutRowsResponse:
        """Put rows by key, all with the same fields."""
        first, cells = header_of(partition_id, rows, **{"request": self.request(), **header})
        return await self.put_parts(parts_of(first, cells, chunk), timeout)

    async def put_parts(
        self, parts: Iterable[pb.PutRowsRequest], timeout: float = CALL_S
    ) -> pb.PutRowsResponse:
        """Put what these messages say."""
        with raised():
            return await self.stub.PutRows(iter(parts), timeout=timeout, metadata=self.metadata)

    async def progress(self, partition_id: str, request: pb.Request) -> pb.GetPutProgressResponse:
        """How much of a put the gateway has."""
        message = pb.GetPutProgressRequest(partition_id=partition_id, request=request)
        return await self.call("GetPutProgress", message)

    async def get_rows(
        self, partition_id: str, keys: Sequence[str], fields: Sequence[str] = (), **parts: Any
    ) -> tuple[pb.GetRowsHeader, bytes]:
        """Rows: what they look like, and their bytes."""
        message = pb.GetRowsRequest(partition_id=partition_id, keys=keys, fields=fields, **parts)
        header: pb.GetRowsHeader | None = None
        data = bytearray()
        with raised():
            async for answer in self.stub.GetRows(message, timeout=CALL_S, metadata=self.metadata):
                if header is None:
                    header = answer.header
                else:
                    assert answer.chunk.offset == len(data)
                    data += answer.chunk.data
        assert header is not None
        assert len(data) == header.total_bytes
        return header, bytes(data)


class raised:
    """Turns gRPC's errors into the plane's."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            raise plane_error(error) from error


def plane_error(error: grpc.aio.AioRpcError) -> DataplaneError:
    """The plane's error that a status carries; `.code` is the status."""
    found = error_of(error.code(), error.details(), tuple(error.trailing_metadata()))
    found.code = error.code()  # type: ignore[attr-defined]
    return found


def header_of(
    partition_id: str,
    rows: Mapping[str, Mapping[str, object]],
    *,
    tags: Sequence[Mapping[str, object]] | None = None,
    **parts: Any,
) -> tuple[pb.PutRowsHeader, Cells]:
    """The header of a put, and the bytes that follow it."""
    keys = list(rows)
    names = list(next(iter(rows.values()), {}))
    cells = cells_of(keys, {name: [row[name] for row in rows.values()] for name in names})
    header = pb.PutRowsHeader(
        partition_id=partition_id,
        keys=keys,
        tags=[tags_to(each) for each in tags or ()],
        columns=cells.shape.to_columns(),
        total_bytes=cells.shape.nbytes,
        **parts,
    )
    return header, cells


def parts_of(
    header: pb.PutRowsHeader, cells: Cells, chunk: int = 1 << 20, offset: int = 0
) -> list[pb.PutRowsRequest]:
    """The messages of a put."""
    return [
        pb.PutRowsRequest(header=header),
        *(
            pb.PutRowsRequest(chunk=pb.Chunk(offset=at, data=data))
            for at, data in cells.chunks(chunk, offset)
        ),
    ]


class Callers:
    """Callers of gateways, whose connections end with the test."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def __call__(
        self,
        server: GatewayServer,
        *,
        client_id: str | None = None,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        options: Sequence[tuple[str, Any]] = (),
    ) -> Caller:
        """Somebody who calls a gateway, on a connection of its own."""
        address = server.addresses[0]
        scheme, _, place = address.partition("://")
        target = f"unix:{place}" if scheme == "grpc+unix" else place
        options = [
            ("grpc.max_receive_message_length", 64 << 20),
            ("grpc.use_local_subchannel_pool", 1),
            *options,
        ]
        channel: Any = (
            grpc.aio.insecure_channel(target, options=options)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, options=options)
        )
        await self._stack.enter_async_context(channel)
        stub = dataplane_pb2_grpc.DataPlaneServiceStub(channel)
        metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        return Caller(stub, client_id or f"client-{next(_clients)}", metadata)


Serve = Callable[..., Any]
"""Starts one more gateway, with settings of its own, for as long as the test lasts."""
