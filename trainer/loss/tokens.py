"""What one token weighs: the same in every pack of an optimizer step, on every rank."""

from __future__ import annotations

import torch


def token_weight(global_tokens: int) -> float:
    """1 / G, with G the supervised tokens of all packs of an optimizer step on all ranks.

    A step that supervises nothing weighs each token 1, and has a loss of 0. The controller knows G
    from tags; where importance correction clears labels, ranks count and add up.

    Where an engine averages gradients over its ranks, it multiplies the loss by their number.

    Example: packs of 7, 3 and no tokens on three ranks weigh every token 0.1.
    """
    if global_tokens < 0:
        raise ValueError(f"an optimizer step has {global_tokens} supervised tokens")
    return 1.0 / max(global_tokens, 1)


def entropy_metrics(
    mask: torch.Tensor,  # [...] bool, before importance correction
    old_logprobs: torch.Tensor | None = None,
    logprobs: torch.Tensor | None = None,
) -> dict[str, float]:
    """Sums over supervised tokens, to be added over packs and ranks before they are divided.

    -log p of what was sampled estimates the entropy; of the training weights as `train_entropy`, of
    the rollout engine as `rollout_entropy`. `entropy_tokens` is what to divide both by.
    """
    sums = {"entropy_tokens": float(mask.sum())}
    for name, values in (("train_entropy", old_logprobs), ("rollout_entropy", logprobs)):
        if values is not None:
            sums[name] = -float(values.masked_fill(~mask, 0.0).double().sum())
    return sums


def mean_over(
    values: torch.Tensor,  # [...]
    mask: torch.Tensor,  # [...] bool
) -> torch.Tensor:  # []
    """The mean of masked entries; 0 of none."""
    return values.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def sequence_ids(cu_seq_lens: torch.Tensor) -> torch.Tensor:  # [L] int64
    """Which sequence of a pack each entry belongs to."""
    ends = cu_seq_lens[1:].to(torch.int64)
    marks = ends.new_zeros(int(ends[-1]) + 1)
    marks.index_add_(0, ends, torch.ones_like(ends))
    return marks[:-1].cumsum(0)


def sums_by_sequence(
    values: torch.Tensor,  # [1, L]
    mask: torch.Tensor,  # [1, L] bool
    cu_seq_lens: torch.Tensor,  # [S + 1]
) -> tuple[torch.Tensor, torch.Tensor]:  # [S], [S]
    """Sum and number of the masked entries of each sequence."""
    ids = sequence_ids(cu_seq_lens)
    flat = values.reshape(-1).masked_fill(~mask.reshape(-1), 0.0)
    size = len(cu_seq_lens) - 1
    sums = flat.new_zeros(size).index_add(0, ids, flat)
    return sums, flat.new_zeros(size).index_add(0, ids, mask.reshape(-1).to(flat.dtype))
