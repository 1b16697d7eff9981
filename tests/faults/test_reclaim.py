"""Who holds bytes, and what ends a hold: never a timer, never somebody else's end.

A reservation or a pin ends when its holder gives it back or when the kernel closes the holder's
connection. What the store itself cuts off may still be written to, so it is never used again.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import gc
import mmap
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dataplane.client.aio import AsyncClient
from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.codec.encoded import Encoded
from dataplane.config import Config
from dataplane.errors import InvalidRequest, QuotaExceeded
from dataplane.values.segments import segment_path
from dataplane.wire.channel import Channel
from tests.deadline import eventually
from tests.faults.planes import SEGMENT_ROOM, SMALL_STORE, MiB, Plane
from tests.faults.processes import Process, Speaker, is_gone
from tests.faults.raw import Raw, block, meta

pytestmark = pytest.mark.faults

LARGE = 100_000
"""int64 entries of a put that is copied in place: over `small_put_bytes`."""
LARGE_BYTES = 64 + 8 * LARGE
LARGE_EXTENT = (LARGE_BYTES + 4095) // 4096 * 4096
OTHERS = torch.arange(50_000)


def copy_half_then(pause: Callable[[], None]) -> None:
    """From now on puts of this process copy half of their bytes, then pause."""
    whole = Encoded.write_into

    def half_then_all(self: Encoded, target: memoryview) -> None:
        np.frombuffer(target, np.uint8)[: self.nbytes // 2] = 0x55
        pause()
        whole(self, target)

    Encoded.write_into = half_then_all


# -- what the processes run ------------------------------------------------------------------


def put_stopping_in_the_copy(
    speaker: Speaker, joined: Joined, config: Config, partition: str
) -> None:
    copy_half_then(speaker.stop_myself)
    Client(joined, config).kv_put("A", partition, {"x": torch.full((LARGE,), 7)})
    speaker.say("done")


def put_forking_in_the_copy(
    speaker: Speaker, joined: Joined, config: Config, partition: str, stays: bool
) -> None:
    """Fork a child in the midst of the copy; it ends at once, or stays until it is killed."""

    def fork() -> None:
        child = os.fork()
        if not child:
            gc.collect()
            if stays:
                signal.pause()
            os._exit(0)
        if not stays:
            os.waitpid(child, 0)
        speaker.say(child)
        speaker.hear()

    copy_half_then(fork)
    Client(joined, config).kv_put("A", partition, {"x": torch.full((LARGE,), 7)})
    speaker.say("done")


def view_and_wait(speaker: Speaker, joined: Joined, config: Config, partition: str) -> None:
    with Client(joined, config).kv_view(["A"], partition, layout="list") as rows:
        speaker.say(int(rows.fields["x"][0].sum()))
        speaker.hear()
    speaker.say("done")


def view_and_fork(
    speaker: Speaker, joined: Joined, config: Config, partition: str, stays: bool
) -> None:
    """Fork a child while a view is open: it reads, lets go and ends, or stays until killed."""
    with Client(joined, config).kv_view(["A"], partition, layout="list") as rows:
        child = os.fork()
        if not child:
            read = int(rows.fields["x"][0].sum())
            rows.fields = {}
            gc.collect()
            if stays:
                signal.pause()
            os._exit(0 if read == int(OTHERS.sum()) else 1)
        status = 0 if stays else os.waitpid(child, 0)[1]
        speaker.say((child, status))
        speaker.hear()
        speaker.say(int(rows.fields["x"][0].sum()))


def fork_a_client(speaker: Speaker, joined: Joined, config: Config, partition: str) -> None:
    """Use one Client before and after a fork, on both sides of it, while a thread of the parent
    uses it all the time."""
    client = Client(joined, config)
    client.kv_put("parent", partition, {"x": torch.tensor([1])})
    with client.kv_view(["parent"], partition, layout="list") as rows:
        ended = threading.Event()
        count = [0]

        def hammer() -> None:
            while not ended.is_set():
                client.kv_put("hammer", partition, None, {"n": count[0]})
                count[0] += 1

        thread = threading.Thread(target=hammer)
        thread.start()
        ids: list[str] = []
        for i in range(5):
            back, forth = os.pipe()
            child = os.fork()
            if not child:
                client.kv_put(f"child{i}", partition, {"x": torch.full((LARGE,), i)})
                read = client.kv_batch_get(["parent"], partition, layout="list").fields["x"][0]
                assert read.tolist() == [1]
                os.write(forth, client.client_id.encode())
                os._exit(0)
            os.close(forth)
            assert os.waitpid(child, 0)[1] == 0
            ids.append(os.read(back, 100).decode())
            os.close(back)
        ended.set()
        thread.join()
        assert rows.fields["x"][0].tolist() == [1]
    client.kv_put("parent", partition, {"x": torch.tensor([2])})
    speaker.say((client.client_id, ids, count[0]))


def fork_an_asyncio_client(
    speaker: Speaker, joined: Joined, config: Config, partition: str
) -> None:
    """Use one AsyncClient before and after a fork, on both sides of it. The child's copies of the
    parent's connections are collected while it has connections of its own."""
    client = AsyncClient(joined, config)
    loops = [asyncio.new_event_loop()]
    loop = loops[0]
    loop.run_until_complete(client.kv_put("parent", partition, {"x": torch.tensor([1])}))
    back, forth = os.pipe()
    child = os.fork()
    if not child:
        broken: list[str] = []

        async def use() -> None:
            lost = Channel.connection_lost

            def noted(self: Channel, error: Exception | None) -> None:
                if error is not None:
                    broken.append(repr(error))
                lost(self, error)

            Channel.connection_lost = noted
            await client.kv_put("child1", partition, {"x": torch.full((LARGE,), 1)})
            loops.clear()
            gc.collect()
            await client.kv_put("child2", partition, {"x": torch.full((LARGE,), 2)})

        del loop
        asyncio.run(use())
        os.write(forth, repr((client.client_id, broken)).encode())
        os._exit(0)
    os.close(forth)
    assert os.waitpid(child, 0)[1] == 0
    told = os.read(back, 1000).decode()
    loop.run_until_complete(client.kv_put("parent", partition, {"x": torch.tensor([2])}))
    loop.run_until_complete(client.close())
    loop.close()
    speaker.say((client.client_id, told))


