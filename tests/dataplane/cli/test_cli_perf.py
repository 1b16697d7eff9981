"""`dataplane check perf`: measures against a live plane, and leaves nothing there."""

from __future__ import annotations

import signal
from typing import Any

import pytest

import dataplane
from dataplane import Client
from dataplane.cli.check.perf import PREFIX
from tests.dataplane.cli.conftest import TIMEOUT_S, Operator, environment_of
from tests.deadline import eventually

SMALL = ("--count", "10", "--size-mib", "2")


def left(plane: Client) -> list[str]:
    return [name for name in plane.kv_list_partitions() if name.startswith(PREFIX)]


def test_it_measures_each_thing_and_drops_its_partition(plane: Client, operator: Operator) -> None:
    used = plane.status()["bytes_in_use"]
    found = operator.ask("check", "perf", *SMALL, "-o", "json").json
    results = {each["name"]: each for each in found["results"]}
    assert list(results) == [
        "put one row", "put one row's tags", "get one row", "memcpy", "put a batch", "get a batch",
        "put until a waiter is woken",
    ]  # fmt: skip
    for each in results.values():
        assert 0 < each["p50_ms"] <= each["p99_ms"]
        assert each["times"] > 0
    for name in ("put a batch", "get a batch"):
        assert results[name]["bytes"] == 2 << 20
        assert results[name]["mib_per_s"] > 0
        assert results[name]["of_memcpy"] > 0
    assert results["put one row"]["bytes"] == 4096
    assert found["partition_id"].startswith(PREFIX)
    assert left(plane) == []
    assert plane.status()["bytes_in_use"] == used


def test_the_table_fits_80_columns(operator: Operator, plane: Client) -> None:
    text = operator.ask("check", "perf", *SMALL).out
    assert max(map(len, text.splitlines())) <= 80
    assert "OF MEMCPY" in text
    assert left(plane) == []


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_ctrl_c_and_sigterm_leave_nothing(
    plane: Client, operator: Operator, ended_by: signal.Signals
) -> None:
    process = operator.start("check", "perf", "--count", "100000")
    try:
        eventually(lambda: left(plane), "it has begun", within_s=TIMEOUT_S)
        process.send_signal(ended_by)
        process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert left(plane) == []


def test_a_batch_is_made_smaller_than_what_is_free(
    operator: Operator, plane: Client, monkeypatch: Any
) -> None:
    found = operator.ask("check", "perf", "--count", "5", "--size-mib", "60000", "-o", "json").json
    results = {each["name"]: each for each in found["results"]}
    assert 0 < results["memcpy"]["bytes"] <= (256 << 20) // 8
    assert left(plane) == []


def test_a_small_store_is_measured_too(here: dict[str, Any]) -> None:
    """Where a batch and the one that it replaces lie in segments that hold little more."""
    with dataplane.init({**here, "capacity_bytes": 8 << 20}, name="small") as small:
        operator = Operator(environment_of(here, small))
        found = operator.ask("check", "perf", "--count", "300", "--timeout", "10", "-o", "json")
        assert len(found.json["results"]) == 7
        assert left(small) == []
        small.close(destroy=True)


def test_wrong_sizes_are_refused(operator: Operator) -> None:
    assert operator.ask("check", "perf", "--count", "0", ok=False).code == 2
    assert operator.ask("check", "perf", "--size-mib", "x", ok=False).code == 2
