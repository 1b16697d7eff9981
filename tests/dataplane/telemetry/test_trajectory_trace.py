"""A trajectory is followed through processes that say nothing of it to each other.

Agent loop, controller and worker are processes of their own, each with an exporter to a file.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import dataplane
from dataplane.telemetry.identity import followed
from tests.dataplane.outside.gateways import gateway
from tests.dataplane.telemetry.exporting import spans_in
from tests.repo.tree import ROOT

COMMON: Final = """
import json, sys
import torch
import dataplane
if sys.argv[1]:
    from tests.dataplane.telemetry.exporting import export_to
path, name, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if path:
    export_to(path)
client = dataplane.connect(name, address=settings.pop("address", None), config=settings)
"""

AGENT_LOOP: Final = """
for uid in ("u1", "u2"):
    client.kv_put(uid, "train", tags={"uid": uid, "is_prompt": True, "status": "pending", "n": 2})
    attempt = client.begin_group(uid, "train", n=2)
    for session in range(2):
        client.kv_put(
            f"{uid}_{session}_0", "train", {"input_ids": torch.arange(5 + session)},
            {"uid": uid, "session_id": session, "seq_len": 5 + session, "status": "completed"},
            attempt=attempt,
        )
    client.end_group(attempt, "finished")
"""

CONTROLLER: Final = """
claim = client.kv_claim("train", "train", count=4, fields=["input_ids"])
uids = {tags["uid"] for tags in claim.tags}
with client.span("plan", "train", uids=uids):
    plan = sorted(claim.keys)
print(json.dumps(plan), flush=True)
"""

WORKER: Final = """
plan = json.loads(sys.argv[4])
with client.stage("update_actor"):
    rows = client.kv_batch_get(plan, "train", ["input_ids"], layout="packed")
    client.kv_batch_put(
        plan, "train", {"old_logprobs": [torch.zeros(3)] * len(plan)}, must_exist=True
    )
    with client.span("optimizer_step", "train", uids=["u1", "u2"]):
        weight = torch.ones(1, requires_grad=True)
        (weight * rows["input_ids"].sum()).backward()
        torch.optim.SGD([weight], lr=0.1).step()
client.kv_clear(None, "train", where={"uid": {"in": ["u1", "u2"]}})
"""


@pytest.fixture(scope="module")
def plane(plane_settings: dict[str, Any]) -> Iterator[dataplane.Client]:
    settings = {**plane_settings, "host": "embedded"}
    client = dataplane.init(settings, name="traced")
    yield client
    client.close(destroy=True)


def run(
    code: str, plane: dataplane.Client, settings: dict[str, Any], path: Path | str, *args: str
) -> str:
    """What a role says, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code, str(path), plane.name, json.dumps(settings), *args],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "span could not be made" not in done.stderr
    return done.stdout


def all_roles(
    plane: dataplane.Client, settings: dict[str, Any], folder: Path, worker: str = WORKER
) -> dict[str, list[dict[str, Any]]]:
    """The spans of each role."""
    run(AGENT_LOOP, plane, settings, folder / "agentloop")
    keys = run(CONTROLLER, plane, settings, folder / "controller").strip()
    run(worker, plane, settings, folder / "worker", keys)
    return {role: spans_in(folder / role) for role in ("agentloop", "controller", "worker")}


