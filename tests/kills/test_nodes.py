"""A node of a Ray cluster dies: what was there is lost, and everybody is told, in bounded time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.repo.tree import ROOT

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]

MiB = 1 << 20
SLACK_S = 1.0
"""By which an answer may come later than its deadline on a machine that does other things."""


@pytest.fixture
def folders() -> Iterator[dict[str, str]]:
    """Where the planes of a scenario are, and may leave nothing."""
    with (
        TemporaryDirectory(prefix="dataplane-") as runtime,
        TemporaryDirectory(prefix="dataplane-", dir="/dev/shm") as shm,
    ):
        yield {"runtime_dir": runtime, "shm_dir": shm}
        left = [name for root in (runtime, shm) for name in os.listdir(root)]
        assert left in ([], ["lock"])


def run(scenario: str, folders: dict[str, str], **settings: Any) -> dict[str, Any]:
    """What a scenario says that it has seen, in a cluster of its own."""
    settings = {"capacity_bytes": 64 * MiB, "segment_bytes": 16 * MiB, **folders, **settings}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)  # of the session's cluster
    done = subprocess.run(
        [sys.executable, "-m", "tests.kills.nodes", scenario, json.dumps(settings)],
        capture_output=True, text=True, timeout=220, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(said, indent=1))
    return said


def test_rows_of_a_dead_node_are_lost_within_5_s_and_everybody_is_told(
    folders: dict[str, str],
) -> None:
    said = run("values_node", folders)
    # Silence is no evidence: until Ray says that the node is dead, its rows may come back.
    # Where the tag store itself does not get to answer in time, that is what is said.
    assert "Unreachable" in said["silent"]
    assert set(said["silent"]) <= {"Unreachable", "DeadlineExceeded"}
    assert said["longest_s"] < 2.0 + SLACK_S
    assert said["gets"] > 3
    assert said["lost_s"] < 5.0
    assert said["woken_s"] < 5.0
    assert "has lost field 'x' of key 'alone', 'g_1'" in said["text"]
    assert said["woken"] == ["alone", "g_1"]
    assert said["lost_rows"] == 1
    assert "1 row that matches is lost" in said["explained"]
    assert said["read"] == ["alone", "g_1", "here", "more"]
    assert said["stores"], "the dead store is known no more"
    assert (said["bytes_in_use"], said["dead_blocks"], said["held_bytes"]) == (0, 0, 0)
    assert said["elsewhere"] == [], "the value store was started on another node"


@pytest.mark.parametrize("scenario", ["read_from_a_dead_raylet", "read_from_a_dead_node"])
def test_a_large_read_from_a_node_that_dies_ends_with_a_typed_error_in_time(
    scenario: str, folders: dict[str, str]
) -> None:
    said = run(scenario, folders, capacity_bytes=512 * MiB, segment_bytes=288 * MiB)
    assert said["kind"] in ("Unreachable", "ValueLost", "DeadlineExceeded"), said
    assert said["took"] < said["deadline"] + SLACK_S
    assert 32 * MiB < said["read"] < 256 * MiB, "it was in the middle of the read"


def test_the_plane_ends_with_the_node_of_its_tag_store_and_a_checkpoint_is_a_new_one(
    folders: dict[str, str],
) -> None:
    said = run("tags_node", folders)
    assert "Unreachable" in said["before"]
    assert set(said["before"]) <= {"Unreachable", "DeadlineExceeded", "OutcomeUnknown"}
    assert said["longest_s"] < 2.0 + 2 * SLACK_S
    assert set(said["lost_s"]) == {"list", "get", "put", "wait"}
    assert max(said["lost_s"].values()) < said["declared_s"] + 5.0
    assert said["totals"] == [499500, 4999950000]
    assert not said["same"]
    assert said["old"] == "PlaneLost", "a client of the old plane is no client of the new one"


def test_a_tag_store_whose_port_was_taken_is_found_by_those_of_other_nodes(
    folders: dict[str, str],
) -> None:
    said = run("tags_again", folders)
    assert said["another_process"]
    assert said["another_port"]
    assert said["callers"], "nobody from another node has called where the tag store was"
    assert said["same_value_store"]
    assert said["keys"] == ["here", "more", "there"]
    assert said["totals"] == [499500, 499500]
    before, after = said["revision"]
    assert after[0] == before[0] + 1
    assert after[1] == before[1] + 1
    assert said["back_s"] < 10.0
