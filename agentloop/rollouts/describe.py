"""What is known of a run's rollouts before any is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentloop.assembly import load_tokenizer
from agentloop.config import RolloutsConfig
from agentloop.datasets import make_dataset


def describe(settings: Mapping[str, Any], *, model_path: str, seed: int) -> dict[str, int]:
    """How many prompts an epoch has: `dataset_size`. The seed changes nothing about that.

    Raises:
        ValueError: the settings make no sense, or a dataset or the model is not there.
    """
    config = RolloutsConfig.model_validate(settings)
    tokenizer = load_tokenizer(Path(model_path))
    return {
        "dataset_size": sum(len(make_dataset(task.dataset, tokenizer)) for task in config.tasks)
    }
