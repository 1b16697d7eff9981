"""A plane in this process: quick, alone in its folders, and gone afterwards whatever happened."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import dataplane
from dataplane import session
from dataplane.client.connection import connect
from dataplane.errors import DeadlineExceeded, InvalidRequest, PlaneLost
from dataplane.testing import MemoryPlane, plane
from tests.deadline import eventually

X = {"x": torch.arange(5)}
LARGE = {"x": torch.arange(200_000)}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_gone(made: MemoryPlane) -> bool:
    folders = made.folders
    return not (folders.runtime.exists() or folders.root.exists() or folders.segments.exists())


def works(client: dataplane.Client) -> None:
    client.kv_put("A", "p", X, {"n": 1})
    client.kv_put("B", "p", LARGE)
    rows = client.kv_batch_get(["B", "A"], "p", layout="list")
    assert rows.fields["x"][0].equal(LARGE["x"])
    assert rows.fields["x"][1].equal(X["x"])
    assert client.kv_claim("p", "t", count=1, where={"n": 1}).keys == ["A"]
    assert client.kv_clear(["A", "B"], "p") == 2


def test_every_way_in_reaches_the_same_plane() -> None:
    async def asked(made: MemoryPlane) -> list[str]:
        client = await made.async_connect()
        return (await client.kv_list("p")).keys

    with plane() as made:
        dataplane.kv_put("A", "p", X, {"n": 1})
        assert made.client.kv_list("p").keys == ["A"]
        assert made.connect(timeout_s=3).kv_list("p").keys == ["A"]
        assert asyncio.run(asked(made)) == ["A"]
        with dataplane.Client(made.joined, made.config) as client:
            assert client.kv_list("p").keys == ["A"]
        assert made.call(lambda: made.server.tags is not None)
        made.client.kv_clear(["A"], "p")
        works(made.client)


def test_settings_are_those_of_init_and_small_without_any() -> None:
    with plane() as made:
        assert made.client.status()["values"]["local"]["capacity_bytes"] == 64 << 20
        assert made.client.status()["values"]["local"]["segment_bytes"] == 4 << 20
    with plane("named", capacity_bytes=8 << 20, tcp_host="127.0.0.1", timeout_s=2) as made:
        assert made.name == made.client.name == "named"
        assert made.client.status()["values"]["local"]["capacity_bytes"] == 8 << 20
        assert made.joined.tags.tcp is not None
        assert made.connect(timeout_s=1)._core.config.capacity_bytes == 8 << 20
    for wrong in ({"capacity_bytes": 1}, {"host": "ray"}, {"frobnicate": 1}):
        with pytest.raises(InvalidRequest), plane(**wrong):
            pass


def test_nothing_is_left_when_it_ends() -> None:
    threads = threading.active_count()
    with plane() as made:
        works(made.client)
        assert not is_gone(made)
    assert is_gone(made)
    assert threading.active_count() == threads
    assert made.client.closed


def test_nothing_is_left_when_the_test_fails() -> None:
    with pytest.raises(ZeroDivisionError), plane() as made:
        reading = made.connect()
        made.client.kv_put("A", "p", X)
        with reading.kv_view(["A"], "p", layout="list"):
            raise ZeroDivisionError
    assert is_gone(made)


def test_no_descriptor_is_left() -> None:
    async def used(made: MemoryPlane) -> None:
        client = await made.async_connect()
        await client.kv_put("A", "p", X)
        await client.close()

    def once() -> None:
        with plane() as made:
            works(made.client)
            asyncio.run(used(made))

    once()
    before = descriptors()
    for _ in range(3):
        once()
    assert descriptors() == before


def test_a_plane_that_was_destroyed_ends_as_quietly() -> None:
    with plane() as made:
        made.client.close(destroy=True)
        eventually(lambda: not made._thread.is_alive(), "the server's thread has ended")
    assert is_gone(made)


def test_planes_beside_and_within_each_other_share_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "_default", None)  # of other tests of this process
    with plane() as one:
        dataplane.kv_put("A", "p", None, {"n": 1})
        with plane() as two:
            dataplane.kv_put("B", "p", None, {"n": 1})
            assert two.client.kv_list("p").keys == ["B"]
        assert dataplane.kv_list("p").keys == one.client.kv_list("p").keys == ["A"]
    with pytest.raises(PlaneLost):
        dataplane.kv_list("p")


def test_the_default_client_of_before_is_the_default_afterwards() -> None:
    with plane() as first, plane() as second:
        assert session.default_client() is second.client
        dataplane.close()
        with session.default_is(first.client):
            dataplane.kv_put("A", "p", None, {"n": 1})
        assert first.client.kv_list("p").keys == ["A"]


def test_many_at_once_from_many_threads() -> None:
    def one(_: int) -> bool:
        with plane() as made:
            works(made.connect())
        return is_gone(made)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(one, range(8)))


async def test_within_a_running_loop() -> None:
    with plane() as made:
        client = await made.async_connect()
        waiting = asyncio.create_task(client.kv_wait("p", {"n": 1}, count=1))
        made.client.kv_put("A", "p", X, {"n": 1})
        assert (await waiting).keys == ["A"]
        await client.kv_clear(["A"], "p")
    assert is_gone(made)
    with pytest.raises(PlaneLost, match="closed"):
        await client.kv_list("p")


def in_child(work: Callable[[], None]) -> int:
    """The exit status of a forked child that does some work and ends as the interpreter does."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_uses_the_plane_and_does_not_end_it() -> None:
    with plane() as made:
        made.client.kv_put("A", "p", X)

        def work() -> None:
            assert made.client.kv_list("p").keys == ["A"]
            made.client.kv_put("B", "p", LARGE)
            made._stop()

        assert in_child(work) == 0
        assert sorted(made.client.kv_list("p").keys) == ["A", "B"]
        works(made.client)
    assert is_gone(made)


