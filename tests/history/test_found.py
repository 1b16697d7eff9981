"""What random histories have found: each fault by the shortest way to it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dataplane.client.aio import AsyncClient
from dataplane.server import tag_service
from dataplane.server.claiming import Ledger
from dataplane.server.connection import Connection
from dataplane.tags.claims.leases import LeaseClock
from dataplane.wire.frames import Header, frame
from tests.deadline import eventually, eventually_async
from tests.faults import planes
from tests.faults.planes import Plane
from tests.faults.raw import Raw
from tests.history.workload import SETTINGS


def test_a_clear_by_tags_that_arrives_twice_at_once_has_one_answer(plane: Plane) -> None:
    client = plane.client
    client.kv_batch_put(["a", "b", "c"], "twice", None, [{"v": 1}, {"v": 1}, {"v": 2}])
    body = ["twice", None, {"v": 1}, False, 1, 0]
    with Raw.greeted(plane.joined) as raw:
        raw.send(frame("clear", 1, body) + frame("clear", 2, body))
        answers = [raw.answer(number) for number in (1, 2)]
    assert answers == [[2, list(client.kv_list("twice").revision)]] * 2
    assert client.kv_list("twice").keys == ["c"]


def test_a_clear_by_tags_is_told_its_own_revision(
    monkeypatch: pytest.MonkeyPatch, roots: dict[str, Path]
) -> None:
    whole = tag_service.clear_where
    go_on = threading.Event()

    async def clear_where(*arguments: Any) -> int:
        removed = await whole(*arguments)
        await asyncio.to_thread(go_on.wait, 10.0)
        return removed

    monkeypatch.setattr(tag_service, "clear_where", clear_where)
    with planes.in_thread("overtaken", **SETTINGS, **roots) as plane:
        client = plane.client
        client.kv_put("a", "p", None, {"v": 1})
        before = client.revision.n
        with Raw.greeted(plane.joined) as raw:
            number = raw.request("clear", ["p", None, {"v": 1}, False, 1, 0])
            eventually(lambda: not client.kv_list("p").keys, "the row is gone")
            client.kv_put("a", "p", None, {"v": 2})
            go_on.set()
            removed, revision = raw.answer(number)
        assert (removed, revision[1], client.revision.n) == (1, before + 1, before + 2)


def test_a_lease_does_not_begin_before_its_client_has_left() -> None:
    clock = LeaseClock()
    assert clock.at(1000.0) == 0.0
    clock.tick(1000.0)
    assert clock.at(1000.03125) == 0.03125
    clock.tick(1000.0625)
    assert clock.now == 0.0625
    clock.pause()
    assert clock.at(2000.0) == 0.0625


def test_the_clock_of_leases_is_read_between_its_ticks() -> None:
    service: Any = None
    ledger = Ledger(service)
    ledger.clock.tick(time.monotonic() - 0.125)
    assert 0.125 <= ledger.lease_now < 0.25


async def test_a_request_whose_connection_is_lost_at_once_is_dropped_without_a_word() -> None:
    begun: list[int] = []

    async def verb(connection: Connection, number: int, body: Any) -> None:
        begun.append(number)

    def gone(connection: Connection, *, stopped: bool) -> None:
        pass

    service: Any = SimpleNamespace(verbs={"verb": verb}, gone=gone, meter=None)
    connection: Any = Connection(service, local=True)
    connection.client_id = "client"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        connection._dispatch(Header("verb", 1, None))
        connection.connection_lost(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gc.collect()
    assert (begun, said) == ([], [])


async def test_a_put_given_up_half_sent_takes_no_memory_from_a_put_that_is_being_copied(
    plane: Plane,
) -> None:
    settings = {"small_put_bytes": 1 << 20}
    copying, go_on = threading.Event(), threading.Event()
    client: Any = AsyncClient(plane.joined, plane.config.model_copy(update=settings))
    in_thread = client._in_thread

    async def held_up(work: Callable[[], Any]) -> Any:
        def wait() -> Any:
            copying.set()
            assert go_on.wait(10.0)
            return work()

        return await in_thread(wait)

    client._in_thread = held_up
    async with client:
        await client.kv_put("before", "p", {"x": torch.zeros(3)})
        large = asyncio.create_task(client.kv_put("large", "p", {"x": torch.ones(1_500_000)}))
        await asyncio.to_thread(copying.wait, 10.0)
        os.kill(plane.pid, signal.SIGSTOP)
        try:
            small = asyncio.create_task(client.kv_put("small", "p", {"x": torch.zeros(200_000)}))
            (mine,) = client._loops.values()

            async def half_sent() -> bool:
                tasks = [task for task in mine.channels.values() if task.done()]
                return any(task.result().is_sending() for task in tasks)

            await eventually_async(half_sent, "a part of the small put is sent")
            small.cancel()
            await asyncio.wait([small])
        finally:
            os.kill(plane.pid, signal.SIGCONT)
        others = [f"other-{i}" for i in range(12)]
        for key in others:
            row = {"x": torch.full((99_999,), 7.0)}
            await asyncio.to_thread(plane.client.kv_put, key, "p", row)
        go_on.set()
        await large
    rows = plane.client.kv_batch_get(others, "p", layout="list")
    assert [x.unique().tolist() for x in rows["x"]] == [[7.0]] * len(others)
    plane.client.kv_drop_partition("p")
