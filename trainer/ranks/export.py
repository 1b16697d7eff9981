"""A model as a folder that `AutoModelForCausalLM.from_pretrained` loads, tokenizer included."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.ranks.files import settle
from trainer.ranks.model import base_of, without_bars
from trainer.ranks.weights import empty_shell


def write_export(
    folder: Path, model: Any, weights: Mapping[str, torch.Tensor], tokenizer_path: str | None
) -> None:
    """Write the folder; it is on the disk when this returns.

    Args:
        model: says what kind it is; its own weights, which may be shards, are not looked at.
        weights: all of them, by the names of the model without an adapter.
    """
    shell = empty_shell(base_of(model))
    shell.load_state_dict(dict(weights), assign=True)
    shell.tie_weights()
    with without_bars():
        shell.save_pretrained(folder)
    if tokenizer_path is not None:
        import transformers

        automatic: Any = transformers.AutoTokenizer
        tokenizer = automatic.from_pretrained(tokenizer_path, local_files_only=True)
        tokenizer.save_pretrained(folder)
    settle(folder)
