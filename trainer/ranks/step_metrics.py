"""Metrics of one optimizer step, from those of its packs to one number over all ranks."""

from __future__ import annotations

from typing import Final

import torch

from trainer.loss import PackLoss, Tally
from trainer.materialize import PackTensors
from trainer.ranks.collectives import Peers

PREFIX: Final = "train_policy_"
TERMS: Final = "loss_"


class StepMetrics:
    """Adds up packs. Names follow from the loss and the columns, so all ranks have the same."""

    def __init__(self) -> None:
        self._loss = 0.0
        self._terms: dict[str, float] = {}
        self._moved: Tally | None = None
        self._consumed = 0
        self._attended = 0.0
        self._attendable = 0.0

    def add(self, pack: PackTensors, found: PackLoss) -> None:
        """Count one pack, whose loss has had its backward pass."""
        self._loss += float(found.loss.detach())
        for name, value in found.metrics.items():
            if name.startswith(TERMS):
                self._terms[name] = self._terms.get(name, 0.0) + value
        moved = {n: v for n, v in found.metrics.items() if n.startswith(PREFIX)}
        if self._moved is None:
            self._moved = Tally(list(moved))
        self._moved.add(moved if pack.num_supervised else None)
        self._consumed += pack.consumed_tokens
        self._attended += pack.attention_ratio * pack.size**2
        self._attendable += float(pack.size) ** 2

    def reduced(self, peers: Peers) -> dict[str, float]:
        """The metrics; every rank enters. Losses are sums over ranks, what the policy moved is as
        `Tally` says, and the rest is this rank's own."""
        if self._moved is None:
            raise ValueError("an optimizer step has a pack on every rank, if only an empty one")
        names = ["loss", *self._terms]
        sums = torch.tensor([self._loss, *self._terms.values()], dtype=torch.float64)
        peers.all_reduce_sum(sums)
        found = {name: float(value) for name, value in zip(names, sums, strict=True)}
        total, largest, smallest = self._moved.vectors()
        reduced = (
            peers.all_reduce_sum(total),
            peers.all_reduce_max(largest),
            peers.all_reduce_min(smallest),
        )
        moved = self._moved.result(reduced)
        found |= {f"reduced_{name}": value for name, value in moved.items()}
        found["max_ratio"] = moved[f"{PREFIX}ratio_max"]
        found["step_consumed_tokens"] = float(self._consumed)
        found["efficient_attn_ratio"] = self._attended / self._attendable
        return found
