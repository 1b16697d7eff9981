"""Those who wait cost nothing until they are woken, are woken at once, and leave nothing behind."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import dataplane.server.crowd as crowd_module
from dataplane.client.aio import AsyncClient
from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.errors import DataplaneError, DeadlineExceeded, InvalidRequest, PlaneLost
from tests.deadline import eventually, eventually_async
from tests.faults import planes
from tests.faults.planes import Plane
from tests.faults.processes import Process, Speaker
from tests.faults.raw import Raw

pytestmark = pytest.mark.faults

WAITERS = 1000
QUIET_S = 10.0
KEYS = 100_000
WAKES = 60


@pytest.fixture(scope="module")
def inside(roots: dict[str, Path]) -> Iterator[Plane]:
    """A plane whose server can be looked into."""
    with planes.in_thread("inside", timeout_s=20, **roots) as plane:
        yield plane


def who_waits(plane: Plane, partition: str) -> int:
    """How many wait in a partition, or for it."""
    assert plane.server is not None
    assert plane.server.tags is not None
    tags = plane.server.tags
    count = len(tags.births._awaited.get(partition, ()))
    for there, crowds in list(tags.waiting._crowds.items()):
        if there.partition_id == partition:
            count += sum(crowd.members for crowd in list(crowds.values()))
    return count


def waited_for(plane: Plane, partition: str, count: int) -> None:
    eventually(lambda: who_waits(plane, partition) == count, f"{count} wait in {partition}")


def cpu_s(pid: int) -> float:
    """User and system time that a process has used so far."""
    return time.clock_gettime((~pid << 3) | 2)  # the kernel's name of that clock


# -- a thousand of them ----------------------------------------------------------------------


def a_thousand(
    speaker: Speaker,
    joined: Joined,
    config: Config,
    partition: str,
    plane_pid: int,
    quiet_s: float = 0.0,
) -> None:
    """Wait in a thousand coroutines, half for one thing, half each for its own; say what the quiet
    time cost the plane and this process."""

    async def main() -> None:
        client = AsyncClient(joined, config)
        wheres: list[Any] = [{"status": "done"}] * (WAITERS // 2)
        wheres += [{"status": "done", "uid": f"u{i}"} for i in range(WAITERS // 2)]
        tasks = [asyncio.create_task(client.kv_wait(partition, where)) for where in wheres]

        async def all_wait() -> bool:
            return (await client.status())["waiting"]["rows"] >= WAITERS

        await eventually_async(all_wait, f"{WAITERS} wait")
        before = cpu_s(plane_pid), time.process_time()
        speaker.say("waiting")
        if quiet_s:
            try:
                # The clock is one more that waits.
                await client.kv_wait(partition, {"status": "never"}, timeout=quiet_s)
            except DeadlineExceeded:
                speaker.say((cpu_s(plane_pid) - before[0], time.process_time() - before[1]))
        results = await asyncio.gather(*tasks)
        speaker.say([rows.keys for rows in results])
        await client.close()

    asyncio.run(main())


@pytest.mark.slow
def test_a_thousand_who_wait_use_no_processor(plane: Plane, partition: str) -> None:
    plane.client.kv_put("first", partition, tags={"status": "running"})
    arguments = plane.joined, plane.config, partition, plane.pid, QUIET_S
    with Process(a_thousand, *arguments) as process:
        assert process.says() == "waiting"
        store, clients = process.says(QUIET_S + 20)
        print(
            f"\n{WAITERS} waiters for {QUIET_S:g} s used {(store + clients) * 1e3:.1f} ms of "
            f"processor time: the store {store * 1e3:.1f}, the clients {clients * 1e3:.1f}"
        )
        assert store + clients < 0.1
        plane.client.kv_put("u7", partition, tags={"status": "done", "uid": "u7"})
        keys = [f"u{i}" for i in range(WAITERS // 2) if i != 7]
        tags = [{"status": "done", "uid": key} for key in keys]
        plane.client.kv_batch_put(keys, partition, None, tags)
        woken = process.says()
    assert woken[: WAITERS // 2] == [["u7"]] * (WAITERS // 2)
    assert woken[WAITERS // 2 :] == [[f"u{i}"] for i in range(WAITERS // 2)]


def test_those_who_are_woken_together_share_one_answer(
    inside: Plane, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[int] = []
    pack_moment = crowd_module.pack_moment

    async def counted(*args: Any) -> Any:
        packed.append(1)
        return await pack_moment(*args)

    monkeypatch.setattr(crowd_module, "pack_moment", counted)
    inside.client.kv_put("old", partition, tags={"v": 0})

    async def main() -> list[Any]:
        async with AsyncClient(inside.joined, inside.config) as client:
            tasks = [asyncio.create_task(client.kv_wait(partition, {"v": 1})) for _ in range(500)]
            await asyncio.to_thread(waited_for, inside, partition, 500)
            keys = [f"k{i}" for i in range(20)]
            await client.kv_batch_put(keys, partition, None, [{"v": 1, "n": i} for i in range(20)])
            return await asyncio.gather(*tasks)

    results = asyncio.run(main())
    assert all(rows == results[0] for rows in results)
    assert results[0].keys == [f"k{i}" for i in range(20)]
    assert len(packed) == 1
    waited_for(inside, partition, 0)


def test_the_thousand_do_not_stop_others_while_they_are_woken(plane: Plane, partition: str) -> None:
    """Answers go out a few at a time; whoever asks for something else meanwhile is served."""
    plane.client.kv_put("first", partition, tags={"status": "running"})
    keys = [f"u{i}" for i in range(WAITERS // 2)]
    with Process(a_thousand, plane.joined, plane.config, partition, plane.pid) as process:
        assert process.says() == "waiting"
        worst: list[float] = []

        def ask() -> None:
            client = plane.another()
            for _ in range(300):
                began = time.perf_counter()
                client.kv_list(partition, limit=0)
                worst.append(time.perf_counter() - began)
            client.close()

        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            tags = [{"status": "done", "uid": key} for key in keys]
            plane.client.kv_batch_put(keys, partition, None, tags)
            asking.result(60)
        process.says()
    status = plane.client.status()
    print(
        f"\nwhile {WAITERS} were woken: slowest of 300 listings {max(worst) * 1e3:.1f} ms, "
        f"worst slice {status['worst_slice_ms']} ms"
    )
    assert max(worst) < 2.0


# -- how soon --------------------------------------------------------------------------------


def wakes(speaker: Speaker, joined: Joined, config: Config, partition: str) -> None:
    """Wait for one row after the other; when each of them came."""
    with Client(joined, config) as client:
        for i in range(WAKES):
            speaker.say("waiting")
            rows = client.kv_wait(partition, {"wake": True}, count=i + 1)
            now = time.monotonic()
            assert rows.keys == [f"w{j}" for j in range(i + 1)]
            speaker.say(now)


def watches(speaker: Speaker, joined: Joined, config: Config, partition: str) -> None:
    """The same by a watch of everything that wakes."""
    with Client(joined, config) as client:
        since = client.kv_list(partition, limit=0).revision
        changes = client.kv_watch(partition, since=since, where={"wake": True})
        for i in range(WAKES):
            speaker.say("waiting")
            change = next(changes)
            now = time.monotonic()
            assert change.rows.keys == [f"w{i}"]
            speaker.say(now)


@pytest.mark.parametrize("how", [wakes, watches])
def test_a_put_wakes_at_once_among_many_keys(
    plane: Plane, partition: str, how: Callable[..., None]
) -> None:
    for at in range(0, KEYS, 10_000):
        tags = [{"status": "running", "uid": f"u{i // 8}", "n": i} for i in range(at, at + 10_000)]
        plane.client.kv_batch_put([f"k{i}" for i in range(at, at + 10_000)], partition, None, tags)
    row = {"x": torch.arange(100)}
    took: list[float] = []
    with Process(how, plane.joined, plane.config, partition) as process:
        for i in range(WAKES):
            assert process.says() == "waiting"
            for _ in range(30 if i else 3000):  # meanwhile the scan of its view is done
                plane.client.kv_list(partition, limit=0)
            began = time.monotonic()
            plane.client.kv_put(f"w{i}", partition, row, {"wake": True})
            took.append(process.says() - began)
    median, p99 = statistics.median(took), statistics.quantiles(took, n=100)[98]
    print(
        f"\nfrom put to {how.__name__[:4]} among {KEYS:,} keys: p50 {median * 1e3:.2f} ms, "
        f"p99 {p99 * 1e3:.2f} ms"
    )
    assert median < 0.02
    plane.client.kv_clear(None, partition, where={})


def test_a_wait_is_one_request_however_much_changes(
    inside: Plane, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inside.server is not None
    asked: list[str] = []
    for verb in ("wait", "watch"):

        def counted(*args: Any, verb: str = verb, real: Any = inside.server.verbs[verb]) -> Any:
            asked.append(verb)
            return real(*args)

        monkeypatch.setitem(inside.server.verbs, verb, counted)
    start = inside.client.kv_put("a", partition, tags={"v": 0}).revision
    with ThreadPoolExecutor(2) as pool, inside.another() as other:
        changes = other.kv_watch(partition, since=start, where={"v": 9})
        rows = pool.submit(other.kv_wait, partition, {"v": 9})
        change = pool.submit(next, changes)
        waited_for(inside, partition, 2)
        for i in range(200):
            inside.client.kv_put(f"k{i % 7}", partition, tags={"v": i % 9})
        assert not rows.done()
        assert not change.done()
        inside.client.kv_put("b", partition, tags={"v": 9})
        assert rows.result(20).keys == change.result(20).rows.keys == ["b"]
        changes.close()
    assert sorted(asked) == ["wait", "watch"]


# -- connections -----------------------------------------------------------------------------


def test_who_waits_stops_nobody_on_its_connection(inside: Plane, partition: str) -> None:
    async def main() -> None:
        async with AsyncClient(inside.joined, inside.config) as client:
            start = (await client.kv_put("a", partition, tags={"v": 1})).revision
            changes = client.kv_watch(partition, since=start, where={"v": 2})
            waiting = [
                asyncio.create_task(client.kv_wait(partition, {"v": 2})),
                asyncio.ensure_future(anext(changes)),
            ]
            await asyncio.to_thread(waited_for, inside, partition, 2)
            for i in range(20):
                await client.kv_put("b", partition, tags={"i": i})
                assert (await client.kv_list(partition)).keys == ["a", "b"]
            assert not any(task.done() for task in waiting)
            await client.kv_put("b", partition, tags={"v": 2})
            rows, change = await asyncio.gather(*waiting)
            assert rows.keys == change.rows.keys == ["b"]
            await changes.aclose()

    asyncio.run(main())


def test_a_wait_goes_on_when_its_connection_was_cut(inside: Plane, partition: str) -> None:
    start = inside.client.kv_put("a", partition, tags={"v": 1}).revision
    with ThreadPoolExecutor(3) as pool, inside.another() as other:
        changes = other.kv_watch(partition, since=start, where={"v": 2})
        calls = [
            pool.submit(other.kv_wait, partition, {"v": 2}),
            pool.submit(other.kv_wait, partition, {"v": 1}, count=3),
            pool.submit(next, changes),
        ]
        waited_for(inside, partition, 3)
        cut_connections(inside)
        inside.client.kv_batch_put(["b", "c", "d"], partition, None, [{"v": 2}, {"v": 1}, {"v": 1}])
        assert calls[0].result(20).keys == ["b"]
        assert calls[1].result(20).keys == ["a", "c", "d"]
        assert calls[2].result(20).rows.keys == ["b"]
        changes.close()
    waited_for(inside, partition, 0)


def cut_connections(plane: Plane) -> None:
    """End every connection from the server's side."""
    server = plane.server
    assert server is not None

    async def cut() -> None:
        for connection in list(server._connections):
            connection.transport.abort()

    asyncio.run_coroutine_threadsafe(cut(), server._tasks[0].get_loop()).result(10)


