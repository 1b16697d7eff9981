"""What the clients of a program report is what they were asked to do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

import dataplane
from dataplane.client.core import Core
from dataplane.errors import DeadlineExceeded, InvalidRequest, KeyNotFound
from dataplane.metrics.client import MAX_VALUES, ProcessMetrics
from tests.dataplane.metrics.scraping import Scrape, ask
from tests.faults.planes import Plane

SMALL, LARGE = 1000, 1 << 20
"""Bytes of a row that travels with its request, and of one that is copied in place."""


@pytest.fixture
def metrics() -> Iterator[ProcessMetrics]:
    """The endpoint of this process, whose clients have counted nothing yet."""
    with dataplane.serve_metrics() as metrics:
        yield metrics
    assert Core.meter is None


def test_calls_and_bytes_by_verb(shared: Plane, metrics: ProcessMetrics) -> None:
    client = shared.client
    client.kv_put("small", "clients", {"x": torch.zeros(SMALL, dtype=torch.uint8)})
    client.kv_put("large", "clients", {"x": torch.zeros(LARGE, dtype=torch.uint8)})
    client.kv_batch_get(["small", "large"], "clients", layout="list")
    with pytest.raises(KeyNotFound):
        client.kv_batch_get(["absent"], "clients")
    seen = Scrape(metrics.target)
    calls = "dataplane_client_call_duration_seconds_count"
    assert seen.value(calls, verb="kv_put") == 2
    assert seen.value(calls, verb="kv_batch_get") == 2
    failed = {"verb": "kv_batch_get", "error": "KeyNotFound"}
    assert seen.value("dataplane_client_calls_failed_total", **failed) == 1
    moved = pytest.approx(SMALL + LARGE, abs=8192)
    assert seen.value("dataplane_client_put_bytes_total", verb="kv_put") == moved
    assert seen.value("dataplane_client_got_bytes_total", verb="kv_batch_get") == SMALL + LARGE
    assert seen.value("dataplane_build_info", role="client") == 1


def test_time_in_verbs_that_wait(shared: Plane, metrics: ProcessMetrics) -> None:
    shared.client.kv_put("k", "waits", tags={"n": 1})
    with pytest.raises(DeadlineExceeded):
        shared.client.kv_wait("waits", {"n": 2}, count=1, timeout=0.2)
    seen = Scrape(metrics.target)
    assert seen.value("dataplane_client_waiting_seconds_total", verb="kv_wait") >= 0.2
    assert seen.all("dataplane_client_waiting_seconds_total", verb="kv_put") == []


async def test_asyncio_clients_count_too(shared: Plane, metrics: ProcessMetrics) -> None:
    address = shared.joined.tags.unix
    client = await dataplane.async_connect(address=address, config=shared.config)
    try:
        await asyncio.gather(*(client.kv_put(f"k{n}", "a", tags={"n": n}) for n in range(5)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.kv_wait("a", {"n": 99}, count=1)
    finally:
        await client.close()
    seen = await asyncio.to_thread(Scrape, metrics.target)
    assert seen.value("dataplane_client_call_duration_seconds_count", verb="kv_put") == 5
    cancelled = {"verb": "kv_wait", "error": "CancelledError"}
    assert seen.value("dataplane_client_calls_failed_total", **cancelled) == 1


def test_a_program_tells_values_of_its_own(metrics: ProcessMetrics) -> None:
    metrics.tell({"time/step": 1.5, "loss": float("nan"), 'x"\n': 2.0}, step=3)
    metrics.tell({"time/step": 2.5})
    seen = Scrape(metrics.target)
    assert seen.value("dataplane_run_value", name="time/step") == 2.5
    assert seen.labels("dataplane_run_value", "name") == {"time/step", 'x"?'}
    assert seen.value("dataplane_run_step") == 3
    metrics.tell({f"v{number}": number for number in range(2 * MAX_VALUES)})
    assert len(Scrape(metrics.target).all("dataplane_run_value")) == MAX_VALUES


def test_probes_of_a_program(metrics: ProcessMetrics) -> None:
    assert ask(metrics.target, "/healthz").status == 200
    assert ask(metrics.target, "/readyz").status == 200


def test_ports_and_hosts_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        dataplane.serve_metrics(70_000)
    with pytest.raises(InvalidRequest):
        dataplane.serve_metrics(host="no-such-host.invalid")


def test_nothing_is_counted_unless_it_is_asked_for(shared: Plane) -> None:
    shared.client.kv_put("k", "quiet", tags={"n": 1})
    assert Core.meter is None