def test_the_block_may_be_left_in_a_forked_child() -> None:
    """What a test runner that forks does: the child unwinds the stack as well."""
    code = """
import os, sys
from dataplane.testing import plane
with plane() as made:
    made.client.kv_put("A", "p", None, {"n": 1})
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
        assert made.client.kv_list("p").keys == ["A"]
    else:
        made.client.kv_list("p")
if pid:
    assert not made.folders.runtime.exists() and not made.folders.segments.exists()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_that_lives_on_does_not_keep_connections_open() -> None:
    """A client of another process hears of the end of the plane, whatever was forked from it."""
    ready, go = os.pipe()
    with plane() as made:
        # Not of the client's pool, which is closed with the plane.
        sock = connect(made.client._core, None, time.monotonic() + 5)
        pid = os.fork()
        if not pid:
            os.close(go)
            sock.close_in_child()
            os.read(ready, 1)
            os._exit(0)
    try:
        eventually(lambda: not sock.is_quiet(), "the connection has ended")
    finally:
        sock.close()
        os.close(ready)
        os.close(go)
        os.waitpid(pid, 0)
    assert is_gone(made)


def test_call_tells_when_the_server_does_not_come_to_it() -> None:
    with plane() as made:
        hold = threading.Event()
        assert made._loop is not None
        made._loop.call_soon_threadsafe(hold.wait, 5)
        with pytest.raises(DeadlineExceeded):
            made.call(lambda: None, timeout=0.05)
        hold.set()
        with pytest.raises(ZeroDivisionError):
            made.call(lambda: 1 // 0)


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dataplane.testing import memory

    async def refused(*_: object, **__: object) -> None:
        raise InvalidRequest("no")

    async def silent(*_: object, **__: object) -> None:
        await asyncio.sleep(0.2)

    threads = threading.active_count()
    before = session._default
    for serve, error in ((refused, InvalidRequest), (silent, PlaneLost)):
        monkeypatch.setattr(memory, "serve", serve)
        with pytest.raises(error), plane():
            pass
    with pytest.raises(DeadlineExceeded), plane(start_timeout_s=0.01):
        pass
    assert session._default is before
    eventually(lambda: threading.active_count() == threads, "no thread is left")