def test_a_call_that_is_cancelled_waits_no_longer(inside: Plane, partition: str) -> None:
    start = inside.client.kv_put("a", partition, tags={"v": 1}).revision

    async def main() -> None:
        async with AsyncClient(inside.joined, inside.config) as client:
            changes = client.kv_watch(partition, since=start, where={"v": 2})
            calls = [
                asyncio.create_task(client.kv_wait(partition, {"v": 2})),
                asyncio.create_task(client.kv_wait(partition, {"v": 3}, group_by="uid")),
                asyncio.create_task(client.kv_wait(f"{partition}-unborn")),
                asyncio.ensure_future(anext(changes)),
            ]
            kept = asyncio.create_task(client.kv_wait(partition, {"v": 2}))
            await asyncio.to_thread(waited_for, inside, partition, 4)
            await asyncio.to_thread(waited_for, inside, f"{partition}-unborn", 1)
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            assert all(call.cancelled() for call in calls)
            await asyncio.to_thread(waited_for, inside, partition, 1)
            await asyncio.to_thread(waited_for, inside, f"{partition}-unborn", 0)
            # One that is given up before the store has begun with it, in the same breath.
            hasty = asyncio.create_task(client.kv_wait(partition, {"v": 4}))
            await asyncio.sleep(0)
            hasty.cancel()
            await asyncio.wait([hasty])
            await client.kv_put("b", partition, tags={"v": 2})
            assert (await kept).keys == ["b"]
            (channel,) = [task.result() for task in channels_of(client)]
            assert channel._waiting == {}

    asyncio.run(main())
    waited_for(inside, partition, 0)
    assert inside.server is not None
    assert inside.server.tags is not None
    assert inside.server.tags.waiting._requests == {}