def test_a_trajectory_is_one_trace_from_put_to_optimizer_step(
    plane: dataplane.Client, plane_settings: dict[str, Any], tmp_path: Path
) -> None:
    roles = all_roles(plane, {**plane_settings, "otel": True}, tmp_path)
    of = followed(plane.plane_id, "train", "u1")
    mine = sorted(
        (span for spans in roles.values() for span in spans if span["trace"] == of.trace_id),
        key=lambda span: span["start"],
    )
    assert [span["name"] for span in mine] == [
        "dataplane.kv_put", "dataplane.begin_group", "dataplane.kv_put", "dataplane.kv_put",
        "dataplane.end_group", "dataplane.kv_claim", "plan", "stage update_actor",
        "dataplane.kv_batch_get", "dataplane.kv_batch_put", "optimizer_step", "dataplane.kv_clear",
    ]  # fmt: skip
    # One after the other, but for the stage, which holds what is done at it.
    serial = [span for span in mine if span["name"] != "stage update_actor"]
    for before, after in itertools.pairwise(serial):
        assert before["end"] <= after["start"]
    stage = mine[7]
    assert stage["start"] <= mine[8]["start"]
    assert stage["end"] >= mine[10]["end"]
    # The prompt's put is the root, and all others are its children, whoever made them.
    root, *others = mine
    assert (root["span"], root["parent"]) == (of.root_id, None)
    assert {span["parent"] for span in others} == {of.root_id}
    assert len({span["span"] for span in mine}) == len(mine)
    get = mine[8]["attributes"]
    assert get["dataplane.outcome"] == "ok"
    assert get["dataplane.partition"] == "train"
    assert get["dataplane.rows"] == 4
    assert get["dataplane.key_sample"] == ["u1_0_0", "u1_1_0", "u2_0_0"]
    assert get["dataplane.bytes"] >= (5 + 6) * 2 * 8
    assert get["dataplane.uid"] == "u1"
    assert get["dataplane.stage"] == "update_actor"


def test_it_is_the_same_trace_through_a_gateway(
    plane: dataplane.Client, plane_settings: dict[str, Any], tmp_path: Path
) -> None:
    """Which is told of no trace, and whose clients know the uids of what they have met."""
    here = {**plane_settings, "host": "embedded"}
    socket = Path(plane_settings["runtime_dir"]) / "traced.sock"
    with gateway(plane.name, here, listen=(f"unix:{socket}",)):
        outside = {**plane_settings, "otel": True, "address": f"grpc+unix://{socket}"}
        roles = all_roles(plane, outside, tmp_path, 'client.kv_list("train")\n' + WORKER)
    of = followed(plane.plane_id, "train", "u2")
    mine = [span for spans in roles.values() for span in spans if span["trace"] == of.trace_id]
    mine.sort(key=lambda span: span["start"])
    assert [span["name"] for span in mine] == [
        "dataplane.kv_put", "dataplane.begin_group", "dataplane.kv_put", "dataplane.kv_put",
        "dataplane.end_group", "dataplane.kv_claim", "plan", "stage update_actor",
        "dataplane.kv_batch_get", "dataplane.kv_batch_put", "optimizer_step", "dataplane.kv_clear",
    ]  # fmt: skip
    assert (mine[0]["span"], mine[0]["parent"]) == (of.root_id, None)
    assert {span["parent"] for span in mine[1:]} == {of.root_id}
    assert mine[8]["attributes"]["dataplane.stage"] == "update_actor"
    assert mine[8]["attributes"]["dataplane.outcome"] == "ok"


def test_a_batch_has_one_span_that_links_to_its_groups(
    plane: dataplane.Client, plane_settings: dict[str, Any], tmp_path: Path
) -> None:
    roles = all_roles(plane, {**plane_settings, "otel": True}, tmp_path)
    groups = {followed(plane.plane_id, "train", uid).trace_id for uid in ("u1", "u2")}
    gets = [span for span in roles["worker"] if span["name"] == "dataplane.kv_batch_get"]
    (call,) = [span for span in gets if span["trace"] not in groups]
    parts = [span for span in gets if span["trace"] in groups]
    assert {span["trace"] for span in parts} == groups
    assert sorted(call["links"]) == sorted([span["trace"], span["span"]] for span in parts)
    assert all(span["links"] == [[call["trace"], call["span"]]] for span in parts)


