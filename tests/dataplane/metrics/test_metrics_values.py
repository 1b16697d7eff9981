"""What a live plane reports is what was done to it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from dataplane.errors import DeadlineExceeded, InvalidRequest, KeyNotFound, StaleWrite
from dataplane.metrics.labels import MAX_PARTITIONS, OTHER
from dataplane.metrics.targets import list_targets
from tests.dataplane.metrics.scraping import ACCEPTS_OPENMETRICS, Scrape, ask
from tests.deadline import eventually
from tests.faults import planes
from tests.faults.planes import Plane

BLOCK_FRONT = 4096
"""What a block may have besides the bytes of its values."""


@pytest.fixture
def plane(roots: dict[str, Path]) -> Iterator[Plane]:
    """A plane with an endpoint, whose counts begin at 0."""
    with ExitStack() as stack:
        yield planes.start(
            stack, "metrics", timeout_s=20, metrics_port=0, capacity_bytes=64 << 20, **roots
        )


def scrape(plane: Plane) -> Scrape:
    return Scrape(plane.client.status()["metrics"])


def rows(count: int) -> dict[str, Any]:
    return {"x": torch.arange(count * 10, dtype=torch.int64).reshape(count, 10)}


def test_seven_puts_of_three_rows(plane: Plane) -> None:
    for put in range(7):
        keys = [f"{put}-{row}" for row in range(3)]
        plane.client.kv_batch_put(keys, "train", rows(3), [{"status": "finished"}] * 3)
    plane.client.kv_batch_get(["0-0", "1-1"], "train")
    seen = scrape(plane)
    payload = 7 * 3 * 10 * 8
    assert seen.value("dataplane_puts_total") == 7
    assert seen.value("dataplane_put_rows_total") == 21
    assert payload <= seen.value("dataplane_put_bytes_total") <= payload + 7 * BLOCK_FRONT
    assert seen.value("dataplane_changes_total") == 7
    assert seen.value("dataplane_gets_total") == 1
    assert seen.value("dataplane_get_rows_total") == 2
    assert seen.value("dataplane_partition_rows", partition="train") == 21
    assert seen.value("dataplane_partition_payload_bytes", partition="train") == payload
    assert seen.value("dataplane_partition_tag_bytes", partition="train") > 0
    assert seen.value("dataplane_store_blocks", state="published") == 7
    received = seen.value("dataplane_store_received_bytes_total", store="local")
    assert received == seen.value("dataplane_put_bytes_total")
    assert seen.value("dataplane_store_pinned_bytes_total") > 0
    assert seen.value("dataplane_request_duration_seconds_count", verb="put_block") == 7
    assert seen.value("dataplane_request_duration_seconds_sum", verb="put_block") > 0
    status = plane.client.status()
    totals = status["totals"]
    assert [totals[name] for name in ("puts", "rows_put", "gets", "rows_got")] == [7, 21, 1, 2]
    assert totals["bytes_put"] == status["values"]["local"]["bytes_in"] == received


def test_a_string_of_a_megabyte_is_a_megabyte(plane: Plane) -> None:
    """TransferQueue#83: sizes of values that are no tensors were 0."""
    size = 1 << 20
    plane.client.kv_put("k", "texts", {"prompt": "a" * size})
    seen = scrape(plane)
    about = pytest.approx(size, rel=0.01)
    assert seen.value("dataplane_partition_payload_bytes", partition="texts") == about
    assert seen.value("dataplane_put_bytes_total") == about
    assert seen.value("dataplane_store_received_bytes_total") == about
    assert seen.value("dataplane_store_used_bytes") == about
    status = plane.client.status()
    assert status["partitions"]["texts"]["payload_bytes"] == about
    assert status["bytes_in_use"] == about
    assert status["totals"]["bytes_put"] == about
    assert plane.client.kv_list_partitions()["texts"]["used_bytes"] == about