def channels_of(client: AsyncClient) -> list[asyncio.Task[Any]]:
    (mine,) = client._loops.values()
    return list(mine.channels.values())


def wait_and_say(speaker: Speaker, joined: Joined, config: Config, partition: str) -> None:
    client = Client(joined, config)
    speaker.say("here")
    client.kv_wait(partition, {"v": 1})


def test_who_dies_waits_no_longer(inside: Plane, partition: str) -> None:
    inside.client.kv_put("a", partition, tags={"v": 0})
    with ExitStack() as stack:
        for name in (partition, f"{partition}-unborn"):
            process = stack.enter_context(Process(wait_and_say, inside.joined, inside.config, name))
            assert process.says() == "here"
            waited_for(inside, name, 1)
            process.kill()
            waited_for(inside, name, 0)
    tags = inside.server and inside.server.tags
    assert tags is not None
    assert tags.waiting._crowds == {}
    assert tags.births._awaited == {}


@pytest.mark.parametrize("verb", ["wait", "watch"])
def test_no_wait_outlives_its_plane(
    own_plane: Callable[..., Plane], partition: str, verb: str
) -> None:
    plane = own_plane()
    start = plane.client.kv_put("a", partition, tags={"v": 0}).revision
    changes = plane.client.kv_watch(partition, since=start)
    call = {
        "wait": lambda: plane.client.kv_wait(partition, {"v": 1}, timeout=60),
        "watch": lambda: next(changes),
    }[verb]
    failed: list[DataplaneError] = []

    def wait() -> None:
        try:
            call()
        except DataplaneError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    with plane.another() as other:
        eventually(lambda: other.status()["waiting"]["rows"] == 1, "it waits")
    plane.lose()
    thread.join(20)
    assert not thread.is_alive()
    (error,) = failed
    assert isinstance(error, PlaneLost)


