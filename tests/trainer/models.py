"""Tiny random models of the shapes that are trained, in float32 on the CPU."""

from __future__ import annotations

from typing import Any, Final

import torch

VOCABULARY: Final = 61
SHAPES: Final = ("llama", "qwen3", "gpt2")


def tiny(shape: str, seed: int = 0) -> Any:
    """A model of two layers whose weights follow from the seed."""
    # Importing transformers takes seconds, and most tests of a trainer need no model.
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    decoder: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(seed)
    if shape == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**decoder))
    elif shape == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**decoder, head_dim=8))
    elif shape == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )
        )  # fmt: skip
    else:
        raise ValueError(f"no tiny model of shape {shape!r}")
    # Random weights of the usual spread make logits of nearly nothing; these disagree more.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "norm" not in name:
                weight.mul_(4.0)
    return model.float().train()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """The gradients that lie in the model, which is left without them."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found
