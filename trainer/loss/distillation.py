"""Learning from a teacher: how far the student's tokens are from what the teacher would say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from trainer.loss.kl import LOG_RATIO_LIMIT

Sampled: TypeAlias = Literal["k1", "k3"]
TopK: TypeAlias = Literal["forward", "reverse", "forward_kl_topk"]

SAMPLED: tuple[str, ...] = ("k1", "k3")
TOPK: tuple[str, ...] = ("forward", "reverse", "forward_kl_topk")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationConfig:
    """What the teacher counts, and how it counts beside the task."""

    mode: Sampled | TopK
    policy_gradient: bool = False
    """The distance lowers the advantage of a token, instead of being a loss of its own."""
    task_weight: float = 0.0
    """Of the advantages; the same as `AdvantageConfig.task_adv_weight`."""
    weight: float = 1.0
    top_k: int | None = None
    log_prob_min: float | None = None
    """forward_kl_topk: log-probs below count as this."""
    loss_max: float | None = None
    """k1, k3: a token's distance is within plus and minus this."""

    def __post_init__(self) -> None:
        if self.mode not in (*SAMPLED, *TOPK):
            raise ValueError(f"distillation: mode is one of {', '.join((*SAMPLED, *TOPK))}")
        for name in ("task_weight", "weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"distillation: {name} is a number from 0 on, not {value!r}")
        if self.loss_max is not None and self.loss_max <= 0:
            raise ValueError(f"distillation: loss_max is above 0, not {self.loss_max!r}")
        if self.mode in TOPK:
            if self.top_k is None or self.top_k < 1:
                raise ValueError(f"distillation: {self.mode} needs top_k from 1 on")
            if self.policy_gradient:
                raise ValueError(f"distillation: {self.mode} has no policy gradient")
        elif self.top_k is not None:
            raise ValueError(f"distillation: {self.mode} is of sampled tokens and takes no top_k")
        if self.mode == "k1" and not self.policy_gradient:
            raise ValueError("distillation: k1 has no gradient of its own: set policy_gradient")


def sampled_divergence(
    student_logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, config: DistillationConfig
) -> torch.Tensor:  # [...], as both
    """The distance of a sampled token. k1: old - teacher; k3: exp(x) - x - 1, x = teacher - student
    within 20. Schulman (2020); on-policy distillation, Lu and Thinking Machines Lab (2025).

    Example: k1 of old -0.5, -1 and teacher -0.7, -0.2 is 0.2, -0.8.
    """
    if config.mode == "k1":
        distance = student_logprobs - teacher_logprobs
    else:
        x = (teacher_logprobs - student_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        distance = x.exp() - x - 1
    if config.loss_max is not None:
        distance = distance.clamp(-config.loss_max, config.loss_max)
    return distance


def combined_advantages(
    advantages: torch.Tensor, distance: torch.Tensor, config: DistillationConfig
) -> torch.Tensor:  # [...], as both
    """task_weight A - weight d, without a gradient.

    Example: A 2, d 0.2 and -0.8, weights 1 and 1 give 1.8 and 2.8.
    """
    return config.task_weight * advantages - config.weight * distance.detach()


def topk_divergence(
    student_logprobs: torch.Tensor,  # [..., k] of the teacher's ids
    teacher_logprobs: torch.Tensor,  # [..., k]
    config: DistillationConfig,
) -> torch.Tensor:  # [...]
    """The distance over the teacher's k likeliest tokens, q the teacher and p the student.

    forward_kl_topk: sum q (ln q - ln p). forward and reverse take what is left of both, as one more
    token: sum q (ln q - ln p), or sum p (ln p - ln q). Hinton et al., arXiv 1503.02531.

    Example: q .5, .3 and p .4, .3 give 0.1115718, 0.0304788 and 0.0323821 (reverse).
    """
    if config.mode == "forward_kl_topk":
        p, q = student_logprobs, teacher_logprobs
        if config.log_prob_min is not None:
            p, q = p.clamp(min=config.log_prob_min), q.clamp(min=config.log_prob_min)
        return (q.exp() * (q - p)).sum(-1)
    p, q = _with_rest(student_logprobs), _with_rest(teacher_logprobs)
    if config.mode == "reverse":
        p, q = q, p
    return (q.exp() * (q - p)).sum(-1)


def _with_rest(logprobs: torch.Tensor) -> torch.Tensor:  # [..., k + 1]
    """The log-probs, and that of all other tokens together."""
    least = torch.finfo(logprobs.dtype).tiny
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=least)
    return torch.cat([logprobs, rest.log()], -1)
