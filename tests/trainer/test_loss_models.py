"""Packed training is training row by row: losses, gradients and logits of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.trainer.materials import Sample, members, packed, sample, spec_of
from tests.trainer.models import SHAPES, VOCABULARY, gradients, tiny
from trainer.loss import (
    ImportanceConfig,
    LossConfig,
    corrected,
    entropy,
    pack_loss,
    token_logprobs,
    with_old_logprobs,
)
from trainer.materialize import PackSpec, PackTensors
from trainer.plan import PlanConfig, make_plan

shapes = pytest.mark.parametrize("shape", SHAPES)

LOSS = LossConfig(clip_low=0.2, clip_high=0.28, kl="k3", kl_coef=0.1, entropy_coef=0.01)
ADVANTAGES = [1.0, -0.5, 2.0, -1.5]
COLUMNS = ("old_logprobs", "ref_logprobs")

_models: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower in several threads, the more so where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_of(shape: str) -> Any:
    """One model of each shape for all tests here; none of them moves its weights."""
    if shape not in _models:
        _models[shape] = tiny(shape)
    _models[shape].zero_grad()
    return _models[shape]


def batch(seed: int = 0) -> list[Sample]:
    """Four rows of different length; one with a hole, one with a response of one token."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(count: int) -> list[int]:
        return torch.randint(1, VOCABULARY, (count,), generator=generator).tolist()

    rows: list[Sample] = []
    for i, (prompt, response) in enumerate([(5, 7), (3, 1), (2, 12), (6, 4)]):
        mask = [int(j not in (3, 4)) for j in range(response)] if i == 2 else [1] * response
        rows.append(
            sample(
                drawn(prompt), drawn(response), mask, (-2 * torch.rand(response)).tolist(),
                session=i,
                fields={
                    name: -3 - torch.rand(prompt + response, generator=generator)
                    for name in COLUMNS
                },
            )
        )  # fmt: skip
    return rows


def forward(model: Any, pack: PackTensors, **change: Any) -> Any:
    return model(**{**pack.model_inputs(), **change}).logits


def train(
    model: Any, pack: PackTensors, global_tokens: int, config: LossConfig = LOSS, **change: Any
) -> float:
    """Forward and backward of one pack; its share of the loss."""
    logits = forward(model, pack, **change)
    found = pack_loss(
        pack,
        token_logprobs(logits, pack.labels),
        config,
        global_tokens=global_tokens,
        entropy=entropy(logits),
    )
    found.loss.backward()
    return found.loss.item()