# -- what no client of ours would ask -


@pytest.mark.parametrize(
    ("verb", "place", "wrong", "message"),
    [
        ("wait", 0, 5, "a partition_id is a string, not int"),
        ("wait", 0, "", "the empty string is no partition_id"),
        ("wait", 1, [], "where: a mapping"),
        ("wait", 2, None, "fields is a list of field names"),
        ("wait", 2, ["x", 5], "fields is a list of field names"),
        ("wait", 3, 0, "count is a number of rows or groups, 1 or more, not 0"),
        ("wait", 3, True, "count is a number"),
        ("wait", 3, 2.0, "count is a number"),
        ("wait", 4, 1, "grouped is true or false, not 1"),
        ("wait", 5, None, "a wait is seconds up to a day, not None"),
        ("wait", 5, -0.5, "a wait is seconds up to a day, not -0.5"),
        ("wait", 5, 86_401, "a wait is seconds up to a day, not 86401"),
        ("wait", 5, float("nan"), "a wait is seconds up to a day, not nan"),
        ("wait", 5, "1", "a wait is seconds up to a day, not '1'"),
        ("wait", 5, True, "a wait is seconds up to a day, not True"),
        ("wait", 6, "1", "a number of its own on its connection, not '1'"),
        ("watch", 0, None, "a partition_id is a string, not NoneType"),
        ("watch", 1, {"a": {}}, "where: at 'a': no operator given"),
        ("watch", 2, None, "since is the revision of an earlier answer, not None"),
        ("watch", 2, [1, -1], "since is the revision of an earlier answer"),
        ("watch", 2, [1, 1 << 62], "ahead of the plane"),
        ("watch", 3, 1e9, "a wait is seconds up to a day, not 1000000000.0"),
        ("watch", 4, None, "a number of its own on its connection, not None"),
        ("wait_abandon", 0, [], "what waits is given up by its number, not []"),
    ],
)
def test_a_wrong_part_of_a_request_is_named_and_nobody_waits(
    inside: Plane, partition: str, verb: str, place: int, wrong: object, message: str
) -> None:
    body: list[Any] = {
        "wait": [partition, None, [], 1, False, 60.0, 1],
        "watch": [partition, None, [1, 0], 60.0, 1],
        "wait_abandon": [1],
    }[verb]
    body[place] = wrong
    with Raw.greeted(inside.joined) as raw:
        with pytest.raises(InvalidRequest) as caught:
            raw.ask(verb, body)
        assert message in str(caught.value)
        with pytest.raises(InvalidRequest, match="malformed"):
            raw.ask(verb, [*body, None])
        assert who_waits(inside, partition) == 0
        assert raw.ask("wait_abandon", [77]) is None  # there is none


