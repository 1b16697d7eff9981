"""Who picks the rows of a claim. One file per sampler; `base` says what a sampler answers."""

from __future__ import annotations

from .base import BaseSampler
from .grpo_group_n_sampler import GRPOGroupNSampler
from .rank_aware_sampler import RankAwareSampler
from .seqlen_balanced_sampler import SeqlenBalancedSampler
from .sequential_sampler import SequentialSampler

__all__ = [
    "BaseSampler",
    "GRPOGroupNSampler",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
]
