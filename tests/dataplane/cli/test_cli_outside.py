"""Commands that write and read rows, through a gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import dataplane
from dataplane import Client
from dataplane.cli.check.perf import PREFIX
from tests.dataplane.cli.conftest import Operator
from tests.dataplane.outside.gateways import gateway
from tests.deadline import eventually

PARTITION = "outside"


@pytest.fixture(scope="module")
def outside(
    plane: Client, here: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator]:
    """An operator who reaches the plane through a gateway only."""
    socket = Path(here["runtime_dir"]) / "gateway.sock"
    with gateway("train", here, listen=(f"unix:{socket}",)):
        yield Operator(
            {
                "DATAPLANE_RUNTIME_DIR": str(tmp_path_factory.mktemp("none") / "none"),
                "DATAPLANE_ADDRESS": f"grpc+unix://{socket}",
            }
        )
    socket.unlink(missing_ok=True)


def test_put_get_and_export(plane: Client, outside: Operator, tmp_path: Path) -> None:
    brain = torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16)
    plane.kv_put("a", PARTITION, {"w": brain})
    outside.ask("put", PARTITION, "a", "-t", "status=failed", "-f", "input_ids=[1,2,3]")
    outside.ask("put", PARTITION, "b", "-t", "status=completed", "--if-absent")
    said = outside.ask("put", PARTITION, "b", "-t", "x=1", "--if-absent", ok=False)
    assert said.code == 7
    to = tmp_path / "a.npz"
    outside.ask("get", PARTITION, "a", "-f", "input_ids", "--to", str(to))
    with np.load(to, allow_pickle=False) as file:
        assert file["a/input_ids"].tolist() == [1, 2, 3]
    to = tmp_path / "rows.parquet"
    outside.ask("export", PARTITION, "--to", str(to))
    table = pq.read_table(to)
    places = {key: row for row, key in enumerate(table.column("key").to_pylist())}
    row = places["a"]
    assert table.column("tag.status").to_pylist()[places["b"]] == "completed"
    assert table.column("field.w").to_pylist()[row] == brain.view(torch.uint16).tolist()


def test_clear_shows_and_clears(plane: Client, outside: Operator) -> None:
    for key, status in (("c", "failed"), ("d", "failed"), ("e", "completed")):
        plane.kv_put(key, "cleared", {"x": torch.zeros(5)}, {"status": status})
    said = outside.ask("clear", "cleared", "--status", "failed", "--dry-run", "-o", "json").json
    assert (said["rows"], said["payload_bytes"], said["cleared"]) == (2, 40, 0)
    said = outside.ask("clear", "cleared", "--status", "failed", "--yes", "-o", "json").json
    assert said["cleared"] == 2
    assert outside.ask("clear", "cleared", "e", "nope", "--yes", "-o", "json").json["cleared"] == 1
    assert plane.kv_list("cleared").keys == []


def test_orphans_and_claims_of_the_dead_are_found(
    plane: Client, outside: Operator, here: dict[str, Any]
) -> None:
    gone = dataplane.connect("train", config=here)
    gone.begin_group("left", "abroad", n=1)
    plane.begin_group("here", "abroad", n=1)
    plane.kv_put("row", "abroad", {"x": torch.zeros(2)}, {"uid": "x"})
    gone.kv_claim("abroad", "actor", count=1, fields=["x"], lease_s=3600)
    gone.close()
    eventually(lambda: not any(h.alive for c in plane.claims("abroad") for h in c.holders), "gone")
    leaks = outside.ask("leaks", "--older-than", "0s", "-o", "json").json
    assert [row["where"] for row in leaks if row["where"].startswith("abroad")] == [
        "abroad, group left",
        "abroad, task actor",
    ]
    said = outside.ask("clear", "abroad", "--orphans", "--yes", "-o", "json").json
    assert (said["cleared"], said["groups_open"]) == (1, 1)
    said = outside.ask("release", "abroad", "--dead", "--yes", "-o", "json").json
    assert [row["outcome"] for row in said] == ["released"]
    assert sorted(plane.kv_list("abroad").keys) == ["here", "row"]
    plane.kv_drop_partition("abroad")


def test_check_perf_leaves_nothing(plane: Client, outside: Operator) -> None:
    found = outside.ask("check", "perf", "--count", "5", "--size-mib", "1", "-o", "json").json
    assert len(found["results"]) == 7
    assert not [name for name in plane.kv_list_partitions() if name.startswith(PREFIX)]


def test_a_report_of_the_plane_is_written(outside: Operator, tmp_path: Path) -> None:
    said = outside.ask("report", "--out", str(tmp_path / "r.html"))
    assert said.out.strip() == str(tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "Timeline of groups" in text
    assert "u1" in text


def test_a_checkpoint_is_made_where_the_plane_is(outside: Operator, tmp_path: Path) -> None:
    said = outside.ask("checkpoint", "save", str(tmp_path / "no"), ok=False)
    assert said.code == 2
    assert "where the plane" in said.err
