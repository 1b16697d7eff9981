"""The loss of one pack: which terms it has, what they weigh, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dataplane.fields import IGNORED
from tests.trainer.materials import ex_2_1, ex_2_2, fetch, packed, sample, spec_of
from trainer.loss import (
    DistillationConfig,
    ImportanceConfig,
    LossConfig,
    corrected,
    pack_loss,
    token_weight,
    with_old_logprobs,
)
from trainer.loss.policy import PolicyInputs
from trainer.materialize import PackSpec, PackTensors, pack_rows

PPO = LossConfig(clip_low=0.2, clip_high=0.2)


def near(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-6, rel=0)


def pack_of(**columns: list[float]) -> PackTensors:
    """EX-6.1 with further columns."""
    pack = packed([ex_2_1(), ex_2_2()], advantages=[1.5, -0.5])
    return pack.with_columns(**{name: torch.tensor([column]) for name, column in columns.items()})


def loss_of(pack: PackTensors, config: LossConfig, logprobs: float = -1.0, **more: Any) -> Any:
    now = torch.full((1, pack.size), logprobs, requires_grad=True)
    more.setdefault("global_tokens", pack.num_supervised)
    found = pack_loss(pack, now, config, **more)
    found.loss.backward()
    assert now.grad is not None
    return found, now.grad[0]


def test_ex_6_1_every_trained_token_weighs_one_seventh() -> None:
    pack = pack_of(old_logprobs=[-1.0] * 16)
    found, grad = loss_of(pack, PPO)
    trained = pack.mask[0]
    assert trained.sum() == 7
    assert grad[~trained].abs().sum() == 0
    assert grad.tolist() == near((-pack["advantages"][0] / 7).tolist())
    assert found.loss.item() == near(-(3 * 1.5 - 4 * 0.5) / 7)
    assert found.metrics["loss_policy"] == near(found.loss.item())
    assert found.metrics["train_policy_ratio_max"] == 1.0


def test_ex_6_13_a_token_weighs_the_same_on_every_rank() -> None:
    """Ranks with 7, 3 and no supervised tokens; the third is all padding."""
    seven = pack_of(old_logprobs=[-1.0] * 16)
    three = packed([ex_2_1()]).with_columns(old_logprobs=torch.full((1, 16), -1.0))
    spec = PackSpec(cap=16)
    empty = pack_rows([], fetch([], spec), spec).with_columns(old_logprobs=torch.zeros(1, 16))
    total = sum(pack.num_supervised for pack in (seven, three, empty))
    assert token_weight(total) == 0.1
    for pack, tokens in ((seven, 7), (three, 3), (empty, 0)):
        ones = replace(pack, columns={**pack.columns, "advantages": torch.ones(1, 16)})
        found, grad = loss_of(ones, PPO, global_tokens=total)
        assert grad[pack.mask[0]].tolist() == near([-0.1] * tokens)
        assert grad.abs().sum().item() == near(0.1 * tokens)
        assert found.loss.item() == near(-0.1 * tokens)
    found, _ = loss_of(empty, PPO, global_tokens=total)
    assert found.loss.item() == 0.0


def test_scenario_4_a_step_that_supervises_nothing_has_a_loss_of_zero() -> None:
    pack = packed([sample([1, 2, 3], [])]).with_columns(old_logprobs=torch.zeros(1, 16))
    found, grad = loss_of(pack, replace(PPO, kl=None))
    assert found.loss.item() == 0.0
    assert not grad.any()
    assert all(value == 0.0 for value in found.metrics.values())


NAN_UNTRAINED = [-1.0 if i in (2, 3, 4, 6, 7, 10, 11) else float("nan") for i in range(16)]


@pytest.mark.parametrize("policy", ["ppo", "gspo", "cispo", "policy_gradient"])
@pytest.mark.parametrize("kl", ["k1", "abs", "k2", "k3"])
def test_what_stands_at_untrained_places_is_not_looked_at(policy: str, kl: Any) -> None:
    """Not by the gradient either, where 0 times NaN would be NaN."""
    config = replace(PPO, policy=policy, kl=kl, kl_coef=0.1)
    found, grad = loss_of(
        pack_of(old_logprobs=NAN_UNTRAINED, ref_logprobs=NAN_UNTRAINED), config, -1.1
    )
    due, due_grad = loss_of(
        pack_of(old_logprobs=[-1.0] * 16, ref_logprobs=[-1.0] * 16), config, -1.1
    )
    assert found.loss.item() == due.loss.item()
    assert grad.tolist() == due_grad.tolist()
    assert bool(grad[pack_of().mask[0]].all())


def test_a_teacher_is_not_looked_at_where_nothing_is_trained() -> None:
    pack = packed([ex_2_1()], cap=5)
    teacher = torch.tensor([[[0.5, 0.3]] * 5]).log()
    teacher[:, :2] = float("nan")
    pack = pack.with_columns(old_logprobs=torch.zeros(1, 5), teacher_logprobs=teacher)
    student = torch.tensor([[[0.4, 0.3]] * 5]).log().requires_grad_()
    config = replace(PPO, distillation=DistillationConfig(mode="forward", top_k=2))
    found, _ = loss_of(pack, config, student_topk=student)
    assert found.metrics["loss_distillation"] == near(0.0304788)
    assert student.grad is not None
    assert not student.grad[0, :2].any()
    assert bool(torch.isfinite(student.grad).all())


def test_importance_weighs_the_policy_loss_and_nothing_else() -> None:
    pack = pack_of(old_logprobs=[-1.0] * 16, ref_logprobs=[-1.2] * 16, is_weights=[0.5] * 16)
    config = replace(PPO, kl="k1", kl_coef=0.1)
    found, _ = loss_of(pack, config)
    assert found.metrics["loss_policy"] == near(-0.5 * 2.5 / 7)
    assert found.metrics["loss_kl"] == near(0.1 * 0.2)
    assert found.loss.item() == near(-0.5 * 2.5 / 7 + 0.02)


def test_entropy_is_rewarded() -> None:
    pack = pack_of(old_logprobs=[-1.0] * 16)
    config = replace(PPO, entropy_coef=0.01)
    found, _ = loss_of(pack, config, entropy=torch.full((1, 16), 2.0))
    assert found.metrics["loss_entropy"] == near(-0.02)
    with pytest.raises(ValueError, match="no entropy was given"):
        loss_of(pack, config)


def test_a_teacher_lowers_the_advantage_of_a_token() -> None:
    """EX-4.16: 2 - 0.2 and 2 + 0.8 where a teacher is 0.2 below and 0.8 above."""
    row = sample([1], [2, 3], fields={})
    pack = packed([row], spec_of([row], 2), advantages=[2.0])
    pack = pack.with_columns(
        old_logprobs=torch.tensor([[-0.5, -1.0]]), teacher_logprobs=torch.tensor([[-0.7, -0.2]])
    )
    distillation = DistillationConfig(mode="k1", policy_gradient=True, task_weight=1.0)
    config = LossConfig(policy="policy_gradient", distillation=distillation)
    _, grad = loss_of(pack, config, global_tokens=1)
    assert grad.tolist() == near([-1.8, -2.8])
    _, grad = loss_of(pack, replace(config, distillation=replace(distillation, task_weight=0.0)),
                      global_tokens=1)  # fmt: skip
    assert grad.tolist() == near([0.2, -0.8])


def test_what_lowers_an_advantage_has_no_gradient_of_its_own() -> None:
    """k3 is of the log-probs now, which the policy loss moves by the advantage alone."""
    pack = packed([sample([1], [2, 3])], cap=2, advantages=[2.0])
    pack = pack.with_columns(teacher_logprobs=torch.full((1, 2), -1.2))
    distillation = DistillationConfig(mode="k3", policy_gradient=True, task_weight=1.0)
    config = LossConfig(policy="policy_gradient", distillation=distillation)
    _, grad = loss_of(pack, config, global_tokens=1)
    distance = torch.tensor(-0.2).exp().item() + 0.2 - 1
    assert grad.tolist() == near([-(2.0 - distance)] * 2)


def test_a_teacher_is_a_loss_of_its_own() -> None:
    pack = pack_of(old_logprobs=[-1.0] * 16, teacher_logprobs=[-1.2] * 16)
    config = replace(PPO, distillation=DistillationConfig(mode="k3", weight=2.0))
    found, _ = loss_of(pack, config)
    distance = torch.tensor(-0.2).exp().item() + 0.2 - 1
    assert found.metrics["loss_distillation"] == near(2 * distance)
    assert found.metrics["loss_policy"] == 0.0


def test_a_teachers_likeliest_tokens_pull_at_the_students() -> None:
    pack = packed([ex_2_1()], cap=5).with_columns(
        old_logprobs=torch.zeros(1, 5),
        teacher_logprobs=torch.tensor([[[0.5, 0.3]] * 5]).log(),
    )
    config = replace(PPO, distillation=DistillationConfig(mode="forward", top_k=2))
    student = torch.tensor([[[0.4, 0.3]] * 5]).log()
    found, _ = loss_of(pack, config, student_topk=student)
    assert found.metrics["loss_distillation"] == near(0.0304788)
    with pytest.raises(ValueError, match="needs the student's top-k"):
        loss_of(pack, config)


def test_a_loss_of_ones_own() -> None:
    def squared(inputs: PolicyInputs, config: LossConfig) -> torch.Tensor:
        assert config.policy is squared
        return (inputs.logprobs - inputs.old_logprobs) ** 2

    pack = pack_of(old_logprobs=[-3.0] * 16)
    found, _ = loss_of(pack, LossConfig(policy=squared))
    assert found.loss.item() == near(4.0)


# -- old log-probs ---------------------------------------------------------------------------


def test_bypass_takes_the_rollouts_log_probs_and_no_forward_pass() -> None:
    config = replace(PPO, old_logprobs="rollout")
    assert not config.needs_forward
    pack = packed([ex_2_1(), ex_2_2()], advantages=[1.0, 1.0])
    bypassed = with_old_logprobs(pack, config)
    assert bypassed["old_logprobs"] is pack["logprobs"]
    now = pack["logprobs"].clone().requires_grad_()
    found = pack_loss(bypassed, now, config, global_tokens=7)
    assert found.metrics["train_policy_ratio_max"] == found.metrics["train_policy_ratio_min"] == 1.0
    with pytest.raises(ValueError, match="computed for nothing"):
        with_old_logprobs(pack, config, pack["logprobs"])
    with pytest.raises(ValueError, match="rows have no logprobs"):
        with_old_logprobs(packed([sample([1], [2])]), config)


def test_recomputed_log_probs_are_needed_otherwise() -> None:
    pack = packed([ex_2_1()])
    mine = torch.full((1, 16), -0.5)
    assert with_old_logprobs(pack, PPO, mine)["old_logprobs"] is mine
    with pytest.raises(ValueError, match="none were given"):
        with_old_logprobs(pack, PPO)


def test_there_is_nothing_to_correct_in_bypass_mode() -> None:
    with pytest.raises(ValueError, match="importance correction compares recomputed"):
        replace(PPO, old_logprobs="rollout", importance=ImportanceConfig(threshold=(2.0, 0.5)))


# -- correction of a pack --------------------------------------------------------------------


def test_corrected_labels_change_what_a_token_weighs() -> None:
    old = [0, 0, -0.1, -0.2, -0.3, 0, -0.1, -0.2, 0, 0, -0.3, -5.0, 0, 0, 0, 0]
    pack = pack_of(old_logprobs=old)
    config = ImportanceConfig(threshold=(2.0, 0.5), mode="both")
    found, metrics = corrected(pack, config)
    assert (pack.num_supervised, found.num_supervised) == (7, 6)
    assert found.labels[0, 11] == IGNORED
    assert metrics is not None
    assert metrics["rollout_is_masked_fraction"] == near(1 / 7)
    assert found["is_weights"][0].tolist() == near(
        [0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0.5, 0, 0, 0, 0]
    )
    _, grad = loss_of(found, PPO)
    assert grad[11] == 0


def test_correction_needs_the_rollouts_log_probs() -> None:
    pack = packed([sample([1], [2])])
    with pytest.raises(ValueError, match="needs the rollout's logprobs"):
        corrected(pack, ImportanceConfig(threshold=(2.0, 0.5)))


def test_a_correction_that_was_forgotten_is_refused() -> None:
    pack = pack_of(old_logprobs=[-1.0] * 16)
    config = replace(PPO, importance=ImportanceConfig(threshold=(2.0, 0.5)))
    with pytest.raises(ValueError, match="call corrected first"):
        loss_of(pack, config)
    assert config.importance is not None
    found, _ = corrected(pack, config.importance)
    assert torch.isfinite(loss_of(found, config)[0].loss)
