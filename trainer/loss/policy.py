"""Policy losses: how much a token's log-prob is to rise or fall. One number a token, no sum yet.

Names: lp the log-prob now, old that at the start of the step, A the advantage,
r = exp(lp - old) the ratio. A gradient flows through lp alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, cast, runtime_checkable

import torch

from trainer.loss.kl import LOG_RATIO_LIMIT
from trainer.loss.tokens import mean_over, sequence_ids, sums_by_sequence

if TYPE_CHECKING:
    from trainer.loss.config import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """What a policy loss is a function of. # all [1, L]"""

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    """True where a token is trained; what a loss has elsewhere is not looked at."""
    cu_seq_lens: torch.Tensor  # [S + 1] int32

    @property
    def log_ratio(self) -> torch.Tensor:
        """lp - old, within 20."""
        difference = self.logprobs - self.old_logprobs
        return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@runtime_checkable
class PolicyLoss(Protocol):
    """A loss of one's own."""

    def __call__(self, inputs: PolicyInputs, config: LossConfig, /) -> torch.Tensor: ...


def ppo(inputs: PolicyInputs, config: LossConfig) -> torch.Tensor:
    """max(-r A, -clip(r, 1 - low, 1 + high) A). PPO, arXiv 1707.06347.

    Where A < 0, at most -c A: the dual clip of arXiv 1912.09729. With high above low it is the
    decoupled clip of DAPO, arXiv 2503.14476.

    Example: ratios 1.1, 1.5, 0.5, 4 with A 1, 1, -1, -1, clips of 0.2 and c = 3 give -1.1, -1.2,
    0.8, 3.
    """
    loss = _clipped(inputs.log_ratio.exp(), inputs.advantages, config)
    if config.dual_clip is None:
        return loss
    bound = -config.dual_clip * inputs.advantages
    return torch.where(inputs.advantages < 0, torch.minimum(bound, loss), loss)


def gspo(inputs: PolicyInputs, config: LossConfig) -> torch.Tensor:
    """PPO's clip on the ratio of the whole sequence. GSPO, arXiv 2507.18071, its token variant.

    s = exp(mean of lp - old over the trained tokens), and a token's ratio is s in value and r in
    gradient: sg(s) r / sg(r). The paper weighs sequences equally; here tokens are, as everywhere.
    """
    sums, counts = sums_by_sequence(
        inputs.logprobs.detach() - inputs.old_logprobs, inputs.mask, inputs.cu_seq_lens
    )
    means = (sums / counts.clamp(min=1)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    whole = means[sequence_ids(inputs.cu_seq_lens)][None]
    ratio = torch.exp(whole + inputs.logprobs - inputs.logprobs.detach())
    return _clipped(ratio, inputs.advantages, config)


def cispo(inputs: PolicyInputs, config: LossConfig) -> torch.Tensor:
    """-sg(clip(r, 1 - low, 1 + high)) A lp. CISPO, arXiv 2506.13585: every token keeps a gradient.

    Without `clip_low` nothing is clipped from below, as in the paper's experiments.
    """
    low = None if config.clip_low is None else 1 - config.clip_low
    weight = inputs.log_ratio.detach().exp().clamp(low, 1 + _set(config.clip_high))
    return -weight * inputs.advantages * inputs.logprobs


def policy_gradient(inputs: PolicyInputs, config: LossConfig) -> torch.Tensor:
    """-A lp. REINFORCE, Williams (1992)."""
    del config
    return -inputs.advantages * inputs.logprobs


@dataclass(frozen=True, slots=True)
class _Registered:
    """A loss of this file, and the settings that it needs."""

    function: PolicyLoss
    needs: tuple[str, ...] = ()

    def __call__(self, inputs: PolicyInputs, config: LossConfig, /) -> torch.Tensor:
        return self.function(inputs, config)


POLICY_LOSSES: Final[Mapping[str, _Registered]] = MappingProxyType(
    {
        "ppo": _Registered(ppo, ("clip_low", "clip_high")),
        "gspo": _Registered(gspo, ("clip_low", "clip_high")),
        "cispo": _Registered(cispo, ("clip_high",)),
        "policy_gradient": _Registered(policy_gradient),
    }
)


def policy_metrics(inputs: PolicyInputs, config: LossConfig) -> dict[str, float]:
    """How far the policy has moved since the start of the step; all 0 where nothing is trained."""
    names = ("ratio_abs_dev_mean", "kl1", "kl3", "clip_frac_low", "clip_frac_high")
    mask = inputs.mask
    if not bool(mask.any()):
        return dict.fromkeys((*names, "ratio_max", "ratio_min"), 0.0)
    log_ratio = inputs.log_ratio.detach()
    ratio = log_ratio.exp()
    low = float("-inf") if config.clip_low is None else 1 - config.clip_low
    high = float("inf") if config.clip_high is None else 1 + config.clip_high
    columns = (
        (ratio - 1).abs(),
        -log_ratio,
        ratio - 1 - log_ratio,
        (ratio < low).float(),
        (ratio > high).float(),
    )
    metrics = {n: float(mean_over(c, mask)) for n, c in zip(names, columns, strict=True)}
    inside = ratio[mask]
    return {**metrics, "ratio_max": float(inside.max()), "ratio_min": float(inside.min())}


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, config: LossConfig) -> torch.Tensor:
    inside = ratio.clamp(1 - _set(config.clip_low), 1 + _set(config.clip_high))
    return torch.maximum(-ratio * advantages, -inside * advantages)


def _set(value: float | None) -> float:
    return cast("float", value)  # `LossConfig` has seen to it
