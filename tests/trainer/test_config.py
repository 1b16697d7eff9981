"""Settings of a run: what is refused, in which words, and what parts get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.config import ConfigError, RunSettings, load_settings, looks_secret, masked
from trainer.config import settings_from as settings_of_data
from trainer.config.yaml_file import parsed, written
from trainer.loss import LossConfig
from trainer.loss.policy import ppo
from trainer.plan import PlanConfig
from trainer.ranks.types import ModelSettings, OptimizerSettings, Phase, PlaneAddress

SMALLEST = """
name: sums
model: some/folder
optimizer: {lr: 1e-3}
loss: {clip_low: 0.2, clip_high: 0.28}
plan: {cap: 512}
train: {batch_size: 4, total_train_steps: 6}
evaluate: {enabled: false}
rollout: {open: "producers:open", tasks: [{name: sums, n: 8}]}
"""


def settings(*assignments: str, text: str = SMALLEST) -> RunSettings:
    return settings_of_data(parsed(text), assignments)


def problems(*assignments: str, text: str = SMALLEST) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        settings(*assignments, text=text)
    return caught.value.problems


# -- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "line"),
    [
        ("train.batchsize=8", "train.batchsize: no such setting; did you mean train.batch_size?"),
        # NeMo#3727: the flat spelling of settings that moved under a section.
        ("batch_size=8", "batch_size: no such setting; did you mean train.batch_size?"),
        ("lr=1", "lr: no such setting; did you mean optimizer.lr?"),
        (
            "train.checkpoint_interval=5",
            "train.checkpoint_interval: no such setting; did you mean "
            "checkpoint.checkpoint_interval?",
        ),
        (
            "checkpoint.interval=5",
            "checkpoint.interval: no such setting; did you mean checkpoint.checkpoint_interval?",
        ),
        (
            "loss.importance={threshold: [2, 0.5], mod: mask}",
            "loss.importance.mod: no such setting; did you mean loss.importance.mode?",
        ),
        ("model.dtyp=float32", "model.dtyp: no such setting; did you mean model.dtype?"),
        ("qqqq=1", "qqqq: no such setting"),
        ("plan.zzzzzz=1", "plan.zzzzzz: no such setting"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_name(assignment: str, line: str) -> None:
    assert problems(assignment) == (f"--set {line}",)


def test_a_list_entry_names_its_place() -> None:
    stage = "[{demonstrator: tool, batch_size: 64, lr: 3e-3, max_steps: 5, maxsteps: 6}]"
    assert problems(f"warmup={stage}") == (
        "--set warmup.0.maxsteps: no such setting; did you mean warmup.0.max_steps?",
    )


def test_what_is_unknown_in_a_file_names_no_option() -> None:
    assert problems(text=SMALLEST + "seeed: 1\n") == ("seeed: no such setting; did you mean seed?",)


def test_plain_data_of_others_is_passed_on_as_it_is() -> None:
    found = settings("rollout.workers.count=3", "rollout.tasks.0.n=2", "engine={hf: {a: 1e-3}}")
    assert found.rollout_settings() == {
        "tasks": [{"name": "sums", "n": 2}],
        "workers": {"count": 3},
        "engine": {"kind": "hf", "a": 0.001},
    }


def test_everything_that_is_wrong_is_in_one_list() -> None:
    found = problems("train.batchsize=8", "ranks.device=tpu", "optimizer.lr=x", "plan.cap=0")
    assert len(found) == 4
    assert "--set train.batchsize: no such setting; did you mean train.batch_size?" in found
    assert "ranks.device: should be 'cpu' or 'cuda', not 'tpu'" in found
    assert any(line.startswith("optimizer.lr: ") and "'x'" in line for line in found)
    assert "plan: cap is a number from 1 on, not 0" in found


def test_the_list_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(SMALLEST.replace("seed", "sed") + "folder: {}\nsed: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path}: 2 settings are wrong"
    assert lines[1] == "  sed: no such setting; did you mean seed?"
    assert lines[2].startswith("  folder: ")


def test_a_secret_is_not_repeated_in_an_error() -> None:
    (line,) = problems("report.trackers=[{wandb: {api_key: hunter2}}]", "model.tokenizer=[x]")
    assert "hunter2" not in line
    (line,) = problems("plane={name: a, tokn: hunter2}")
    assert "hunter2" not in line


# -- values and --set ----------------------------------------------------------------------------


def test_set_takes_yaml_typed_by_the_schema() -> None:
    found = settings(
        "optimizer.lr=3e-4",
        "optimizer.betas=[0.9, 0.95]",
        "train.total_train_steps=7",
        "deterministic=true",
        "train.stop_at=0.9",
        "train.stop_at.of=train",
        "name='7'",
        "ranks={count: 2}",
    )
    assert found.optimizer == OptimizerSettings(lr=3e-4, betas=(0.9, 0.95))
    assert found.train.total_train_steps == 7
    assert found.deterministic
    assert found.name == "7"
    assert found.ranks.count == 2


def test_set_reaches_into_short_forms() -> None:
    found = settings("model=other/folder", "model.dtype=float32", "engine=hf", "engine.batch=4")
    assert (found.model.path, found.model.dtype) == ("other/folder", "float32")
    assert found.rollout_settings()["engine"] == {"kind": "hf", "batch": 4}


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("train.batch_size", "write section.name=value"),
        ("=3", "write section.name=value"),
        ("train..x=3", "write section.name=value"),
        ("name.x=3", "name is a value, and no section"),
        ("rollout.tasks.4.n=3", "'4' is no place in a list of 1"),
        ("train.batch_size=[", "line 1, column"),
    ],
)
def test_a_malformed_assignment_is_refused(assignment: str, text: str) -> None:
    (line,) = problems(assignment)
    assert line.startswith("--set ")
    assert text in line


def test_yaml_says_what_it_means() -> None:
    assert parsed("{a: 1e-3, b: 2E5, c: 1.5e+2, d: 12, e: 1e, f: e3}") == {
        "a": 0.001, "b": 2e5, "c": 150.0, "d": 12, "e": "1e", "f": "e3",
    }  # fmt: skip
    with pytest.raises(ValueError, match="line 2, column 1: 'a' is set twice"):
        parsed("a: 1\na: 2")
    with pytest.raises(ValueError, match="python"):
        parsed("!!python/object/apply:os.getcwd []")


@pytest.mark.parametrize("text", ["- a\n", "", "a: [", "a: 1\na: 2\n"])
def test_a_file_that_holds_no_settings_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="a setting is wrong"):
        load_settings(path)
    with pytest.raises(ConfigError, match="No such file"):
        load_settings(tmp_path / "other.yaml")


# -- rules (8.1) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpoint_interval", "hf_interval"])
def test_ex_8_1_intervals_of_checkpoints(name: str) -> None:
    for value in ("4", "-1", "null"):
        settings("train.sync_weights_interval=2", f"checkpoint.{name}={value}")
    (line,) = problems("train.sync_weights_interval=2", f"checkpoint.{name}=5")
    assert f"{name}=5" in line
    assert "sync_weights_interval=2" in line
    for value in ("0", "-2"):
        (line,) = problems("train.sync_weights_interval=2", f"checkpoint.{name}={value}")
        assert f"{name}={value}" in line


def test_ex_8_1_evaluation_step() -> None:
    sync = "train.sync_weights_interval=2"
    (line,) = problems(sync, "evaluate={evaluate_step: 3}")
    assert "evaluate_step=3" in line
    assert "sync_weights_interval=2" in line
    settings(sync, "evaluate={evaluate_step: 3, enabled: false}")
    assert settings(sync, "evaluate={evaluate_step: 4}").evaluate.enabled  # on by default
    assert "evaluate_step=0" in problems("evaluate={evaluate_step: 0}")[0]
    assert problems("evaluate={}") == (
        "evaluate.evaluate_step: is not set; write how many steps lie between evaluations, or "
        "evaluate.enabled: false",
    )


def test_rules_are_value_errors_without_a_file_too() -> None:
    with pytest.raises(ValueError, match=r"checkpoint_interval=5 .*sync_weights_interval=2"):
        RunSettings.model_validate(
            {
                **parsed(SMALLEST),
                "train": {
                    "batch_size": 4, "total_train_steps": 6, "sync_weights_interval": 2,
                },
                "checkpoint": {"checkpoint_interval": 5},
            }
        )  # fmt: skip


@pytest.mark.parametrize(
    ("assignments", "text"),
    [
        (["train.sync_weights_interval=0"], "sync_weights_interval=0"),
        (["train={batch_size: 4}"], "neither total_train_steps nor total_epochs is set"),
        (["train.total_epochs=3"], "total_train_steps and total_epochs are both set"),
        (["train.total_train_steps=0"], "total_train_steps=0"),
        (["debug={debug_rollout: true, debug_rollout_dir: a, debug_train: true}"], "both set"),
        (["debug.debug_rollout=true"], "debug_rollout needs it"),
        (["debug.debug_train=true"], "debug_train needs it"),
        (["rollout=null"], "rollout: is not set"),
        (["checkpoint.checkpoint_maxkeep=0"], "checkpoint_maxkeep=0"),
        (["checkpoint.hf_max_keep=-2"], "hf_max_keep=-2"),
        (["evaluate={evaluate_step: 1, sampled: false}"], "both false"),
        (["train.stop_at=0.9"], "evaluate.enabled is false"),
        (["evaluate={evaluate_step: 1}", "train.stop_at={reward: 1, of: greedy}"],
         "evaluate.greedy is false"),
        (["loss.kl=k3"], "reference: is not set"),
        (["reference=frozen"], "loss.kl: is not set"),
        (["loss.kl=k3", "reference=adapter_off"], "needs model.adapter"),
        (["advantage.estimator=gae"], "'values'"),
        (["optimizer.schedule=cosine", "plan.mini_batch_rows=8"], "optimizer.total_steps"),
        (["ranks={kind: local, count: 2}"], "count=2"),
        (["replay.mode=async"], "mode=async"),
        (["plan.mini_batch_rows=3", "ranks.count=2"], "mini_batch_rows=3"),
        (["engine=hf", "rollout.engine={kind: hf}"], "engine: is set here and as rollout.engine"),
        (["model={}"], "one of path, config and make is set"),
        (["model={path: a, make: 'b:c'}"], "not path and make"),
        (["model={config: {hidden_size: 3}, tokenizer: a}"], "model_type"),
        (["model={config: {model_type: qwen3}}"], "tokenizer"),
        (["report.trackers=[jsnl]"], "'jsnl' is none of jsonl"),
        (["loss.policy='own.losses:mine'"], "loaded by the command"),
        (["warmup=[{demonstrator: a, batch_size: 1, lr: 1, max_steps: 1, until: {}}]"],
         "one of above and below"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named(assignments: list[str], text: str) -> None:
    (line,) = problems(*assignments)
    assert text in line


def test_a_run_on_saved_batches_needs_no_length_and_no_rollouts() -> None:
    found = settings(
        "train={batch_size: 4}", "rollout=null", "evaluate={}",
        "debug={debug_train: true, debug_rollout_dir: saved}",
    )  # fmt: skip
    assert found.rollout_settings() == {}
    with pytest.raises(ValueError, match="how many steps there are is not said"):
        found.total_steps(None)


def test_defaults() -> None:
    found = settings()
    assert found.seed == 42
    assert found.folder == Path("runs/sums")
    assert found.train.sync_weights_interval == 1
    assert found.checkpoint.checkpoint_interval is found.checkpoint.hf_interval is None
    assert found.checkpoint.checkpoint_maxkeep == found.checkpoint.hf_max_keep == -1
    assert found.checkpoint.keep is found.checkpoint.keep_exports is None
    assert not found.evaluate.enable_initial_evaluate
    assert found.plane == PlaneAddress(name="sums")
    assert settings("checkpoint.checkpoint_maxkeep=3").checkpoint.keep == 3


def test_ten_prompts_in_batches_of_four_for_three_epochs_are_six_steps() -> None:
    found = settings("train={batch_size: 4, total_epochs: 3}")
    assert found.total_steps(10) == 6
    assert found.steps_per_epoch(10) == 2
    with pytest.raises(ValueError, match="batch_size=4, and the dataset has 3 prompts"):
        found.total_steps(3)
    assert settings().total_steps(None) == 6


# -- what parts get ------------------------------------------------------------------------------


def test_seed_and_mode_of_the_run_are_those_of_its_plans() -> None:
    found = settings("seed=7", "deterministic=true")
    assert found.plan == PlanConfig(cap=512, seed=7, deterministic=True)
    assert settings("plan.seed=3", "seed=7").plan.seed == 3


def test_ranks_get_the_run_s_settings() -> None:
    found = settings(
        "ranks={count: 2, parallel: fsdp, threads: 1, prefetch: 2, write_back: false}",
        "model={path: a, dtype: float32, gradient_checkpointing: true}",
        "plan.optimizer_steps=3", "seed=7", "loss.kl=k3", "reference=frozen",
    )  # fmt: skip
    plane = PlaneAddress(name="sums", address="here")
    ranks = found.rank_settings(model_path="made", plane=plane)
    assert ranks.plane == plane
    assert ranks.model == ModelSettings(path="made", dtype="float32", gradient_checkpointing=True)
    assert ranks.tokenizer_path == "made"
    assert (ranks.world_size, ranks.parallel, ranks.threads) == (2, "fsdp", 1)
    assert (ranks.prefetch, ranks.write_back, ranks.seed) == (2, False, 7)
    assert (ranks.cap, ranks.optimizer_steps, ranks.reference) == (512, 3, "frozen")
    assert found.topology().dp_size == 2


def test_phases() -> None:
    stage = "{demonstrator: tool, batch_size: 64, lr: 3e-3, max_steps: 100, until: {above: 0.6}}"
    found = settings(
        f"warmup=[{stage}]", "optimizer={lr: 1e-3, weight_decay: 0.1, schedule: cosine}",
        "plan.optimizer_steps=2",
    )  # fmt: skip
    assert found.warmup_phase(0) == Phase(
        name="warmup-1",
        loss=LossConfig(policy="policy_gradient", old_logprobs="rollout"),
        optimizer=OptimizerSettings(lr=3e-3, weight_decay=0.1),
    )
    phase = found.training_phase(6)
    assert (phase.name, phase.loss) == ("train", found.loss)
    assert phase.optimizer.total_steps == 12
    assert settings("optimizer.total_steps=5", "optimizer.schedule=linear").training_phase(
        6
    ).optimizer.total_steps == 5  # fmt: skip


def test_until_passes_above_and_reaches_below() -> None:
    stage = "demonstrator: tool, batch_size: 64, lr: 3e-3, max_steps: 100"
    found = settings(
        f"warmup=[{{{stage}, until: {{above: 0.6}}}}, {{{stage}, until: {{below: 0.3}}}}]"
    )
    above, below = (stage.until for stage in found.warmup)
    assert above is not None
    assert below is not None
    assert [above.is_reached(reward) for reward in (0.5, 0.6, 0.7)] == [False, False, True]
    assert [below.is_reached(reward) for reward in (0.2, 0.3, 0.4)] == [True, True, False]


def test_a_loss_of_one_s_own_is_resolved() -> None:
    found = settings_of_data(
        parsed(SMALLEST), ["loss.policy='own.losses:mine'"], resolve={"own.losses:mine": ppo}.get
    )
    assert found.loss.policy is ppo
    assert found.as_data()["loss"]["policy"] == "trainer.loss.policy:ppo"


def test_short_forms() -> None:
    def engine(value: str) -> dict[str, Any]:
        return settings(f"engine={value}").rollout_settings()["engine"]

    assert engine("{openai: 'http://host:8000'}") == {
        "kind": "openai", "base_url": "http://host:8000",
    }  # fmt: skip
    assert engine("{hf: {dtype: float32}}") == {"kind": "hf", "dtype": "float32"}
    assert engine("{kind: scripted, script: a}") == {"kind": "scripted", "script": "a"}
    assert problems("engine={a: b, c: d}") == ("engine.kind: is not set",)
    made = settings("model={make: 'a:b', family: qwen3, dtype: float32}").model
    assert (made.make, made.options, made.dtype) == ("a:b", {"family": "qwen3"}, "float32")
    assert settings("model=a/b").model.path == "a/b"
    trackers = settings("report.trackers=[jsonl, {wandb: {project: x}}]").report.trackers
    assert [(t.kind, t.options) for t in trackers] == [("jsonl", {}), ("wandb", {"project": "x"})]


def test_what_is_written_reads_back_as_the_same() -> None:
    found = settings(
        "model={make: 'a:b', family: qwen3}", "engine={openai: 'http://host'}", "loss.kl=k3",
        "loss.importance={threshold: [2, 0.5]}", "reference=frozen", "train.stop_at={reward: 0.9, "
        "of: train}", "warmup=[{demonstrator: a, batch_size: 1, lr: 1e-5, max_steps: 1}]",
    )  # fmt: skip
    assert settings_of_data(parsed(written(found.as_data()))) == found


# -- secrets -------------------------------------------------------------------------------------


def test_what_looks_like_a_secret() -> None:
    secret = "HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY api_key apiKey password Authorization"
    plain = "tokenizer tokenizer_path max_new_tokenization label_key keys num_cpus partoken_id"
    assert [name for name in secret.split() if not looks_secret(name)] == []
    assert [name for name in plain.split() if looks_secret(name)] == []


def test_secrets_are_masked_and_the_rest_is_not() -> None:
    data = {
        "api_key": "abc",
        "max_tokens": 30,
        "headers": {"Authorization": ["Bearer x"], "x-auth-token": {"a": "b"}},
        "base_url": "https://user:pw@host/v1?token=abc&n=3",
        "text": "says planted-value aloud",
        "none_token": None,
    }
    assert masked(data, {"HF_TOKEN": "planted-value", "SHORT_TOKEN": "says"}) == {
        "api_key": "***",
        "max_tokens": 30,
        "headers": {"Authorization": ["***"], "x-auth-token": {"a": "***"}},
        "base_url": "https://***@host/v1?token=***&n=3",
        "text": "says *** aloud",
        "none_token": None,
    }
