"""From log-probs of a pack to a loss and its metrics.

Owns policy losses, penalties, importance correction, distillation, supervised terms, and how they
are weighed against each other: every term is a number a token, times a weight, and the loss of an
optimizer step is the plain sum over tokens, packs and ranks. No collective runs here: where ranks
must agree on a number, it is an argument.
"""

from __future__ import annotations

from trainer.loss.config import LossConfig
from trainer.loss.distillation import (
    DistillationConfig,
    combined_advantages,
    sampled_divergence,
    topk_divergence,
)
from trainer.loss.importance import Correction, ImportanceConfig, check_logprob_kinds, correct
from trainer.loss.kl import KL_KINDS, kl
from trainer.loss.mismatch import mismatch_metrics
from trainer.loss.mtp import mtp_loss, rolled
from trainer.loss.oreal import OrealConfig, oreal_loss, oreal_weights
from trainer.loss.policy import POLICY_LOSSES, policy_metrics
from trainer.loss.sft import sft_due, sft_weights
from trainer.loss.step import PackLoss, corrected, pack_loss, with_old_logprobs
from trainer.loss.tally import Tally
from trainer.loss.tokens import entropy_metrics, token_weight
from trainer.loss.vocabulary import chosen_logprobs, entropy, token_logprobs

__all__ = [
    "KL_KINDS",
    "POLICY_LOSSES",
    "Correction",
    "DistillationConfig",
    "ImportanceConfig",
    "LossConfig",
    "OrealConfig",
    "PackLoss",
    "Tally",
    "check_logprob_kinds",
    "chosen_logprobs",
    "combined_advantages",
    "correct",
    "corrected",
    "entropy",
    "entropy_metrics",
    "kl",
    "mismatch_metrics",
    "mtp_loss",
    "oreal_loss",
    "oreal_weights",
    "pack_loss",
    "policy_metrics",
    "rolled",
    "sampled_divergence",
    "sft_due",
    "sft_weights",
    "token_logprobs",
    "token_weight",
    "topk_divergence",
    "with_old_logprobs",
]
