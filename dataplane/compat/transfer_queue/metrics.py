"""An instance's Prometheus metrics, made when they are scraped.

Owns the names. What they say comes from the controller's own counters, from its registry (a
`Snapshot`), and from the plane's `status()`; nothing is polled between scrapes. Names of
TransferQueue that have a meaning here keep it:

    tq_controller_request_duration_seconds,       requests that the controller answered, by
    tq_controller_request_total,                  op_type; their duration has waits for rows in it.
    tq_controller_request_errors_total,           Puts and gets by key are none of them: they go to
    tq_controller_request_samples_total           the plane itself
    tq_controller_uptime_seconds                  since the actor started last
    tq_controller_memory_rss_bytes                of the actor's process
    tq_partitions_total                           partitions that have rows
    tq_partition_samples_total                    {partition_id}
    tq_partition_production_progress              {partition_id, task_name}; task_name "all" as well
    tq_partition_consumption_progress             {partition_id, task_name}
    tq_global_index_allocated_total               indexes of rows that are there
    tq_storage_utilization_ratio                  {storage_unit_id}: used bytes of capacity bytes

    dataplane_up                                  whether the plane answered this scrape
    dataplane_partition_payload_bytes, …_tag_bytes     {partition_id}
    dataplane_store_used_bytes, …_held_bytes, …_capacity_bytes, …_blocks, …_waiting     {store_id}
    dataplane_clients, dataplane_waiting          {for: rows, claims, room, partitions}

and the others are not served:

    tq_global_index_reusable_total                indexes are never used again
    tq_storage_capacity_total, …_active_keys_total     capacity is in bytes, stores know no keys
    tq_storage_memory_rss_bytes                   values lie in shared memory: dataplane_store_…
    tq_storage_ssd_…                              there is no such tier
    tq_storage_requests_…, …_arrivals_by_op, …_request_…, tq_storage_request_…, …_accept_queue_…,
    …_socket_drops, …_listen_…                    a store's sockets are not ZeroMQ's, and no request
                                                  of theirs is lost in a queue
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dataplane.errors import DataplaneError

from .names import HIDDEN

log = logging.getLogger("dataplane.compat")

STATUS_TIMEOUT_S = float(os.environ.get("TQ_METRICS_STORAGE_TIMEOUT", "5"))
"""How long a scrape waits for the plane."""
BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
OP = ("op_type",)


class Progress(NamedTuple):
    """How far a partition is."""

    rows: int
    produced: float
    """Share of its cells (rows times fields) that have been written."""
    consumed: Mapping[str, float]
    """Share of its rows that each task has consumed."""


class Snapshot(NamedTuple):
    """What the controller's registry says of itself, in one moment."""

    partitions: Mapping[str, Progress]
    indexes: int
    """Indexes of rows that are there."""


