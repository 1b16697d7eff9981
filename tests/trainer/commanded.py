"""What settings in tests name: rollouts that never open, a model of a file or two, a loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.loss import LossConfig
from trainer.loss.policy import PolicyInputs

PROMPTS = 10


async def open_rollouts(settings: Mapping[str, Any], **_: Any) -> Any:
    """A `trainer.rollouts.OpenRollouts`; the loop of these tests never calls it."""
    raise AssertionError("nothing was to be opened")


def describe(settings: Mapping[str, Any], *, model_path: str, seed: int) -> dict[str, Any]:
    """What is known without opening anything."""
    if "tasks" not in settings:
        raise ValueError("tasks are missing")
    assert (Path(model_path) / "config.json").exists()
    return {"dataset_size": PROMPTS}


def make_model(folder: Path, *, seed: int, words: int = 3) -> None:
    """Files of the names that a model has."""
    folder.mkdir()
    (folder / "config.json").write_text(f'{{"words": {words}, "seed": {seed}}}')
    (folder / "model.safetensors").write_bytes(b"weights")


def make_nothing(folder: Path) -> None:
    """A folder without a model."""
    folder.mkdir()


def open_at_once(settings: Mapping[str, Any]) -> None:
    """Not what is needed: it cannot be awaited."""


def own_loss(inputs: PolicyInputs, config: LossConfig, /) -> torch.Tensor:
    """A loss of one's own."""
    return -inputs.logprobs * inputs.advantages
