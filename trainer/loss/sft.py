"""Supervised steps among those of reinforcement learning: when, and what their tokens weigh."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from trainer.loss.tokens import sequence_ids, sums_by_sequence

Reduction: TypeAlias = Literal["token", "sample", "square"]


def sft_due(rollout: int, rollouts_per_sft: int) -> bool:
    """Whether a supervised optimizer step follows this rollout, counted from 1.

    Example: with 4, after rollouts 4, 8, 12.
    """
    if rollouts_per_sft < 1:
        raise ValueError(f"a supervised step follows every 1 rollout or more: {rollouts_per_sft}")
    return rollout > 0 and rollout % rollouts_per_sft == 0


def sft_weights(
    mask: torch.Tensor,  # [1, L] bool
    cu_seq_lens: torch.Tensor,  # [S + 1] int32
    reduction: Reduction,
    *,
    num_padding: int = 0,
) -> torch.Tensor:  # [1, L]
    """What each supervised token weighs in the cross-entropy, before division by the sum of all
    weights of the step on all ranks.

    token: 1; sample: 1 / n of its sequence, so that sequences count equally; square: 1 / sqrt(n).

    Example: sequences of 1 and 2 supervised tokens weigh 1, 1, 1; 1, 1/2, 1/2; 1, 0.7071, 0.7071.

    Raises:
        ValueError: a sequence supervises nothing, under sample and square.
    """
    ones = mask.float()
    if reduction == "token":
        return ones
    if reduction not in ("sample", "square"):
        raise ValueError(f"sft: reduction {reduction!r} is none of token, sample, square")
    _, counts = sums_by_sequence(ones, mask, cu_seq_lens)
    real = cu_seq_lens[:-1] < mask.shape[1] - num_padding
    idle = int((real & (counts == 0)).sum())
    if idle:
        raise ValueError(f"sft: {idle} sequences supervise no token, and cannot weigh 1 / 0")
    each = 1 / counts.clamp(min=1)
    each = each if reduction == "sample" else each.sqrt()
    return ones * each[sequence_ids(cu_seq_lens)][None]
