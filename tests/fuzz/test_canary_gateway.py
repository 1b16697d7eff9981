"""A pickle that comes by gRPC is bytes: on the port, in metadata, in each place of each request."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from dataplane.v1 import dataplane_pb2 as pb
from dataplane.v1 import dataplane_pb2_grpc
from tests.dataplane.gateway.gateways import serving
from tests.faults import planes
from tests.fuzz.canary import canaries

CALL_S = 5.0
ENDLESS = {"Watch", "Wait", "Claim", "Attend", "PutRows"}
"""Calls that wait for something; PutRows is asked by itself."""
SERVICE = pb.DESCRIPTOR.services_by_name["DataPlaneService"]


@pytest.fixture
def sang(tmp_path: Path) -> Iterator[Path]:
    """The folder that is made if a pickle is loaded; it is not."""
    path = tmp_path / "sang"
    yield path
    assert not path.exists()


def planted(message: Any, payload: bytes, depth: int = 0) -> Any:
    """The message with the payload in every field that holds text or bytes, at any depth."""
    text = payload.decode("latin-1")
    for field in message.DESCRIPTOR.fields:
        many = field.is_repeated
        if field.type == field.TYPE_BYTES:
            _set(message, field.name, [payload] if many else payload, many)
        elif field.type == field.TYPE_STRING and not field.containing_oneof:
            _set(message, field.name, [text] if many else text, many)
        elif field.type == field.TYPE_MESSAGE and depth < 3 and field.message_type.name != "Tags":
            if many and not field.message_type.GetOptions().map_entry:
                planted(getattr(message, field.name).add(), payload, depth + 1)
            elif not many:
                planted(getattr(message, field.name), payload, depth + 1)
    return message


def _set(message: Any, name: str, value: Any, many: bool) -> None:
    if many:
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


def parts(payload: bytes) -> Iterator[pb.PutRowsRequest]:
    """A put of an object whose bytes are the payload."""
    column = pb.Column(name="o", dtype="object", dims=[-1], lengths=[len(payload)])
    request = pb.Request(client_id="canary", number=1)
    yield pb.PutRowsRequest(
        header=pb.PutRowsHeader(
            request=request, partition_id="p", keys=["k"], columns=[column],
            total_bytes=len(payload),
        )
    )  # fmt: skip
    yield pb.PutRowsRequest(chunk=pb.Chunk(data=payload))


async def test_no_pickle_that_comes_by_grpc_is_loaded(roots: dict[str, Path], sang: Path) -> None:
    with ExitStack() as stack:
        plane = planes.start(stack, "canary-gateway", timeout_s=20, **roots)
        async with (
            serving(plane, roots["runtime_dir"], listen=["127.0.0.1:0"]) as gateway,
            grpc.aio.insecure_channel(gateway.addresses[0].partition("://")[2]) as channel,
        ):
            stub: Any = dataplane_pb2_grpc.DataPlaneServiceStub(channel)
            host, _, port = gateway.addresses[0].partition("://")[2].rpartition(":")
            for _, payload in canaries(sang):
                with socket.create_connection((host, int(port))) as raw:
                    raw.sendall(payload)
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.PutRows(parts(payload), timeout=CALL_S)
                metadata = (("authorization", "Bearer " + payload.hex()), ("x-bin", payload))
                with suppress(grpc.aio.AioRpcError):
                    await stub.Describe(pb.DescribeRequest(), timeout=CALL_S, metadata=metadata)
                for method in SERVICE.methods:
                    if method.name in ENDLESS:
                        continue
                    kind = getattr(pb, method.input_type.name)
                    call = getattr(stub, method.name)(planted(kind(), payload), timeout=CALL_S)
                    with suppress(grpc.aio.AioRpcError):
                        if method.server_streaming:
                            async for _answer in call:
                                pass
                        else:
                            await call
            assert (await stub.Describe(pb.DescribeRequest(), timeout=CALL_S)).plane_id
        assert "p" not in plane.client.kv_list_partitions()
