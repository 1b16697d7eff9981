"""What a model says of the tokens of a pack. Letters: L entries, M of them trained, V words.

Logits are the largest tensor there is, so they are made for the trained entries alone where the
model can, and numbers lie in full length again behind them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final

import torch

from trainer.loss import chosen_logprobs, entropy, token_logprobs
from trainer.materialize import PackTensors
from trainer.ranks.model import base_of

CHOICE: Final = "logits_to_keep"
"""Argument of a model for the entries that are to have logits."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Numbers of every entry; 0 where nothing is trained."""

    logprobs: torch.Tensor  # [1, L] float32
    entropy: torch.Tensor | None = None  # [1, L] float32
    student_topk: torch.Tensor | None = None  # [1, L, k] float32


def score(
    model: Any, pack: PackTensors, *, with_entropy: bool = False, with_topk: bool = False
) -> Scores:
    """One forward pass; with a gradient where that is enabled.

    Args:
        with_entropy: costs two tensors as large as the logits.
        with_topk: log-probs of the column `teacher_ids`.

    Raises:
        ValueError: the pack has what models here do not take.
    """
    mask = pack.mask
    places = mask[0].nonzero()[:, 0]  # [M]
    logits = _logits(model, pack, places)  # [1, M, V]

    def spread(values: torch.Tensor) -> torch.Tensor:
        whole = values.new_zeros((1, pack.size, *values.shape[2:]))
        return whole.index_copy(1, places, values)

    return Scores(
        spread(token_logprobs(logits, pack.labels[:, places])),
        spread(entropy(logits)) if with_entropy else None,
        spread(chosen_logprobs(logits, pack["teacher_ids"][:, places])) if with_topk else None,
    )


def _logits(model: Any, pack: PackTensors, places: torch.Tensor) -> torch.Tensor:  # [1, M, V]
    if pack.routed_experts is not None:
        raise ValueError(
            "the pack replays routed experts, and models of transformers choose their own: leave "
            "`experts` out of the work"
        )
    inputs = pack.model_inputs()
    for name, value in pack.multi_modal.items():
        inputs[name] = value.to(places.device) if isinstance(value, torch.Tensor) else value
    if CHOICE in inspect.signature(base_of(model).forward).parameters:
        return model(**inputs, **{CHOICE: places}).logits
    return model(**inputs).logits[:, places]
