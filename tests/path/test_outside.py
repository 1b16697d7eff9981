"""A training run whose agent loops are outside: they reach its plane through a gateway, by TLS and
a token that allows them their partitions and the weights, and by nothing else."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dataplane
from agentloop.config import PlaneConfig, WorkerConfig, WorkersConfig
from agentloop.groups.plane_clock import PlaneClock
from agentloop.production import staffing
from dataplane import PermissionDenied, async_connect
from dataplane.session import join
from tests.dataplane.outside.gateways import Authority, gateway, token_for
from tests.repo.tree import ROOT
from tests.trainer.runs import write_run
from trainer.config import load_settings
from trainer.report import read_metrics
from trainer.run import app

EXAMPLES = ROOT / "deploy" / "examples"
STEPS = 2
WORKING = ("put", "put_tags", "group", "list", "read", "clear")
LOOKING = ("list", "read")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of a name that sockets in it can have."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    state = torch.random.get_rng_state()
    with tempfile.TemporaryDirectory(prefix="outside-") as name:
        yield Path(name)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.random.set_rng_state(state)


def test_a_run_trains_with_its_agent_loops_outside(folder: Path) -> None:
    planes = folder / "planes"
    planes.mkdir(mode=0o700)
    inside: dict[str, Any] = {
        "host": "embedded", "runtime_dir": str(planes), "capacity_bytes": 64 << 20,
        "segment_bytes": 4 << 20,
    }  # fmt: skip
    name = f"outside-{os.getpid()}"
    owner = dataplane.init(inside, name=name)
    try:
        authority = Authority(folder)
        token = token_for(
            folder, "worker", {"train": WORKING, "val": WORKING, "weights@*": LOOKING}
        )
        with gateway(
            name,
            inside,
            listen=("127.0.0.1:0",),
            token_file=folder / "tokens.json",
            **authority.settings,
        ) as server:
            outside = {
                "address": server.addresses[0],
                "settings": {"token_file": str(token), "ca_file": str(authority.ca_file)},
            }
            file = write_run(
                folder,
                plane={"address": str(join(name, None, dataplane.Config(**inside)).tags.unix),
                       "settings": inside},
                train__total_train_steps=STEPS,
                checkpoint__hf_interval=-1,
                rollout__workers={"kind": "process", "count": 1, "groups": 8, "plane": outside},
            )  # fmt: skip
            done = CliRunner().invoke(app, ["run", str(file)], catch_exceptions=False)
            assert done.exit_code == 0, done.output
            calls = server.calls
        lines = read_metrics(folder / "run" / "metrics.jsonl")
        steps = [line.values for line in lines if "time/step" in line.values]
        # What was sampled outside is what the trainer's own weights give.
        assert [values["training/off_policy/staleness/mean"] for values in steps] == [0] * STEPS
        assert all(abs(values["mismatch/mismatch_kl"]) < 1e-3 for values in steps)
        summary = json.loads((folder / "run" / "summary.json").read_text())
        assert (summary["steps"], summary["rows_left"]) == (STEPS, 0)
        rows = folder / "run" / "trajectories"
        trained = [len(p.read_text().splitlines()) - 1 for p in sorted(rows.glob("train_*"))]
        assert trained == [12] * STEPS
        assert {principal for principal, _ in calls} == {"worker"}
        # Three prompts of four sessions a step, besides what is evaluated: every row of them.
        assert calls["worker", "PutRows"] >= STEPS * 12
        assert calls["worker", "BeginGroup"] == calls["worker", "EndGroup"] >= STEPS * 3
        assert calls["worker", "GetRows"] >= STEPS  # the weights of each step
    finally:
        owner.close(destroy=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes its certificate")
async def test_the_example_of_a_site_comes_up(folder: Path) -> None:
    """All but the training: certificate, token, plane, gateway, and what the trainer is told."""
    outside: Any = runpy.run_path(str(EXAMPLES / "outside.py"))
    await outside["make_certificate"](folder)
    outside["make_token"](folder)
    async with outside["serve"](folder) as plane, outside["gateway"](folder, plane) as address:
        assignments = outside["settings"](folder, plane, address)
        told = load_settings(EXAMPLES / "quickstart.yaml", assignments)
        assert told.plane.address == plane
        worker = told.rollout_settings()["workers"]["plane"]
        assert worker["address"] == address
        async with await async_connect(address=address, config=worker["settings"]) as client:
            await client.kv_put("a", "train", {"x": torch.arange(3)})
            for refused in ("weights@1", "demonstrations"):
                with pytest.raises(PermissionDenied):
                    await client.kv_put("a", refused, {"x": torch.arange(3)})
            assert list(await client.kv_list_partitions()) == ["train"]


async def test_a_worker_outside_is_told_no_other_way_to_the_plane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[dict[str, Any]] = []

    class Worker:
        @classmethod
        async def start(cls, config: dict[str, Any], **_: Any) -> Worker:
            started.append(config)
            return cls()

    monkeypatch.setattr(staffing, "ProcessWorker", Worker)
    outside = PlaneConfig(address="grpcs://gateway:443", settings={"token_file": "/t"})
    seats = staffing.make_seats(
        WorkersConfig(kind="process", plane=outside),
        WorkerConfig(
            plane=PlaneConfig(
                name="secret-name", address="/run/plane/tags.sock", settings={"runtime_dir": "/run"}
            ),
            ray_address="ray-head:6379",
            engine={"kind": "hf"},
            tasks=[],
        ),
        PlaneClock(),
    )
    await seats.open()
    (config,) = started
    assert config["plane"] == {"name": "default", **outside.model_dump(exclude={"name"})}
    assert config["ray_address"] is None
    assert not any(word in json.dumps(config) for word in ("secret-name", "/run", "ray-head"))
