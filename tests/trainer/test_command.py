"""The command `trainer`: what it prints, how it ends, and what it hands to the loop."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from tests.repo.tree import ROOT
from tests.trainer import commanded
from tests.trainer.killed_saves import save
from trainer.checkpoint import Checkpoint
from trainer.config import settings_from
from trainer.run import app, load_dotted, new_run_id
from trainer.run_folder import RunFolder

SECRETS = {
    "HF_TOKEN": "hf_planted1",
    "WANDB_API_KEY": "wandb-planted2",
    "AWS_SECRET_ACCESS_KEY": "aws/planted3",
    "MY_PASSWORD": "planted4-word",
}


class Ran:
    """What the loop was called with, each time."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.act: Callable[[RunFolder], None] = lambda folder: None

    async def train(self, settings: Any, folder: RunFolder, **named: Any) -> None:
        self.calls.append({"settings": settings, "folder": folder, **named})
        self.act(folder)

    @property
    def last(self) -> dict[str, Any]:
        return self.calls[-1]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """A loop that only notes what it was called with."""
    ran = Ran()
    module = ModuleType("trainer.loop.colocated")
    module.train = ran.train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trainer.loop.colocated", module)
    return ran


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A file of settings whose folder is `run`."""
    path = tmp_path / "run.yaml"
    data = {
        "name": "sums",
        "folder": str(tmp_path / "run"),
        "model": {"make": "tests.trainer.commanded:make_model", "words": 5},
        "engine": {"openai": "https://me:planted5-word@host/v1"},
        "optimizer": {"lr": 0.001},
        "loss": {"policy": "tests.trainer.commanded:own_loss"},
        "plan": {"cap": 64},
        "train": {"batch_size": 4, "total_epochs": 3},
        "evaluate": {"evaluate_step": 5, "greedy": True},
        "checkpoint": {"checkpoint_interval": 2, "checkpoint_maxkeep": 2},
        "report": {"trackers": ["jsonl", {"wandb": {"project": "p", "api_key": "planted6-word"}}]},
        "rollout": {"open": "tests.trainer.commanded:open_rollouts", "tasks": [{"name": "sums"}]},
    }
    path.write_text(yaml.safe_dump(data))
    return path


def trainer(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """What is said when the command ends with 2."""
    result = trainer(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.output


# -- validate ------------------------------------------------------------------------------------


def test_validate_prints_what_is_effective(config: Path) -> None:
    result = trainer("validate", config, "--set", "optimizer.lr=2e-4", "--set", "seed=7")
    assert result.exit_code == 0, result.output
    printed = yaml.safe_load(result.stdout)
    assert printed["optimizer"]["lr"] == 0.0002
    assert printed["optimizer"]["eps"] == 1e-8  # defaults too
    assert printed["plan"]["seed"] == 7
    assert printed["loss"]["policy"] == "tests.trainer.commanded:own_loss"
    assert printed["engine"] == {"kind": "openai", "base_url": "https://***@host/v1"}
    assert printed["report"]["trackers"][1]["api_key"] == "***"


def test_errors_are_one_list_and_exit_code_2(config: Path) -> None:
    output = refused(
        "validate", config, "--set", "train.batchsize=3", "--set", "checkpoint.hf_interval=x"
    )
    assert output.splitlines()[0] == f"trainer: {config}: 2 settings are wrong"
    assert "  --set train.batchsize: no such setting; did you mean train.batch_size?" in output
    assert "  checkpoint.hf_interval: should be a valid integer" in output


def test_a_loss_that_is_not_there_is_named(config: Path) -> None:
    output = refused("validate", config, "--set", "loss.policy='tests.trainer.commanded:mine'")
    assert "loss: 'tests.trainer.commanded:mine': tests.trainer.commanded has no 'mine'" in output


def test_the_module_is_a_command(config: Path) -> None:
    """As it is called from a shell, with secrets around."""
    ran = subprocess.run(
        [sys.executable, "-m", "trainer.run", "run", str(config), "--set", "seeed=3"],
        capture_output=True, text=True, cwd=ROOT, timeout=120, env={**os.environ, **SECRETS},
        check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.splitlines() == [
        f"trainer: {config}: a setting is wrong",
        "  --set seeed: no such setting; did you mean seed?",
    ]


@pytest.mark.parametrize(
    ("dotted", "text"),
    [
        ("tests.trainer.commanded", "write package.module:name"),
        (":x", "write package.module:name"),
        ("no.such.module:x", "no.such.module cannot be imported"),
        ("tests.trainer.commanded:a.b", "has no 'a'"),
    ],
)
def test_dotted_names(dotted: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load_dotted(dotted)
    assert load_dotted("tests.trainer.commanded:PROMPTS") == commanded.PROMPTS
    assert load_dotted("trainer.run_folder:RunFolder.take") is RunFolder.take


# -- run -----------------------------------------------------------------------------------------


def test_run_calls_the_loop(config: Path, loop: Ran, tmp_path: Path) -> None:
    result = trainer("run", config, "--set", "train.total_epochs=1")
    assert result.exit_code == 0, result.output
    (call,) = loop.calls
    assert call["open_rollouts"] is commanded.open_rollouts
    assert call["settings"].loss.policy is commanded.own_loss
    assert call["settings"].train.total_epochs == 1
    assert call["resume"] is None
    folder = call["folder"]
    assert folder.path == tmp_path / "run"
    assert call["model_path"] == str(folder.model)
    assert json.loads((folder.model / "config.json").read_text()) == {"words": 5, "seed": 42}
    assert folder.run_id.startswith("sums-")
    assert set(json.loads(folder.environment.read_text())) >= {"python", "packages", "variables"}
    saved = settings_from(
        yaml.safe_load(folder.settings.read_text()), resolve=load_dotted
    )  # what was masked apart, the same run
    assert saved.train == call["settings"].train


def test_no_secret_gets_into_the_folder_or_the_output(
    config: Path, loop: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)

    def act(folder: RunFolder) -> None:
        log = logging.getLogger("trainer.report")
        log.warning("refused with %s", SECRETS["HF_TOKEN"])
        log.info("at https://me:planted5-word@host/v1")
        save(folder.checkpoints, 2, folder.run_id)
        folder.write_summary({"reward": 1.0})

    loop.act = act
    outputs = [
        trainer("run", config).output,
        trainer("validate", config).output,
        refused("run", config, "--set", "report.trackers=[{wandbb: {api_key: planted6-word}}]"),
    ]
    captured = capfd.readouterr()
    outputs += [captured.out, captured.err]
    secrets = [*SECRETS.values(), "planted5-word", "planted6-word"]
    found = [
        (str(path), secret)
        for path in (tmp_path / "run").rglob("*")
        if path.is_file()
        for secret in secrets
        if secret.encode() in path.read_bytes()
    ]
    assert found == []
    assert [secret for secret in secrets for output in outputs if secret in output] == []
    log = (tmp_path / "run" / "logs" / "trainer.log").read_text()
    assert "WARNING trainer.report: refused with ***" in log
    assert "at https://***@host/v1" in log
    assert {"settings.yaml", "logs", "checkpoints"} <= set(os.listdir(tmp_path / "run"))


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("rollout.open='no.such:thing'", "rollout.open: 'no.such:thing': no.such cannot be"),
        ("rollout.open='tests.trainer.commanded:open_at_once'", "is no async function"),
        ("model.make='tests.trainer.commanded:make_noting'", "model.make: "),
        ("model.wrods=3", "'wrods'; it takes seed, words"),
        ("model={make: 'tests.trainer.commanded:make_nothing'}", "made no model"),
        ("model=no/such/folder", "model.path: there is no folder 'no/such/folder'"),
        ("model=.", "has no config.json"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    assignment: str, text: str, config: Path, loop: Ran
) -> None:
    assert text in refused("run", config, "--set", assignment)
    assert loop.calls == []


def test_an_error_of_training_is_not_hidden(config: Path, loop: Ran) -> None:
    def act(_: RunFolder) -> None:
        raise RuntimeError("a rank died")

    loop.act = act
    result = trainer("run", config)
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)
    assert trainer("run", config).exit_code == 1  # and the folder was let go


def test_a_folder_in_use_is_said(config: Path, loop: Ran, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run"):
        assert "another run writes to" in refused("run", config)
    assert loop.calls == []


def test_a_run_on_saved_batches_opens_no_rollouts(config: Path, loop: Ran, tmp_path: Path) -> None:
    debug = f"debug={{debug_train: true, debug_rollout_dir: {tmp_path}}}"
    result = trainer("run", config, "--set", debug, "--set", "train={batch_size: 4}")
    assert result.exit_code == 0, result.output
    assert loop.last["open_rollouts"] is None


# -- resume --------------------------------------------------------------------------------------


def _saved(step: int) -> Callable[[RunFolder], None]:
    return lambda folder: _save(folder, step)


def _save(folder: RunFolder, step: int) -> None:
    folder.metrics.write_text(f"until {step}")
    checkpoints = folder.checkpoints
    with checkpoints.saving(step) as saving:
        from trainer.checkpoint import TrainState

        state = TrainState(cur_step=step, model_step=step, run_id=folder.run_id, seed=42)
        saving.write_state(state)
        saving.publish()


def test_resume_goes_on_from_the_newest_checkpoint(config: Path, loop: Ran, tmp_path: Path) -> None:
    loop.act = _saved(2)
    assert trainer("run", config).exit_code == 0
    run_id = loop.last["folder"].run_id
    loop.act = _saved(4)
    result = trainer("run", config, "--resume")
    assert "goes on from" in result.output
    assert "ckpt-step-2" in result.output
    start = loop.last["resume"]
    assert isinstance(start, Checkpoint)
    assert (start.step, start.state.run_id) == (2, run_id)
    assert loop.last["folder"].run_id == run_id
    # Damaged: said, and the one before is taken.
    (tmp_path / "run" / "checkpoints" / "ckpt-step-4" / "manifest.json").write_text("{}")
    loop.act = _saved(6)
    result = trainer("run", config, "--set", "checkpoint.auto_resume=true")
    assert "ckpt-step-4' is refused: its manifest is not what was written" in result.output
    assert loop.last["resume"].step == 2
    assert not (tmp_path / "run" / "earlier").exists()
    # Without either a run begins anew, with nothing to go on from.
    loop.act = lambda folder: None
    assert trainer("run", config).exit_code == 0
    assert loop.last["resume"] is None
    assert loop.last["folder"].run_id != run_id
    earlier = tmp_path / "run" / "earlier" / "1" / "metrics.jsonl"
    assert earlier.read_text() == "until 6"


def test_resume_before_the_first_checkpoint_begins_the_same_run_again(
    config: Path, loop: Ran
) -> None:
    assert trainer("run", config).exit_code == 0
    run_id = loop.last["folder"].run_id
    assert trainer("run", config, "--resume").exit_code == 0
    assert loop.last["resume"] is None
    assert loop.last["folder"].run_id == run_id


def test_what_cannot_be_resumed_is_said(config: Path, loop: Ran, tmp_path: Path) -> None:
    assert "holds no run to resume" in refused("run", config, "--resume")
    assert trainer("run", config, "--set", "checkpoint.auto_resume=true").exit_code == 0
    loop.act = _saved(2)
    assert trainer("run", config).exit_code == 0
    output = refused("run", config, "--resume", "--set", "seed=7")
    assert "is of a run with seed 42, and seed is 7" in output
    (tmp_path / "run" / "checkpoints" / "ckpt-step-2" / "train_state.json").unlink()
    for how in (["--resume"], ["--set", "checkpoint.auto_resume=true"]):
        output = refused("run", config, *how)
        assert "train_state.json cannot be read" in output
        assert "is whole; to begin anew, run without --resume" in output
    assert len(loop.calls) == 2


def test_deterministic_runs_have_the_same_name_each_time(config: Path) -> None:
    data = yaml.safe_load(config.read_text())
    settings = settings_from(data, ["deterministic=true"], resolve=load_dotted)
    assert new_run_id(settings) == new_run_id(settings) == "sums-42"
    other = settings_from(data, resolve=load_dotted)
    assert new_run_id(other) != new_run_id(other)


# -- dry run -------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_plan_and_leaves_nothing(
    config: Path, loop: Ran, tmp_path: Path
) -> None:
    stage = "{demonstrator: tool, batch_size: 64, lr: 3e-3, max_steps: 100, until: {above: 0.6}}"
    options = [
        "--set", "model={make: 'agentloop.tiny:make_tiny_model', family: qwen3}",
        "--set", f"warmup=[{stage}]", "--set", "ranks.count=2",
    ]  # fmt: skip
    result = trainer("run", config, "--dry-run", *options)
    assert result.exit_code == 0, result.output
    lines = dict(line.split(None, 1) for line in result.stdout.splitlines())
    assert lines["run"] == f"sums in {tmp_path / 'run'}, from the beginning, seed 42"
    assert lines["model"] == "Qwen3ForCausalLM, 28,608 parameters; tokenizer of 312 tokens"
    assert lines["ranks"] == "2 on cpu, ray, replicated"
    # 10 prompts in batches of 4 for 3 epochs
    assert lines["steps"] == "6, of 4 groups; 10 prompts are 2 steps per epoch"
    assert lines["warm-up"].endswith(
        "tool: at most 100 steps of 64 prompts, until the sampled reward is above 0.6"
    )
    assert lines["evaluation"] == "every 5 steps: all prompts, sampled and greedy"
    assert lines["checkpoints"] == "every 2 steps; the newest 2 are kept"
    assert lines["exports"] == "none"
    assert os.listdir(tmp_path) == ["run.yaml"]
    assert loop.calls == []


def test_a_dry_run_finds_what_is_wrong(config: Path) -> None:
    tiny = ["--set", "model={make: 'agentloop.tiny:make_tiny_model'}"]
    dry = ["run", config, "--dry-run"]
    too_large = refused(*dry, *tiny, "--set", "train.batch_size=11")
    assert "batch_size=11, and the dataset has 10 prompts" in too_large
    without = "rollout={open: 'tests.trainer.commanded:open_rollouts'}"
    assert "rollout: tasks are missing" in refused(*dry, *tiny, "--set", without)
    assert "cannot be loaded" in refused(*dry)  # its config.json is no model's
    assert "holds no run to resume" in refused(*dry, *tiny, "--resume")


def test_the_quickstart_is_a_run() -> None:
    example = ROOT / "deploy" / "examples" / "quickstart.yaml"
    result = trainer("run", example, "--dry-run", "--set", "folder=nowhere")
    assert result.exit_code == 0, result.output
    assert "steps per epoch" in result.stdout
    wrong = refused("run", example, "--dry-run", "--set", "rollout.tasks.0.nn=3")
    assert "rollout.tasks.0.nn: no such setting" in wrong


def test_a_model_is_made_of_a_configuration(config: Path, loop: Ran, tmp_path: Path) -> None:
    from agentloop.tiny import tiny_tokenizer

    tiny: Any = tiny_tokenizer()
    tiny.save_pretrained(tmp_path / "tokenizer")
    shape = (
        "{model_type: llama, vocab_size: 320, hidden_size: 16, intermediate_size: 16, "
        "num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2}"
    )
    model = f"model={{config: {shape}, tokenizer: {tmp_path / 'tokenizer'}}}"
    weights: list[bytes] = []
    for seed in (1, 1, 2):
        result = trainer("run", config, "--set", model, "--set", f"seed={seed}")
        assert result.exit_code == 0, result.output
        folder = Path(loop.last["model_path"])
        assert (folder / "tokenizer.json").exists()
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]
    output = refused("run", config, "--set", model.replace("llama", "lama"))
    assert "model: it cannot be made of its configuration" in output
