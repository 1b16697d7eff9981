"""Connections that come, stay and go cost a gateway nothing once they are gone; others go on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dataplane.producer.aio import AsyncProducer
from tests.deadline import eventually
from tests.faults.connections import Served, idle, served, storm, trusting
from tests.faults.planes import Plane

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

LONG = bool(os.environ.get("FAULTS"))
IDLE = 5000 if LONG else 500
STORM_S = 60.0 if LONG else 2.0


def comes_to(gateway: Served, descriptors: int, threads: int) -> None:
    """It holds what it held."""
    eventually(
        lambda: gateway.descriptors <= descriptors and gateway.threads <= threads,
        f"{descriptors} descriptors and {threads} threads",
        within_s=60,
    )


async def at_work(address: str, ca: Path | None, over: asyncio.Event) -> int:
    """Put and read rows until it is over; how many. Fails with the first that fails."""
    count = 0
    async with AsyncProducer(address, ca_file=ca) as producer:
        while not over.is_set():
            key = f"k{count}"
            await producer.kv_put(key, "p", {"x": [1, 2, count]}, {"n": count}, timeout=20)
            rows = await producer.kv_batch_get([key], "p", ["x"], timeout=20)
            assert rows.fields["x"] == [[1, 2, count]]
            count += 1
    return count


async def beside_work(gateway: Served, disturbance: Callable[[], Awaitable[object]]) -> int:
    """Disturb a gateway while somebody works; how much that one did."""
    over = asyncio.Event()
    work = asyncio.create_task(at_work(gateway.address, gateway.ca, over))
    try:
        await disturbance()
    finally:
        over.set()
    return await work


async def test_idle_connections_leave_nothing_and_disturb_nobody(
    own_plane: Callable[..., Plane], tmp_path: Path
) -> None:
    plane = own_plane()
    with served(plane, tmp_path, tls=False) as gateway:

        async def come_and_stay(count: int) -> None:
            held = gateway.descriptors
            async with idle(gateway.port, count):
                assert gateway.descriptors >= held + count - 10
                async with AsyncProducer(gateway.address) as producer:
                    await producer.kv_put("late", "p", {"x": [1]}, None, timeout=20)

        await beside_work(gateway, lambda: come_and_stay(3))
        before = gateway.descriptors, gateway.threads
        done = await beside_work(gateway, lambda: come_and_stay(IDLE))
        print(f"{IDLE} idle connections, beside {done} puts and gets")
        assert done > 1
        comes_to(gateway, before[0] + 2, before[1] + 2)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_a_storm_of_connections_leaves_nothing_and_disturbs_nobody(
    own_plane: Callable[..., Plane], tmp_path: Path, tls: bool
) -> None:
    plane = own_plane()
    with served(plane, tmp_path, tls=tls) as gateway:
        context = trusting(gateway.ca) if gateway.ca is not None else None
        await beside_work(gateway, lambda: storm(gateway.port, 50, 0.5, context))
        before = gateway.descriptors, gateway.threads
        made = 0

        async def blow() -> None:
            nonlocal made
            made = await storm(gateway.port, 200 if tls else 1000, STORM_S, context)

        done = await beside_work(gateway, blow)
        print(f"{made} connections in {STORM_S:g} s, beside {done} puts and gets")
        assert done > 1
        assert made > 20 * STORM_S
        comes_to(gateway, before[0] + 2, before[1] + 2)
