"""Sizes over time: bounded whatever the time, peaks kept, told by a live plane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import dataplane
from dataplane import Client, DeadlineExceeded
from dataplane.server.sampling import Point, Points
from tests.contract.planes import SETTINGS
from tests.deadline import eventually


def test_points_are_bounded_and_keep_peaks() -> None:
    points = Points(limit=8)
    for at in range(1000):
        points.add(Point(float(at), [100 if at == 333 else 1], [at], {("p", "t"): at % 7}))
    assert len(points.points) <= 8
    assert points.looks == 128
    assert max(point.gauges[0] for point in points.points) == 100
    assert points.points[-1].counters == [999]
    assert points.points[-1].time_s == 999.0
    assert [p.time_s for p in points.points] == sorted(p.time_s for p in points.points)


@pytest.fixture(scope="module")
def client(roots: dict[str, Path]) -> Iterator[Client]:
    settings: dict[str, Any] = {**SETTINGS, **{k: str(v) for k, v in roots.items()}}
    client = dataplane.init({**settings, "host": "embedded"}, name="samples")
    yield client
    client.close(destroy=True)


def test_a_plane_tells_its_sizes_and_who_waited(client: Client) -> None:
    def wait() -> None:
        with pytest.raises(DeadlineExceeded):
            client.kv_claim("train", "trainer", count=50, timeout=3.0)

    attempt = client.begin_group("u0", "train", n=2)
    client.kv_put("u0_0_0", "train", tags={"seq_len": 12, "prompt_len": 4}, attempt=attempt)
    waiting = Thread(target=wait)
    waiting.start()
    eventually(lambda: client.samples().waits, "a wait is seen", within_s=20.0)
    waiting.join()
    samples = client.samples()
    assert samples.times_s == sorted(samples.times_s)
    assert {len(values) for values in samples.columns.values()} == {len(samples.times_s)}
    assert max(samples.columns["keys"]) == 2
    assert max(samples.columns["waiting_claims"]) == 1
    assert (samples.waits[0].kind, samples.waits[0].what) == ("claim", "trainer")
    assert samples.lags[0][:2] == ("train", "trainer")


def test_a_record_holds_the_lives_of_groups(client: Client) -> None:
    attempt = client.begin_group("u1", "train", n=1)
    client.kv_put("u1_0_0", "train", tags={"seq_len": 9, "response_len": 5}, attempt=attempt)
    client.end_group(attempt, "finished")
    client.kv_clear(["u1", "u1_0_0"], "train", retire=True)
    record = client.record()
    life = {group.uid: group for group in record.groups}["u1"]
    assert (life.status, life.rows, life.is_open) == ("finished", 1, False)
    assert life.cleared_s is not None
    assert life.begun_s <= life.cleared_s <= record.at_s
    assert 9 in record.lengths["train"]["seq_len"]
    assert record.capacity_bytes > 0
