"""Stages: what is computed for every token of a batch before it is trained.

Each makes one column of the packs, by the weights as they are before the first optimizer step, and
the column goes back to the plane under the keys of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from trainer.loss.config import LossConfig
from trainer.materialize import COLUMNS, PackTensors
from trainer.ranks.trainee import Trainee

_OF_ROLLOUTS = ("input_ids", "labels", "logprobs")


@dataclass(frozen=True, slots=True)
class Stage:
    """One column, and when it is due.

    Those of one's own go beside `STAGES` to `RankGroup.start`. Ranks are other processes: functions
    must be importable there.
    """

    column: str
    """Its name in packs, and the field that it is written back to: one of `COLUMNS`."""
    compute: Callable[[PackTensors, Trainee], torch.Tensor]
    """A number for every entry of a pack. All ranks call it, packs without a row included.
    # [1, L]"""
    due: Callable[[LossConfig], bool] = lambda loss: True
    """Whether a phase with this loss needs it."""

    def __post_init__(self) -> None:
        if self.column in _OF_ROLLOUTS or self.column not in COLUMNS:
            known = ", ".join(sorted(set(COLUMNS).difference(_OF_ROLLOUTS)))
            raise ValueError(f"stage: {self.column!r} is no column of a stage; those are {known}")


def _old_logprobs(pack: PackTensors, trainee: Trainee) -> torch.Tensor:
    return trainee.logprobs(pack)


def _reference_logprobs(pack: PackTensors, trainee: Trainee) -> torch.Tensor:
    return trainee.reference_logprobs(pack)


def _needs_forward(loss: LossConfig) -> bool:
    return loss.needs_forward


def _has_penalty(loss: LossConfig) -> bool:
    return loss.kl is not None


OLD_LOGPROBS: Final = Stage("old_logprobs", _old_logprobs, _needs_forward)
"""What ratios are taken to."""

REFERENCE_LOGPROBS: Final = Stage("ref_logprobs", _reference_logprobs, _has_penalty)
"""What the penalty is a distance to."""

STAGES: Final = (OLD_LOGPROBS, REFERENCE_LOGPROBS)
"""In the order in which they run, before importance correction clears labels."""
