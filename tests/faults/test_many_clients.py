"""Many attached clients cost little, and the one that works does not feel them.

The full size, 2,000, is measured by `make bench`.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

import pytest
import torch

from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.config import Config
from tests.bench.footprint import descriptors, own_bytes
from tests.deadline import eventually
from tests.faults.planes import Plane
from tests.faults.processes import Process, Speaker

pytestmark = pytest.mark.faults

PROCESSES = 4
CLIENTS_EACH = 50


def attach(speaker: Speaker, joined: Joined, config: Config, count: int) -> None:
    """Attach so many clients, each by a call of its own, and wait."""
    clients = [Client(joined, config) for _ in range(count)]
    ids = set[str]()
    for client in clients:
        client.kv_list("p", limit=1)
        ids.add(client.client_id)
    speaker.say(len(ids))
    speaker.hear()
    for client in clients:
        client.close()
    speaker.say("closed")


def latencies(plane: Plane) -> tuple[float, float]:
    """Median and p99 of small puts in seconds, of the best of five tries: the machine's own
    pauses are not the point."""
    row = {"x": torch.arange(1000)}
    tries: list[tuple[float, float]] = []
    for _ in range(5):
        took: list[float] = []
        for i in range(200):
            began = time.perf_counter()
            plane.client.kv_put(f"k{i}", "p", row, {"n": i})
            took.append(time.perf_counter() - began)
        tries.append((statistics.median(took), statistics.quantiles(took, n=100)[98]))
    return min(tries)


def test_an_active_client_does_not_feel_two_hundred_idle_ones(plane: Plane) -> None:
    latencies(plane)
    alone = latencies(plane)
    fds, memory = descriptors(plane.pid), own_bytes(plane.pid)
    with ExitStack() as stack:
        crowd = [
            stack.enter_context(Process(attach, plane.joined, plane.config, CLIENTS_EACH))
            for _ in range(PROCESSES)
        ]
        assert [process.says() for process in crowd] == [CLIENTS_EACH] * PROCESSES
        count = CLIENTS_EACH * PROCESSES
        assert plane.client.status()["clients"] == count + 1
        fds_each = (descriptors(plane.pid) - fds) / count
        bytes_each = (own_bytes(plane.pid) - memory) / count
        crowded = latencies(plane)
        print(
            f"\n{count} clients: {fds_each:.2f} descriptors and {bytes_each / 1e3:.1f} kB each in "
            f"the plane; median and p99 of a put {alone[0] * 1e6:.0f} and {alone[1] * 1e6:.0f} -> "
            f"{crowded[0] * 1e6:.0f} and {crowded[1] * 1e6:.0f} us"
        )
        assert fds_each == 1
        assert bytes_each < 50_000
        assert crowded[0] < 2 * alone[0] + 100e-6
        assert crowded[1] < 2 * alone[1] + 5e-3
        for process in crowd:
            process.hears("close")
            assert process.says() == "closed"
    eventually(lambda: plane.client.status()["clients"] == 1, "the crowd is gone")
    assert descriptors(plane.pid) == fds
    plane.client.kv_clear(None, "p", where={})