CALLER: Final = """
from opentelemetry import trace
with trace.get_tracer("mine").start_as_current_span("my step"):
    client.kv_put("a_0", "train", {"x": torch.zeros(2)}, {"uid": "a"})
    client.kv_list("train")
    with client.stage("looks"):
        client.kv_batch_get(["a_0"], "train")
    try:
        client.kv_batch_get(["none"], "train")
    except dataplane.KeyNotFound:
        pass
client.kv_list("train")
client.kv_clear(["a_0"], "train")
"""


def test_calls_are_in_the_trace_of_their_caller(
    plane: dataplane.Client, plane_settings: dict[str, Any], tmp_path: Path
) -> None:
    run(CALLER, plane, {**plane_settings, "otel": True}, tmp_path / "spans")
    spans = spans_in(tmp_path / "spans")
    (mine,) = [span for span in spans if span["name"] == "my step"]
    inside = [span for span in spans if span["trace"] == mine["trace"] and span is not mine]
    (stage,) = [span for span in inside if span["name"] == "stage looks"]
    assert [(span["name"], span["parent"]) for span in inside] == [
        ("dataplane.kv_put", mine["span"]),
        ("dataplane.kv_list", mine["span"]),
        ("stage looks", mine["span"]),
        ("dataplane.kv_batch_get", stage["span"]),
        ("dataplane.kv_batch_get", mine["span"]),
    ]
    failed = inside[-1]
    assert failed["status"] == "ERROR"
    assert failed["attributes"]["dataplane.outcome"] == "KeyNotFound"
    of = followed(plane.plane_id, "train", "a")
    own = [span["name"] for span in spans if span["trace"] == of.trace_id]
    assert own == [
        "dataplane.kv_put", "stage looks", "dataplane.kv_batch_get", "dataplane.kv_clear",
    ]  # fmt: skip
    # Who traces nothing has no span of a call that is about no group.
    assert sum(span["name"] == "dataplane.kv_list" for span in spans) == 1


@pytest.mark.parametrize("settings", [{}, {"otel": True, "otel_sample": 0.0}])
def test_nothing_is_traced_where_nobody_asked(
    plane: dataplane.Client, plane_settings: dict[str, Any], tmp_path: Path,
    settings: dict[str, Any],
) -> None:  # fmt: skip
    roles = all_roles(plane, {**plane_settings, **settings}, tmp_path)
    assert not any(roles.values())


def test_all_processes_follow_the_same_groups(
    plane: dataplane.Client, plane_settings: dict[str, Any], tmp_path: Path
) -> None:
    of = [followed(plane.plane_id, "train", uid) for uid in ("u1", "u2")]
    low, high = sorted((one.trace_id & (2**64 - 1)) / 2**64 for one in of)
    sample = (low + high) / 2
    roles = all_roles(plane, {**plane_settings, "otel": True, "otel_sample": sample}, tmp_path)
    (one,) = [each for each in of if each.within(sample)]
    (other,) = [each for each in of if not each.within(sample)]
    for role, spans in roles.items():
        traces = {span["trace"] for span in spans}
        assert one.trace_id in traces, role
        assert other.trace_id not in traces, role


OFF: Final = """
assert client._core.spans is None
assert not [name for name in sys.modules if name.startswith("opentelemetry.sdk")]
"""


def test_off_it_loads_nothing(plane: dataplane.Client, plane_settings: dict[str, Any]) -> None:
    run(OFF, plane, plane_settings, "")


MISSING: Final = """
import logging
assert client._core.spans is None
client.kv_put("a", "train", tags={"uid": "a"})
client.kv_clear(["a"], "train")
"""


def test_without_the_package_all_goes_on(
    plane: dataplane.Client, plane_settings: dict[str, Any]
) -> None:
    blocked = "import sys\nsys.modules['opentelemetry'] = None\n"
    code = COMMON
    done = subprocess.run(
        [sys.executable, "-c", blocked + code + MISSING, "", plane.name,
         json.dumps({**plane_settings, "otel": True})],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("OpenTelemetry is not installed") == 1
