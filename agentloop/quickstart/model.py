"""The model of the quickstart: a Qwen3 of a hundred thousand random weights, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentloop.quickstart.tokenizer import CONTEXT, make_tokenizer
from agentloop.tiny import random_model


def make_model(folder: str | Path, *, seed: int) -> Path:
    """A folder with configuration, random weights and tokenizer, as `from_pretrained` takes it.

    The same seed gives the same weights, and the global random state is left alone.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer: Any = make_tokenizer()
    model: Any = random_model(_config(tokenizer), tokenizer, seed=seed)
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    return path


def _config(tokenizer: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
