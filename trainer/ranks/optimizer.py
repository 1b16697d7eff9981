"""AdamW, and how its rate goes up and down."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trainer.ranks.types import OptimizerSettings


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """The rate of an optimizer step, counted from 0.

    In `warmup_steps` it rises in equal parts from 0, which no step has, to `lr`, which the first
    one after them has. Then it stays, or comes down to `min_lr_ratio` of it, which the first one
    after `total_steps` would have.

    Example: lr 1, warm-up 1, linear to 0 over 5 steps: 0.5, 1, 0.75, 0.5, 0.25, then 0.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.lr
    length = _length(settings)
    done = min((step - settings.warmup_steps) / length, 1.0)
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)


def make_optimizer(
    parameters: Sequence[torch.Tensor], settings: OptimizerSettings
) -> torch.optim.AdamW:
    """A fresh one. ValueError if settings make no schedule."""
    if settings.schedule not in ("constant", "linear", "cosine"):
        raise ValueError(
            f"optimizer: schedule {settings.schedule!r} is no constant, linear or cosine"
        )
    if settings.warmup_steps < 0:
        raise ValueError(f"optimizer: warmup_steps is 0 or more, not {settings.warmup_steps}")
    if settings.schedule != "constant":
        _length(settings)
    return torch.optim.AdamW(
        list(parameters),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def _length(settings: OptimizerSettings) -> int:
    """Steps from the highest rate to the lowest."""
    total = settings.total_steps
    if total is None or total <= settings.warmup_steps:
        raise ValueError(
            f"optimizer: a {settings.schedule} schedule needs total_steps above warmup_steps "
            f"({settings.warmup_steps}), not {total}"
        )
    return total - settings.warmup_steps
