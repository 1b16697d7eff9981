"""The rollout that README shows, as a command: embedded and on Ray."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

import agentloop
from agentloop.groups.invariants import wrong_rows
from agentloop.run import read_config
from dataplane import async_connect
from tests.contract.planes import Plane

CONFIG = Path("deploy/examples/rollout.yaml")

LINE = re.compile(r"(step 1|step 2|evaluation): (\d+) groups; (\d+) trajectories and (\d+) tokens")


def small(runtime_dir: Path, **more: Any) -> dict[str, Any]:
    """The example's settings, for a plane in the tests' folder."""
    settings = yaml.safe_load(CONFIG.read_text())
    settings["plane"]["settings"] |= {
        "runtime_dir": str(runtime_dir), "linger_s": 5.0, "host": more.pop("host", "embedded")
    }  # fmt: skip
    settings["plane"]["name"] = more.pop("name")
    return settings | more


def run(config: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "agentloop.run", "--config", str(config), *arguments],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def check(output: str) -> None:
    found = {name: (int(groups), int(rows)) for name, groups, rows, _ in LINE.findall(output)}
    # Two tasks by weight: 4 prompts of 4 sessions and 2 of 2; then 4 prompts of 2.
    assert found == {"step 1": (6, 20), "step 2": (6, 20), "evaluation": (4, 8)}, output
    assert re.findall(r"(\d+) rows in order", output) == ["20", "20", "8"]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(240)
def test_the_example_runs_on_ray(ray_cluster: list[str], runtime_dir: Path, tmp_path: Path) -> None:
    import ray

    config = tmp_path / "rollout.yaml"
    config.write_text(yaml.safe_dump(small(runtime_dir, name="rollout-ray", host="ray")))
    check(run(config, "--ray", ray.get_runtime_context().gcs_address))


@pytest.mark.slow
async def test_the_example_runs_and_every_row_has_what_trainers_read(
    plane: Plane, tmp_path: Path
) -> None:
    """On a plane that is there already, in which it leaves what it produced."""
    from trainer.trajectory import Trajectory

    config = tmp_path / "rollout.yaml"
    settings = small(Path(plane.settings["runtime_dir"]), name=plane.name, keep=True, steps=1)
    config.write_text(yaml.safe_dump(settings))
    output = await asyncio.to_thread(run, config)
    assert [(name, int(groups)) for name, groups, _, _ in LINE.findall(output)] == [
        ("step 1", 6), ("evaluation", 4)
    ]  # fmt: skip
    client = await async_connect(plane.name, config=plane.settings)
    try:
        for partition, produced in (("train", 20), ("val", 8)):
            listing = await client.kv_list(partition)
            assert await wrong_rows(client, listing) == []
            rows = [
                (key, cast("dict[str, Any]", tags), names)
                for key, tags, names in zip(listing.keys, listing.tags, listing.fields, strict=True)
                if not tags.get("is_prompt")
            ]
            assert len(rows) == produced
            for key, tags, names in rows:
                assert {
                    "uid", "session_id", "index", "attempt", "status", "prompt_len",
                    "response_len", "seq_len", "policy_len", "num_turns", "global_steps",
                    "min_global_steps", "max_global_steps", "policy_spans", "finish_reason",
                    "task_name", "data_source", "ids_source", "logprob_kind", "score",
                    "group_generate_time_s", "position_layout", "has_rollout_logprobs",
                    "has_routed_experts",
                } <= set(tags)  # fmt: skip
                assert {"input_ids", "labels", "logprobs", "response_model_steps"} <= set(names)
                trajectory = Trajectory.of(key, tags, names)
                assert trajectory.policy_len <= trajectory.response_len
            tools = [tags for _, tags, _ in rows if tags["task_name"] == "calculator"]
            assert (len(tools) > 0) == (partition == "train")
            await client.kv_clear(None, partition, where={}, retire=True)
        plane.settle()
        assert plane.used_bytes() == 0
    finally:
        await client.close()


def test_settings_that_are_wrong_are_named(tmp_path: Path) -> None:
    config = tmp_path / "rollout.yaml"
    good = yaml.safe_load(CONFIG.read_text())
    twice = {**good, "eval_tasks": [{**good["eval_tasks"][0], "name": "sums"}]}
    for wrong, message in (
        ({**good, "batchsize": 3}, "batchsize"),
        ({**good, "tasks": []}, "tasks"),
        ({**good, "model": {"tiny": "llama", "path": str(tmp_path)}}, "one of the two"),
        ({**good, "model": {"path": "/no/such"}}, "does not point to a directory"),
        (twice, "sums"),  # RG-36: an evaluation would be given what is left of training
    ):
        config.write_text(yaml.safe_dump(wrong))
        with pytest.raises(ValueError, match=message):
            read_config(config)


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "rollout.yaml"
    config.write_text("tasks: 7\nmodel: {tiny: llama}\n")
    done = subprocess.run(
        [sys.executable, "-m", "agentloop.run", "--config", str(config)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("agentloop.run: ")
    assert "Traceback" not in done.stderr


def test_the_module_is_light() -> None:
    """What only looks at trajectories, or only sends them, loads neither torch nor transformers."""
    done = subprocess.run(
        [
            sys.executable, "-c",
            "import sys, agentloop.trajectory.canonicalize, agentloop.trajectory.rows;"
            "import agentloop.loops.loop, agentloop.groups.job;"
            "print([m for m in ('torch', 'transformers', 'ray', 'aiohttp') if m in sys.modules])",
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    assert [name for name in agentloop.__all__ if getattr(agentloop, name) is None] == []
    assert sorted(agentloop.__all__) == agentloop.__all__ == sorted(agentloop._HOME)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        agentloop.Nothing  # noqa: B018
