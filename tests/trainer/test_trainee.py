"""One rank that trains: what it computes, what it keeps, what it hands over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dataplane
from agentloop.engines.hf_weights import replace_weights
from agentloop.tiny import tiny_tokenizer
from dataplane import AlreadyWritten, read_weights
from tests.trainer.models import SHAPES, VOCABULARY, tiny
from tests.trainer.trainees import (
    ADAPTER,
    CAP,
    LOSS,
    PLAIN,
    TIED,
    pack,
    phase,
    settings,
    step_of,
    weights_of,
)
from trainer.loss import DistillationConfig, LossConfig, pack_loss, token_logprobs
from trainer.loss import entropy as entropy_of
from trainer.ranks import scores as scores_module
from trainer.ranks.collectives import Peers
from trainer.ranks.gradients import clip
from trainer.ranks.model import make_model
from trainer.ranks.optimizer import learning_rate, make_optimizer
from trainer.ranks.scores import score
from trainer.ranks.state import StateError
from trainer.ranks.trainee import Trainee
from trainer.ranks.types import ModelSettings, OptimizerSettings

ALONE = Peers.alone()
DROPPING: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 128, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5,
}  # fmt: skip
ADAPTED = ModelSettings(config=TIED, adapter=ADAPTER)


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """A trainee sets threads and determinism of its process, which here is everybody's."""
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
    torch.use_deterministic_algorithms(False)


def begun(
    loss: LossConfig = LOSS, *, optimizer: dict[str, Any] | None = None, **change: Any
) -> Any:
    trainee = Trainee(settings(**change), ALONE)
    trainee.begin_phase(phase(loss, **(optimizer or {})))
    return trainee


def trained(trainee: Any, *seeds: int) -> list[dict[str, float]]:
    return [trainee.train_step(step_of(seed), global_tokens=10) for seed in seeds]


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(one) == set(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


# -- rates and norms -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "more", "rates"),
    [
        ("constant", {}, [1, 1, 1]),
        ("constant", {"warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1]),
        ("linear", {"warmup_steps": 1, "total_steps": 5}, [0.5, 1, 0.75, 0.5, 0.25, 0, 0]),
        ("linear", {"total_steps": 2, "min_lr_ratio": 0.5}, [1, 0.75, 0.5, 0.5]),
        ("cosine", {"total_steps": 4}, [1, 0.853553, 0.5, 0.146447, 0, 0]),
        ("cosine", {"warmup_steps": 1, "total_steps": 3, "min_lr_ratio": 0.1}, [0.5, 1, 0.55, 0.1]),
    ],
)
def test_rates_go_up_and_down(schedule: Any, more: dict[str, Any], rates: list[float]) -> None:
    given = OptimizerSettings(lr=2.0, schedule=schedule, **more)
    found = [learning_rate(given, step) / 2 for step in range(len(rates))]
    assert found == pytest.approx(rates, abs=1e-6)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"schedule": "linear"}, "linear schedule needs total_steps above warmup_steps"),
        ({"schedule": "cosine", "warmup_steps": 4, "total_steps": 4}, r"\(4\), not 4"),
        ({"schedule": "steps"}, "'steps' is no constant, linear or cosine"),
        ({"warmup_steps": -1}, "warmup_steps is 0 or more"),
    ],
)
def test_settings_that_make_no_schedule_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_optimizer([torch.zeros(1)], OptimizerSettings(lr=1.0, **more))


