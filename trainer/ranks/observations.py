"""What a batch looks like before it is trained: entropies, mismatch, importance correction."""

from __future__ import annotations

import torch

from trainer.loss import (
    Tally,
    corrected,
    entropy_metrics,
    mismatch_metrics,
    with_old_logprobs,
)
from trainer.loss.config import LossConfig
from trainer.loss.importance import IMPORTANCE_NAMES
from trainer.loss.mismatch import MISMATCH_NAMES
from trainer.materialize import PackTensors
from trainer.ranks.collectives import Peers
from trainer.trajectory import BatchTraits

_ENTROPY = ("entropy_tokens", "train_entropy", "rollout_entropy")


class Observations:
    """Metrics of packs on their way to numbers of the whole batch.

    Which numbers there are follows from settings and from the batch, never from the packs of one
    rank, so that ranks meet in the same reductions.
    """

    def __init__(self, loss: LossConfig, traits: BatchTraits) -> None:
        self._loss = loss
        self._has_rollout = traits.has_rollout_logprobs
        self._entropy = torch.zeros(len(_ENTROPY), dtype=torch.float64)
        compares = loss.needs_forward and self._has_rollout
        self._mismatch = Tally(MISMATCH_NAMES) if compares else None
        self._importance = Tally(IMPORTANCE_NAMES) if loss.importance is not None else None

    def see(
        self, pack: PackTensors, recomputed: torch.Tensor | None = None  # [1, L]
    ) -> PackTensors:  # fmt: skip
        """Count a pack, and give it what its loss needs: old log-probs, and where importance
        correction is set its weights, without the labels that it clears."""
        rollout = pack.columns.get("logprobs") if self._has_rollout else None
        # Entropies are of all supervised tokens: those that correction clears were sampled too.
        seen = entropy_metrics(pack.mask, recomputed, rollout)
        self._entropy += torch.tensor(
            [seen.get(name, 0.0) for name in _ENTROPY], dtype=torch.float64
        )
        if recomputed is None and rollout is None and self._loss.policy == "policy_gradient":
            return pack  # it takes no ratio, and rows of demonstrators have no log-probs
        pack = with_old_logprobs(pack, self._loss, recomputed)
        if self._mismatch is not None:
            metrics = mismatch_metrics(pack["old_logprobs"], pack["logprobs"], pack.mask)
            self._mismatch.add(metrics)
        if self._importance is not None and self._loss.importance is not None:
            pack, metrics = corrected(pack, self._loss.importance)
            self._importance.add(metrics)
        return pack

    def reduced(self, peers: Peers) -> dict[str, float]:
        """The metrics over all packs of all ranks, which all enter."""
        tokens, train, rollout = map(float, peers.all_reduce_sum(self._entropy))
        metrics: dict[str, float] = {}
        if self._loss.needs_forward:
            metrics["entropy/train"] = train / max(tokens, 1.0)
        if self._has_rollout:
            metrics["entropy/rollout"] = rollout / max(tokens, 1.0)
        for prefix, tally in (("mismatch", self._mismatch), ("rollout_is", self._importance)):
            if tally is not None:
                total, largest, smallest = tally.vectors()
                merged = tally.result(
                    (
                        peers.all_reduce_sum(total),
                        peers.all_reduce_max(largest),
                        peers.all_reduce_min(smallest),
                    )
                )
                metrics |= {f"{prefix}/{name}": value for name, value in merged.items()}
        return metrics