class MetricsExporter:
    """Counts the requests of a controller, and serves all metrics over HTTP when started.

    `snapshot` and `status` (the plane's, given a timeout in seconds) are called in the threads of
    scrapes. An error of the plane in `status` costs that scrape the plane's metrics, no more.
    """

    def __init__(
        self, snapshot: Callable[[], Snapshot], status: Callable[[float], Mapping[str, Any]]
    ) -> None:
        self.registry = CollectorRegistry()
        self.endpoint: str | None = None
        """`host:port` while it is served."""
        prefix, registry = "tq_controller_request", self.registry
        self._seconds = Histogram(
            f"{prefix}_duration_seconds", "Time to the answer of a request", OP,
            buckets=BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._total = Counter(prefix, "Requests", OP, registry=registry)
        self._errors = Counter(f"{prefix}_errors", "Requests that failed", OP, registry=registry)
        self._samples = Counter(f"{prefix}_samples", "Rows that requests were about", OP,
                                registry=registry)  # fmt: skip
        self._server: Any = None
        registry.register(_Gauges(snapshot, status))

    @contextmanager
    def measure(self, op_type: str) -> Generator[None]:
        """Count a request, how long it takes, and whether it fails."""
        self._total.labels(op_type).inc()
        began = time.perf_counter()
        try:
            yield
        except BaseException:
            self._errors.labels(op_type).inc()
            raise
        finally:
            self._seconds.labels(op_type).observe(time.perf_counter() - began)

    def record_samples(self, op_type: str, count: int) -> None:
        """Count the rows that a request was about."""
        self._samples.labels(op_type).inc(count)

    def start(self, host: str, port: int = 0) -> str:
        """Serve `/metrics` on this address; `host:port`. Port 0 takes a free one. Repeatable."""
        if self.endpoint is None:
            self._server, _ = start_http_server(port, addr=host, registry=self.registry)
            self.endpoint = f"{host}:{self._server.server_address[1]}"
        return self.endpoint

    def stop(self) -> None:
        """Serve no more. Repeatable."""
        server, self._server, self.endpoint = self._server, None, None
        if server is not None:
            server.shutdown()
            server.server_close()


class _Gauges(Collector):
    """What is looked up when it is scraped."""

    def __init__(
        self, snapshot: Callable[[], Snapshot], status: Callable[[float], Mapping[str, Any]]
    ) -> None:
        self._snapshot = snapshot
        self._status = status
        self._began = time.monotonic()

    def describe(self) -> list[Metric]:
        # Without it, registering would ask a plane that may not be there yet.
        return []

    def collect(self) -> Iterator[Metric]:
        uptime_s = time.monotonic() - self._began
        yield _gauge("tq_controller_uptime_seconds", "Since the controller started", uptime_s)
        yield _gauge("tq_controller_memory_rss_bytes", "Of the controller's process", rss_bytes())
        yield from _of_registry(self._snapshot())
        try:
            status = self._status(STATUS_TIMEOUT_S)
        except DataplaneError as error:
            log.warning("metrics of the plane are left out: %s", error)
            yield _gauge("dataplane_up", "Whether the plane answered", 0)
            return
        yield _gauge("dataplane_up", "Whether the plane answered", 1)
        yield from _of_plane(status)


def _of_registry(snapshot: Snapshot) -> Iterator[Metric]:
    partitions = snapshot.partitions
    yield _gauge("tq_partitions_total", "Partitions that have rows", len(partitions))
    yield _labelled(
        "tq_partition_samples_total", "Rows", ("partition_id",),
        {(name,): progress.rows for name, progress in partitions.items()},
    )  # fmt: skip
    yield _labelled(
        "tq_partition_production_progress", "Share of cells that are written",
        ("partition_id", "task_name"),
        {
            (name, task): progress.produced
            for name, progress in partitions.items()
            for task in ("all", *progress.consumed)
        },
    )  # fmt: skip
    yield _labelled(
        "tq_partition_consumption_progress", "Share of rows that a task has consumed",
        ("partition_id", "task_name"),
        {
            (name, task): share
            for name, progress in partitions.items()
            for task, share in progress.consumed.items()
        },
    )  # fmt: skip
    yield _gauge("tq_global_index_allocated_total", "Indexes of rows", snapshot.indexes)


def _of_plane(status: Mapping[str, Any]) -> Iterator[Metric]:
    partitions = {name: of for name, of in status["partitions"].items() if name != HIDDEN}
    for what in ("payload_bytes", "tag_bytes"):
        yield _labelled(
            f"dataplane_partition_{what}", f"{what.replace('_', ' ')} of the rows that are there",
            ("partition_id",), {(name,): of[what] for name, of in partitions.items()},
        )  # fmt: skip
    stores: Mapping[str, Mapping[str, Any]] = status["values"]
    for what in ("used_bytes", "held_bytes", "capacity_bytes", "blocks", "waiting"):
        yield _labelled(
            f"dataplane_store_{what}", f"{what.replace('_', ' ')} of a value store",
            ("store_id",), {(name,): of[what] for name, of in stores.items()},
        )  # fmt: skip
    yield _labelled(
        "tq_storage_utilization_ratio", "Used bytes of capacity bytes", ("storage_unit_id",),
        {(name,): of["used_bytes"] / of["capacity_bytes"] for name, of in stores.items()},
    )  # fmt: skip
    yield _gauge("dataplane_clients", "Clients that are connected", status["clients"])
    yield _labelled(
        "dataplane_waiting", "Requests that wait", ("for",),
        {(what,): count for what, count in status["waiting"].items()},
    )  # fmt: skip


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _labelled(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family


def rss_bytes() -> int:
    """Memory of this process that is resident."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
