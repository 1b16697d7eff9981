"""How differently the rollout engine and the training weights see the same tokens."""

from __future__ import annotations

import math

import torch

from trainer.loss.kl import LOG_RATIO_LIMIT

TINY = 1e-8


def mismatch_metrics(
    old_logprobs: torch.Tensor,  # [1, L]
    logprobs: torch.Tensor,  # [1, L], of the rollout engine
    mask: torch.Tensor,  # [1, L] bool, before importance correction
) -> dict[str, float] | None:
    """The mismatch over the supervised tokens of a pack, which counts as one row.

    None where nothing is supervised, which a `Tally` leaves out. With lr = old - rollout: the mean
    of -lr, of exp(lr) - lr - 1 (Schulman's k1 and k3, 2020) and of |lr|; perplexities of both,
    their ratio, and the difference of their logarithms.

    Example: one token of old -1 and rollout -1.5 gives -0.5, 0.1487213 and 0.5, and perplexities
    of 2.718 and 4.482.
    """
    count = int(mask.sum())
    if not count:
        return None

    def mean(values: torch.Tensor) -> float:
        return float(values[mask].double().sum()) / (count + TINY)

    ratio = old_logprobs - logprobs
    limited = ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ours, theirs = -mean(old_logprobs), -mean(logprobs)
    difference = ours - theirs
    return {
        "mismatch_kl": mean(-ratio),
        "mismatch_k3_kl": mean(limited.exp() - limited - 1),
        "mismatch_training_log_ppl": ours,
        "mismatch_training_ppl": _exp(ours),
        "mismatch_rollout_log_ppl": theirs,
        "mismatch_rollout_ppl": _exp(theirs),
        "mismatch_log_ppl_diff": difference,
        "mismatch_log_ppl_abs_diff": abs(difference),
        "mismatch_log_ppl_diff_max": difference,
        "mismatch_log_ppl_diff_min": difference,
        "mismatch_ppl_ratio": _exp(difference),
        "mismatch_logprob_abs_diff": mean(ratio.abs()),
    }


MISMATCH_NAMES: tuple[str, ...] = (
    "mismatch_kl",
    "mismatch_k3_kl",
    "mismatch_training_log_ppl",
    "mismatch_training_ppl",
    "mismatch_rollout_log_ppl",
    "mismatch_rollout_ppl",
    "mismatch_log_ppl_diff",
    "mismatch_log_ppl_abs_diff",
    "mismatch_log_ppl_diff_max",
    "mismatch_log_ppl_diff_min",
    "mismatch_ppl_ratio",
    "mismatch_logprob_abs_diff",
)
"""What `mismatch_metrics` returns, for ranks that have nothing to return."""


def _exp(value: float) -> float:
    """exp that overflows to infinity, as tensors do."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