# -- a writer ends ---------------------------------------------------------------------------


@pytest.fixture
def others(plane: Plane, partition: str) -> int:
    """A row that somebody else put before; the bytes in use then."""
    plane.client.kv_put("others", partition, {"x": OTHERS})
    return plane.counts()["used_bytes"]


@pytest.fixture(autouse=True)
def all_is_free_again(request: pytest.FixtureRequest):
    """The shared plane is empty before and after each test: nothing held, nothing leaked."""
    if "plane" not in request.fixturenames:
        yield
        return
    plane: Plane = request.getfixturevalue("plane")
    yield
    for name in plane.client.status()["partitions"]:
        plane.client.kv_clear(None, name, where={})
    plane.comes_to(used_bytes=0, blocks=0, pins=0, waiting=0)


def start(function: Callable[..., None], plane: Plane, partition: str, *more: object) -> Process:
    return Process(function, plane.joined, plane.config, partition, *more)


def untouched(plane: Plane, partition: str) -> bool:
    """Whether the others' row, and nothing else, is listed and as it was put."""
    rows = plane.client.kv_batch_get(["others"], partition, layout="list")
    return plane.client.kv_list(partition).keys == ["others"] and torch.equal(
        rows.fields["x"][0], OTHERS
    )


def test_a_writer_killed_in_its_copy_leaves_nothing(
    plane: Plane, partition: str, others: int
) -> None:
    with start(put_stopping_in_the_copy, plane, partition) as writer:
        writer.stopped()
        plane.comes_to(used_bytes=others + LARGE_EXTENT, blocks_reserved=1)
        writer.kill()
        plane.comes_to(used_bytes=others, blocks_reserved=0)
    assert untouched(plane, partition)
    # The bytes are used again at once.
    plane.client.kv_put("A", partition, {"x": torch.full((LARGE,), 8)})
    assert plane.counts()["used_bytes"] == others + LARGE_EXTENT
    assert set(plane.reads("A", partition)) == {8}


