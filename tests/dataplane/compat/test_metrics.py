"""Metrics as they are scraped: from the controller's counts, its registry and the plane."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from transfer_queue.metrics import MetricsExporter, Progress, Snapshot
from transfer_queue.names import HIDDEN

from dataplane.errors import Unreachable

STATUS: dict[str, Any] = {
    "partitions": {
        "p": {"payload_bytes": 100, "tag_bytes": 7, "keys": 2},
        HIDDEN: {"payload_bytes": 0, "tag_bytes": 50, "keys": 3},
    },
    "values": {
        "s1": {
            "used_bytes": 4096, "held_bytes": 0, "capacity_bytes": 8192, "blocks": 1, "waiting": 2,
        },
    },
    "clients": 5,
    "waiting": {"rows": 1, "claims": 0, "room": 0, "partitions": 0},
}  # fmt: skip
SNAPSHOT = Snapshot({"p": Progress(2, 0.75, {"train": 0.5})}, indexes=2)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(endpoint: str) -> Samples:
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def exporter() -> Any:
    made = MetricsExporter(lambda: SNAPSHOT, lambda timeout_s: STATUS)
    yield made
    made.stop()


def test_a_scrape_has_what_registry_and_plane_say_in_that_moment(exporter: MetricsExporter) -> None:
    found = scraped(exporter.start("127.0.0.1"))
    in_p, store = (("partition_id", "p"),), (("store_id", "s1"),)
    trained = (("partition_id", "p"), ("task_name", "train"))
    expected: Samples = {
        ("tq_partitions_total", ()): 1,
        ("tq_partition_samples_total", in_p): 2,
        ("tq_partition_production_progress", (*in_p, ("task_name", "all"))): 0.75,
        ("tq_partition_production_progress", trained): 0.75,
        ("tq_partition_consumption_progress", trained): 0.5,
        ("tq_global_index_allocated_total", ()): 2,
        ("tq_storage_utilization_ratio", (("storage_unit_id", "s1"),)): 0.5,
        ("dataplane_up", ()): 1,
        ("dataplane_partition_payload_bytes", in_p): 100,
        ("dataplane_partition_tag_bytes", in_p): 7,
        ("dataplane_store_used_bytes", store): 4096,
        ("dataplane_store_capacity_bytes", store): 8192,
        ("dataplane_store_waiting", store): 2,
        ("dataplane_clients", ()): 5,
        ("dataplane_waiting", (("for", "rows"),)): 1,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found["tq_controller_memory_rss_bytes", ()] > 1 << 20
    assert found["tq_controller_uptime_seconds", ()] >= 0
    assert not any(HIDDEN in value for _, labels in found for _, value in labels)


def test_requests_are_counted_with_their_errors_and_rows(exporter: MetricsExporter) -> None:
    with exporter.measure("FETCH"):
        exporter.record_samples("FETCH", 8)
    with pytest.raises(ValueError, match="no"), exporter.measure("FETCH"):
        raise ValueError("no")
    found = scraped(exporter.start("127.0.0.1"))
    op = (("op_type", "FETCH"),)
    assert found["tq_controller_request_total", op] == 2
    assert found["tq_controller_request_errors_total", op] == 1
    assert found["tq_controller_request_samples_total", op] == 8
    assert found["tq_controller_request_duration_seconds_count", op] == 2


def test_a_plane_that_does_not_answer_costs_only_its_own_metrics() -> None:
    def gone(timeout_s: float) -> Any:
        raise Unreachable("nobody there")

    exporter = MetricsExporter(lambda: SNAPSHOT, gone)
    try:
        found = scraped(exporter.start("127.0.0.1"))
    finally:
        exporter.stop()
    assert found["dataplane_up", ()] == 0
    assert found["tq_partition_samples_total", (("partition_id", "p"),)] == 2
    assert not any(name.startswith("dataplane_store") for name, _ in found)


def test_it_is_started_once_and_names_the_port_that_was_free(exporter: MetricsExporter) -> None:
    endpoint = exporter.start("127.0.0.1")
    assert exporter.start("127.0.0.1") == endpoint
    assert int(endpoint.rpartition(":")[2]) > 0
    exporter.stop()
    exporter.stop()
    assert exporter.endpoint is None
    with pytest.raises(OSError, match="refused"):
        scraped(endpoint)
