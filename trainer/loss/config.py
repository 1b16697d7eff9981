"""What a policy is trained with: settings, checked before a step begins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainer.loss.distillation import DistillationConfig
from trainer.loss.importance import ImportanceConfig
from trainer.loss.kl import KL_KINDS, KlKind
from trainer.loss.policy import POLICY_LOSSES, PolicyLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The terms of a loss, and how much each weighs."""

    policy: str | PolicyLoss = "ppo"
    """One of `POLICY_LOSSES`, or a function of the same arguments."""
    clip_low: float | None = None
    """How far below 1 a ratio counts: ppo and gspo need it, cispo takes it."""
    clip_high: float | None = None
    """How far above 1: ppo, gspo and cispo need it. Larger than `clip_low` it leaves unlikely
    tokens more room (the decoupled clip of DAPO)."""
    dual_clip: float | None = 3.0
    """ppo: with a negative advantage a token's loss is at most this times its size."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """What ratios are taken to: log-probs of the weights at the start of the step, or those of the
    rollout engine, which saves a forward pass (bypass mode)."""
    kl: KlKind | None = None
    """A penalty for leaving the reference; needs the column `ref_logprobs`."""
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    """A reward for a wide distribution."""
    importance: ImportanceConfig | None = None
    """Correction of what the rollout engine computes differently; needs the column `logprobs`."""
    distillation: DistillationConfig | None = None

    def __post_init__(self) -> None:
        if isinstance(self.policy, str):
            if self.policy not in POLICY_LOSSES:
                raise ValueError(
                    f"loss: policy {self.policy!r} is none of {', '.join(POLICY_LOSSES)}, nor a "
                    "function"
                )
            for name in POLICY_LOSSES[self.policy].needs:
                if getattr(self, name) is None:
                    raise ValueError(f"loss: {self.policy} needs {name}, which is not set")
        for name in ("clip_low", "clip_high", "dual_clip", "kl_coef", "entropy_coef"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"loss: {name} is a number from 0 on, not {value!r}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"loss: dual_clip is above 1 or None, not {self.dual_clip!r}")
        if self.kl is not None and self.kl not in KL_KINDS:
            raise ValueError(f"loss: kl is one of {', '.join(KL_KINDS)}, not {self.kl!r}")
        if self.old_logprobs not in ("recompute", "rollout"):
            raise ValueError(
                f"loss: old_logprobs is 'recompute' or 'rollout', not {self.old_logprobs!r}"
            )
        if self.old_logprobs == "rollout" and self.importance is not None:
            raise ValueError(
                "loss: importance correction compares recomputed log-probs with the rollout's, and "
                "old_logprobs is 'rollout'"
            )

    @property
    def needs_forward(self) -> bool:
        """Whether log-probs are recomputed before the first optimizer step."""
        return self.old_logprobs == "recompute"
