"""One reading of a process: values by metric and labels, and what Prometheus is told of them.

Owns the way from plain numbers to the text of a scrape. A reading is made on the event loop whose
state it is of; all else happens in the thread of who asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dataplane.metrics.labels import readable
from dataplane.metrics.table import BY_NAME, COUNTER, GAUGE, HISTOGRAM, Described
from dataplane.metrics.timing import BOUNDS_S, Histogram, Meter


class Reading:
    """Values of one moment."""

    def __init__(self) -> None:
        self._values: dict[str, dict[tuple[str, ...], float | Histogram]] = {}

    def set(self, name: str, value: float | Histogram, *labels: str) -> None:
        """The value of a metric; `labels` in the order of the table, and `name` less its prefix."""
        self._values.setdefault(f"dataplane_{name}", {})[labels] = value

    def counts(self, name: str, values: Iterable[tuple[tuple[str, ...], float]]) -> None:
        """Values by labels; a metric without any is there all the same."""
        here = self._values.setdefault(f"dataplane_{name}", {})
        for labels, value in values:
            here[labels] = value

    def update(self, other: Reading) -> None:
        """Take over what another one says."""
        for name, values in other._values.items():
            self._values.setdefault(name, {}).update(values)

    def collect(self) -> Iterator[Metric]:
        """What it says, as Prometheus' own client takes it."""
        for name, values in self._values.items():
            yield _family(BY_NAME[name], values)


class Joint(Collector):
    """Several collectors, one after the other."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        for part in self._parts:
            yield from part.collect()


def read_meter(meter: Meter, into: Reading) -> None:
    """What connections have measured."""
    into.counts("request_duration_seconds", ())
    for verb, histogram in meter.durations.items():
        into.set("request_duration_seconds", histogram.copy(), verb)
    into.counts("requests_failed_total", meter.failures.items())
    into.counts("requests_abandoned_total", (((v,), n) for v, n in meter.abandoned.items()))


def _family(metric: Described, values: dict[tuple[str, ...], Any]) -> Metric:
    family: Any
    if metric.kind == HISTOGRAM:
        family = HistogramMetricFamily(metric.name, metric.text, labels=metric.labels)
        for labels, histogram in values.items():
            family.add_metric(_readable(labels), _buckets(histogram), histogram.sum_s)
        return family
    if metric.kind == COUNTER:
        family = CounterMetricFamily(metric.name, metric.text, labels=metric.labels)
    elif metric.kind == GAUGE:
        family = GaugeMetricFamily(metric.name, metric.text, labels=metric.labels)
    else:
        family = InfoMetricFamily(metric.name.removesuffix("_info"), metric.text)
        for labels in values:
            told = dict(zip(metric.labels, _readable(labels), strict=True))
            family.add_metric([], told)
        return family
    for labels, value in values.items():
        family.add_metric(_readable(labels), value)
    return family


def _readable(labels: Iterable[str]) -> list[str]:
    return [readable(label) for label in labels]


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    return list(zip(_BOUNDS, accumulate(histogram.counts), strict=True))


_BOUNDS = [*map(repr, BOUNDS_S), "+Inf"]
