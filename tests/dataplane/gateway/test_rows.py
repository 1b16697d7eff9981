"""Rows through a gateway: what was put is what is got, whichever side put it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from dataplane.errors import (
    AlreadyWritten,
    DeadlineExceeded,
    FieldNotFound,
    InvalidRequest,
    KeyNotFound,
    PartitionNotFound,
    PlaneLost,
    QuotaExceeded,
    RateLimited,
    SchemaMismatch,
    StaleWrite,
)
from dataplane.gateway.server import GatewayServer
from dataplane.protocol.cells import arrays_of, shape_from
from dataplane.types import Revision
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.gateways import (
    Caller,
    Callers,
    Serve,
    header_of,
    parts_of,
    plane_error,
)
from tests.deadline import until
from tests.faults.planes import Plane

MiB = 1 << 20


def arrays(header: pb.GetRowsHeader, data: bytes) -> dict[str, Any]:
    """The fields of a get."""
    return arrays_of(shape_from(header.columns, len(header.keys)), data)


def ids(*lengths: int) -> dict[str, dict[str, object]]:
    """Rows of one field, with these lengths."""
    return {str(i): {"x": np.arange(n, dtype=np.int64)} for i, n in enumerate(lengths)}


def is_idle(server: GatewayServer) -> bool:
    """Whether a gateway holds nothing of any call."""
    return server.rows.budget.used_bytes == 0 and not len(server.rows.uploads)


# -- in and out ------------------------------------------------------------------------------


async def test_what_is_put_outside_is_got_inside(
    caller: Caller, plane: Plane, partition: str
) -> None:
    rows: dict[str, dict[str, object]] = {
        "a": {
            "input_ids": np.arange(5, dtype=np.int64),
            "flags": np.array([True, False, True]),
            "score": np.float32(0.5),
            "routed_experts": np.arange(12, dtype=np.uint16).reshape(3, 4),
            "half": torch.arange(4, dtype=torch.bfloat16).reshape(2, 2),
            "messages": [{"role": "user", "content": "hé"}, None, 7, 1.5, True, b"raw", ("t", 1)],
        },
        "b": {
            "input_ids": np.arange(3, dtype=np.int64),
            "flags": np.array([], bool),
            "score": np.float32(-1.0),
            "routed_experts": np.arange(8, dtype=np.uint16).reshape(2, 4),
            "half": torch.ones((2, 2), dtype=torch.bfloat16),
            "messages": {"pixels": np.ones((2, 2), np.float32)},
        },
    }
    tags = [{"status": "finished", "n": 1}, {"spans": [[1, 2], [3, 4]]}]
    answer = await caller.put_rows(partition, rows, tags=tags, chunk=7)
    assert list(answer.fields) == sorted(rows["a"])

    listing = plane.client.kv_list(partition)
    assert dict(zip(listing.keys, listing.tags, strict=True)) == dict(zip("ab", tags, strict=True))
    got = plane.client.kv_batch_get(["a", "b"], partition, layout="list").fields
    assert [row.tolist() for row in got["input_ids"]] == [[0, 1, 2, 3, 4], [0, 1, 2]]
    assert [row.tolist() for row in got["flags"]] == [[True, False, True], []]
    assert [float(row) for row in got["score"]] == [0.5, -1.0]
    assert got["routed_experts"][1].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert got["half"][0].dtype is torch.bfloat16
    assert got["half"][0].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert got["messages"][0] == rows["a"]["messages"]
    pixels = got["messages"][1]["pixels"]
    assert isinstance(pixels, torch.Tensor)
    assert pixels.tolist() == [[1.0, 1.0], [1.0, 1.0]]


async def test_what_is_put_inside_is_got_outside(
    caller: Caller, plane: Plane, partition: str
) -> None:
    plane.client.kv_batch_put(
        ["a", "b", "c"],
        partition,
        {
            "x": [torch.arange(n) for n in (3, 0, 5)],
            "image": [torch.full((2, n, 3), n, dtype=torch.uint8) for n in (1, 2, 3)],
            "score": torch.tensor([1.0, 2.0, 3.0]),
            "extra": [{"t": torch.arange(2), "deep": [(1, "x")]}, None, "text"],
        },
    )
    header, data = await caller.get_rows(partition, ["c", "a", "c"])
    assert list(header.keys) == ["c", "a", "c"]
    assert {column.name: list(column.dims) for column in header.columns} == {
        "extra": [-1], "image": [2, -1, 3], "score": [], "x": [-1],
    }  # fmt: skip
    fields = arrays(header, data)
    assert [row.tolist() for row in fields["x"]] == [[0, 1, 2, 3, 4], [0, 1, 2], [0, 1, 2, 3, 4]]
    assert [row.shape for row in fields["image"]] == [(2, 3, 3), (2, 1, 3), (2, 3, 3)]
    assert [int(row[0, 0, 0]) for row in fields["image"]] == [3, 1, 3]
    assert fields["score"].tolist() == [3.0, 1.0, 3.0]
    assert fields["extra"][0] == fields["extra"][2] == "text"
    assert fields["extra"][1]["t"].tolist() == [0, 1]
    assert fields["extra"][1]["deep"] == [(1, "x")]
    assert (
        Revision(header.revision.epoch, header.revision.n)
        >= plane.client.kv_list(partition).revision
    )


async def test_a_large_get_comes_in_chunks_of_the_size_that_is_told(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    server = await serve(chunk_bytes=64 << 10)
    caller = await callers(server)
    rows = torch.randint(0, 1 << 60, (3, 30_000))
    plane.client.kv_batch_put(["a", "b", "c"], partition, {"x": list(rows), "y": list(rows)})
    sizes: list[int] = []
    message = pb.GetRowsRequest(partition_id=partition, keys=["a", "b", "c"])
    async for answer in caller.stub.GetRows(message):
        if answer.WhichOneof("part") == "chunk":
            sizes.append(len(answer.chunk.data))
    assert sum(sizes) == 2 * rows.nbytes
    assert set(sizes[:-1]) == {64 << 10}
    header, data = await caller.get_rows(partition, ["a", "b", "c"])
    fields = arrays(header, data)
    for name in ("x", "y"):
        assert torch.equal(torch.from_numpy(np.stack(fields[name])), rows)
    assert is_idle(server)


async def test_a_get_of_no_fields_brings_those_that_all_rows_have(
    caller: Caller, plane: Plane, partition: str
) -> None:
    plane.client.kv_put("a", partition, {"x": torch.arange(2), "y": torch.arange(2)})
    plane.client.kv_put("b", partition, {"x": torch.arange(3)})
    header, _ = await caller.get_rows(partition, ["a", "b"])
    assert [column.name for column in header.columns] == ["x"]
    with pytest.raises(FieldNotFound) as lacking:
        await caller.get_rows(partition, ["a", "b"], ["y"])
    assert lacking.value.keys == ["b"]
    header, _ = await caller.get_rows(partition, ["a", "b", "c"], ["y"], drop_missing=True)
    assert list(header.keys) == ["a"]
    for fields in ([], ["x"]):
        with pytest.raises(KeyNotFound) as missing:
            await caller.get_rows(partition, ["c", "a", "d"], fields)
        assert missing.value.keys == ["c", "d"]
    header, data = await caller.get_rows(partition, ["c", "d"], drop_missing=True)
    assert (list(header.keys), list(header.columns), data) == ([], [], b"")
    header, data = await caller.get_rows(partition, [])
    assert (list(header.keys), data) == ([], b"")
    with pytest.raises(PartitionNotFound):
        await caller.get_rows("nowhere", ["a"])


# -- the conditions of a put -----------------------------------------------------------------


async def test_a_put_says_what_it_depends_on(caller: Caller, partition: str) -> None:
    with pytest.raises((KeyNotFound, PartitionNotFound)):
        await caller.put_rows(partition, ids(3), mode=pb.PUT_MODE_MUST_EXIST)
    await caller.put_rows(partition, ids(3), tags=[{"a": 1}], mode=pb.PUT_MODE_IF_ABSENT)
    with pytest.raises(AlreadyWritten) as there:
        await caller.put_rows(partition, ids(3), mode=pb.PUT_MODE_IF_ABSENT)
    assert there.value.keys == ["0"]
    assert there.value.code is grpc.StatusCode.ALREADY_EXISTS
    answer = await caller.put_rows(
        partition, ids(4), tags=[{"b": 2}], mode=pb.PUT_MODE_MUST_EXIST, return_tags=True
    )
    assert {name: value.int_value for name, value in answer.tags[0].values.items()} == {
        "a": 1, "b": 2,
    }  # fmt: skip
    with pytest.raises(SchemaMismatch):
        await caller.put_rows(partition, {"0": {"x": np.zeros(2, np.float32)}})
    with pytest.raises(StaleWrite):
        await caller.put_rows(partition, ids(4), attempt=12345)
    with pytest.raises(PlaneLost):
        await caller.put_rows(partition, ids(4), request=caller.request(plane_id="another"))


async def test_tags_may_come_without_fields(caller: Caller, plane: Plane, partition: str) -> None:
    await caller.put_rows(partition, {"a": {}, "b": {}}, tags=[{"n": 1}, {"n": 2}])
    assert plane.client.kv_list(partition).tags == [{"n": 1}, {"n": 2}]


async def test_the_same_request_has_one_effect_and_one_answer(
    caller: Caller, plane: Plane, partition: str
) -> None:
    request = caller.request()
    first = await caller.put_rows(partition, ids(3), request=request)
    plane.client.kv_clear(["0"], partition)
    again = await caller.put_rows(partition, ids(3), request=caller.request(1, retry=True))
    assert again == first
    assert plane.client.kv_list(partition).keys == []


@pytest.mark.parametrize("total", [5_000_000, 17 << 20])
async def test_a_trajectory_of_more_than_grpcs_own_limit_is_taken(
    caller: Caller, plane: Plane, partition: str, total: int
) -> None:
    """One row, in one message as large as the gateway says, or in several where it is larger."""
    row = np.random.default_rng(1).integers(0, 256, total, dtype=np.uint8)
    await caller.put_rows(partition, {"a": {"x": row}}, chunk=15 << 20)
    got = plane.client.kv_batch_get(["a"], partition, layout="list").fields["x"][0]
    assert np.array_equal(got.numpy(), row)


async def test_what_is_too_large_is_refused_with_size_and_limit(
    serve: Serve, callers: Callers, partition: str
) -> None:
    server = await serve(
        max_message_bytes=MiB, max_put_bytes=2 * MiB, chunk_bytes=256 << 10, resume_s=0
    )
    caller = await callers(server)
    with pytest.raises(InvalidRequest, match=rf"{3 * MiB} bytes.*{2 * MiB} \(max_put_bytes\)"):
        await caller.put_rows(partition, {"a": {"x": np.zeros(3 * MiB, np.uint8)}}, chunk=4096)
    with pytest.raises(InvalidRequest, match=rf"{MiB + 8} bytes.*{MiB} \(max_message_bytes\)"):
        await caller.put_rows(partition, {"a": {"x": bytes(MiB + 4)}}, chunk=4096)
    with pytest.raises(InvalidRequest, match=r"larger than its receiver takes"):
        await caller.put_rows(
            partition, {"a": {"x": np.zeros(MiB + 1024, np.uint8)}}, chunk=MiB + 1024
        )
    await until(lambda: is_idle(server))


async def test_a_get_that_is_too_large_is_refused_with_size_and_limit(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    server = await serve(max_get_bytes=MiB)
    caller = await callers(server)
    plane.client.kv_put("a", partition, {"x": torch.zeros(MiB + 1, dtype=torch.uint8)})
    with pytest.raises(InvalidRequest, match=rf"{MiB + 1} bytes.*{MiB}.*max_get_bytes"):
        await caller.get_rows(partition, ["a"])
    assert is_idle(server)


# -- what is no put --------------------------------------------------------------------------


def _changed(header: pb.PutRowsHeader, **parts: Any) -> pb.PutRowsHeader:
    other = pb.PutRowsHeader()
    other.CopyFrom(header)
    for name, value in parts.items():
        other.ClearField(name)
        if isinstance(value, list):
            getattr(other, name).extend(value)
        else:
            setattr(other, name, value)
    return other


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"total_bytes": 23}, "23 bytes, and its columns have 24"),
        ({"keys": ["0", "1"]}, "1 lengths, where"),
        ({"keys": ["0", "0"]}, "names each key once"),
        ({"keys": []}, "1 to 65536 keys"),
        ({"keys": ["\n"]}, "control characters"),
        ({"partition_id": ""}, "empty string is no partition"),
        ({"tags": [pb.Tags(), pb.Tags()]}, "1 keys and 2 tags"),
        ({"tags": [pb.Tags(values={"a": pb.Value(bytes_value=b"x")})]}, "'a'"),
        ({"mode": 77}, "mode"),
        ({"attempt": -1}, "BeginGroup"),
        ({"columns": []}, "24 bytes, and its columns have 0"),
        ({"columns": [], "total_bytes": 0}, "fields, tags or both"),
        ({"columns": [pb.Column(name="x", dtype="int65")]}, "unknown dtype"),
        (
            {"columns": [pb.Column(name="x", dtype="int64", dims=[-1], lengths=[-3])]},
            "negative",
        ),
        (
            {"columns": [pb.Column(name="x", dtype="int64", dims=[1 << 30, 1 << 30, 1 << 30])]},
            "than can be counted|larger than",
        ),
    ],
)  # fmt: skip
async def test_a_header_that_is_wrong_is_refused_before_anything_is_taken(
    caller: Caller, gateway: GatewayServer, partition: str, parts: dict[str, Any], reason: str
) -> None:
    header, _ = header_of(partition, ids(3), request=caller.request())
    call = caller.put()
    try:
        await call.write(pb.PutRowsRequest(header=_changed(header, **parts)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call  # it does not wait for the end of the stream
    finally:
        call.cancel()
    error = plane_error(refused.value)
    assert type(error) is InvalidRequest
    assert re.search(reason, error.message), error.message
    assert is_idle(gateway)
    with pytest.raises(PartitionNotFound):
        await caller.get_rows(partition, ["0"])


async def test_a_row_that_is_no_value_of_its_dtype_is_refused(
    caller: Caller, gateway: GatewayServer, plane: Plane, partition: str
) -> None:
    header, _ = header_of(partition, {"k": {"f": np.array([True])}}, request=caller.request())
    wrong = pb.PutRowsRequest(chunk=pb.Chunk(data=b"\x02"))
    with pytest.raises(InvalidRequest, match="'f': a bool is a byte 0 or 1, not 2"):
        await caller.put_parts([pb.PutRowsRequest(header=header), wrong])
    header, _ = header_of(partition, {"k": {"o": "text"}}, request=caller.request())
    junk = pb.PutRowsRequest(chunk=pb.Chunk(data=b"\xff" * header.total_bytes))
    with pytest.raises(InvalidRequest, match=r"'o' of key 'k': .*not a Value"):
        await caller.put_parts([pb.PutRowsRequest(header=header), junk])
    assert is_idle(gateway)
    assert partition not in plane.client.kv_list_partitions()


# -- room ------------------------------------------------------------------------------------


async def test_a_put_that_finds_no_room_waits_without_reading_on(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    server = await serve(
        buffer_bytes=4 * MiB, buffer_share=1, max_put_bytes=4 * MiB - 4096,
        max_get_bytes=MiB, max_message_bytes=2 * MiB,
    )  # fmt: skip
    slow, quick = await callers(server), await callers(server)
    rows = {"a": {"x": np.ones(3 * MiB, np.uint8)}}
    header, cells = header_of(partition, rows, request=slow.request())
    call = slow.put()
    first, *rest = parts_of(header, cells)
    await call.write(first)
    await until(lambda: server.rows.budget.used_bytes > 3 * MiB)
    waits = asyncio.create_task(quick.put_rows(partition, {"b": rows["a"]}))
    await until(lambda: server.rows.budget.waiting == 1)
    with pytest.raises(RateLimited) as full:
        await callers_put(quick, partition, rows, timeout=0.5)
    assert full.value.limit == "buffer_bytes"
    for part in rest:
        await call.write(part)
    await call.done_writing()
    await call
    await waits
    assert plane.client.kv_list(partition).keys == ["a", "b"]
    assert is_idle(server)


async def callers_put(caller: Caller, partition: str, rows: Any, timeout: float) -> None:
    await caller.put_rows(partition, {"c": rows["a"]}, timeout=timeout)


async def test_who_takes_nothing_of_a_get_holds_only_its_own_call(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    server = await serve(stall_s=0.3, max_get_bytes=32 * MiB)
    caller, other = await callers(server), await callers(server)
    plane.client.kv_put("a", partition, {"x": torch.zeros(24 * MiB, dtype=torch.uint8)})
    plane.client.kv_put("b", partition, {"x": torch.zeros(8, dtype=torch.uint8)})
    call = caller.stub.GetRows(pb.GetRowsRequest(partition_id=partition, keys=["a"]))
    assert (await call.read()).WhichOneof("part") == "header"
    assert server.rows.budget.used_bytes == 24 * MiB
    await other.get_rows(partition, ["b"])
    await until(lambda: is_idle(server))  # it was ended
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        while await call.read() is not grpc.aio.EOF:
            pass
    assert type(plane_error(ended.value)) is DeadlineExceeded
    plane.client.kv_clear(["a", "b"], partition)


async def test_a_full_store_makes_puts_wait_and_then_says_what_fills_it(
    serve: Serve, callers: Callers, roots: Any, partition: str
) -> None:
    from contextlib import ExitStack

    from tests.faults import planes

    with ExitStack() as stack:
        small = planes.start(stack, "small", timeout_s=20, **planes.SMALL_STORE, **roots)
        small.fill()
        server = await serve(small)
        caller = await callers(server)
        rows = {"a": {"x": np.ones(2 * MiB, np.uint8)}}
        with pytest.raises(QuotaExceeded) as full:
            await caller.put_rows(partition, rows, timeout=0.6)
        assert full.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert full.value.limit_bytes
        assert full.value.oldest_keys
        assert is_idle(server)
        waits = asyncio.create_task(caller.put_rows(partition, rows))
        await until(lambda: server.rows.budget.used_bytes > 2 * MiB)
        await asyncio.to_thread(small.make_room)
        await waits
        assert small.client.kv_list(partition).keys == ["a"]
        assert is_idle(server)