def test_no_deadline_of_anybody_ends_the_reservation_of_a_stopped_writer(
    own_plane: Callable[..., Plane], partition: str
) -> None:
    plane = own_plane(**SMALL_STORE, history_age_s=0.1)
    row = {"x": torch.zeros(SEGMENT_ROOM - 64, dtype=torch.uint8)}
    with Process(put_stopping_in_the_copy, plane.joined, plane.config, partition) as writer:
        writer.stopped()
        plane.comes_to(blocks_reserved=1)
        plane.client.kv_put("0", "full", row)
        with pytest.raises(QuotaExceeded) as full:
            plane.client.kv_put("1", "full", row, timeout=2.0)
        assert full.value.used_bytes == SEGMENT_ROOM + LARGE_EXTENT
        assert full.value.limit_bytes == SMALL_STORE["capacity_bytes"]
        assert plane.counts()["blocks_reserved"] == 1
        writer.resume()
        assert writer.says() == "done"
    assert set(plane.reads("A", partition)) == {7}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_put_that_is_interrupted_in_its_copy_gives_its_reservation_back(
    monkeypatch: pytest.MonkeyPatch, plane: Plane, partition: str, others: int, error: Any
) -> None:
    def interrupted(self: Encoded, target: memoryview) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Encoded, "write_into", interrupted)
        with pytest.raises(error):
            plane.client.kv_put("A", partition, {"x": torch.full((LARGE,), 7)})
    plane.comes_to(used_bytes=others, blocks_reserved=0)
    assert untouched(plane, partition)
    plane.client.kv_put("A", partition, {"x": torch.full((LARGE,), 7)})


def test_closing_a_client_does_not_end_a_reservation_that_a_thread_still_copies_into(
    monkeypatch: pytest.MonkeyPatch, plane: Plane, partition: str
) -> None:
    copying, go_on = threading.Event(), threading.Event()
    whole = Encoded.write_into

    def slow(self: Encoded, target: memoryview) -> None:
        copying.set()
        assert go_on.wait(10)
        whole(self, target)

    monkeypatch.setattr(Encoded, "write_into", slow)
    client = plane.another()
    thread = threading.Thread(
        target=client.kv_put, args=("A", partition, {"x": torch.full((LARGE,), 7)})
    )
    thread.start()
    assert copying.wait(10)
    client.close()
    plane.client.kv_put("B", partition, None, {"n": 1})  # the store has seen whatever close did
    assert plane.counts()["blocks_reserved"] == 1
    go_on.set()
    thread.join(10)
    plane.comes_to(blocks_reserved=0)
    assert set(plane.reads("A", partition)) == {7}


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_coroutine_leaves_no_reservation_however_late_it_is_granted(
    own_plane: Callable[..., Plane], partition: str
) -> None:
    plane = own_plane(**SMALL_STORE)
    plane.fill()
    client = AsyncClient(plane.joined, plane.config)
    put = asyncio.create_task(client.kv_put("A", partition, {"x": torch.full((LARGE,), 7)}))
    await asyncio.to_thread(plane.comes_to, waiting=1)
    await _cancel(put)
    await asyncio.to_thread(plane.make_room)
    await asyncio.to_thread(plane.comes_to, waiting=0, used_bytes=0)
    # The connection is as good as before.
    await client.kv_put("B", partition, {"x": torch.full((LARGE,), 8)})
    assert (await client.kv_list(partition)).keys == ["B"]
    await client.close()


async def test_a_coroutine_cancelled_in_its_copy_gives_back_only_after_the_copy_has_stopped(
    monkeypatch: pytest.MonkeyPatch, plane: Plane, partition: str
) -> None:
    copying, go_on = threading.Event(), threading.Event()
    whole = Encoded.write_into

    def slow(self: Encoded, target: memoryview) -> None:
        copying.set()
        assert go_on.wait(10)
        whole(self, target)

    monkeypatch.setattr(Encoded, "write_into", slow)
    client = AsyncClient(plane.joined, plane.config)
    put = asyncio.create_task(client.kv_put("A", partition, {"x": torch.full((LARGE,), 7)}))
    assert await asyncio.to_thread(copying.wait, 10)
    put.cancel()
    await client.kv_put("B", partition, None, {"n": 1})
    assert (await asyncio.to_thread(plane.counts))["blocks_reserved"] == 1
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await put
    await asyncio.to_thread(plane.comes_to, blocks_reserved=0, used_bytes=0)
    await client.close()


