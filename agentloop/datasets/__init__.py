"""Datasets: prompts from files and from generated tasks, and the order they are drawn in.

Names are loaded when they are used: pyarrow only where files are read.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentloop.datasets.make import make_dataset
    from agentloop.datasets.prompt import Dataset, DatasetError, PromptRow, Tokenizer
    from agentloop.datasets.sampler import Sampler

__all__ = ["Dataset", "DatasetError", "PromptRow", "Sampler", "Tokenizer", "make_dataset"]

_WHERE = {
    "Dataset": "prompt",
    "DatasetError": "prompt",
    "PromptRow": "prompt",
    "Sampler": "sampler",
    "Tokenizer": "prompt",
    "make_dataset": "make",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