def test_a_number_names_one_request_at_a_time(inside: Plane, partition: str) -> None:
    body = [partition, None, [], 1, False, 60.0, 5]
    with Raw.greeted(inside.joined) as raw, Raw.greeted(inside.joined) as other:
        first = raw.request("wait", body)
        waited_for(inside, partition, 1)
        with pytest.raises(InvalidRequest, match="a number of its own"):
            raw.ask("wait", body)
        other.request("wait", body)  # of another connection it is another
        waited_for(inside, partition, 2)
        abandoned = raw.request("wait_abandon", [5])
        assert raw.answer(abandoned) is None
        assert raw.answer(first) is None
        waited_for(inside, partition, 1)
    waited_for(inside, partition, 0)


# -- under load ------------------------------------------------------------------------------


def test_many_who_wait_and_watch_lose_nothing_while_rows_come_and_go(
    inside: Plane, partition: str
) -> None:
    """Eight watch, eight wait for ever more; one writes. All of them see all of it."""
    count = 120
    start = inside.client.kv_put("start", partition, tags={"n": -1}).revision

    async def watch(client: AsyncClient) -> list[int]:
        seen: list[int] = []
        async for change in client.kv_watch(partition, since=start, where={"n": {">=": 0}}):
            seen += [tags["n"] for tags in change.rows.tags]
            if seen[-1] == count - 1:
                return seen
        raise AssertionError("a watch does not end")

    async def wait(client: AsyncClient) -> list[int]:
        sizes: list[int] = []
        while not sizes or sizes[-1] < count:
            least = sizes[-1] + 1 if sizes else 1
            rows = await client.kv_wait(partition, {"n": {">=": 0}}, count=least)
            assert [tags["n"] for tags in rows.tags] == list(range(len(rows)))
            assert len(rows) >= least
            sizes.append(len(rows))
        return sizes

    async def write(client: AsyncClient) -> None:
        for n in range(count):
            await client.kv_put(f"k{n}", partition, tags={"n": n})
            await client.kv_put(f"x{n % 5}", partition, tags={"other": n})

    async def main() -> list[Any]:
        async with AsyncClient(inside.joined, inside.config) as client:
            others = [watch(client) for _ in range(8)] + [wait(client) for _ in range(8)]
            return (await asyncio.gather(*others, write(client)))[:-1]

    results = asyncio.run(main())
    assert all(seen == list(range(count)) for seen in results[:8])
    waited_for(inside, partition, 0)
    inside.client.kv_clear(None, partition, where={})
