"""Multi-token prediction: a head of depth d predicts the token d further on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch

from dataplane.fields import IGNORED
from trainer.loss.kl import kl


def rolled(
    values: torch.Tensor,  # [1, L]
    cu_seq_lens: torch.Tensor,  # [S + 1] int32
    depth: int,
    fill: float,
) -> torch.Tensor:  # [1, L]
    """Every sequence moved `depth` to the left, and `fill` behind it.

    Of the whole pack, before it is split: a head looks over the edge of a rank's slice.

    Example: labels [-100, 20, 21, | 7, 8] at depth 1 become [20, 21, -100, | 8, -100].
    """
    if depth < 0:
        raise ValueError(f"a head predicts 0 tokens further on or more, not {depth}")
    moved = torch.full_like(values, fill)
    ends: list[int] = cast("Any", cu_seq_lens).tolist()
    for start, end in pairwise(ends):
        if end - start > depth:
            moved[..., start : end - depth] = values[..., start + depth : end]
    return moved


def mtp_loss(
    head_logprobs: torch.Tensor,  # [1, L], of the rolled labels
    labels: torch.Tensor,  # [1, L], rolled
    logprobs: torch.Tensor | None = None,  # [1, L], of the rollout engine, rolled
) -> torch.Tensor:  # [1, L]
    """The loss of one head, a token: k3 to what the rollout engine gave, else cross-entropy.

    DeepSeek-V3, arXiv 2412.19437. 0 where there is no label.
    """
    loss = -head_logprobs if logprobs is None else kl(head_logprobs, logprobs, "k3")
    return loss.masked_fill(labels == IGNORED, 0.0)