def test_what_is_cleared_is_gone(plane: Plane) -> None:
    keys = [str(k) for k in range(10)]
    plane.client.kv_batch_put(keys, "train", rows(10), [{"even": k % 2 == 0} for k in range(10)])
    plane.client.kv_clear(keys[:1], "train")
    plane.client.kv_clear(["absent"], "train")
    plane.client.kv_clear(None, "train", where={"even": True})
    seen = scrape(plane)
    assert seen.value("dataplane_clears_total") == 2
    assert seen.value("dataplane_cleared_rows_total") == 5
    assert seen.value("dataplane_partition_rows", partition="train") == 5
    plane.client.kv_drop_partition("train")
    assert scrape(plane).all("dataplane_partition_rows", partition="train") == []
    plane.comes_to(blocks=0)
    seen = scrape(plane)
    assert seen.value("dataplane_store_used_bytes") == 0
    assert seen.value("dataplane_dead_blocks") == 0


def test_lag_and_claims_of_tasks(plane: Plane) -> None:
    client = plane.client
    client.kv_batch_put([str(k) for k in range(8)], "train", rows(8))
    first = client.kv_claim("train", "fit", count=3, fields=["x"])
    second = client.kv_claim("train", "fit", count=2, fields=["x"])
    client.kv_commit(first)
    seen = scrape(plane)
    of = {"partition": "train", "task": "fit"}
    assert seen.value("dataplane_task_lag_rows", **of) == 5
    assert seen.value("dataplane_task_claimed_rows", **of) == 2
    assert seen.value("dataplane_task_leases", **of) == 1
    assert seen.value("dataplane_claims_total") == 2
    assert seen.value("dataplane_claimed_rows_total") == 5
    assert seen.value("dataplane_commits_total") == 1
    assert seen.value("dataplane_committed_rows_total") == 3
    client.kv_release(second)
    seen = scrape(plane)
    assert seen.value("dataplane_releases_total") == 1
    assert seen.value("dataplane_task_claimed_rows", **of) == 0
    totals = client.status()["totals"]
    assert [totals[name] for name in ("claims", "commits", "releases")] == [2, 1, 1]


def test_the_oldest_row_that_is_not_consumed(plane: Plane) -> None:
    client = plane.client
    assert scrape(plane).all("dataplane_partition_oldest_unconsumed_seconds") == []
    client.kv_batch_put(["a", "b"], "train", rows(2))
    before = scrape(plane).value("dataplane_partition_oldest_unconsumed_seconds", partition="train")
    assert 0 <= before < 60
    client.kv_commit(client.kv_claim("train", "fit", count=2, fields=["x"]))
    assert scrape(plane).all("dataplane_partition_oldest_unconsumed_seconds") == []


def test_groups_and_what_they_hold(plane: Plane) -> None:
    client = plane.client
    attempt = client.begin_group("q1", "train", n=2, declared_bytes=1 << 20)
    seen = scrape(plane)
    assert seen.value("dataplane_partition_open_groups", partition="train") == 1
    assert seen.value("dataplane_partition_held_bytes", partition="train") == 1 << 20
    assert seen.value("dataplane_store_held_bytes") >= 1 << 20
    assert seen.value("dataplane_store_holds") == 1
    assert seen.value("dataplane_store_blocks", state="reserved") == 0
    age = seen.value("dataplane_partition_oldest_open_group_seconds", partition="train")
    assert 0 <= age < 60
    client.end_group(attempt, "finished")
    seen = scrape(plane)
    assert seen.value("dataplane_partition_open_groups", partition="train") == 0
    assert seen.all("dataplane_partition_oldest_open_group_seconds") == []


def test_refused_puts_by_the_class_of_the_error(plane: Plane) -> None:
    client = plane.client
    client.kv_create_partition("small", quota={"rows": 1})
    client.kv_put("a", "small", tags={"n": 1})
    for _ in range(2):
        with pytest.raises(KeyNotFound):
            client.kv_put("no", "small", tags={"n": 1}, must_exist=True)
    with pytest.raises(StaleWrite):
        client.kv_put("b", "small", tags={"n": 1}, attempt=12345)
    seen = scrape(plane)
    assert seen.value("dataplane_puts_refused_total", error="KeyNotFound") == 2
    assert seen.value("dataplane_puts_refused_total", error="StaleWrite") == 1
    assert seen.value("dataplane_puts_total") == 1
    failed = {"verb": "put_tags", "error": "KeyNotFound"}
    assert seen.value("dataplane_requests_failed_total", **failed) == 2
    assert client.status()["totals"]["refused"] == 3


