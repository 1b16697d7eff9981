"""Estimators of scalar advantages: the scores of some sessions in, as many advantages out.

Each computes in float64 and says where its formula is from. r are scores, K how many, n response
lengths. What has no signal is exactly 0:

| case | grpo, dr_grpo | rloo | opo | pass_at_k | reinforce_plus_plus(_baseline) |
|---|---|---|---|---|---|
| K = 1 | 0 | r | 0 | PlanError if k > 1 | 0 |
| all r equal | 0 | 0 | 0 | 0 | 0 |
| all n zero | as usual | as usual | r | as usual | 0 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.advantage.config import PASS_AT_K_EPS, AdvantageConfig
from trainer.errors import PlanError

Floats: TypeAlias = npt.NDArray[np.float64]
GroupEstimator: TypeAlias = Callable[[Floats, Floats, AdvantageConfig], Floats]
"""(scores [K], response lengths [K], config) -> advantages [K]"""

NOISE: Final = 1e-6
"""A deviation below this share of the mean (or of 1) is rounding of equal scores: divided by it,
seven scores of 0.1 in float32 would come out as -0.41."""


def grpo(scores: Floats, lengths: Floats, config: AdvantageConfig) -> Floats:
    """(r - mean) / (std + eps). DeepSeekMath, arXiv 2402.03300."""
    del lengths
    if is_flat(scores):
        return np.zeros_like(scores)
    centered = scores - scores.mean()
    if config.std == "none":
        return centered
    deviation = scores.std(ddof=1 if config.std == "sample" else 0)
    return centered / (deviation + config.divisor_eps())


def dr_grpo(scores: Floats, lengths: Floats, config: AdvantageConfig) -> Floats:
    """GRPO's value times n / max_length, as XTuner has it. Dr. GRPO, arXiv 2503.20783, whose own
    numerator is that of std="none"."""
    return grpo(scores, lengths, config) * lengths / config.max_length


def rloo(scores: Floats, lengths: Floats, config: AdvantageConfig) -> Floats:
    """r less the mean of the others; r itself where there are none. arXiv 2402.14740."""
    del lengths, config
    if len(scores) == 1:
        return scores.copy()
    if scores.max() == scores.min():
        return np.zeros_like(scores)
    return scores - (scores.sum() - scores) / (len(scores) - 1)


def opo(scores: Floats, lengths: Floats, config: AdvantageConfig) -> Floats:
    """r - sum(r n) / (sum(n) + eps), the baseline of least variance. OPO, arXiv 2505.23585."""
    total = lengths.sum()
    if total > 0 and scores.max() == scores.min():
        return np.zeros_like(scores)
    return scores - (scores * lengths).sum() / (total + config.divisor_eps())


def pass_at_k(scores: Floats, lengths: Floats, config: AdvantageConfig) -> Floats:
    """Advantages of the chance that one of k attempts succeeds. Pass@k training, arXiv 2508.10751.

    With c of K sessions above 0, rho = 1 - C(K-c, k) / C(K, k) and sigma = sqrt(rho (1 - rho)):
    a success gets (1 - rho) / sigma, a failure the same less C(K-c-1, k-1) / C(K-1, k-1), its
    chance of being drawn among failures alone.
    """
    del lengths
    count, k = len(scores), config.k
    if count < k:
        raise PlanError(f"pass_at_k with k {k} needs groups of {k} sessions, and one has {count}")
    success = scores > 0
    right = int(success.sum())  # where none succeeded, both terms of a failure are 1 and it gets 0
    rho = 1 - _choose(count - right, k) / _choose(count, k)
    sigma = math.sqrt(rho * (1 - rho)) + config.divisor_eps(PASS_AT_K_EPS)
    alone = _choose(count - right - 1, k - 1) / _choose(count - 1, k - 1)
    advantages = np.full(count, (1 - rho - alone) / sigma)
    advantages[success] = (1 - rho) / sigma
    return advantages


def whitened(returns: Floats, weights: Floats, config: AdvantageConfig) -> Floats:
    """(R - mean) / sqrt(var + eps) over the tokens of a batch. REINFORCE++, arXiv 2501.03262.

    Rows weigh as many tokens as they supervise; the variance has Bessel's correction, as in verl's
    `masked_whiten`. Without discount and per-token penalty the return of every token of a row is
    its score, so one number a row says it all.
    """
    tokens = weights.sum()
    counted = returns[weights > 0]
    if tokens <= 1 or counted.max() == counted.min():
        return np.zeros_like(returns)
    centered = returns - (returns * weights).sum() / tokens
    variance = (centered**2 * weights).sum() / (tokens - 1)
    if math.sqrt(variance) < NOISE * max(1.0, abs(float(counted.mean()))):
        return np.zeros_like(returns)
    return centered / math.sqrt(variance + config.divisor_eps())


def is_flat(scores: Floats) -> bool:
    """Whether scores do not differ by more than rounding."""
    if scores.max() == scores.min():
        return True
    return bool(scores.std() < NOISE * max(1.0, abs(float(scores.mean()))))


ESTIMATORS: Final[Mapping[str, GroupEstimator]] = MappingProxyType(
    {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "opo": opo, "pass_at_k": pass_at_k}
)
"""Those that compare the sessions of one group, by name."""


def _choose(n: int, r: int) -> int:
    return math.comb(n, r) if 0 <= r <= n else 0
