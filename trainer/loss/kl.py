"""Distance of a policy from a reference, from the log-probs that both give the sampled tokens."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

import torch

KlKind: TypeAlias = Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"]

KL_KINDS: Final[tuple[str, ...]] = get_args(KlKind)
LOG_RATIO_LIMIT: Final = 20.0
K3_LIMIT: Final = 10.0


def kl(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: KlKind = "k3"
) -> torch.Tensor:  # [...], as both
    """Estimates of the divergence a token. Schulman, "Approximating KL Divergence" (2020).

    k1 (or kl): lp - ref; abs: |lp - ref|; k2 (or mse): (lp - ref)^2 / 2; k3 (or low_var_kl):
    exp(x) - x - 1 with x = ref - lp within 20, itself within 10.

    Example: lp -1 and ref -1.2 give 0.2, 0.2, 0.02 and 0.0187308.
    """
    difference = logprobs - ref_logprobs
    if kind in ("k1", "kl"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("k2", "mse"):
        return difference**2 / 2
    if kind in ("k3", "low_var_kl"):
        back = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return (back.exp() - back - 1).clamp(-K3_LIMIT, K3_LIMIT)
    raise ValueError(f"kl: kind {kind!r} is none of {', '.join(KL_KINDS)}")
