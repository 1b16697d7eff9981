"""The policy that is not to be left too far: who it is, and what it says of a pack."""

from __future__ import annotations

from typing import Any

import torch

from trainer.materialize import PackTensors
from trainer.ranks.scores import score


class Reference:
    """A frozen copy of the first weights, or the model in training with its adapter off."""

    def __init__(self, model: Any, *, adapter_off: bool) -> None:
        """`model` is the copy, or with `adapter_off` the one in training."""
        self._model = model
        self._adapter_off = adapter_off

    @torch.no_grad()
    def logprobs(self, pack: PackTensors) -> torch.Tensor:  # [1, L] float32
        """log p of the labels; 0 where there is no label."""
        if not self._adapter_off:
            return score(self._model, pack).logprobs
        with self._model.disable_adapter():
            return score(self._model, pack).logprobs

    def to(self, device: torch.device | str) -> None:
        """Move a copy; the model in training is moved by its owner."""
        if not self._adapter_off:
            self._model.to(device)