def test_who_waits_and_for_how_long(plane: Plane) -> None:
    client = plane.client
    client.kv_put("a", "train", tags={"n": 1})
    told: list[BaseException] = []

    def wait() -> None:
        try:
            client.kv_wait("train", {"n": 2}, count=1, timeout=20)
        except DeadlineExceeded as error:
            told.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(
        lambda: scrape(plane).value("dataplane_waiting_requests", reason="rows") == 1, "it waits"
    )
    seen = scrape(plane)
    assert seen.value("dataplane_requests_in_flight") >= 1
    assert 0 < seen.value("dataplane_oldest_request_seconds", verb="wait") < 20
    client.kv_put("b", "train", tags={"n": 2})
    thread.join(20)
    assert told == []
    seen = scrape(plane)
    assert seen.value("dataplane_waiting_requests", reason="rows") == 0
    assert seen.value("dataplane_oldest_request_seconds", verb="wait") == 0
    assert seen.value("dataplane_request_duration_seconds_count", verb="wait") == 1


def test_versions_of_a_family_are_one(plane: Plane) -> None:
    for version in range(5):
        plane.client.kv_put("layer", f"weights@{version}", {"x": torch.zeros(100)})
    seen = scrape(plane)
    assert seen.labels("dataplane_partition_rows", "partition") == {"weights"}
    assert seen.value("dataplane_partition_rows", partition="weights") == 5
    assert seen.value("dataplane_partitions", partition="weights") == 5
    assert seen.value("dataplane_partition_payload_bytes", partition="weights") == 5 * 400


def test_partitions_without_end_make_no_series_without_end(plane: Plane) -> None:
    for number in range(2 * MAX_PARTITIONS):
        plane.client.kv_put("k", f"p{number}", tags={"n": number})
    seen = scrape(plane)
    shown = seen.labels("dataplane_partition_rows", "partition")
    assert len(shown) == MAX_PARTITIONS + 1
    assert seen.value("dataplane_partition_rows", partition=OTHER) == MAX_PARTITIONS
    assert sum(seen.all("dataplane_partition_rows")) == 2 * MAX_PARTITIONS
    assert scrape(plane).labels("dataplane_partition_rows", "partition") == shown


def test_hostile_names_are_told_of_and_break_nothing(plane: Plane) -> None:
    names = ['a"b', "a\\b", 'a{b="c"} 1', "[red]x[/red]", "наборы", "a" * 200, "# TYPE x gauge"]
    put: list[str] = []
    for name in names:
        try:
            plane.client.kv_put("k", name, tags={"n": 1})
        except InvalidRequest:
            continue
        put.append(name)
        plane.client.kv_claim(name, name[:60], count=1)
    assert len(put) > 4
    for accept in ("", ACCEPTS_OPENMETRICS):
        seen = Scrape(plane.client.status()["metrics"], accept=accept)
        found = seen.labels("dataplane_partition_rows", "partition")
        assert found == {name if len(name) <= 120 else name[:117] + "..." for name in put}
        assert seen.all("dataplane_task_claimed_rows") == [1.0] * len(put)


def test_verbs_that_a_caller_makes_up_are_one(plane: Plane) -> None:
    from dataplane.wire.frames import frame
    from tests.faults.raw import Raw

    with Raw.greeted(plane.joined) as raw:
        for number in range(1, 51):
            raw.send(frame(f"verb-{number}", number, []))
        for number in range(1, 51):
            with pytest.raises(InvalidRequest):
                raw.answer(number)
    seen = scrape(plane)
    assert seen.value("dataplane_request_duration_seconds_count", verb="unknown") == 50
    assert not any(v.startswith("verb-") for v in seen.labels(
        "dataplane_request_duration_seconds_count", "verb"
    ))  # fmt: skip


