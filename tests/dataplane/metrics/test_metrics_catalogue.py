"""The table, the documentation, the dashboard and the alerts say the same as live processes do."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import yaml

import dataplane
from dataplane.errors import DataplaneError, KeyNotFound
from dataplane.gateway.server import GatewayServer
from dataplane.metrics import table
from dataplane.metrics.table import Described
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.gateways import Callers, Serve
from tests.dataplane.metrics.queries import asked, grouped_by
from tests.dataplane.metrics.scraping import Scrape
from tests.deadline import eventually
from tests.faults import planes
from tests.faults.planes import Plane

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "deploy/grafana/dataplane.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
SCRAPED = ROOT / "deploy/prometheus/prometheus.yaml"
DOCS = ROOT / "docs/metrics.md"

OF_PROMETHEUS = {"up"}
OF_PROCESSES = {"process_resident_memory_bytes"}
"""Told by Prometheus itself, and by its client in each process."""
TARGET_LABELS = {"instance", "job"}
"""Labels that Prometheus adds."""
LABELS = {
    "plane", "plane_id", "role", "version", "verb", "error", "partition", "task", "reason", "store",
    "state", "method", "code", "name",
}  # fmt: skip
"""Each has few values, whatever is put into a plane."""


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Title and expression of each query of the dashboard."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", "5m")
            yield panel["title"], expression.replace("$instance", ".*")


def alerts() -> list[dict[str, Any]]:
    """The rules of all groups."""
    return [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]


QUERIES = [
    *dashboard_queries(),
    *((rule["alert"], rule["expr"]) for rule in alerts()),
]


# -- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", table.ALL, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: Described) -> None:
    name = metric.name
    assert re.fullmatch(r"dataplane_[a-z][a-z0-9_]*[a-z0-9]", name)
    assert name.endswith("_total") == (metric.kind == table.COUNTER)
    assert name.endswith("_info") == (metric.kind == table.INFO)
    # Base units, and the unit last: never milliseconds, kilobytes, percent.
    assert not re.search(r"_(ms|us|milliseconds|minutes|hours|kb|mb|mib|percent|ratio)(_|$)", name)
    for unit in ("seconds", "bytes"):
        if f"_{unit}" in name:
            assert re.search(rf"_{unit}(_total)?$", name)
    if metric.kind == table.HISTOGRAM:
        assert name.endswith(("_seconds", "_bytes"))
        assert "le" not in metric.labels
    assert not name.endswith(("_bucket", "_count", "_sum"))
    assert set(metric.labels) <= LABELS
    # A name does not say what a label says.
    assert not any(f"_by_{label}" in name for label in metric.labels)
    assert metric.text
    assert not metric.text.endswith(".")


def test_no_name_is_there_twice() -> None:
    assert len({metric.name for metric in table.ALL}) == len(table.ALL)


def test_every_metric_is_documented_as_it_is() -> None:
    documented = {}
    for line in DOCS.read_text().splitlines():
        row = re.fullmatch(r"\| `(dataplane_\w+)` \| (\w+) \| (.*) \| (.*) \|", line)
        if row is not None:
            name, kind, labels, text = row.groups()
            documented[name] = (kind, tuple(re.findall(r"`(\w+)`", labels)), text)
    assert documented == {m.name: (m.kind, m.labels, m.text) for m in table.ALL}


# -- what is exported ------------------------------------------------------------------------


@pytest_asyncio.fixture
async def exported(serve: Serve, callers: Callers, roots: dict[str, Path]) -> AsyncIterator[Any]:
    """Names and labels of all series of a plane, a gateway and a program that were used."""
    gateway: GatewayServer = await serve(metrics_port=0)
    caller = await callers(gateway)
    await caller.put_rows("outside", {"a": {"text": b"x"}})
    with pytest.raises(KeyNotFound):
        await caller.get_rows("outside", ["absent"])
    bad = pb.Trajectory(uid="q1", input_ids=[1, 2], labels=[1])
    request = caller.request()
    await caller.call(
        "PutTrajectories",
        pb.PutTrajectoriesRequest(request=request, partition_id="outside", trajectories=[bad]),
    )
    assert gateway.metrics is not None
    found = (await asyncio.to_thread(Scrape, gateway.metrics.target or "")).names()
    for more in await asyncio.to_thread(_used_plane, roots):
        for name, labels in more.items():
            found.setdefault(name, set()).update(labels)
    yield found


def _used_plane(roots: dict[str, Path]) -> list[dict[str, set[str]]]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        metrics = stack.enter_context(dataplane.serve_metrics())
        plane = planes.start(
            stack, "used", metrics_port=0, snapshot_bytes=64 << 10, timeout_s=20, **roots
        )
        _use(plane)
        metrics.tell({"time/step": 1.0}, step=1)
        target = plane.client.status()["metrics"]
        eventually(lambda: bool(Scrape(target).all("dataplane_snapshot_age_seconds")), "a snapshot")
        return [Scrape(target).names(), Scrape(metrics.target).names()]


def _use(plane: Plane) -> None:
    client = plane.client
    client.kv_create_partition("train", quota={"bytes": 1 << 24})
    client.begin_group("q1", "train", n=2, declared_bytes=1 << 16)
    client.kv_batch_put(["a", "b"], "train", {"x": torch.zeros(2, 10)})
    client.kv_batch_get(["a"], "train")
    client.kv_claim("train", "fit", count=1, fields=["x"])
    for attempts in range(2):
        with pytest.raises(DataplaneError):
            client.kv_wait("train", {"no": attempts}, count=1, timeout=0.05)
        with pytest.raises(KeyNotFound):
            client.kv_put("no", "train", tags={"n": 1}, must_exist=True)
    for number in range(100):
        client.kv_put(f"t{number}", "tags", tags={"text": "x" * 1000})
    # Requests of a connection that breaks are never answered.
    from dataplane.wire.frames import frame
    from tests.faults.raw import Raw

    with Raw.greeted(plane.joined) as raw:
        raw.send(frame("wait", 1, ["train", {"no": 9}, [], 1, False, 20.0, 1]))
        eventually(
            lambda: client.status()["waiting"]["rows"] == 1, "the request is there"
        )  # fmt: skip
    eventually(lambda: client.status()["waiting"]["rows"] == 0, "the request is gone")


def test_expressions_are_read_as_prometheus_reads_them() -> None:
    expression = 'histogram_quantile(0.9, sum by (le) (rate(a_bucket{x="1"}[5m]))) / on (y) -b > c'
    assert {one.name: one.labels for one in asked(expression)} == {
        "a_bucket": {"x"}, "b": set(), "c": set(),
    }  # fmt: skip
    assert grouped_by(expression) == {"le", "y"}
    with pytest.raises(ValueError, match="parenthesis"):
        asked("sum by (")


async def test_live_processes_export_the_table_and_nothing_else(
    exported: dict[str, set[str]],
) -> None:
    described = table.series_names()
    assert set(exported) - set(described) == set()
    assert set(described) - set(exported) == set()
    assert {name: labels for name, labels in exported.items() if labels != described[name]} == {}


async def test_dashboard_and_alerts_ask_for_what_is_exported(exported: dict[str, set[str]]) -> None:
    wrong: list[str] = []
    for title, expression in QUERIES:
        labels = set(TARGET_LABELS)
        for name, named in asked(expression):
            if name in OF_PROMETHEUS | OF_PROCESSES:
                known = TARGET_LABELS
            elif name in exported:
                known = exported[name] | TARGET_LABELS
            else:
                wrong.append(f"{title}: there is no {name}")
                continue
            labels |= known
            wrong += [f"{title}: {name} has no label {label}" for label in named - known]
        wrong += [f"{title}: by {label}" for label in grouped_by(expression) - labels]
    assert not wrong, "\n".join(wrong)


# -- the dashboard and the alerts ------------------------------------------------------------


def test_every_metric_of_the_plane_is_on_the_dashboard() -> None:
    shown = {name for _, expression in dashboard_queries() for name, _ in asked(expression)}
    shown |= {name.removesuffix(s) for name in shown for s in ("_bucket", "_count", "_sum")}
    not_shown = {m.name for m in table.ALL} - shown
    assert not_shown == {
        "dataplane_build_info", "dataplane_partitions", "dataplane_store_joined",
        "dataplane_store_segments", "dataplane_store_blocks", "dataplane_put_bytes_total",
        "dataplane_client_calls_failed_total", "dataplane_client_put_bytes_total",
        "dataplane_client_got_bytes_total",
    }  # fmt: skip


def test_the_dashboard_can_be_read() -> None:
    board = json.loads(DASHBOARD.read_text())
    panels = board["panels"]
    assert [p["title"] for p in panels if p["type"] == "row"] == [
        "Overview", "Flow and lag", "Memory", "Latency", "Gateways", "Faults", "Run",
    ]  # fmt: skip
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == ["datasource", "instance"]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"Dataplane[A-Z]\w+", rule["alert"])
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert notes["runbook_url"] == f"docs/metrics.md#{rule['alert'].lower()}"
    assert f"### {rule['alert']}\n" in DOCS.read_text()
    assert not notes["summary"].endswith(".")
    assert notes["description"].endswith(".")
    # Labels that a text names are those that its expression has left.
    for label in re.findall(r"\$labels\.(\w+)", notes["summary"]):
        known = set(TARGET_LABELS) | grouped_by(rule["expr"])
        for name, _ in asked(rule["expr"]):
            known |= table.series_names().get(name, set())
        assert label in known


def test_every_runbook_has_its_alert() -> None:
    headings = re.findall(r"^### (Dataplane\w+)$", DOCS.read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in alerts()]


def test_the_scrape_example_is_whole() -> None:
    config = yaml.safe_load(SCRAPED.read_text())
    assert config["rule_files"] == ["alerts.yaml"]
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert jobs == {"dataplane", "dataplane-gateway", "dataplane-run"}
