"""Many threads on one client, coroutines on many loops, and calls that are given up half-way."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dataplane
from dataplane.errors import DeadlineExceeded, KeyNotFound, QuotaExceeded
from tests.contract.planes import Plane, embedded_sync
from tests.deadline import eventually, eventually_async


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run the work in so many threads at once; the first error of any is raised."""
    failed: list[BaseException] = []
    start = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            start.wait(10.0)
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


def test_threads_share_one_client(client: Any, partition: str) -> None:
    rounds = 25

    def work(number: int) -> None:
        for i in range(rounds):
            key = f"{number}-{i}"
            size = 100_000 if i % 8 == 7 else i
            client.kv_put(key, partition, {"x": torch.full((size,), number)}, {"n": number})
            rows = client.kv_batch_get([key, key], partition, layout="list")
            assert torch.equal(rows["x"][1], torch.full((size,), number))
            assert key in client.kv_list(partition, where={"n": number}).keys
            if i % 5 == 4:
                assert client.kv_clear([key], partition) == 1

    in_threads(6, work)
    listing = client.kv_list(partition)
    assert len(listing) == 6 * (rounds - rounds // 5)
    rows = client.kv_batch_get(listing.keys, partition, layout="packed")
    lengths = rows.lengths["x"].tolist()
    want = [t["n"] for t, n in zip(listing.tags, lengths, strict=True) for _ in range(n)]
    assert rows["x"].tolist() == want


def test_writers_of_one_key_leave_one_of_their_values_whole(
    plane: Plane, client: Any, partition: str
) -> None:
    def work(number: int) -> None:
        for _ in range(20):
            client.kv_put(
                "k", partition, {"x": torch.full((number + 1,), number), "y": torch.tensor(number)},
                {"by": number},
            )  # fmt: skip
            try:
                rows = client.kv_batch_get(["k"], partition, layout="list")
            except KeyNotFound:
                continue  # overwritten three times while it was read
            by = int(rows["y"][0])
            assert rows["x"][0].tolist() == [by] * (by + 1)

    in_threads(5, work)
    (tags,) = client.kv_list(partition).tags
    assert client.kv_batch_get(["k"], partition)["y"].tolist() == [tags["by"]]
    plane.settle()
    assert plane.used_bytes() == 4096


def test_if_absent_lets_exactly_one_of_many_through(client: Any, partition: str) -> None:
    won: list[int] = []

    def work(number: int) -> None:
        try:
            client.kv_put("k", partition, tags={"by": number}, if_absent=True)
        except dataplane.AlreadyWritten:
            return
        won.append(number)

    in_threads(8, work)
    assert len(won) == 1
    assert client.kv_list(partition).tags == [{"by": won[0]}]


# -- coroutines ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plane_of_coroutines(plane_settings: dict[str, Any]) -> Any:
    with embedded_sync("coroutines", plane_settings) as plane:
        yield plane


async def connected(plane: Plane) -> dataplane.AsyncClient:
    return await dataplane.async_connect(plane.name, config=plane.settings)


async def test_many_coroutines_share_one_client(plane_of_coroutines: Plane) -> None:
    async with await connected(plane_of_coroutines) as client:

        async def work(i: int) -> None:
            size = 60_000 if i % 10 == 0 else i
            await client.kv_put(f"k{i}", "many", {"x": torch.full((size,), i)})
            rows = await client.kv_batch_get([f"k{i}"], "many", layout="list")
            assert torch.equal(rows["x"][0], torch.full((size,), i))

        await asyncio.gather(*(work(i) for i in range(100)))
        listing = await client.kv_list("many")
        assert sorted(listing.keys) == sorted(f"k{i}" for i in range(100))
        assert await client.kv_clear(None, "many", where={}) == 100


def test_one_async_client_is_used_from_several_event_loops(plane_of_coroutines: Plane) -> None:
    client = asyncio.run(connected(plane_of_coroutines))

    def work(number: int) -> None:
        async def rounds() -> None:
            for i in range(20):
                key = f"{number}-{i}"
                await client.kv_put(key, "loops", {"x": torch.full((3,), number)})
                rows = await client.kv_batch_get([key], "loops", layout="packed")
                assert rows["x"].tolist() == [number] * 3
                async with client.kv_view([key], "loops", layout="list") as view:
                    assert view["x"][0].tolist() == [number] * 3
                    del view

        asyncio.run(rounds())

    in_threads(4, work)
    gc.collect()

    async def end() -> None:
        assert len(await client.kv_list("loops")) == 80
        await client.kv_clear(None, "loops", where={})
        await client.close()

    asyncio.run(end())


def test_a_tensor_of_a_view_outlives_the_loop_that_it_was_viewed_from(
    plane_of_coroutines: Plane,
) -> None:
    plane = plane_of_coroutines

    async def look() -> torch.Tensor:
        async with await connected(plane) as client:
            await client.kv_put("k", "loop", {"x": torch.arange(1000)})
            async with client.kv_view(["k"], "loop", layout="list") as view:
                return view["x"][0]

    seen = asyncio.run(look())
    gc.collect()
    plane.client.kv_clear(["k"], "loop")
    plane.settle()
    for i in range(5):
        plane.client.kv_put(f"k{i}", "loop", {"x": torch.full((1000,), -1)})
    assert torch.equal(seen, torch.arange(1000))
    assert plane.client.status()["values"]["local"]["pins"] == 1
    del seen
    gc.collect()
    eventually(
        lambda: not plane.client.status()["values"]["local"]["pins"], "the pin went with the tensor"
    )
    plane.client.kv_clear(None, "loop", where={})


async def test_a_call_waiting_for_room_stops_no_other_call_of_its_client(
    plane_settings: dict[str, Any],
) -> None:
    small = {**plane_settings, "capacity_bytes": 4 << 20, "segment_bytes": 4 << 20}
    with embedded_sync("no-room", small) as plane:
        async with await connected(plane) as client:
            await client.kv_put("full", "p", {"x": torch.zeros(1_000_000)})
            for size in (500_000, 60_000):  # reserved, and through the socket
                waiting = asyncio.create_task(
                    client.kv_put("more", "p", {"x": torch.zeros(size)}, timeout=20.0)
                )
                await waits_for_room(client)
                assert (await client.kv_list("p")).keys == ["full"]
                await client.kv_put("full", "p", tags={"n": 1})
                rows = await client.kv_batch_get(["full"], "p", layout="packed")
                assert len(rows["x"]) == 1_000_000
                await client.kv_clear(["full"], "p")
                assert (await waiting).keys == ["more"]
                await client.kv_clear(["more"], "p")
                await client.kv_put("full", "p", {"x": torch.zeros(1_000_000)})


async def waits_for_room(client: dataplane.AsyncClient) -> None:
    """Until a request waits for room in the only value store."""

    async def waits() -> bool:
        return (await client.status())["values"]["local"]["waiting"] == 1

    await eventually_async(waits, "a put waits for room")


async def test_a_cancelled_reservation_gives_its_room_back(
    plane_settings: dict[str, Any],
) -> None:
    small = {**plane_settings, "capacity_bytes": 4 << 20, "segment_bytes": 4 << 20}
    with embedded_sync("cancelled", small) as plane:
        async with await connected(plane) as client:
            await client.kv_put("full", "p", {"x": torch.zeros(1_000_000)})
            waiting = asyncio.create_task(
                client.kv_put("more", "p", {"x": torch.zeros(500_000)}, timeout=20.0)
            )
            await waits_for_room(client)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await client.kv_clear(["full"], "p")
            # The room that was waited for is granted, and comes back: nobody takes it.
            await client.kv_put("again", "p", {"x": torch.zeros(1_000_000)}, timeout=10.0)
            assert (await client.kv_list("p")).keys == ["again"]
            store = (await client.status())["values"]["local"]
            assert (store["blocks_reserved"], store["waiting"]) == (0, 0)


async def test_a_cancelled_get_lets_go_of_its_rows(plane_of_coroutines: Plane) -> None:
    plane = plane_of_coroutines
    pid = plane.client.status()["pid"]
    async with await connected(plane) as client:
        await client.kv_put("k", "gets", {"x": torch.arange(1000)})
        await client.kv_batch_get(["k"], "gets")
        for timeout in (None, 0.1):
            os.kill(pid, signal.SIGSTOP)
            try:
                gets = [
                    asyncio.create_task(client.kv_batch_get(["k"], "gets", timeout=timeout))
                    for _ in range(5)
                ]
                await asyncio.sleep(0)
                if timeout is None:
                    for get in gets:
                        get.cancel()
                ends = await asyncio.gather(*gets, return_exceptions=True)
            finally:
                os.kill(pid, signal.SIGCONT)
            kind = asyncio.CancelledError if timeout is None else DeadlineExceeded
            assert {type(end) for end in ends} == {kind}
            assert (await client.kv_batch_get(["k"], "gets", layout="list"))["x"][0][-1] == 999
        await client.kv_clear(["k"], "gets")

        async def none_is_pinned() -> bool:
            return not (await client.status())["values"]["local"]["pins"]

        await eventually_async(none_is_pinned, "no pin is left")


async def test_a_put_that_was_cancelled_half_sent_never_shows_what_came_after(
    plane_settings: dict[str, Any],
) -> None:
    settings = {**plane_settings, "small_put_bytes": 1 << 30}
    with embedded_sync("half-sent", settings) as plane:
        pid = plane.client.status()["pid"]
        async with await connected(plane) as client:
            await client.kv_put("other", "p", {"x": torch.zeros(2)})
            value = torch.zeros(4_000_000)
            os.kill(pid, signal.SIGSTOP)
            try:
                put = asyncio.create_task(client.kv_put("k", "p", {"x": value}))

                async def half_sent() -> bool:
                    return any(is_sending(client))

                await eventually_async(half_sent, "a part of the put is sent")
                put.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await put
                value.fill_(7)
            finally:
                os.kill(pid, signal.SIGCONT)
            assert (await client.kv_list("p")).keys == ["other"]
        eventually(
            lambda: plane.client.status()["values"]["local"]["used_bytes"] == 4096,
            "the half of a block is gone",
        )
        assert plane.client.kv_list("p").keys == ["other"]


def is_sending(client: dataplane.AsyncClient) -> list[bool]:
    """Of each connection of this loop, whether bytes have not left for the kernel."""
    mine = client._loops[asyncio.get_running_loop()]
    return [
        task.result().is_sending() for task in mine.channels.values()
        if task.done() and not task.result().closed
    ]  # fmt: skip


def test_a_put_that_timed_out_leaves_no_room_taken(plane_settings: dict[str, Any]) -> None:
    small = {**plane_settings, "capacity_bytes": 4 << 20, "segment_bytes": 4 << 20}
    with embedded_sync("timed-out", small) as plane:
        client = plane.client
        client.kv_put("full", "p", {"x": torch.zeros(1_000_000)})
        for size in (500_000, 60_000):
            with pytest.raises((QuotaExceeded, DeadlineExceeded)):
                client.kv_put("more", "p", {"x": torch.zeros(size)}, timeout=0.05)
        client.kv_clear(["full"], "p")
        plane.settle()
        eventually(lambda: plane.used_bytes() == 0, "nothing is reserved")
