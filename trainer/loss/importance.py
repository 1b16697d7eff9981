"""Importance correction: tokens weighed by how likely training weights find what was sampled.

The rollout engine samples from weights of the same numbers in another arithmetic, or from older
ones. A token's ratio is exp(old - rollout); what is far off weighs less, or loses its label.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Literal

import torch

from trainer.errors import PlanError
from trainer.loss.kl import LOG_RATIO_LIMIT
from trainer.loss.tokens import mean_over, sequence_ids, sums_by_sequence

Bounds = tuple[float, float]
"""(upper, lower), in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceConfig:
    """How ratios become weights; every pair of bounds is (upper, lower)."""

    threshold: Bounds
    level: Literal["token", "sequence", "geometric"] = "token"
    """Of which a ratio is taken: a token, the product of a sequence, or its geometric mean."""
    mode: Literal["truncate", "mask", "both"] = "truncate"
    """Whether ratios are clamped to the bounds (at both ends), or tokens beyond them cleared."""
    mask_threshold: Bounds | None = None
    """Beyond which tokens are cleared; `threshold` if not given."""
    veto: Bounds | None = None
    """A sequence with a single token beyond these loses all labels."""

    def __post_init__(self) -> None:
        if self.level not in ("token", "sequence", "geometric"):
            raise ValueError(f"importance: level {self.level!r} is no token, sequence or geometric")
        if self.mode not in ("truncate", "mask", "both"):
            raise ValueError(f"importance: mode {self.mode!r} is no truncate, mask or both")
        for name in ("threshold", "mask_threshold", "veto"):
            bounds = getattr(self, name)
            if bounds is not None:
                upper, lower = bounds
                if not (math.isfinite(upper) and upper > lower >= 0):
                    raise ValueError(f"importance: {name} is (upper, lower), not {bounds!r}")


@dataclass(frozen=True, slots=True)
class Correction:
    """What becomes of the tokens of a pack."""

    weights: torch.Tensor  # [1, L], 0 where nothing was supervised
    mask: torch.Tensor  # [1, L] bool, what is still supervised
    metrics: dict[str, float] | None
    """None where nothing was supervised."""


IMPORTANCE_NAMES: Final = tuple(
    f"rollout_is_{name}"
    for name in (
        "mean std min max eff_sample_size veto_fraction catastrophic_token_fraction "
        "ratio_fraction_high ratio_fraction_low masked_fraction "
        "seq_mean seq_std seq_max seq_min seq_max_deviation"
    ).split()
)
"""What metrics a correction has."""


def correct(
    old_logprobs: torch.Tensor,  # [1, L]
    logprobs: torch.Tensor,  # [1, L], of the rollout engine
    mask: torch.Tensor,  # [1, L] bool
    cu_seq_lens: torch.Tensor,  # [S + 1] int32
    config: ImportanceConfig,
) -> Correction:
    """Weights and labels of a pack. Truncated importance sampling: Ionides (2008), as in xtuner.

    Example: ratios 1.22, 0.37, 1, 1.35 truncated to (1.3, 0.5) weigh 1.22, 0.5, 1, 1.3; masked by
    them the second and the fourth lose their labels.
    """
    raw = (old_logprobs - logprobs).masked_fill(~mask, 0.0)
    token = raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    ratio = token if config.level == "token" else _by_sequence(raw, mask, cu_seq_lens, config)
    weights = ratio
    keep = mask
    if config.mode in ("truncate", "both"):
        upper, lower = config.threshold
        weights = ratio.clamp(lower, upper)
    if config.mode in ("mask", "both"):
        keep = keep & ~_outside(ratio, config.mask_threshold or config.threshold)
    wild = torch.zeros_like(mask)
    vetoed = torch.zeros_like(mask)
    if config.veto is not None:
        wild = mask & _outside(token, config.veto)
        counts, _ = sums_by_sequence(wild.float(), mask, cu_seq_lens)
        vetoed = (counts > 0)[sequence_ids(cu_seq_lens)][None]
        keep = keep & ~vetoed
    weights = weights.masked_fill(~mask, 0.0)
    metrics = None
    if bool(mask.any()):
        metrics = _metrics(weights, ratio, mask, keep, wild, vetoed, cu_seq_lens, config)
    return Correction(weights, keep, metrics)


def check_logprob_kinds(kinds: Iterable[str | None], accepted: Collection[str] = ("raw",)) -> None:
    """PlanError unless the rollout's log-probs are of the distribution that training computes.

    Args:
        kinds: tag `logprob_kind` of the rows.
        accepted: `raw` for a softmax of the logits as they are, `processed` where training applies
            the sampler's temperature too. `recomputed` ones tell nothing of the sampler.
    """
    wrong = sorted({str(kind) for kind in kinds if kind not in accepted})
    if wrong:
        raise PlanError(
            f"importance correction takes log-probs of kind {', '.join(accepted)}, and rows have "
            f"{', '.join(wrong)}: have the engine return those, or turn the correction off"
        )


def _by_sequence(
    raw: torch.Tensor, mask: torch.Tensor, cu_seq_lens: torch.Tensor, config: ImportanceConfig
) -> torch.Tensor:
    sums, counts = sums_by_sequence(raw, mask, cu_seq_lens)
    if config.level == "geometric":
        sums = sums / counts.clamp(min=1)
    whole = sums.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return whole[sequence_ids(cu_seq_lens)][None]


def _outside(ratio: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    upper, lower = bounds
    return (ratio > upper) | (ratio < lower)


def _metrics(
    weights: torch.Tensor,
    ratio: torch.Tensor,
    mask: torch.Tensor,
    keep: torch.Tensor,
    wild: torch.Tensor,
    vetoed: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    config: ImportanceConfig,
) -> dict[str, float]:
    upper, lower = config.threshold
    inside = weights[mask].double()
    sums, counts = sums_by_sequence(weights, mask, cu_seq_lens)
    real = counts > 0
    each = (sums[real] / counts[real]).double()
    vetoes, _ = sums_by_sequence(vetoed.float(), mask, cu_seq_lens)
    square = float((inside**2).mean())
    found = {
        "mean": float(inside.mean()),
        "std": float(inside.std(correction=0)),
        "min": float(inside.min()),
        "max": float(inside.max()),
        "eff_sample_size": float(inside.mean()) ** 2 / square if square else 0.0,
        "veto_fraction": float((vetoes[real] > 0).double().mean()),
        "catastrophic_token_fraction": float(mean_over(wild.double(), mask)),
        "ratio_fraction_high": float(mean_over((ratio > upper).double(), mask)),
        "ratio_fraction_low": float(mean_over((ratio < lower).double(), mask)),
        "masked_fraction": float(mean_over((~keep).double(), mask)),
        "seq_mean": float(each.mean()),
        "seq_std": float(each.std(correction=0)),
        "seq_max": float(each.max()),
        "seq_min": float(each.min()),
        "seq_max_deviation": float((each - 1).abs().max()),
    }
    return {f"rollout_is_{name}": value for name, value in found.items()}
