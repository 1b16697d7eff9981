"""What a strategy gets to plan: lengths, capacity, ranks, steps, and the randomness it may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.plan.pack import StepSplit


@dataclass(frozen=True, slots=True)
class Job:
    """One call of a strategy. It has rows, and each fits a pack."""

    lengths: Sequence[int]  # [rows] T of each
    cap: int
    dp_size: int
    steps: int
    """Optimizer steps wanted; a strategy may make fewer."""
    step_split: StepSplit
    deterministic: bool
    rng: np.random.Generator
    cost_alpha: int
    order: Sequence[int]
    """Every row once, in an order that ties between equal rows follow."""
