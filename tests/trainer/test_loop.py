"""The colocated loop as a whole, with real rollouts, a plane and a rank, and what it leaves."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.trainer.runs import write_run
from trainer.report import read_metrics
from trainer.run import app

SECRET = "hf_" + "plantedplantedplanted"


@contextmanager
def short_folder() -> Generator[Path]:
    """A folder of a name that sockets in it can have."""
    with tempfile.TemporaryDirectory(prefix="loop-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module", autouse=True)
def torch_as_it_was() -> Generator[None]:
    """A rank in this process changes torch for all of it."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    state = torch.random.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.random.set_rng_state(state)


def run(file: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["run", str(file), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def values_of(folder: Path) -> dict[int, dict[str, float]]:
    """What each training step logged."""
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    return {line.step: dict(line.values) for line in lines if "time/step" in line.values}


@pytest.fixture(scope="module")
def finished() -> Generator[tuple[Path, str]]:
    """The folder of a run of four steps, and what it printed."""
    with short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        yield folder, run(write_run(folder))


def test_the_summary_says_what_came_of_it(finished: tuple[Path, str]) -> None:
    summary = json.loads((finished[0] / "run" / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["rows_left"] == 0  # everything was cleared, prompts too
    assert summary["seed"] == 7
    assert 0.0 <= summary["sampled_final"] <= 1.0
    assert 0.0 <= summary["greedy_final"] <= 1.0
    assert summary["plane_share_steps"] == 4
    assert "plane:" in finished[1]


def test_a_page_tells_of_the_run_and_of_its_plane(finished: tuple[Path, str]) -> None:
    page = (finished[0] / "run" / "report.html").read_text()
    assert "up to step 4" in page
    assert "train: 1" in page or "train: 2" in page  # groups of the plane, which has ended
    assert "is remembered" not in page
    assert SECRET not in page


def test_every_step_is_logged_under_the_names_of_8_8(finished: tuple[Path, str]) -> None:
    steps = values_of(finished[0])
    assert list(steps) == [1, 2, 3, 4]
    due = {
        "time/step", "time/produce_batch", "time/training", "time/sync_weight", "time/save_ckpt",
        "timing/task_n", "async/failed_samples", "response/rewards/mean",
        "response/packing/efficiency", "throughput/e2e_effective_tgs", "throughput/rollout_sgs",
        "mismatch/mismatch_kl", "entropy/train", "entropy/rollout", "plane/share",
        "train_metrics/worker_0/step_avg_grad_norm", "training/off_policy/staleness/mean",
    }  # fmt: skip
    for values in steps.values():
        assert due - {"time/sync_weight"} <= set(values)
    assert all("time/sync_weight" in steps[step] for step in (1, 2, 3, 4))
    assert [step for step, v in steps.items() if "eval/reward/mean" in v] == [2, 4]
    # Sampled evaluations have two sessions a prompt, greedy ones have one.
    assert {"eval/pass@2", "eval/greedy/accuracy"} <= set(steps[4])
    assert "eval/greedy/pass@2" not in steps[4]


def test_rows_are_of_the_weights_that_the_step_before_handed_over(
    finished: tuple[Path, str],
) -> None:
    steps = values_of(finished[0])
    assert all(values["training/off_policy/staleness/mean"] == 0 for values in steps.values())
    # An engine and a trainer of the same weights agree on what was sampled.
    assert all(abs(values["mismatch/mismatch_kl"]) < 1e-3 for values in steps.values())


def test_what_lies_in_the_run_folder(finished: tuple[Path, str]) -> None:
    folder = finished[0] / "run"
    names = [f"train_rollout_{step}.jsonl" for step in (1, 2, 3, 4)]
    names += ["eval_rollout_2.jsonl", "eval_rollout_4.jsonl"]
    assert sorted(p.name for p in (folder / "trajectories").iterdir()) == sorted(names)
    head, *rows = (folder / "trajectories" / names[0]).read_text().splitlines()
    assert json.loads(head)["total_len"] == len(rows) == 12
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"ckpt-step-3", "ckpt-step-4"}
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "logs" / "env.json").read_text())["packages"]["torch"]
    model: Any = AutoModelForCausalLM
    trained = model.from_pretrained(folder / "hf" / "hf-step-4", local_files_only=True)
    first = model.from_pretrained(folder / "model", local_files_only=True)
    assert any(
        not torch.equal(a, b) for a, b in zip(trained.parameters(), first.parameters(), strict=True)
    )


def test_no_secret_of_the_environment_is_written_or_printed(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    assert SECRET not in printed
    found = [p for p in folder.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
    assert not found


def test_saved_batches_are_trained_as_if_they_had_just_been_produced() -> None:
    """8.5: what is told of a replayed batch is what was told when it was saved."""
    with short_folder() as folder:
        saved = folder / "saved"
        off = {"evaluate__enabled": False, "checkpoint__checkpoint_interval": None}
        file = write_run(
            folder, **off, train__total_train_steps=2, checkpoint__hf_interval=None,
            debug={"debug_rollout": True, "debug_rollout_dir": str(saved)},
        )  # fmt: skip
        run(file)
        produced = values_of(folder)
        assert list(produced) == [1, 2]
        assert not any("time/training" in values for values in produced.values())

        settings = yaml.safe_load(file.read_text())
        settings["debug"] = {"debug_train": True, "debug_rollout_dir": str(saved)}
        del settings["train"]["total_train_steps"]
        file.write_text(yaml.safe_dump(settings))
        run(file)
        trained = values_of(folder)
        assert list(trained) == [1, 2]
        for step, values in trained.items():
            assert "time/load_debug_rollout" in values
            assert values["time/training"] > 0

            def told(of: dict[str, float]) -> dict[str, float]:
                times = ("time_s", "time_s_max")
                return {
                    name: value
                    for name, value in of.items()
                    if name.startswith("response/") and not name.endswith(times)
                }

            assert told(values) == told(produced[step])


def test_a_warm_up_ends_where_its_reward_is_reached_and_its_weights_are_rolled_out() -> None:
    with short_folder() as folder:
        demonstrations = {
            "direct": {
                "demonstrator": {
                    "path": "agentloop.quickstart.demonstrator:SumDemonstrator",
                    "options": {"direct_share": 1.0},
                }
            }
        }
        stage = {
            "demonstrator": "direct", "batch_size": 4, "lr": 3.0e-3, "max_steps": 4,
            "check_every": 2, "until": {"below": 1.0},
        }  # fmt: skip
        printed = run(
            write_run(
                folder, train__total_train_steps=1, warmup=[stage],
                evaluate={"evaluate_step": 1, "prompts": 2}, checkpoint__hf_interval=None,
                rollout__demonstrations=demonstrations,
            )
        )  # fmt: skip
        summary = json.loads((folder / "run" / "summary.json").read_text())
        assert "held-out reward direct, step 2" in printed
        assert "held-out reward direct, step 4" not in printed  # it was reached at the second
        assert {"sampled_before_warmup", "sampled_after_warmup", "sampled_final"} <= set(summary)
        assert summary["sampled_before_warmup"] != summary["sampled_after_warmup"]
        assert summary["rows_left"] == 0
        # The first step's rows come from the weights that the warm-up ended with.
        assert abs(values_of(folder)[1]["mismatch/mismatch_kl"]) < 1e-3