def test_the_journal_and_its_snapshots(roots: dict[str, Path]) -> None:
    with ExitStack() as stack:
        plane = planes.start(
            stack, "journal", metrics_port=0, snapshot_bytes=64 << 10, journal_sync="interval",
            **roots,
        )  # fmt: skip
        seen = scrape(plane)
        assert seen.all("dataplane_snapshot_age_seconds") == []
        before = seen.value("dataplane_journal_bytes")
        plane.client.kv_put("k", "train", tags={"text": "x" * 1000})
        assert scrape(plane).value("dataplane_journal_bytes") > before + 1000
        for number in range(100):
            plane.client.kv_put(f"k{number}", "train", tags={"text": "x" * 1000})
        eventually(
            lambda: bool(scrape(plane).all("dataplane_snapshot_age_seconds")), "a snapshot is taken"
        )
        seen = scrape(plane)
        assert seen.value("dataplane_snapshot_bytes") > 0
        assert seen.value("dataplane_journal_broken") == 0
        assert seen.value("dataplane_journal_refused_total") == 0
        assert seen.value("dataplane_journal_snapshot_due_bytes") >= 64 << 10
        eventually(
            lambda: scrape(plane).value("dataplane_journal_unflushed_bytes") == 0, "it is flushed"
        )


def test_a_plane_that_comes_back_serves_them_again(plane: Plane) -> None:
    plane.client.kv_put("k", "train", tags={"n": 1})
    plane.kill()
    plane.client.kv_put("k2", "train", tags={"n": 1})
    seen = scrape(plane)
    assert seen.value("dataplane_epoch") == 2
    assert seen.value("dataplane_changes_total") == 2
    assert seen.value("dataplane_puts_total") == 1
    assert len(list_targets(plane.folders.runtime)) == 1


def test_where_it_is_can_be_found(plane: Plane) -> None:
    target = plane.client.status()["metrics"]
    labels = {"plane": "metrics", "plane_id": plane.folders.plane_id, "role": "stores"}
    assert list_targets(plane.folders.runtime) == [{"targets": [target], "labels": labels}]
    assert json.loads(ask(target, "/targets").body) == [{"targets": [target], "labels": labels}]
    assert plane.counts()["metrics"] == target
    seen = Scrape(target)
    assert seen.value("dataplane_build_info", role="stores", plane="metrics") == 1
    assert target.startswith("127.0.0.1:")


def test_nothing_listens_unless_it_is_asked_for(roots: dict[str, Path]) -> None:
    with ExitStack() as stack:
        plane = planes.start(stack, "quiet", **roots)
        status = plane.client.status()
        assert status["metrics"] is None
        assert status["values"]["local"]["metrics"] is None
        assert list_targets(plane.folders.runtime) == []


def test_many_scrapes_at_once_are_answered(plane: Plane) -> None:
    target = plane.client.status()["metrics"]
    plane.client.kv_put("k", "train", tags={"n": 1})
    pages: list[int] = []

    def many() -> None:
        for _ in range(10):
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=20) as page:
                pages.append(page.status)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(200):
        plane.client.kv_put(f"k{number}", "train", tags={"n": number})
    for thread in threads:
        thread.join(60)
    assert pages == [200] * 40


def test_the_command_says_where_they_are(roots: dict[str, Path]) -> None:
    settings = {
        "--name": "told", "--metrics-port": 0, "--capacity-bytes": 64 << 20,
        "--runtime-dir": roots["runtime_dir"], "--shm-dir": roots["shm_dir"],
    }  # fmt: skip
    command = [sys.executable, "-m", "dataplane.cli.main", "serve"]
    command += [str(part) for option in settings.items() for part in option]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            said = process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGTERM)
    assert said.startswith("metrics are at http://127.0.0.1:")
    assert said.endswith("/metrics")
