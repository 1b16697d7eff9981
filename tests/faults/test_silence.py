"""No call hangs: not on a plane that is stopped, not on one that is killed, not half-way."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dataplane.client.aio import AsyncClient
from dataplane.client.connection import Connection
from dataplane.client.sync import Client
from dataplane.errors import DeadlineExceeded, PlaneLost, Unreachable
from dataplane.wire.channel import Channel
from tests.deadline import eventually
from tests.faults.planes import SMALL_STORE, Plane
from tests.faults.processes import is_gone, state_of

pytestmark = pytest.mark.faults

SMALL = {"x": torch.tensor([1, 2, 3])}
LARGE = {"x": torch.arange(100_000)}


def view(client: Client, timeout: float | None) -> None:
    with client.kv_view(["A"], "p", timeout=timeout):
        pass


VERBS: dict[str, Callable[[Client, float | None], Any]] = {
    "put tags": lambda c, t: c.kv_put("B", "p", None, {"n": 1}, timeout=t),
    "put small": lambda c, t: c.kv_put("B", "p", SMALL, timeout=t),
    "put large": lambda c, t: c.kv_put("B", "p", LARGE, timeout=t),
    "get": lambda c, t: c.kv_batch_get(["A"], "p", timeout=t),
    "view": view,
    "list": lambda c, t: c.kv_list("p", timeout=t),
    "clear": lambda c, t: c.kv_clear(["B"], "p", timeout=t),
    "clear where": lambda c, t: c.kv_clear(None, "p", where={"n": 1}, timeout=t),
    "status": lambda c, t: c.status(timeout=t),
    "group": lambda c, t: c.end_group(
        c.begin_group("u", "p", n=1, declared_bytes=4096, timeout=t), "failure", timeout=t
    ),
    "create partition": lambda c, t: c.kv_create_partition("q", timeout=t),
    "list partitions": lambda c, t: c.kv_list_partitions(timeout=t),
}


class Blocking:
    """The verbs of an asyncio client for calls from any thread."""

    def __init__(self, client: AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        verb = getattr(self._client, name)
        return lambda *a, **k: self._wait(verb(*a, **k))

    @contextmanager
    def kv_view(self, *arguments: Any, **named: Any) -> Generator[Any]:
        viewing = self._client.kv_view(*arguments, **named)
        rows = self._wait(viewing.__aenter__())
        try:
            yield rows
        finally:
            self._wait(viewing.__aexit__(None, None, None))

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)


@contextmanager
def client_of(plane: Plane, kind: str) -> Generator[Any]:
    """A client that has used every connection that its verbs need."""
    if kind == "sync":
        with plane.another() as client:
            yield client
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    client = Blocking(AsyncClient(plane.joined, plane.config), loop)
    try:
        yield client
    finally:
        client.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_every_verb_meets_its_deadline_on_a_stopped_plane_and_works_when_it_goes_on(
    own_plane: Callable[..., Plane], kind: str
) -> None:
    plane = own_plane()
    plane.client.kv_put("A", "p", LARGE)
    with client_of(plane, kind) as fresh, client_of(plane, kind) as used:
        for verb in VERBS.values():
            verb(used, None)
        plane.client.kv_clear(["B"], "p")
        os.kill(plane.pid, signal.SIGSTOP)
        eventually(lambda: state_of(plane.pid) == "T", "the plane is stopped")
        try:
            for client in (used, fresh):
                for name, verb in VERBS.items():
                    began = time.monotonic()
                    # Unreachable where a new connection is needed: a blocking client has closed
                    # the one whose answer did not come.
                    with pytest.raises((DeadlineExceeded, Unreachable)) as silent:
                        verb(client, 0.1)
                    assert time.monotonic() - began < 1.5, name
                    if client is used and (kind == "async" or name == "put tags"):
                        assert isinstance(silent.value, DeadlineExceeded)
                        assert 0.05 < silent.value.waited_s < 1.5
        finally:
            os.kill(plane.pid, signal.SIGCONT)
        for client in (used, fresh):
            for verb in VERBS.values():
                verb(client, 20)
    plane.client.kv_clear(None, "p", where={})
    plane.comes_to(used_bytes=0, blocks_reserved=0, pins=0, waiting=0)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_every_verb_says_that_a_plane_is_lost_that_nobody_starts_again(
    own_plane: Callable[..., Plane], kind: str
) -> None:
    plane = own_plane()
    plane.client.kv_put("A", "p", LARGE)
    with client_of(plane, kind) as fresh, client_of(plane, kind) as used:
        for verb in VERBS.values():
            verb(used, None)
        plane.lose()
        for client in (used, fresh):
            for name, verb in VERBS.items():
                began = time.monotonic()
                with pytest.raises(PlaneLost, match="own-1"):
                    verb(client, None)
                assert time.monotonic() - began < 1, name


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_every_verb_says_that_a_plane_that_was_ended_is_lost(
    own_plane: Callable[..., Plane], kind: str
) -> None:
    plane = own_plane()
    plane.client.kv_put("A", "p", LARGE)
    with client_of(plane, kind) as fresh, client_of(plane, kind) as used:
        for verb in VERBS.values():
            verb(used, None)
        plane.client.close(destroy=True)
        eventually(lambda: is_gone(plane.pid), "the plane has ended")
        eventually(lambda: not plane.folders.runtime.exists(), "its runtime folder is gone")
        eventually(lambda: not plane.folders.segments.exists(), "its segments are gone")
        for client in (used, fresh):
            for verb in VERBS.values():
                with pytest.raises(PlaneLost, match="own-1"):
                    verb(client, None)


class Waiting:
    """Puts that wait for room, each in a thread, and what came of them when."""

    def __init__(self, client: Any) -> None:
        self.ended: list[tuple[float, Exception | None]] = []
        self._threads = [
            threading.Thread(target=self._put, args=(client, key, fields))
            for key, fields in (("B", LARGE), ("C", {"x": torch.arange(10_000)}), ("D", LARGE))
        ]
        for thread in self._threads:
            thread.start()

    def _put(self, client: Any, key: str, fields: dict[str, torch.Tensor]) -> None:
        error = None
        try:
            client.kv_put(key, "p", fields, timeout=60)
        except Exception as raised:
            error = raised
        self.ended.append((time.monotonic(), error))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)
        assert len(self.ended) == len(self._threads)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_calls_under_way_say_within_a_second_that_their_plane_is_lost(
    own_plane: Callable[..., Plane], kind: str
) -> None:
    plane = own_plane(**SMALL_STORE)
    plane.fill()
    with client_of(plane, kind) as client:
        waiting = Waiting(client)
        plane.comes_to(waiting=3)
        lost = time.monotonic()
        plane.lose()
        waiting.join()
    assert [type(error) for _, error in waiting.ended] == [PlaneLost] * 3
    assert max(at for at, _ in waiting.ended) - lost < 1.5


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_calls_under_way_go_on_waiting_at_the_process_that_comes_next(
    own_plane: Callable[..., Plane], kind: str
) -> None:
    plane = own_plane(**SMALL_STORE)
    plane.fill()
    with client_of(plane, kind) as client:
        waiting = Waiting(client)
        plane.comes_to(waiting=3)
        plane.kill()
        plane.comes_to(waiting=3)
        plane.make_room()
        waiting.join()
    assert [error for _, error in waiting.ended] == [None] * 3
    assert sorted(plane.client.kv_list("p").keys) == ["B", "C", "D"]
    assert plane.reads("D", "p") == LARGE["x"].tolist()


@pytest.mark.parametrize("again", [True, False], ids=["served-again", "lost"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_large_read_whose_store_is_killed_in_its_midst_is_whole_or_ends_in_a_second(
    monkeypatch: pytest.MonkeyPatch, own_plane: Callable[..., Plane], kind: str, again: bool
) -> None:
    plane = own_plane(tcp_host="127.0.0.1", capacity_bytes=256 << 20)
    whole = torch.arange(8 << 20)
    plane.client.kv_put("A", "p", {"x": whole})
    killed: list[float] = []

    def kill_in_the_midst(at: int) -> None:
        if at > 1 << 20 and not killed:
            killed.append(time.monotonic())
            (plane.kill if again else plane.lose)()

    more, updated = Connection._more, Channel.buffer_updated
    received = [0]

    def counting_more(self: Connection, view: memoryview, deadline: float) -> int:
        got = more(self, view, deadline)
        received[0] += got
        kill_in_the_midst(received[0])
        return got

    def counting_updated(self: Channel, nbytes: int) -> None:
        received[0] += nbytes
        kill_in_the_midst(received[0])
        updated(self, nbytes)

    monkeypatch.setattr(Connection, "_more", counting_more)
    monkeypatch.setattr(Channel, "buffer_updated", counting_updated)
    far = Plane(
        plane.joined, plane.folders, plane.config.model_copy(update={"same_node_reads": False}),
        plane.client,
    )  # fmt: skip
    with client_of(far, kind) as client:
        if again:
            rows = client.kv_batch_get(["A"], "p", layout="list")
            assert torch.equal(rows.fields["x"][0], whole)
        else:
            with pytest.raises(PlaneLost):
                client.kv_batch_get(["A"], "p")
            assert time.monotonic() - killed[0] < 1.5
    assert len(killed) == 1


def test_a_socket_that_belongs_to_another_plane_now_is_a_lost_plane(
    own_plane: Callable[..., Plane],
) -> None:
    first, second = own_plane(), own_plane()
    first.client.kv_put("A", "p", SMALL)
    first.client.close()
    assert first.host is not None
    first.host.stop()
    # The secret is the same in this picture, as it could be for planes of one supervisor.
    moved = Client(
        type(first.joined)(
            first.joined.name, first.joined.plane_id, second.joined.secret, second.joined.tags
        ),
        first.config,
    )
    with moved, pytest.raises(PlaneLost, match=second.joined.plane_id):
        moved.kv_list("p")


def test_a_put_whose_connection_breaks_after_it_was_published_has_one_effect(
    monkeypatch: pytest.MonkeyPatch, own_plane: Callable[..., Plane]
) -> None:
    """The answer is lost, not the put: the client's repetition gets the first one's answer."""
    plane = own_plane()
    received = Connection._receive
    lost: list[str] = []

    def lose_one(self: Connection, *arguments: Any) -> Any:
        answer = received(self, *arguments)
        if not lost and answer[0].kind == 0:
            lost.append("answer")
            raise ConnectionResetError("lost by the test")
        return answer

    for fields in (None, SMALL, LARGE):
        plane.client.kv_put("A", "p", fields, {"n": 0})  # every connection is there
        before = plane.client.revision
        eventually(lambda: not plane.client.status()["dead_blocks"], "what it replaced is freed")
        used = plane.counts()["used_bytes"]
        lost.clear()
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "_receive", lose_one)
            put = plane.client.kv_put("A", "p", fields, {"n": 1})
        assert lost == ["answer"]
        assert put.revision == (before.epoch, before.n + 1)
        plane.comes_to(used_bytes=used, blocks_reserved=0)