@pytest.mark.parametrize(
    ("max_norm", "expected"),
    [(None, [3.0, 4.0, 12.0]), (26.0, [3.0, 4.0, 12.0]), (6.5, [1.5, 2.0, 6.0])],
)
def test_gradients_are_cut_to_the_norm_of_all_together(max_norm: Any, expected: Any) -> None:
    parameters = [torch.zeros(2), torch.zeros(1)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
    assert clip(parameters, max_norm, ALONE) == pytest.approx(13.0)
    assert torch.cat([p.grad for p in parameters if p.grad is not None]).tolist() == expected


# -- forward passes --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chooses", [True, False])
def test_scores_are_those_of_all_logits(
    shape: str, chooses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not a model can be asked for the logits of some entries alone."""
    model = tiny(shape).eval()
    if not chooses:
        monkeypatch.setattr(scores_module, "CHOICE", "no_such_argument")
    some = pack([(3, 5), (4, 2)])
    ids = torch.randint(0, VOCABULARY, (1, CAP, 3))
    found = score(model, some.with_columns(teacher_ids=ids), with_entropy=True, with_topk=True)
    logits = model(**some.model_inputs()).logits
    mask = some.mask
    close = {"atol": 1e-5, "rtol": 0.0}
    torch.testing.assert_close(found.logprobs, token_logprobs(logits, some.labels), **close)
    assert found.entropy is not None
    assert found.student_topk is not None
    torch.testing.assert_close(found.entropy[mask], entropy_of(logits)[mask], **close)
    expected = logits.log_softmax(-1).gather(-1, ids)[mask]
    torch.testing.assert_close(found.student_topk[mask], expected, **close)
    for values in (found.logprobs, found.entropy, found.student_topk):
        assert not values[~mask].any()


def test_logits_are_made_for_what_is_trained_and_entropy_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes: list[Any] = []
    real = scores_module.token_logprobs

    def seen(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shapes.append(list(logits.shape))
        return real(logits, labels)

    def refuse(*_: Any) -> Any:
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr(scores_module, "token_logprobs", seen)
    monkeypatch.setattr(scores_module, "entropy", refuse)
    trainee = begun(replace(LOSS, entropy_coef=0.0))
    trained(trainee, 0)
    trainee.logprobs(pack([(3, 5), (4, 2)]))
    assert shapes == [[1, n, VOCABULARY] for n in (7, 3, 0, 7)]
    trainee.begin_phase(phase(LOSS))
    with pytest.raises(AssertionError, match="nobody asked"):
        trained(trainee, 0)


def test_a_pack_that_replays_experts_is_refused() -> None:
    routed = replace(pack([(3, 5)]), routed_experts=torch.zeros(CAP, 2, 1, dtype=torch.uint16))
    with pytest.raises(ValueError, match="leave `experts` out of the work"):
        begun().logprobs(routed)


def test_dropout_is_off_so_ratios_of_weights_that_have_not_moved_are_1() -> None:
    trainee = begun(LossConfig(clip_low=0.2, clip_high=0.2), config=DROPPING)
    some = pack([(3, 5)])
    old = trainee.logprobs(some)
    assert torch.equal(old, trainee.logprobs(some))
    assert not old.requires_grad
    found = trainee.train_step([some.with_columns(old_logprobs=old)], global_tokens=5)
    assert found["reduced_train_policy_ratio_max"] == 1.0
    assert found["reduced_train_policy_ratio_min"] == 1.0
    assert not torch.equal(old, trainee.logprobs(some))


@pytest.mark.parametrize("config", [TIED, DROPPING], ids=["qwen3", "gpt2"])
def test_checkpointed_activations_change_no_number(config: dict[str, Any]) -> None:
    plain = begun(config=config)
    saving = begun(model=ModelSettings(config=config, gradient_checkpointing=True))
    layers = [m for m in saving._model.modules() if type(m).__name__ in ("Qwen3MLP", "GPT2MLP")]
    runs: list[int] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: runs.append(1))
    assert trained(plain, 0) == trained(saving, 0)
    assert len(runs) == 2 * len(layers) * 3  # each layer once more for each of three packs
    assert_equal(weights_of(plain), weights_of(saving))


# -- steps -----------------------------------------------------------------------------------


def test_a_step_is_the_sum_over_packs_clipped_and_taken_by_adamw() -> None:
    trainee = begun()
    model = make_model(ModelSettings(config=TIED), 5)
    assert_equal(weights_of(trainee), dict(model.state_dict()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step, rate in enumerate([5e-4, 1e-3, 1e-3 * 0.9504844]):
        found = trainee.train_step(iter(step_of(step)), global_tokens=10)
        optimizer.zero_grad()
        total = 0.0
        for one in step_of(step):
            logits = model(**one.model_inputs()).logits
            logprobs = token_logprobs(logits, one.labels)
            part = pack_loss(one, logprobs, LOSS, global_tokens=10, entropy=entropy_of(logits)).loss
            part.backward()
            total += part.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        assert found["loss"] == pytest.approx(total, abs=1e-5)
        assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert float(norm) > 1.0
        assert found["lr"] == pytest.approx(rate, rel=1e-6)
        expected = dict(model.state_dict())
        for name, weight in weights_of(trainee).items():
            torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0.0)
    assert trainee.optimizer_steps == 3


def test_metrics_have_the_names_that_are_logged() -> None:
    (found,) = trained(begun(), 0)
    moved = "ratio_abs_dev_mean kl1 kl3 clip_frac_low clip_frac_high ratio_max ratio_min".split()
    assert set(found) == {
        "loss", "loss_policy", "loss_kl", "loss_entropy", "grad_norm", "lr", "update_skipped",
        "max_ratio", "step_consumed_tokens", "efficient_attn_ratio",
        *(f"reduced_train_policy_{name}" for name in moved),
    }  # fmt: skip
    assert found["loss"] == pytest.approx(
        sum(found[f"loss_{n}"] for n in ("policy", "kl", "entropy"))
    )
    assert found["step_consumed_tokens"] == 7 + 5 + 8
    attended = (7**2 + 5**2 + 12**2) + (8**2 + 16**2) + 24**2
    assert found["efficient_attn_ratio"] == pytest.approx(attended / (3 * 24**2))
    assert found["max_ratio"] == found["reduced_train_policy_ratio_max"] > 1


def test_a_step_that_supervises_nothing_moves_nothing() -> None:
    """RG-38: momentum and weight decay would move weights without a gradient."""
    trainee = begun()
    trained(trainee, 0)
    before = weights_of(trainee)
    found = trainee.train_step([pack([]), pack([])], global_tokens=0)
    assert_equal(before, weights_of(trainee))
    assert (found["loss"], found["grad_norm"], found["update_skipped"]) == (0.0, 0.0, 1.0)
    assert trainee.optimizer_steps == 1


def test_a_gradient_that_is_no_number_moves_nothing() -> None:
    trainee = begun()
    before = weights_of(trainee)
    broken = pack([(3, 5)])
    broken = broken.with_columns(advantages=broken["advantages"] * float("nan"))
    found = trainee.train_step([broken], global_tokens=5)
    assert found["update_skipped"] == 1.0
    assert found["grad_norm"] != found["grad_norm"]
    assert_equal(before, weights_of(trainee))
    assert trained(trainee, 0)[0]["update_skipped"] == 0.0


def test_what_packs_raise_leaves_no_gradient_behind() -> None:
    """Fetching fails between two packs: the step that follows is as if it had not been tried."""
    trainee, other = begun(), begun()

    def failing() -> Iterator[Any]:
        yield step_of(3)[0]
        raise KeyError("a row was cleared")

    with pytest.raises(KeyError, match="a row was cleared"):
        trainee.train_step(failing(), global_tokens=10)
    assert trained(trainee, 0) == trained(other, 0)
    assert_equal(weights_of(trainee), weights_of(other))


def test_a_step_needs_a_phase_and_a_pack() -> None:
    trainee = Trainee(settings(), ALONE)
    with pytest.raises(RuntimeError, match="call begin_phase first"):
        trained(trainee, 0)
    trainee.begin_phase(phase())
    with pytest.raises(ValueError, match="has a pack on every rank"):
        trainee.train_step([], global_tokens=0)


def test_a_phase_begins_with_a_fresh_optimizer_and_its_own_loss() -> None:
    trainee = begun(LossConfig(policy="policy_gradient"), optimizer={"name": "warm-up"})
    first = trained(trainee, 0)[0]
    assert "loss_kl" not in first
    trainee.begin_phase(phase())
    assert trainee.phase.name == "policy"
    assert trainee.optimizer_steps == 0
    fresh = Trainee(settings(), ALONE)
    fresh._model.load_state_dict(trainee._model.state_dict())
    fresh.begin_phase(phase())
    assert trained(trainee, 1, 2) == trained(fresh, 1, 2)


def test_a_teachers_likeliest_tokens_are_learned() -> None:
    config = DistillationConfig(mode="forward_kl_topk", top_k=3)
    trainee = begun(
        LossConfig(policy="policy_gradient", distillation=config),
        optimizer={"lr": 0.05, "schedule": "constant", "max_grad_norm": None},
    )
    ids = torch.arange(3 * CAP).reshape(1, CAP, 3) % VOCABULARY
    teacher = torch.tensor([0.6, 0.3, 0.1]).log().expand(1, CAP, 3)
    some = pack([(3, 5)]).with_columns(teacher_ids=ids, teacher_logprobs=teacher)
    losses = [trainee.train_step([some], global_tokens=5)["loss_distillation"] for _ in range(12)]
    assert losses[-1] < losses[0] / 4


# -- references ------------------------------------------------------------------------------


def test_a_frozen_reference_stays_what_the_weights_were_first() -> None:
    trainee = begun(reference="frozen")
    some = pack([(3, 5)])
    first = trainee.logprobs(some)
    trained(trainee, 0, 1)
    assert torch.equal(trainee.reference_logprobs(some), first)
    assert not torch.equal(trainee.logprobs(some), first)


def test_with_its_adapter_off_the_model_is_the_reference() -> None:
    base = Trainee(settings(), ALONE)
    trainee = begun(model=ADAPTED, reference="adapter_off")
    some = pack([(3, 5)])
    assert torch.equal(trainee.reference_logprobs(some), base.logprobs(some))
    before = weights_of(trainee)
    trained(trainee, 0, 1)
    assert torch.equal(trainee.reference_logprobs(some), base.logprobs(some))
    assert float((trainee.logprobs(some) - base.logprobs(some)).abs().max()) > 1e-3
    after = weights_of(trainee)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_a_reference_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"adapter_off needs model\.adapter"):
        Trainee(settings(reference="adapter_off"), ALONE)
    with pytest.raises(ValueError, match="none is set"):
        Trainee(settings(), ALONE).reference_logprobs(pack([(3, 5)]))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (ModelSettings(), "give either `path` or `config`"),
        (ModelSettings(path="no/such/folder"), "is no folder"),
        (ModelSettings(config={"hidden_size": 8}), "config has no model_type"),
        (ModelSettings(config=TIED, dtype="float31"), "torch has no dtype 'float31'"),
        (ModelSettings(config=TIED, adapter={**ADAPTER, "lora_dropout": 0.1}), "is to be 0"),
        (ModelSettings(config=TIED, adapter={**ADAPTER, "rank": 3}), "adapter: .*rank"),
    ],
)
def test_settings_that_make_no_model_are_refused(model: ModelSettings, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_model(model, 0)


# -- weights that leave ----------------------------------------------------------------------


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**pack([(3, 5), (4, 2)]).model_inputs()).logits


@pytest.mark.parametrize("kind", ["tied", "plain", "adapter"])
def test_an_export_is_loaded_by_transformers_with_equal_logits(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = PLAIN if kind == "plain" else TIED
    model = ModelSettings(config=config, adapter=ADAPTER if kind == "adapter" else None)
    trainee = begun(model=model, tokenizer_path=str(tmp_path / "tokenizer"))
    trained(trainee, 0, 1)
    trainee.export(tmp_path / "hf")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    expected = logits_of(trainee._model)
    if kind == "adapter":
        torch.testing.assert_close(logits_of(loaded), expected, atol=1e-4, rtol=0.0)
        assert not [name for name in loaded.state_dict() if "lora" in name]
        assert float((logits_of(make_model(model, 5)) - expected).abs().max()) > 1e-2
    else:
        assert torch.equal(logits_of(loaded), expected)
    tied = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert tied == (kind != "plain")
    assert {path.suffix for path in (tmp_path / "hf").iterdir()} <= {
        ".json",
        ".safetensors",
        ".jinja",
    }
    beside: Any = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert beside.get_vocab() == tokenizer.get_vocab()
    assert beside.chat_template == tokenizer.chat_template
    # It is what a rank can begin with.
    again = Trainee(settings(model=ModelSettings(path=str(tmp_path / "hf"))), ALONE)
    assert torch.equal(logits_of(again._model), logits_of(loaded))


@pytest.mark.parametrize("kind", ["tied", "adapter"])
def test_published_weights_are_what_an_engine_takes(
    kind: str, plane_settings: dict[str, Any]
) -> None:
    trainee = begun(model=ADAPTED if kind == "adapter" else None)
    trained(trainee, 0)
    engine = make_model(ModelSettings(config=TIED), 99)
    with dataplane.init(plane_settings, name=f"trainee-{kind}") as client:
        try:
            size = trainee.publish_weights(client, 3)
            with read_weights(client) as found:
                assert found.version == 3
                replace_weights(engine, found.tensors)
            assert size == sum(p.nbytes for p in engine.parameters())  # tied ones once
            with pytest.raises(AlreadyWritten):
                trainee.publish_weights(client, 3)
            trainee.publish_weights(client, 3, replace=True, dtype="bfloat16")
            with read_weights(client, 3) as found:
                assert {t.dtype for t in found.tensors.values()} == {torch.bfloat16}
        finally:
            client.close(destroy=True)
    torch.testing.assert_close(
        logits_of(engine), logits_of(trainee._model), atol=1e-4 if kind == "adapter" else 0, rtol=0
    )
    before = weights_of(trainee)
    trained(trainee, 1)  # merging has left the adapter as it was
    other = begun(model=ADAPTED if kind == "adapter" else None)
    trained(other, 0, 1)
    assert_equal(weights_of(trainee), weights_of(other))
    assert set(before) == set(weights_of(other))


def test_weights_are_published_in_the_dtype_that_engines_loaded(
    tmp_path: Path, plane_settings: dict[str, Any]
) -> None:
    """Trained in float32 and served in bfloat16, as the folder has it."""
    begun(model=ModelSettings(config=TIED, dtype="bfloat16")).export(tmp_path)
    trainee = begun(model=ModelSettings(path=str(tmp_path), dtype="float32"))
    assert {w.dtype for w in weights_of(trainee).values()} == {torch.float32}
    engine = make_model(ModelSettings(path=str(tmp_path)), 0)
    assert engine.dtype == torch.bfloat16
    trained(trainee, 0)
    with dataplane.init(plane_settings, name="trainee-dtype") as client:
        try:
            trainee.publish_weights(client, 1)
            with read_weights(client) as found:
                replace_weights(engine, found.tensors)
        finally:
            client.close(destroy=True)
    expected = weights_of(trainee)["model.embed_tokens.weight"].bfloat16()
    assert torch.equal(engine.model.embed_tokens.weight, expected)


# -- states ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_a_run_that_was_saved_and_loaded_is_the_run_that_was_not(kind: str, tmp_path: Path) -> None:
    change: dict[str, Any] = {
        "model": ADAPTED if kind == "adapter" else None,
        "reference": "adapter_off" if kind == "adapter" else "frozen",
        "deterministic": True,
    }
    through = begun(**change)
    expected = trained(through, 0, 1, 2, 3)
    first = begun(**change)
    assert trained(first, 0, 1) == expected[:2]
    first.save(tmp_path)
    drawn = torch.rand(3)
    second = begun(**change)
    second.load(tmp_path)
    assert torch.equal(torch.rand(3), drawn)
    assert second.optimizer_steps == 2
    assert trained(second, 2, 3) == expected[2:]
    assert_equal(weights_of(second), weights_of(through))
    some = pack([(3, 5)])
    assert torch.equal(second.reference_logprobs(some), through.reference_logprobs(some))
    second.save(tmp_path / "b")
    through.save(tmp_path / "a")
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert {p.suffix for p in (tmp_path / "a").iterdir()} == {".json", ".safetensors"}


def test_a_state_without_a_step_is_one_too(tmp_path: Path) -> None:
    first = Trainee(settings(), ALONE)
    first.save(tmp_path)
    other = Trainee(settings(seed=6), ALONE)
    other.load(tmp_path)
    assert_equal(weights_of(first), weights_of(other))
    other.begin_phase(phase())
    with pytest.raises(StateError, match="is of phase None, and this is phase 'policy'"):
        other.load(tmp_path)


def test_a_state_without_its_optimizer_goes_on_with_a_fresh_one(tmp_path: Path) -> None:
    first = begun()
    trained(first, 0)
    first.save(tmp_path, optimizer=False)
    other = begun()
    other.load(tmp_path)
    assert_equal(weights_of(first), weights_of(other))
    assert other.optimizer_steps == 1
    trained(first, 1)
    trained(other, 1)
    moved = [
        not torch.equal(a, b)
        for a, b in zip(weights_of(first).values(), weights_of(other).values(), strict=True)
    ]
    assert any(moved)  # one had moments of its first step, the other had none


@pytest.mark.parametrize("damage", ["phase", "model", "gone", "cut", "format"])
def test_a_state_that_does_not_fit_changes_nothing(damage: str, tmp_path: Path) -> None:
    first = begun(config=PLAIN if damage == "model" else TIED)
    trained(first, 0)
    first.save(tmp_path)
    said = {
        "phase": "is of phase 'policy', and this is phase 'other': begin that phase first",
        "model": "is of another model: lm_head.weight",
        "gone": "is not whole: .*optimizer.safetensors",
        "cut": "holds no state of training",
        "format": "another version",
    }[damage]
    if damage == "gone":
        (tmp_path / "optimizer.safetensors").unlink()
    elif damage in ("cut", "format"):
        whole = json.loads((tmp_path / "state.json").read_text())
        text = json.dumps(whole | {"format": 2})
        (tmp_path / "state.json").write_text(text[:9] if damage == "cut" else text)
    trainee = Trainee(settings(seed=7), ALONE)
    trainee.begin_phase(phase(name="other" if damage == "phase" else "policy"))
    before = weights_of(trainee)
    with pytest.raises(StateError, match=said):
        trainee.load(tmp_path)
    assert_equal(before, weights_of(trainee))
    assert trainee.optimizer_steps == 0


def test_deterministic_and_threads_are_what_torch_is_set_to() -> None:
    Trainee(settings(deterministic=True, threads=2), ALONE)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 2


# -- GPUs ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_step_on_a_gpu_is_the_step_on_a_cpu(tmp_path: Path) -> None:
    cpu = begun(reference="frozen")
    peers = Peers.alone("cuda")
    gpu = Trainee(settings(reference="frozen", device="cuda"), peers)
    gpu.begin_phase(phase())
    for seed in (0, 1):
        expected = trained(cpu, seed)[0]
        found = trained(gpu, seed)[0]
        assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-3)
        assert 0 < found["max_memory"] <= found["reserved_memory"]
        held = torch.cuda.memory_allocated()
        gpu.offload()
        assert torch.cuda.memory_allocated() < held
        gpu.onload()
    some = pack([(3, 5)])
    for name in ("logprobs", "reference_logprobs"):
        torch.testing.assert_close(
            getattr(gpu, name)(some).cpu(), getattr(cpu, name)(some), atol=1e-3, rtol=0
        )
    for name, weight in weights_of(cpu).items():
        torch.testing.assert_close(weights_of(gpu)[name].cpu(), weight, atol=2e-4, rtol=0)
    gpu.save(tmp_path)
    cpu.load(tmp_path)
    for name, weight in weights_of(cpu).items():
        assert torch.equal(weights_of(gpu)[name].cpu(), weight)