# -- a fork ----------------------------------------------------------------------------------


def test_a_forked_child_does_not_keep_its_dead_parents_reservation(
    plane: Plane, partition: str, others: int
) -> None:
    with start(put_forking_in_the_copy, plane, partition, True) as writer:
        child = writer.says()
        try:
            plane.comes_to(blocks_reserved=1)
            writer.kill()
            plane.comes_to(blocks_reserved=0, used_bytes=others)
            assert not is_gone(child)
        finally:
            os.kill(child, signal.SIGKILL)
    assert untouched(plane, partition)


def test_the_end_of_a_forked_child_does_not_end_its_parents_reservation(
    plane: Plane, partition: str, others: int
) -> None:
    with start(put_forking_in_the_copy, plane, partition, False) as writer:
        child = writer.says()
        assert is_gone(child)
        assert plane.counts()["blocks_reserved"] == 1
        writer.hears("go on")
        assert writer.says() == "done"
    assert set(plane.reads("A", partition)) == {7}
    assert plane.counts()["used_bytes"] == others + LARGE_EXTENT


def test_a_forked_child_does_not_keep_its_dead_parents_pins(plane: Plane, partition: str) -> None:
    plane.client.kv_put("A", partition, {"x": OTHERS})
    with start(view_and_fork, plane, partition, True) as reader:
        child, _ = reader.says()
        try:
            plane.comes_to(pins=1)
            reader.kill()
            plane.comes_to(pins=0)
            assert not is_gone(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_lets_go_of_a_view_and_ends_leaves_its_parents_pins(
    plane: Plane, partition: str
) -> None:
    plane.client.kv_put("A", partition, {"x": OTHERS})
    with start(view_and_fork, plane, partition, False) as reader:
        _, status = reader.says()
        assert status == 0
        assert plane.counts()["pins"] == 1
        plane.client.kv_clear(["A"], partition)
        plane.comes_to(blocks_dead=1)
        reader.hears("go on")
        assert reader.says() == int(OTHERS.sum())
        plane.comes_to(pins=0, used_bytes=0)


def test_a_forked_child_is_a_new_client_and_its_parent_goes_on(
    plane: Plane, partition: str
) -> None:
    with start(fork_a_client, plane, partition) as process:
        parent, children, hammered = process.says()
    assert len({parent, *children}) == 6
    assert hammered > 0
    listing = plane.client.kv_list(partition)
    tags = dict(zip(listing.keys, listing.tags, strict=True))
    assert sorted(tags) == [f"child{i}" for i in range(5)] + ["hammer", "parent"]
    assert tags["hammer"] == {"n": hammered - 1}
    assert [set(plane.reads(f"child{i}", partition)) for i in range(5)] == [{i} for i in range(5)]
    assert plane.reads("parent", partition) == [2]


def test_a_forked_asyncio_client_is_a_new_client_and_closes_no_descriptor_twice(
    plane: Plane, partition: str
) -> None:
    with start(fork_an_asyncio_client, plane, partition) as process:
        parent, told = process.says()
    child, broken = ast.literal_eval(told)
    assert child != parent
    assert broken == []
    assert sorted(plane.client.kv_list(partition).keys) == ["child1", "child2", "parent"]
    assert plane.content("child2", partition) == [2]
    assert plane.reads("parent", partition) == [2]


# -- a reader ends ---------------------------------------------------------------------------


def test_pins_end_with_their_killed_reader(plane: Plane, partition: str) -> None:
    plane.client.kv_put("A", partition, {"x": OTHERS})
    with start(view_and_wait, plane, partition) as reader:
        assert reader.says() == int(OTHERS.sum())
        plane.client.kv_clear(["A"], partition)
        plane.comes_to(pins=1, blocks_dead=1)
        assert plane.counts()["used_bytes"] > 0
        reader.kill()
        plane.comes_to(pins=0, blocks_dead=0, used_bytes=0)


def test_pins_of_a_stopped_reader_stay(plane: Plane, partition: str) -> None:
    plane.client.kv_put("A", partition, {"x": OTHERS})
    with start(view_and_wait, plane, partition) as reader:
        reader.says()
        reader.stop()
        plane.client.kv_clear(["A"], partition)
        for i in range(20):  # what comes after does not land there
            plane.client.kv_put(f"B{i}", partition, {"x": torch.full((LARGE,), 9)})
        assert plane.counts()["pins"] == 1
        reader.resume()
        reader.hears("go on")
        assert reader.says() == "done"
    plane.comes_to(pins=0)


@pytest.mark.parametrize("closes_first", [False, True], ids=["inside", "outside"])
def test_a_view_outlives_the_close_of_its_client_and_keeps_its_block(
    plane: Plane, partition: str, closes_first: bool
) -> None:
    plane.client.kv_put("A", partition, {"x": OTHERS})
    reader = plane.another()
    with reader.kv_view(["A"], partition, layout="list") as rows:
        tensor = rows.fields["x"][0]
        if not closes_first:
            reader.close()
    reader.close()
    del rows
    plane.client.kv_clear(["A"], partition)
    for i in range(20):
        plane.client.kv_put(f"B{i}", partition, {"x": torch.full((len(OTHERS),), 9)})
    assert torch.equal(tensor, OTHERS)
    assert plane.counts()["pins"] == 1
    part = tensor[10:20]
    del tensor
    assert plane.counts()["pins"] == 1
    assert part.tolist() == list(range(10, 20))
    del part
    plane.comes_to(pins=0, blocks_dead=0)


# -- the store cuts a client off -------------------------------------------------------------


def misbehave(raw: Raw) -> None:
    raw.send(b"\0" * 64)
    assert isinstance(raw.refusal(), InvalidRequest)


def test_what_a_client_reserved_that_was_cut_off_is_never_used_again(
    own_plane: Callable[..., Plane], partition: str
) -> None:
    plane = own_plane(capacity_bytes=64 * MiB, segment_bytes=4 * MiB)
    plane.client.kv_put("others", partition, {"x": OTHERS})
    (doomed,) = plane.segments()
    with Raw.greeted(plane.joined) as raw:
        _, number, offset, _ = raw.ask("reserve", [LARGE_BYTES, 5.0, None])
        path = segment_path(plane.folders.segments / "local", number)
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        misbehave(raw)
    plane.comes_to(blocks_reserved=0)
    # Its file stays for the rows of others, which another process may have to find there.
    assert path.stat().st_ino == doomed
    memory[offset : offset + LARGE_BYTES] = b"\xff" * LARGE_BYTES
    # Rows that lie there already are still read, by clients old and new.
    assert untouched(plane, partition)
    with plane.another() as late:
        rows = late.kv_batch_get(["others"], partition, layout="list")
        assert torch.equal(rows.fields["x"][0], OTHERS)
    # New ones lie elsewhere, whatever the one that was cut off goes on writing.
    keys = [f"B{i}" for i in range(12)]
    for i, key in enumerate(keys):
        plane.client.kv_put(key, partition, {"x": torch.full((LARGE,), i)})
        memory[4096:] = b"\xff" * (len(memory) - 4096)
    for i, key in enumerate(keys):
        assert set(plane.reads(key, partition)) == {i}
    # With its last row the segment is gone for good.
    before = plane.counts()["segments"]
    plane.client.kv_clear(["others"], partition)
    eventually(lambda: plane.counts()["segments"] == before - 1, "the segment is given back")
    assert not path.exists()
    memory.close()


def test_what_a_client_pinned_that_was_cut_off_is_never_written_again(
    own_plane: Callable[..., Plane], partition: str
) -> None:
    plane = own_plane(capacity_bytes=64 * MiB, segment_bytes=4 * MiB)
    plane.client.kv_put("A", partition, {"x": torch.full((LARGE,), 7)})
    (doomed,) = plane.segments()
    with Raw.greeted(plane.joined) as raw:
        reserved = raw.ask("reserve", [4096, 5.0, None])
        raw.ask("abort", [reserved[0]])
        handle, gone = raw.ask("pin", [np.array([reserved[0] - 1], np.int64).tobytes()])
        assert (handle, gone) == (1, [])
        path = segment_path(plane.folders.segments / "local", reserved[1])
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        there = memory[:]
        misbehave(raw)
    plane.comes_to(pins=0)
    plane.client.kv_clear(["A"], partition)
    plane.comes_to(used_bytes=0)
    assert doomed not in plane.segments()
    for i in range(12):
        plane.client.kv_put(f"B{i}", partition, {"x": torch.full((LARGE,), i)})
    assert memory[:] == there
    memory.close()


# -- other nodes -----------------------------------------------------------------------------


def read_request(blocks: list[int], nbytes: int, timeout_s: float) -> list[Any]:
    """A `read` of so many bytes from the start of each block."""
    count = len(blocks)
    return [
        np.array(blocks, np.int64).tobytes(),
        np.arange(count, dtype=np.int32).tobytes(),
        np.zeros(count, np.int64).tobytes(),
        np.full(count, nbytes, np.int64).tobytes(),
        timeout_s,
    ]


def last_block(plane: Plane) -> int:
    """The block that was made last: ids count up."""
    with Raw.greeted(plane.joined) as raw:
        number, *_ = raw.ask("reserve", [4096, 5.0, None])
        raw.ask("abort", [number])
    return number - 1


@pytest.fixture
def remote(own_plane: Callable[..., Plane], partition: str) -> Plane:
    """A plane that listens on TCP, with a row larger than any socket buffer."""
    plane = own_plane(tcp_host="127.0.0.1", capacity_bytes=128 * MiB)
    plane.client.kv_put("A", partition, {"x": torch.zeros(32 * MiB, dtype=torch.uint8)})
    return plane


def test_a_remote_reader_that_vanishes_ends_its_pin_and_harms_no_segment(remote: Plane) -> None:
    before, number = remote.segments(), last_block(remote)
    with Raw.greeted(remote.joined, tcp=True) as raw:
        raw.request("read", read_request([number], 32 * MiB, 60.0))
        remote.comes_to(pins=1)
    remote.comes_to(pins=0)
    assert remote.segments() == before


def test_a_remote_reader_that_does_not_read_loses_its_pin_at_its_deadline_and_gets_no_more(
    remote: Plane, partition: str
) -> None:
    nbytes = 32 * MiB
    remote.client.kv_put("A", partition, {"x": torch.full((nbytes,), 1, dtype=torch.uint8)})
    remote.comes_to(blocks=1)
    number = last_block(remote)
    with Raw.greeted(remote.joined, tcp=True) as raw:
        raw.request("read", read_request([number], nbytes, 0.2))
        remote.comes_to(pins=1)
        remote.comes_to(pins=0)
        # The bytes are somebody else's now; what the reader still gets is none of them.
        remote.client.kv_clear(["A"], partition)
        remote.comes_to(used_bytes=0)
        for key in "BC":
            remote.client.kv_put(key, partition, {"x": torch.full((nbytes,), 2, dtype=torch.uint8)})
        received = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while piece := raw.socket.recv(MiB):
                received += piece
    assert len(received) < nbytes
    assert set(received[1000:]) <= {1}
    assert remote.client.status()["clients"] == 1


@pytest.mark.parametrize(
    ("verb", "body"),
    [("reserve", [4096, 5.0, None]), ("pin", [np.array([1], np.int64).tobytes()])],
)
def test_a_client_of_another_node_can_hold_neither_reservation_nor_pin(
    remote: Plane, verb: str, body: list[Any]
) -> None:
    with (
        Raw.greeted(remote.joined, tcp=True) as raw,
        pytest.raises(InvalidRequest, match="only clients of this node"),
    ):
        raw.ask(verb, body)


def test_a_remote_writer_that_vanishes_in_its_payload_leaves_nothing(
    remote: Plane, partition: str
) -> None:
    before = remote.segments()
    used = remote.counts()["used_bytes"]
    head, payload = block({"x": torch.zeros(MiB, dtype=torch.uint8)})
    with Raw.greeted(remote.joined, tcp=True) as raw:
        raw.request("put_block", [meta(partition, ["B"]), None, *head, 5.0, None], len(payload))
        raw.send(payload[:1000])
        eventually(lambda: remote.counts()["used_bytes"] > used, "its head has arrived")
    remote.comes_to(used_bytes=used)
    assert remote.client.kv_list(partition).keys == ["A"]
    assert remote.segments() == before