def alone(row: Sample, advantage: float, spec: PackSpec) -> PackTensors:
    """A pack of one row, without padding."""
    return packed([row], replace(spec, cap=row.row.train_len), advantages=[advantage])


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert set(one) == set(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def disagreement(shape: str, config: LossConfig, **change: Any) -> tuple[float, float]:
    """How far loss and gradients of a pack are from those of its rows one by one."""
    model, rows = model_of(shape), batch()
    spec = spec_of(rows, 48, columns=COLUMNS)
    pack = packed(rows, spec, advantages=ADVANTAGES)
    assert pack.num_padding == 48 - sum(row.row.train_len for row in rows) > 1
    assert 1 in [row.row.response_len for row in rows]
    together = train(model, pack, pack.num_supervised, config, **change)
    packed_gradients = gradients(model)
    apart = sum(
        train(model, alone(row, advantage, spec), pack.num_supervised, config)
        for row, advantage in zip(rows, ADVANTAGES, strict=True)
    )
    row_gradients = gradients(model)
    assert max(float(g.abs().max()) for g in row_gradients.values()) > 1e-3
    return abs(together - apart), differences(packed_gradients, row_gradients)


@shapes
@pytest.mark.parametrize("policy", ["ppo", "gspo", "cispo", "policy_gradient"])
def test_packed_and_row_by_row_agree(shape: str, policy: str) -> None:
    assert max(disagreement(shape, replace(LOSS, policy=policy))) < 1e-5


@shapes
def test_with_a_cache_they_do_not_agree(shape: str) -> None:
    """The mutant: transformers looks for restarting positions only where there is no cache."""
    assert min(disagreement(shape, LOSS, use_cache=True)) > 1e-4


def leaks(shape: str, inputs: Callable[[PackTensors], dict[str, Any]]) -> bool:
    """Whether another first row changes a bit of the logits of the other rows."""
    model, rows = model_of(shape), batch()
    others = [sample([9] * 5, [8] * 7, logprobs=[0.0] * 7, fields=rows[0].fields), *rows[1:]]
    others[0].fields["input_ids"] = torch.tensor([9] * 5 + [8] * 7)
    first, second = batch(), others
    end = first[0].row.train_len
    logits: list[torch.Tensor] = []
    for some in (first, second):
        pack = packed(some, spec_of(some, 48), advantages=ADVANTAGES)
        with torch.no_grad():
            logits.append(model(**inputs(pack)).logits[0, end:])
    return not torch.equal(*logits)


@shapes
def test_a_row_never_sees_another(shape: str) -> None:
    assert not leaks(shape, lambda pack: pack.model_inputs())


@shapes
def test_with_a_cache_rows_leak_so_packs_ask_for_none(shape: str) -> None:
    assert leaks(shape, lambda pack: {**pack.model_inputs(), "use_cache": True})


@shapes
def test_without_restarting_positions_rows_leak(shape: str) -> None:
    """The other mutant: positions that count through the pack."""
    assert leaks(
        shape, lambda pack: {**pack.model_inputs(), "position_ids": torch.arange(pack.size)[None]}
    )


def test_padding_changes_nothing() -> None:
    """Scenario 8: the loss and the gradient of a padded pack are those of an unpadded one."""
    model, rows = model_of("llama"), batch()
    found: list[tuple[float, dict[str, torch.Tensor]]] = []
    for cap in (sum(row.row.train_len for row in rows), 60):
        pack = packed(rows, spec_of(rows, cap, columns=COLUMNS), advantages=ADVANTAGES)
        found.append((train(model, pack, pack.num_supervised), gradients(model)))
    (loss, grads), (padded_loss, padded_grads) = found
    assert padded_loss == pytest.approx(loss, abs=1e-6)
    assert differences(grads, padded_grads) < 1e-6


@shapes
def test_scenario_8_three_rows_on_four_ranks(shape: str) -> None:
    """The fourth rank runs as many micro-batches, of padding, and adds exactly nothing."""
    model, rows = model_of(shape), batch()[:3]
    spec = spec_of(rows, 16, columns=COLUMNS)
    plan = make_plan([row.row.train_len for row in rows], PlanConfig(cap=16), dp_size=4)
    parts = [plan.for_rank(rank) for rank in range(4)]
    assert {tuple(map(len, part.packs)) for part in parts} == {(1,)}
    packs = [
        packed(part.take(rows), spec, places=part.packs[0][0], advantages=part.take(ADVANTAGES[:3]))
        for part in parts
    ]
    total = sum(pack.num_supervised for pack in packs)
    losses: list[float] = []
    for pack in packs:
        before = gradients(model)
        losses.append(train(model, pack, total))
        if not pack.keys:
            assert (losses[-1], pack.num_supervised, pack.consumed_tokens) == (0.0, 0, 0)
            assert all(not bool(g.any()) for g in gradients(model).values())
        for name, parameter in model.named_parameters():
            if name in before:
                parameter.grad = before[name] + (0 if parameter.grad is None else parameter.grad)
    ranks = gradients(model)
    apart = sum(
        train(model, alone(row, advantage, spec), total)
        for row, advantage in zip(rows, ADVANTAGES, strict=False)
    )
    assert sum(losses) == pytest.approx(apart, abs=1e-5)
    assert differences(ranks, gradients(model)) < 1e-5


def test_in_bypass_mode_fresh_weights_have_ratios_of_one() -> None:
    """What rows were sampled with, row by row, is what the packed weights give them now."""
    model, rows = model_of("qwen3"), batch()
    fresh: list[Sample] = []
    with torch.no_grad():
        for row in rows:
            one = packed([row], spec_of([row], row.row.train_len))
            logprobs = one.rows_of(token_logprobs(forward(model, one), one.labels))
            fresh.append(Sample({**row.fields, "logprobs": logprobs[row.row.key]}, row.row))
    config = LossConfig(clip_low=0.2, clip_high=0.2, old_logprobs="rollout")
    assert not config.needs_forward
    pack = with_old_logprobs(packed(fresh, spec_of(fresh, 40), advantages=ADVANTAGES), config)
    found = pack_loss(
        pack,
        token_logprobs(forward(model, pack), pack.labels),
        config,
        global_tokens=pack.num_supervised,
    )
    assert found.metrics["train_policy_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert found.metrics["train_policy_ratio_min"] == pytest.approx(1.0, abs=1e-5)
    assert found.metrics["train_policy_clip_frac_high"] == 0


def test_importance_weights_agree_packed_and_row_by_row() -> None:
    model, rows = model_of("gpt2"), batch()
    spec = spec_of(rows, 48, columns=COLUMNS)
    config = ImportanceConfig(threshold=(4.0, 0.01), level="sequence", mode="both")
    pack, _ = corrected(packed(rows, spec, advantages=ADVANTAGES), config)
    total = max(pack.num_supervised, 1)
    together = train(model, pack, total)
    grads = gradients(model)
    apart = [
        corrected(alone(row, advantage, spec), config)[0]
        for row, advantage in zip(rows, ADVANTAGES, strict=True)
    ]
    assert sum(one.num_supervised for one in apart) == pack.num_supervised
    assert sum(train(model, one, total) for one in apart) == pytest.approx(together, abs=1e-5)
    assert differences(grads, gradients(model)) < 1e-5
    assert members(rows)[0].key in pack.keys
