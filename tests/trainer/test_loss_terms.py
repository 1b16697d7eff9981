"""Penalties, imitation, distillation and further heads, with the specification's numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dataplane.fields import IGNORED
from tests.trainer.materials import ex_2_1, ex_2_2, packed
from trainer.loss import (
    DistillationConfig,
    OrealConfig,
    chosen_logprobs,
    combined_advantages,
    entropy,
    kl,
    mtp_loss,
    oreal_loss,
    oreal_weights,
    rolled,
    sampled_divergence,
    sft_due,
    sft_weights,
    token_logprobs,
    token_weight,
    topk_divergence,
)

I = IGNORED  # noqa: E741 as in the specification


def near(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-6, rel=0)


# -- over a vocabulary -----------------------------------------------------------------------

LOGITS = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [0.0, math.log(3), -1e9, -1e9], [9e9, 0, 0, 0]]])


def test_log_probs_of_labels() -> None:
    found = token_logprobs(LOGITS, torch.tensor([[2, 1, 0]]))
    assert found[0].tolist() == near([math.log(1 / 4), math.log(3 / 4), 0.0])
    holed = token_logprobs(LOGITS, torch.tensor([[2, I, I]]))
    assert holed[0].tolist() == near([math.log(1 / 4), 0.0, 0.0])
    assert not holed[0, 1:].any()


def test_temperature_flattens_the_distribution() -> None:
    found = token_logprobs(LOGITS[:, 1:2], torch.tensor([[1]]), temperature=2.0)
    root = math.sqrt(3)
    assert found.item() == pytest.approx(math.log(root / (1 + root)), abs=1e-6)


def test_log_probs_of_several_words() -> None:
    found = chosen_logprobs(LOGITS[:, 1:2], torch.tensor([[[0, 1]]]))
    assert found[0, 0].exp().tolist() == near([0.25, 0.75])


def test_entropy_of_a_distribution() -> None:
    assert entropy(LOGITS)[0].tolist() == near([math.log(4), 0.5623351, 0.0])


def test_log_probs_of_narrow_logits_are_computed_wide() -> None:
    found = token_logprobs(LOGITS[:, :1].bfloat16(), torch.tensor([[0]]))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(math.log(1 / 4), abs=1e-6)


# -- penalties -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lp", "ref", "k1", "k2", "k3"),
    [
        (-1.0, -1.2, 0.2, 0.02, 0.0187308),  # EX-6.10
        (-2.0, -1.0, -1.0, 0.5, 0.7182818),
        (-0.5, -1.0, 0.5, 0.125, 0.1065307),
        (-2.0, -2.0, 0.0, 0.0, 0.0),
    ],
)
def test_ex_6_10_kl_kinds(lp: float, ref: float, k1: float, k2: float, k3: float) -> None:
    due = {"k1": k1, "kl": k1, "abs": abs(k1), "k2": k2, "mse": k2, "k3": k3, "low_var_kl": k3}
    for kind, value in due.items():
        found = kl(torch.tensor(lp), torch.tensor(ref), kind)  # type: ignore[arg-type]
        assert found.item() == near(value)


def test_k3_is_bounded() -> None:
    assert kl(torch.tensor(-90.0), torch.tensor(0.0), "k3").item() == 10.0
    with pytest.raises(ValueError, match="'k9' is none of k1"):
        kl(torch.tensor(0.0), torch.tensor(0.0), "k9")  # type: ignore[arg-type]


# -- OREAL -----------------------------------------------------------------------------------


def test_ex_6_11_oreal() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1, 0]]).bool()
    advantages = torch.tensor([[0.0, 1, 1, -1, 0, 0]])
    policy, sft = oreal_weights(mask, advantages, OrealConfig())
    assert policy.tolist() == [[0, 0.5, 0.5, 0.5, 0.5, 0]]
    assert sft.tolist() == [[0, 0.5, 0.5, 0, 0, 0]]


@pytest.mark.parametrize(
    ("advantages", "due", "imitated"),
    [
        ([0.0, 1, 1, 0], [0, 0.5, 0.5, 0], [0, 0.5, 0.5, 0]),
        ([0.0, -1, -1, 0], [0, 0.5, 0.5, 0], [0] * 4),
    ],
)
def test_rg_24_oreal_of_one_sign_is_finite(
    advantages: list[float], due: list[float], imitated: list[float]
) -> None:
    mask = torch.tensor([[0, 1, 1, 0]]).bool()
    policy, sft = oreal_weights(mask, torch.tensor([advantages]), OrealConfig())
    assert policy.tolist() == [due]
    assert sft.tolist() == [imitated]
    infinite = torch.tensor([[math.inf, 1.0, 2.0, math.nan]])
    loss = oreal_loss(infinite, torch.full((1, 4), -1.0), (policy, sft))
    assert loss.item() == near(1.5 + sum(imitated))


def test_oreal_counts_tokens_of_all_ranks() -> None:
    mask = torch.tensor([[1, 1, 1]]).bool()
    config = OrealConfig(positive=2.0, negative=3.0, positive_policy=0.5, positive_sft=4.0)
    policy, sft = oreal_weights(
        mask, torch.tensor([[1.0, -1, 0]]), config, positive_tokens=4, negative_tokens=6
    )
    assert policy.tolist() == [[0.25, 0.5, 0.5]]
    assert sft.tolist() == [[2.0, 0, 0]]
    with pytest.raises(ValueError, match="oreal: negative"):
        OrealConfig(negative=-1)


# -- distillation ----------------------------------------------------------------------------

K1 = DistillationConfig(mode="k1", policy_gradient=True, task_weight=1.0)


def test_ex_4_16_k1_lowers_advantages() -> None:
    old, teacher = torch.tensor([-0.5, -1.0]), torch.tensor([-0.7, -0.2])
    distance = sampled_divergence(old, teacher, K1)
    assert distance.tolist() == near([0.2, -0.8])
    advantages = torch.tensor([2.0, 2.0])
    assert combined_advantages(advantages, distance, K1).tolist() == near([1.8, 2.8])
    alone = DistillationConfig(mode="k1", policy_gradient=True)
    assert combined_advantages(advantages, distance, alone).tolist() == near([-0.2, 0.8])


@pytest.mark.parametrize(
    ("student", "teacher", "due"),
    [(-1.0, -1.2, 0.0187308), (-2.0, -1.0, 0.7182818), (-1.0, -1.0, 0.0)],
)
def test_k3_of_a_teacher(student: float, teacher: float, due: float) -> None:
    config = DistillationConfig(mode="k3")
    found = sampled_divergence(torch.tensor(student), torch.tensor(teacher), config)
    assert found.item() == near(due)


def test_a_distance_can_be_bounded_on_both_sides() -> None:
    config = DistillationConfig(mode="k1", policy_gradient=True, loss_max=0.5)
    found = sampled_divergence(torch.tensor([0.0, -3.0, -0.2]), torch.tensor([-3.0, 0, 0]), config)
    assert found.tolist() == near([0.5, -0.5, -0.2])


@pytest.mark.parametrize(
    ("q", "p", "forward_kl_topk", "forward", "reverse"),
    [
        ([0.5, 0.3], [0.4, 0.3], 0.1115718, 0.0304788, 0.0323821),  # EX-4.16
        ([0.5, 0.3], [0.5, 0.3], 0.0, 0.0, 0.0),
        ([0.6, 0.2], [0.3, 0.4], 0.2772589, 0.1961659, 0.1909542),
    ],
)
def test_ex_4_16_the_likeliest_tokens(
    q: list[float], p: list[float], forward_kl_topk: float, forward: float, reverse: float
) -> None:
    due = {"forward_kl_topk": forward_kl_topk, "forward": forward, "reverse": reverse}
    for mode, value in due.items():
        config = DistillationConfig(mode=mode, top_k=2)  # type: ignore[arg-type]
        found = topk_divergence(torch.tensor([p]).log(), torch.tensor([q]).log(), config)
        assert found.tolist() == near([value])


def test_log_probs_are_bounded_from_below_where_that_is_asked_for() -> None:
    config = DistillationConfig(mode="forward_kl_topk", top_k=1, log_prob_min=-2.0)
    found = topk_divergence(torch.tensor([[-9.0]]), torch.tensor([[-1.0]]), config)
    assert found.item() == near(math.exp(-1.0))


def test_what_is_left_of_a_certain_teacher_is_no_nan() -> None:
    config = DistillationConfig(mode="forward", top_k=1)
    found = topk_divergence(torch.tensor([[-0.5]]), torch.tensor([[0.0]]), config)
    assert math.isfinite(found.item())
    assert found.item() == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "k9"}, "mode is one of k1, k3, forward"),
        ({"mode": "forward"}, "forward needs top_k"),
        (
            {"mode": "reverse", "top_k": 2, "policy_gradient": True},
            "reverse has no policy gradient",
        ),
        ({"mode": "k3", "top_k": 2}, "k3 is of sampled tokens"),
        ({"mode": "k1"}, "k1 has no gradient of its own"),
        ({"mode": "k3", "task_weight": -1.0}, "task_weight is a number from 0 on"),
        ({"mode": "k3", "loss_max": 0.0}, "loss_max is above 0"),
    ],
)
def test_distillation_that_makes_no_sense_is_refused(settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DistillationConfig(**settings)


# -- further heads ---------------------------------------------------------------------------


def test_ex_6_1_labels_of_heads_stay_in_their_sequence() -> None:
    pack = packed([ex_2_1(), ex_2_2()])
    first = rolled(pack.labels, pack.cu_seq_lens, 1, I)
    assert first[0].tolist() == [I, 20, 21, 22, I, 20, 21, I, I, 22, 2, I, I, I, I, I]
    second = rolled(pack.labels, pack.cu_seq_lens, 2, I)
    assert second[0].tolist() == [20, 21, 22, I, I, 21, I, I, 22, 2, I, I, I, I, I, I]
    assert torch.equal(rolled(pack.labels, pack.cu_seq_lens, 0, I), pack.labels)
    assert rolled(pack.labels, pack.cu_seq_lens, 9, I).unique().tolist() == [I]
    with pytest.raises(ValueError, match="not -1"):
        rolled(pack.labels, pack.cu_seq_lens, -1, I)


def test_a_head_learns_from_the_rollout_or_from_the_labels() -> None:
    labels = torch.tensor([[5, I, 7]])
    head = torch.tensor([[-1.0, -1.0, -2.0]])
    assert mtp_loss(head, labels)[0].tolist() == [1.0, 0.0, 2.0]
    rollout = torch.tensor([[-1.2, 0.0, -1.0]])
    assert mtp_loss(head, labels, rollout)[0].tolist() == near([0.0187308, 0.0, 0.7182818])


# -- supervised steps ------------------------------------------------------------------------

SFT_MASK = torch.tensor([[1, 0, 0, 1, 1]]).bool()
SFT_ENDS = torch.tensor([0, 3, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("reduction", "due"),
    [
        ("token", [1 / 3, 0, 0, 1 / 3, 1 / 3]),
        ("sample", [0.5, 0, 0, 0.25, 0.25]),
        ("square", [0.414214, 0, 0, 0.292893, 0.292893]),
    ],
)
def test_ex_6_12_sft_weights(reduction: Any, due: list[float]) -> None:
    weights = sft_weights(SFT_MASK, SFT_ENDS, reduction)
    assert (weights / weights.sum())[0].tolist() == near(due)


def test_a_sequence_that_supervises_nothing_cannot_be_a_sample() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0]]).bool()
    for reduction in ("sample", "square"):
        with pytest.raises(ValueError, match="1 sequences supervise no token"):
            sft_weights(mask, SFT_ENDS, reduction)  # type: ignore[arg-type]
    assert sft_weights(mask, SFT_ENDS, "token").sum() == 3
    padded = sft_weights(mask, SFT_ENDS, "sample", num_padding=2)
    assert padded[0].tolist() == near([1 / 3] * 3 + [0, 0])
    with pytest.raises(ValueError, match="'word' is none of"):
        sft_weights(mask, SFT_ENDS, "word")  # type: ignore[arg-type]


def test_a_supervised_step_follows_every_so_many_rollouts() -> None:
    assert [i for i in range(13) if sft_due(i, 4)] == [4, 8, 12]
    assert [i for i in range(4) if sft_due(i, 1)] == [1, 2, 3]
    with pytest.raises(ValueError, match="every 1 rollout or more"):
        sft_due(1, 0)


def test_ex_6_13_tokens_of_all_ranks_weigh_the_same() -> None:
    assert token_weight(7 + 3 + 0) == 0.1
    assert token_weight(0) == 1.0
    with pytest.raises(ValueError, match="-1 supervised"):
        token_weight(-1)
