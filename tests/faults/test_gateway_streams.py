"""Puts through a gateway that end half-way: nothing in part, nothing twice, nothing for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from dataplane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OutOfRange,
    PlaneLost,
    StaleWrite,
    Unreachable,
)
from dataplane.gateway import child as child_module
from dataplane.gateway.server import GatewayServer
from dataplane.v1 import dataplane_pb2 as pb
from dataplane.v1 import dataplane_pb2_grpc
from tests.dataplane.gateway.gateways import (
    Caller,
    Callers,
    Serve,
    header_of,
    parts_of,
    plane_error,
    raised,
    serving,
)
from tests.deadline import eventually, until
from tests.faults import planes
from tests.faults.planes import MiB, Plane
from tests.faults.processes import Process, Speaker, is_gone

pytestmark = pytest.mark.faults

CHUNK = 64 << 10
BYTES = 8 * CHUNK
ROWS: dict[str, dict[str, object]] = {
    key: {"x": np.random.default_rng(i).integers(0, 256, BYTES // 2, dtype=np.uint8)}
    for i, key in enumerate(("a", "b"))
}


@pytest_asyncio.fixture
async def serve(plane: Plane, roots: dict[str, Path]) -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(of: Plane = plane, **settings: Any) -> GatewayServer:
            return await stack.enter_async_context(serving(of, roots["runtime_dir"], **settings))

        yield start


@pytest_asyncio.fixture
async def callers() -> AsyncIterator[Callers]:
    async with AsyncExitStack() as stack:
        yield Callers(stack)


class Put:
    """One put, of which parts are sent."""

    def __init__(self, caller: Caller, partition: str, **parts: Any) -> None:
        self.caller = caller
        self.partition = partition
        self.request = caller.request()
        self.header, self.cells = header_of(partition, ROWS, request=self.request, **parts)

    def parts(self, offset: int = 0) -> list[pb.PutRowsRequest]:
        """The messages of it from an offset on."""
        self.header.resume_offset = offset
        return parts_of(self.header, self.cells, CHUNK, offset)

    async def begin(self, chunks: int, offset: int = 0) -> Any:
        """A stream that has brought the header and so many chunks."""
        call = self.caller.put()
        for part in self.parts(offset)[: 1 + chunks]:
            await call.write(part)
        return call

    async def arrived(self, server: GatewayServer, offset: int, *, left: bool = False) -> None:
        """Wait until so many bytes of it are there, and (with `left`) nobody brings it."""

        def there() -> bool:
            uploads = list(server.rows.uploads._uploads.values())
            mine = [each for each in uploads if each.owner.client_id == self.caller.client_id]
            return (
                len(mine) == 1
                and mine[0].received.nbytes == offset
                and (not left or mine[0].stream is None)
            )

        await until(there, f"{offset} bytes of it arrive")

    async def goes_on(self, offset: int, **request: Any) -> pb.PutRowsResponse:
        """Send the rest of it, to its end."""
        self.header.request.retry = True
        return await self.caller.put_parts(self.parts(offset))


def is_whole(plane: Plane, partition: str) -> bool:
    """Whether the rows are there as they were sent, once."""
    rows = plane.client.kv_batch_get(["a", "b"], partition, layout="list").fields["x"]
    return all(
        np.array_equal(row.numpy(), ROWS[key]["x"]) for row, key in zip(rows, "ab", strict=True)
    )


def is_idle(server: GatewayServer) -> bool:
    return server.rows.budget.used_bytes == 0 and not len(server.rows.uploads)


def keys_of(plane: Plane, partition: str) -> list[str]:
    known = plane.client.kv_list_partitions()
    return plane.client.kv_list(partition).keys if partition in known else []


@pytest.fixture(autouse=True)
def nothing_is_left(plane: Plane, partition: str) -> Iterator[None]:
    """The value store has not a byte more after a test than it had before."""
    yield
    for name in plane.client.kv_list_partitions():
        plane.client.kv_clear(None, name, where={})
    plane.comes_to(used_bytes=0)


# -- broken streams --------------------------------------------------------------------------


async def test_a_stream_that_breaks_goes_on_where_it_was(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    server = await serve()
    put, other = Put(await callers(server), partition), await callers(server)
    call = await put.begin(3)
    await put.arrived(server, 3 * CHUNK)
    call.cancel()
    await put.arrived(server, 3 * CHUNK, left=True)
    assert keys_of(plane, partition) == []
    await other.put_rows(partition, {"c": {"x": np.zeros(4, np.uint8)}})  # nobody else minds
    told = await put.caller.progress(partition, put.request)
    assert (told.state, told.offset) == (pb.PUT_STATE_RECEIVING, 3 * CHUNK)
    await put.goes_on(told.offset)
    assert is_whole(plane, partition)
    assert is_idle(server)
    told = await put.caller.progress(partition, put.request)
    assert (told.state, told.offset) == (pb.PUT_STATE_NOT_HELD, 0)


async def test_a_stream_that_ends_too_early_changes_nothing_and_may_go_on(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    server = await serve()
    put = Put(await callers(server), partition)
    with pytest.raises(InvalidRequest, match=rf"after {2 * CHUNK} of {BYTES} bytes"):
        await put.caller.put_parts(put.parts()[:3])
    assert keys_of(plane, partition) == []
    await put.goes_on(2 * CHUNK)
    assert is_whole(plane, partition)


@pytest.mark.parametrize("order", ["repeated", "reordered", "left out", "one more"])
async def test_chunks_in_another_order_are_no_put(
    serve: Serve, callers: Callers, plane: Plane, partition: str, order: str
) -> None:
    server = await serve()
    put = Put(await callers(server), partition)
    header, *chunks = put.parts()
    wrong = {
        "repeated": [header, *chunks[:3], chunks[2], *chunks[3:]],
        "reordered": [header, chunks[0], chunks[2], chunks[1], *chunks[3:]],
        "left out": [header, *chunks[:2], *chunks[3:]],
        "one more": [header, *chunks, pb.PutRowsRequest(chunk=pb.Chunk(offset=BYTES, data=b"x"))],
    }[order]
    with pytest.raises(InvalidRequest) as refused:
        await put.caller.put_parts(wrong)
    if order != "one more":
        assert isinstance(refused.value, OutOfRange)
        assert refused.value.code is grpc.StatusCode.OUT_OF_RANGE
        assert refused.value.offset == {"repeated": 3, "reordered": 1, "left out": 2}[order] * CHUNK
    assert keys_of(plane, partition) == []
    await until(lambda: is_idle(server))
    await put.goes_on(0)
    assert is_whole(plane, partition)


async def test_a_second_header_is_no_chunk(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    server = await serve()
    put = Put(await callers(server), partition)
    header, *chunks = put.parts()
    for wrong in ([header, chunks[0], header], [chunks[0]], [], [pb.PutRowsRequest()]):
        with pytest.raises(InvalidRequest):
            await put.caller.put_parts(wrong)
    assert keys_of(plane, partition) == []
    await until(lambda: is_idle(server))


async def test_of_two_streams_with_one_put_the_later_one_has_it(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    server = await serve()
    put = Put(await callers(server), partition)
    first = await put.begin(3)
    await put.arrived(server, 3 * CHUNK)
    second = await put.begin(1, offset=2 * CHUNK)  # some of it comes once more
    with pytest.raises(grpc.aio.AioRpcError) as put_out:
        await first
    assert type(plane_error(put_out.value)) is Unreachable
    await put.arrived(server, 3 * CHUNK)
    third = await put.begin(2)  # from its start
    with pytest.raises(grpc.aio.AioRpcError):
        await second
    await put.arrived(server, 2 * CHUNK)
    assert server.rows.budget.used_bytes < 2 * BYTES
    for part in put.parts(2 * CHUNK)[1:]:
        await third.write(part)
    await third.done_writing()
    await third
    assert is_whole(plane, partition)
    assert is_idle(server)


async def test_a_sender_that_stops_is_not_waited_for_and_may_go_on(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    server = await serve(stall_s=0.2)
    put = Put(await callers(server), partition)
    silent = put.caller.put()
    with raised(), pytest.raises(grpc.aio.AioRpcError) as waited:
        await silent
    assert type(plane_error(waited.value)) is DeadlineExceeded
    call = await put.begin(3)
    with pytest.raises(grpc.aio.AioRpcError) as waited:
        await call
    assert type(plane_error(waited.value)) is DeadlineExceeded
    await put.goes_on(3 * CHUNK)
    assert is_whole(plane, partition)


async def test_what_was_left_is_forgotten_in_time_and_before_others_wait(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    server = await serve(
        buffer_bytes=2 * MiB, buffer_share=1, max_put_bytes=MiB, max_get_bytes=MiB,
        chunk_bytes=64 << 10, resume_s=0.5,
    )  # fmt: skip
    for _ in range(6):  # more than there is room for
        put = Put(await callers(server), partition)
        call = await put.begin(1)
        await put.arrived(server, CHUNK)
        call.cancel()
        await put.arrived(server, CHUNK, left=True)
    assert len(server.rows.uploads) < 6
    assert server.rows.budget.waiting == 0
    await until(lambda: is_idle(server))
    put.header.request.retry = True
    with pytest.raises(OutOfRange) as forgotten:
        await put.goes_on(CHUNK)
    assert forgotten.value.offset == 0
    await put.goes_on(0)
    assert is_whole(plane, partition)


async def test_a_put_that_waits_for_room_is_taken_up_again_without_its_bytes(
    serve: Serve, callers: Callers, roots: dict[str, Path], partition: str
) -> None:
    with ExitStack() as stack:
        small = planes.start(stack, "small", timeout_s=20, **planes.SMALL_STORE, **roots)
        small.fill()
        server = await serve(small)
        put = Put(await callers(server), partition)
        call = await put.begin(8)
        await call.done_writing()
        await put.arrived(server, BYTES)
        told = await put.caller.progress(partition, put.request)
        assert (told.state, told.offset) == (pb.PUT_STATE_APPLYING, BYTES)
        call.cancel()
        await put.arrived(server, BYTES, left=True)
        again = asyncio.create_task(put.goes_on(BYTES))
        await until(lambda: put_out_of(server) is not None)
        await asyncio.to_thread(small.make_room)
        await again
        assert is_whole(small, partition)
        assert is_idle(server)
        small.client.kv_clear(None, partition, where={})
        small.comes_to(used_bytes=0)


def put_out_of(server: GatewayServer) -> object:
    """Who brings the only put that there is."""
    (upload,) = server.rows.uploads._uploads.values()
    return upload.stream


async def test_a_put_whose_deadline_has_passed_may_go_on(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    server = await serve()
    put = Put(await callers(server), partition)
    call = put.caller.put(timeout=0.3)
    for part in put.parts()[:4]:
        await call.write(part)
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await call
    assert type(plane_error(late.value)) is DeadlineExceeded
    await put.arrived(server, 3 * CHUNK, left=True)
    await put.goes_on(3 * CHUNK)
    assert is_whole(plane, partition)
    assert is_idle(server)


# -- one effect ------------------------------------------------------------------------------


async def test_the_same_request_through_two_gateways_has_one_effect(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    first, second = await serve(), await serve()
    put = Put(await callers(first), partition, mode=pb.PUT_MODE_IF_ABSENT)
    answer = await put.goes_on(0)
    put.caller = await callers(second, client_id=put.caller.client_id)
    assert await put.goes_on(0) == answer
    plane.client.kv_clear(["a"], partition)
    put.caller = await callers(await serve(), client_id=put.caller.client_id)
    assert await put.goes_on(0) == answer
    assert keys_of(plane, partition) == ["b"]
    # The same number of somebody else is another request.
    stranger = Put(await callers(first), partition, mode=pb.PUT_MODE_UNSPECIFIED)
    assert stranger.request.number == put.request.number
    assert await stranger.caller.put_parts(stranger.parts()) != answer


async def test_what_was_cleared_is_not_brought_back_by_a_repetition(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    """Half of it came before the clear; the rest is a repetition of what was asked before it."""
    server = await serve()
    plane.client.kv_put("a", partition, {"x": ROWS["a"]["x"]})
    seen = plane.client.kv_list(partition).revision
    put = Put(await callers(server), partition)
    put.header.request.seen.epoch, put.header.request.seen.n = seen
    call = await put.begin(3)
    await put.arrived(server, 3 * CHUNK)
    call.cancel()
    await put.arrived(server, 3 * CHUNK, left=True)
    plane.client.kv_clear(["a"], partition)
    with pytest.raises(StaleWrite):
        await put.goes_on(3 * CHUNK)
    assert keys_of(plane, partition) == []
    assert is_idle(server)


async def test_a_plane_that_dies_meanwhile_has_it_once(
    serve: Serve, callers: Callers, roots: dict[str, Path], partition: str
) -> None:
    with ExitStack() as stack:
        own = planes.start(stack, "dying", timeout_s=20, **roots)
        server = await serve(own)
        put = Put(await callers(server), partition)
        call = await put.begin(3)
        await put.arrived(server, 3 * CHUNK)
        own.kill()
        for part in put.parts()[4:]:
            await call.write(part)
        await call.done_writing()
        answer = await call
        assert is_whole(own, partition)
        own.kill()
        assert await put.goes_on(0) == answer
        assert is_idle(server)


# -- dying processes -------------------------------------------------------------------------


def producer(speaker: Speaker, target: str, header: bytes, chunk: bytes) -> None:
    """Sends a header and a chunk, and then nothing for ever."""
    with grpc.insecure_channel(target) as channel:
        stub = dataplane_pb2_grpc.DataPlaneServiceStub(channel)

        def parts() -> Iterator[pb.PutRowsRequest]:
            yield pb.PutRowsRequest.FromString(header)
            yield pb.PutRowsRequest.FromString(chunk)
            speaker.say("sent")
            threading.Event().wait()

        stub.PutRows(parts())


async def test_a_producer_that_is_killed_leaves_nothing(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    server = await serve(resume_s=0.2)
    put = Put(await callers(server), partition)
    header, chunk, *_ = (part.SerializeToString() for part in put.parts())
    target = server.addresses[0].replace("grpc+unix://", "unix:")
    with Process(producer, target, header, chunk) as dying:
        assert await asyncio.to_thread(dying.says) == "sent"
        await put.arrived(server, CHUNK)
        dying.kill()
        await until(lambda: is_idle(server))
    assert keys_of(plane, partition) == []


@contextmanager
def gateway_process(
    plane: Plane, roots: dict[str, Path], listen: str, *options: str
) -> Iterator[subprocess.Popen[str]]:
    """`dataplane gateway` as an operator starts it."""
    code = "import typer; from dataplane.gateway.command import gateway; typer.run(gateway)"
    command = [
        sys.executable, "-c", code, "--name", plane.joined.name, "--listen", listen,
        "--runtime-dir", str(roots["runtime_dir"]), *options,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    try:
        assert process.stdout is not None
        assert "listens at grpc+unix://" in process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


class At:
    """Where a gateway process listens, for `Callers`."""

    def __init__(self, path: Path) -> None:
        self.addresses = [f"grpc+unix://{path}"]


async def test_a_gateway_that_is_killed_and_started_again_has_one_effect(
    callers: Callers, plane: Plane, roots: dict[str, Path], partition: str
) -> None:
    path = roots["runtime_dir"] / "killed.sock"
    with gateway_process(plane, roots, f"unix:{path}") as first:
        caller = await callers(At(path))  # type: ignore[arg-type]
        done, put = Put(caller, f"{partition}-done"), Put(caller, partition)
        put.header.request.settled = 0  # of both the answers are still to be asked for
        answer = await done.goes_on(0)
        call = await put.begin(3)
        while (await put.caller.progress(partition, put.request)).offset < 3 * CHUNK:
            pass
        first.kill()
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await call
        assert type(plane_error(broken.value)) is Unreachable
    assert keys_of(plane, partition) == []
    with gateway_process(plane, roots, f"unix:{path}", "--drain-s", "5") as second:
        again = await callers(At(path), client_id=put.caller.client_id)  # type: ignore[arg-type]
        put.caller = done.caller = again
        assert await done.goes_on(0) == answer
        with pytest.raises(OutOfRange):
            await put.goes_on(3 * CHUNK)
        late = await put.begin(3)
        while (await put.caller.progress(partition, put.request)).offset < 3 * CHUNK:
            pass
        second.send_signal(signal.SIGTERM)
        for part in put.parts()[4:]:  # it may end what it has begun
            await late.write(part)
        await late.done_writing()
        await late
        assert await asyncio.to_thread(second.wait, 20) == 0
    assert is_whole(plane, partition)
    plane.client.kv_clear(None, f"{partition}-done", where={})


async def test_a_gateway_ends_with_its_plane(roots: dict[str, Path]) -> None:
    with ExitStack() as stack:
        own = planes.start(stack, "ending", timeout_s=20, **roots)
        path = roots["runtime_dir"] / "ending.sock"
        with gateway_process(own, roots, f"unix:{path}") as process:
            assert own.host is not None
            await asyncio.to_thread(own.host.stop)
            assert await asyncio.to_thread(process.wait, 20) == 1
            assert process.stderr is not None
            assert "has ended" in process.stderr.read()


def described(path: Path) -> pb.DescribeResponse:
    """What a gateway says of itself, once it is there."""
    with grpc.insecure_channel(f"unix:{path}") as channel:
        stub = dataplane_pb2_grpc.DataPlaneServiceStub(channel)
        return stub.Describe(pb.DescribeRequest(), timeout=20, wait_for_ready=True)


def test_a_gateway_that_init_starts_comes_back_and_ends_with_the_plane(
    roots: dict[str, Path],
) -> None:
    from dataplane import session

    path = roots["runtime_dir"] / "beside.sock"
    settings = {**roots, "host": "embedded", "timeout_s": 20}
    settings |= {"gateway": {"listen": f"unix:{path}", "drain_s": 0.5}}
    client = session.init(settings, name="beside")
    try:
        (child,) = (each for each in child_module._children if each.pid is not None)
        assert child.addresses == [f"grpc+unix://{path}"]
        first = child.pid
        assert first is not None
        assert described(path).plane_id == client.plane_id
        os.kill(first, signal.SIGKILL)
        eventually(lambda: child.pid != first, "another gateway is started")
        assert described(path).plane_id == client.plane_id
        second = child.pid
        assert second is not None
        assert second != first
    finally:
        client.close()
    assert is_gone(second)
    assert child.pid is None


def test_an_init_whose_gateway_may_not_listen_leaves_no_plane(roots: dict[str, Path]) -> None:
    from dataplane import session

    settings = {**roots, "host": "embedded"}
    with pytest.raises(InvalidRequest, match="insecure_allow_anyone"):
        session.init({**settings, "gateway": {"listen": "0.0.0.0:0"}}, name="open")
    with pytest.raises(PlaneLost):
        session.connect("open", config=settings)
