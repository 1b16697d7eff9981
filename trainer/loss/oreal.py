"""OREAL: tokens of good answers are imitated, those of bad ones pushed away. arXiv 2502.06781."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class OrealConfig:
    """How much each part weighs."""

    positive: float = 1.0
    negative: float = 1.0
    positive_policy: float = 1.0
    """Of good tokens, as the policy loss has them."""
    positive_sft: float = 1.0
    """Of good tokens, as a cross-entropy has them."""

    def __post_init__(self) -> None:
        for name in ("positive", "negative", "positive_policy", "positive_sft"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"oreal: {name} is a number from 0 on, not {value!r}")


def oreal_weights(
    mask: torch.Tensor,  # [1, L] bool
    advantages: torch.Tensor,  # [1, L]
    config: OrealConfig,
    *,
    positive_tokens: int | None = None,
    negative_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # [1, L], [1, L]
    """Weights of the policy loss and of the cross-entropy, a token.

    Args:
        positive_tokens: supervised tokens of A > 0 in all packs on all ranks; of this pack if not
            given. `negative_tokens` counts the other supervised ones. Where there are none their
            weight is 0, and never NaN.

    Example: with A 1, 1, -1, 0 on four tokens policy weights are all 1/2, and those of the
    cross-entropy 1/2, 1/2, 0, 0.
    """
    good = mask & (advantages > 0)
    bad = mask & ~good
    ours = (int(good.sum()), int(bad.sum()))
    goods = max(ours[0] if positive_tokens is None else positive_tokens, 1)
    bads = max(ours[1] if negative_tokens is None else negative_tokens, 1)
    share, other = config.positive / goods, config.negative / bads
    policy = good.float() * (config.positive_policy * share) + bad.float() * other
    return policy, good.float() * (config.positive_sft * share)


def oreal_loss(
    policy_loss: torch.Tensor,  # [1, L]
    logprobs: torch.Tensor,  # [1, L]
    weights: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:  # []
    """The policy loss of all tokens and the cross-entropy of the good ones, summed."""
    policy, sft = weights
    zero = torch.zeros_like(policy_loss)
    terms = torch.where(policy > 0, policy_loss * policy, zero)
    return (terms - torch.where(sft > 0, logprobs * sft, zero)).sum()
