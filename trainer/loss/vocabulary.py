"""From logits over a vocabulary to numbers a token. Letters: L entries, V words, k chosen ones."""

from __future__ import annotations

import torch

from dataplane.fields import IGNORED


def token_logprobs(
    logits: torch.Tensor,  # [..., L, V]
    labels: torch.Tensor,  # [..., L]
    temperature: float = 1.0,
) -> torch.Tensor:  # [..., L] float32
    """log p(label) at every entry; 0 where there is no label.

    With the temperature that tokens were sampled at, so that both speak of one distribution.
    """
    wanted = labels.clamp(min=0)[..., None]
    found = chosen_logprobs(logits, wanted, temperature)[..., 0]
    return found.masked_fill(labels == IGNORED, 0.0)


def chosen_logprobs(
    logits: torch.Tensor,  # [..., L, V]
    ids: torch.Tensor,  # [..., L, k]
    temperature: float = 1.0,
) -> torch.Tensor:  # [..., L, k] float32
    """log p of some tokens at every entry: their logit less the logarithm of the sum of all."""
    scaled = _scaled(logits, temperature)
    return scaled.gather(-1, ids) - torch.logsumexp(scaled, -1, keepdim=True)


def entropy(
    logits: torch.Tensor,  # [..., L, V]
    temperature: float = 1.0,
) -> torch.Tensor:  # [..., L] float32
    """-sum p log p at every entry."""
    scaled = _scaled(logits, temperature)
    return torch.logsumexp(scaled, -1) - (scaled.softmax(-1) * scaled).sum(-1)


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """In float32; not copied where that changes nothing, for they are the largest tensor of all."""
    whole = logits.float()
    return whole if temperature == 1.0 else whole / temperature
