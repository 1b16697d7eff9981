"""The loss of one pack, all terms together, and what is done to a pack before it has one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dataplane.fields import IGNORED
from trainer.loss.config import LossConfig
from trainer.loss.distillation import (
    TOPK,
    DistillationConfig,
    combined_advantages,
    sampled_divergence,
    topk_divergence,
)
from trainer.loss.importance import ImportanceConfig, correct
from trainer.loss.kl import kl
from trainer.loss.policy import POLICY_LOSSES, PolicyInputs, policy_metrics
from trainer.loss.tokens import token_weight
from trainer.materialize import PackTensors


@dataclass(frozen=True, slots=True)
class PackLoss:
    """The part that a pack has in the loss of its optimizer step."""

    loss: torch.Tensor  # []
    metrics: dict[str, float]
    """Shares of each term in the loss, to be added up, and under `train_policy_` how far the policy
    moved."""


def with_old_logprobs(
    pack: PackTensors, config: LossConfig, recomputed: torch.Tensor | None = None
) -> PackTensors:
    """The pack with the log-probs that ratios are taken to.

    In bypass mode those of the rollout engine, so that no forward pass is needed: weights that are
    still the engine's have ratios of 1.

    Raises:
        ValueError: what the config asks for is not there.
    """
    if config.needs_forward:
        if recomputed is None:
            raise ValueError("old_logprobs is 'recompute', and none were given")
        return pack.with_columns(old_logprobs=recomputed)
    if recomputed is not None:
        raise ValueError("old_logprobs is 'rollout', and others were computed for nothing")
    if "logprobs" not in pack.columns:
        raise ValueError("old_logprobs is 'rollout', and the rollout's rows have no logprobs")
    return pack.with_columns(old_logprobs=pack["logprobs"])


def corrected(
    pack: PackTensors, config: ImportanceConfig
) -> tuple[PackTensors, dict[str, float] | None]:
    """The pack with the column `is_weights` and without the labels that correction clears; and its
    metrics. Count the supervised tokens of the step after it."""
    if "logprobs" not in pack.columns:
        raise ValueError("importance correction needs the rollout's logprobs, and rows have none")
    found = correct(pack["old_logprobs"], pack["logprobs"], pack.mask, pack.cu_seq_lens, config)
    labels = pack.labels.masked_fill(~found.mask, IGNORED)
    return replace(pack.with_columns(is_weights=found.weights), labels=labels), found.metrics


def pack_loss(
    pack: PackTensors,
    logprobs: torch.Tensor,  # [1, L], of the weights now
    config: LossConfig,
    *,
    global_tokens: int,
    entropy: torch.Tensor | None = None,  # [1, L]
    student_topk: torch.Tensor | None = None,  # [1, L, k], of `teacher_ids`
) -> PackLoss:
    """The loss of one pack; the sum over packs and ranks is that of the optimizer step.

    A token weighs 1 / `global_tokens`, and in the policy loss its importance weight. An empty pack
    has a loss of exactly 0 and a gradient of 0, so that its rank still meets the others.
    """
    mask = pack.mask
    weight = token_weight(global_tokens)
    # Cut here, what stands at untrained places has no gradient, be it NaN: 0 * NaN is NaN.
    logprobs = logprobs.masked_fill(~mask, 0.0)
    if student_topk is not None:
        student_topk = student_topk.masked_fill(~mask[..., None], 0.0)
    advantages = pack["advantages"]
    terms: dict[str, torch.Tensor] = {}
    if config.distillation is not None:
        distance = _distance(pack, logprobs, config.distillation, student_topk)
        if config.distillation.policy_gradient:
            advantages = combined_advantages(advantages, distance, config.distillation)
        else:
            advantages = config.distillation.task_weight * advantages
            terms["distillation"] = config.distillation.weight * distance
    policy = config.policy
    old = pack.columns.get("old_logprobs")
    if old is None and policy == "policy_gradient":
        old = logprobs.detach()  # it takes no ratio
    inputs = PolicyInputs(
        logprobs=logprobs,
        old_logprobs=pack["old_logprobs"] if old is None else old,
        advantages=advantages,
        mask=mask,
        cu_seq_lens=pack.cu_seq_lens,
    )
    function = POLICY_LOSSES[policy] if isinstance(policy, str) else policy
    policy_loss = function(inputs, config)
    if config.importance is not None and "is_weights" not in pack.columns:
        raise ValueError("importance is set, and the pack has no is_weights: call corrected first")
    if "is_weights" in pack.columns:
        policy_loss = policy_loss * pack["is_weights"]
    terms = {"policy": policy_loss, **terms}
    if config.kl is not None:
        terms["kl"] = config.kl_coef * kl(logprobs, pack["ref_logprobs"], config.kl)
    if config.entropy_coef:
        if entropy is None:
            raise ValueError("entropy_coef is set, and no entropy was given")
        terms["entropy"] = -config.entropy_coef * entropy
    sums = {n: term.masked_fill(~mask, 0.0).sum() * weight for n, term in terms.items()}
    moved = policy_metrics(inputs, config)
    metrics = {f"loss_{name}": float(value.detach()) for name, value in sums.items()}
    metrics |= {f"train_policy_{name}": value for name, value in moved.items()}
    return PackLoss(torch.stack(list(sums.values())).sum(), metrics)


def _distance(
    pack: PackTensors,
    logprobs: torch.Tensor,
    config: DistillationConfig,
    student_topk: torch.Tensor | None,
) -> torch.Tensor:
    if config.mode in TOPK:
        if student_topk is None:
            raise ValueError(f"distillation: {config.mode} needs the student's top-k log-probs")
        return topk_divergence(student_topk, pack["teacher_logprobs"], config)
    student = pack["old_logprobs"] if config.mode == "k1" else logprobs
    return sampled_divergence(student, pack["teacher_logprobs"], config)
