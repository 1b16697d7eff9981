"""The distribution that a next token is drawn from, and the draw. Owns the order of processors.

Penalties come first, then forbidden ends, temperature, top-k and top-p, each as transformers
defines it; `tests/agentloop/test_hf_engine.py` holds them side by side. No I/O, no random state:
a draw is a function of the seed and of the token's position.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from agentloop.engines.types import EngineError, Sampling

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Context:
    """What the next token of one row depends on, its logits aside."""

    sampling: Sampling
    asked: Sequence[int]
    """The tokens that the engine was asked with."""
    made: Sequence[int]
    """What it has generated since."""
    ends: Collection[int]
    """Tokens that would end the row."""
    seed: int


def check_sampling(sampling: Sampling) -> None:
    """Refuse what has no meaning. EngineError names the setting."""
    wrong: list[str] = []
    if not 0 <= sampling.temperature < float("inf"):
        wrong.append(f"temperature {sampling.temperature} is not a number from 0 on")
    if not 0 < sampling.top_p <= 1:
        wrong.append(f"top_p {sampling.top_p} is not in (0, 1]")
    if sampling.top_k < -1:
        wrong.append(f"top_k {sampling.top_k} is neither a count nor 0 (all tokens)")
    if not 0 < sampling.repetition_penalty < float("inf"):
        wrong.append(f"repetition_penalty {sampling.repetition_penalty} is not above 0")
    if sampling.max_tokens < 0 or sampling.min_tokens < 0:
        wrong.append(f"max_tokens {sampling.max_tokens}, min_tokens {sampling.min_tokens}")
    if wrong:
        raise EngineError(f"sampling parameters that mean nothing: {'; '.join(wrong)}")


def process(logits: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
    """The scores that tokens are drawn from, one row each; -inf where a token cannot come.

    Args:
        logits: # [B, V] float32, left as they are
    """

    scores = logits.clone()
    settings = [context.sampling for context in contexts]
    for place, context in enumerate(contexts):
        _penalize(scores[place], context)
        if len(context.made) < settings[place].min_tokens and context.ends:
            scores[place, sorted(context.ends)] = float("-inf")
    scores = scores / _column(scores, [s.temperature or 1.0 for s in settings])
    scores = _keep_top_k(scores, [s.top_k if s.temperature else 0 for s in settings])
    return _keep_top_p(scores, [s.top_p if s.temperature else 1.0 for s in settings])


def _column(like: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:  # [B, 1]
    import torch

    return torch.tensor(numbers, dtype=like.dtype, device=like.device)[:, None]


def _penalize(row: torch.Tensor, context: Context) -> None:  # [V]
    """Repetition counts everything that was asked with; presence and frequency only what was made
    since, as OpenAI's do: an engine that is asked to go on cannot know where the prompt ended."""
    import torch

    sampling = context.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*context.asked, *context.made}), device=row.device)
        old = row[seen]
        penalty = sampling.repetition_penalty
        row[seen] = torch.where(old < 0, old * penalty, old / penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and context.made:
        made = torch.tensor(context.made, device=row.device)
        counts = torch.bincount(made, minlength=len(row)).to(row.dtype)
        row -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)


def _keep_top_k(scores: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    """Only the k best of each row, and what equals the last of them; k below 1 keeps all."""
    import torch

    vocabulary = scores.shape[-1]
    k = [min(count, vocabulary) if count > 0 else vocabulary for count in top_k]
    if min(k) == vocabulary:
        return scores
    partial = max(count for count in k if count < vocabulary)
    best = torch.topk(scores, partial).values
    last = torch.tensor([min(count, partial) - 1 for count in k], device=scores.device)[:, None]
    limited = torch.tensor([count < vocabulary for count in k], device=scores.device)[:, None]
    return scores.masked_fill(limited & (scores < best.gather(1, last)), float("-inf"))


def _keep_top_p(scores: torch.Tensor, top_p: Sequence[float]) -> torch.Tensor:
    """The fewest best tokens of each row whose probabilities add up to p or more."""
    import torch

    if min(top_p) >= 1.0:
        return scores
    order = torch.sort(scores, descending=False)
    below = order.values.softmax(-1).cumsum(-1)  # including the token itself
    drop = (below <= _column(scores, [1 - p for p in top_p])) & (_column(scores, top_p) < 1)
    drop[:, -1] = False
    return scores.masked_fill(drop.scatter(1, order.indices, drop), float("-inf"))


def draw(scores: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
    """One token of each row: the best at temperature 0, else drawn by its seed.  # [B] int64

    The draw inverts the distribution in vocabulary order at one uniform number, so that the
    last bits of the logits, which other rows of a batch may change, hardly ever matter.
    """
    import torch

    best = scores.argmax(-1)
    drawn = [bool(context.sampling.temperature) for context in contexts]
    if not any(drawn):
        return best
    uniform = [uniform_at(c.seed, len(c.asked) + len(c.made)) for c in contexts]
    probabilities = scores.softmax(-1, dtype=torch.float64)
    below = probabilities.cumsum(-1)
    at = _column(below, uniform) * below[:, -1:]
    tokens = torch.searchsorted(below, at, right=True).squeeze(1)
    # Rounding may leave nothing above `at`: then it is the last token that can come at all.
    possible = (probabilities > 0).to(torch.int8)
    last = scores.shape[-1] - 1 - possible.flip(-1).argmax(-1)
    return torch.where(torch.tensor(drawn, device=scores.device), tokens.minimum(last), best)


def uniform_at(seed: int, position: int) -> float:
    """The number in [0, 1) that draws the token at a position.

    A function of both and of nothing else: a response that was interrupted goes on as if it had
    not been, on any device.
    """
    digest = blake2b(struct.pack("<QQ", seed % (1 << 64), position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)
