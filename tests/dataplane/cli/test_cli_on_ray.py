"""Commands on a plane that Ray hosts, from a process that has not joined its cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dataplane
from dataplane import Client
from tests.dataplane.cli.conftest import Operator
from tests.deadline import eventually

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def on_ray(ray_cluster: list[str], plane_settings: dict[str, Any]) -> Iterator[Client]:
    """A plane of two nodes' cluster, with three rows."""
    assert len(ray_cluster) == 2
    client = dataplane.init({**plane_settings, "host": "ray"}, name=f"cli-{os.getpid()}")
    for key, status in (("a", "failed"), ("b", "failed"), ("c", "completed")):
        client.kv_put(key, "train", {"x": torch.arange(4)}, {"status": status})
    yield client
    client.close(destroy=True)
    folder = Path(plane_settings["runtime_dir"]) / client.plane_id
    eventually(lambda: not folder.exists(), "nothing is left of it", within_s=30)


@pytest.fixture
def abroad(on_ray: Client, tmp_path: Any) -> Operator:
    """An operator who knows the cluster's address and the plane's name."""
    import ray

    address = ray.get_runtime_context().gcs_address
    return Operator(
        {
            "DATAPLANE_RUNTIME_DIR": str(tmp_path / "none"),
            "DATAPLANE_NAME": on_ray.name,
            "RAY_ADDRESS": address,
        }
    )


def test_clear_and_doctor(on_ray: Client, abroad: Operator) -> None:
    said = abroad.run("clear", "train", "--status", "failed", "--dry-run", "-o", "json")
    assert said.json["rows"] == 2
    abroad.run("clear", "train", "--status", "failed", "--yes")
    assert on_ray.kv_list("train").keys == ["c"]
    found = abroad.run("doctor", "-o", "json").json
    of = {each["check"]: each for each in found}
    assert of["ray"]["verdict"] == "ok"
    assert "2 of 2 nodes are alive" in of["ray"]["says"]
    assert of[f"actor {on_ray.name}/tags"]["verdict"] == "ok"
