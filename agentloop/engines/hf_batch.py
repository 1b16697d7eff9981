"""Rows that are generated together, token by token, over one KV cache. Owns cache and padding.

Rows are padded on the left, and positions count real tokens only, so that a row computes what it
would compute alone. Rows that have ended leave, new ones join with a cache of their own, and after
new weights the cache is computed again: every token comes from the weights it names.

Letters: B rows, S columns of the cache, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentloop.engines.hf_experts import ExpertRecorder
from agentloop.engines.hf_row import Row
from agentloop.engines.hf_sampling import draw, process
from agentloop.engines.types import EngineError, LogprobKind

if TYPE_CHECKING:
    import torch


class Forward:
    """A model's forward pass as batches call it: logits of the last position, experts if asked."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.recorder = ExpertRecorder(model)
        names = inspect.signature(model.forward).parameters
        self._positions = "position_ids" in names
        self._last_only = "logits_to_keep" in names
        # Newer versions of transformers say `cache` and deprecate the older name.
        found = [name for name in ("cache", "past_key_values") if name in names]
        if not found:
            raise EngineError(f"{type(model).__name__} generates without a KV cache; unsupported")
        self._cache_name = found[0]

    def new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def __call__(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """Logits of the last column; the cache grows by the others.  # [B, V] float32"""
        extra: dict[str, Any] = {self._cache_name: cache}
        if self._positions:
            extra["position_ids"] = positions
        if self._last_only:
            extra["logits_to_keep"] = 1
        output = self.model(input_ids=ids, attention_mask=mask, use_cache=True, **extra)
        return output.logits[:, -1].float()


class Batch:
    """Rows that take their next token together."""

    def __init__(self, forward: Forward, rows: Sequence[Row], kind: LogprobKind) -> None:
        self.rows = list(rows)
        self._forward = forward
        self._kind = kind
        self._cache: Any = None
        self._mask: Any = None  # [B, S] of real tokens

    def step(self, version: int) -> None:
        """Give every row its next token, of this policy version.

        Raises:
            EngineError: logits are not numbers, or routers say nothing; no row has changed.
        """
        import torch

        with torch.inference_mode():
            recorder = self._forward.recorder
            recorder.active = any(row.request.sampling.routed_experts for row in self.rows)
            try:
                logits = self._prefill() if self._cache is None else self._advance()
                if (torch.isnan(logits) | torch.isposinf(logits)).any():
                    raise EngineError(f"weights of version {version} give logits of NaN or inf")
                if recorder.active:
                    self._take_experts()
            except BaseException:
                recorder.forget()
                self.forget()
                raise
            contexts = [row.context for row in self.rows]
            scores = process(logits, contexts)
            tokens: Any = draw(scores, contexts)[:, None]
            raw = logits.log_softmax(-1).gather(1, tokens)
            drawn = scores.log_softmax(-1).gather(1, tokens)
            both: Any = torch.cat([raw, drawn], dim=1)
            made = zip(self.rows, tokens.squeeze(1).tolist(), both.tolist(), strict=True)
        for row, token, (of_model, of_draw) in made:
            sampled = self._kind == "processed" and row.request.sampling.temperature
            row.take(token, of_draw if sampled else of_model, version)

    def _prefill(self) -> torch.Tensor:
        """Compute the rows from their first token."""
        import torch

        tokens = [row.tokens for row in self.rows]
        width = max(map(len, tokens))
        device = self._forward.model.device
        ids = torch.tensor([[0] * (width - len(row)) + row for row in tokens], device=device)
        self._mask = torch.tensor(
            [[0] * (width - len(row)) + [1] * len(row) for row in tokens], device=device
        )
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._cache = self._forward.new_cache()
        return self._forward(ids, self._mask, positions, self._cache)

    def _advance(self) -> torch.Tensor:
        """Compute the newest token of each row."""
        import torch

        ids = torch.tensor([[row.made[-1]] for row in self.rows], device=self._mask.device)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.rows), 1)], dim=1)
        positions = self._mask.sum(-1, keepdim=True) - 1
        return self._forward(ids, self._mask, positions, self._cache)

    def _take_experts(self) -> None:
        routed = self._forward.recorder.take(len(self.rows))  # [B, columns fed, layers * topk]
        for row, of_row in zip(self.rows, routed, strict=True):
            fed = len(row.request.token_ids) + len(row.made)
            real = min(fed, len(of_row))
            row.take_experts(of_row[len(of_row) - real :], fed - real)

    # -- rows come and go --------------------------------------------------------------------

    def forget(self) -> None:
        """Compute everything again at the next step: the weights have changed."""
        self._cache = self._mask = None

    def leave(self, gone: Sequence[Row]) -> None:
        """Take rows out."""
        import torch

        out = set(map(id, gone))
        stay = [place for place, row in enumerate(self.rows) if id(row) not in out]
        self.rows = [self.rows[place] for place in stay]
        if self._cache is None or not gone:
            return
        if not stay:
            self.forget()
            return
        with torch.inference_mode():
            index = torch.tensor(stay, device=self._mask.device)
            self._cache.batch_select_indices(index)
            self._mask = self._mask[index]
            self._trim()

    @property
    def joinable(self) -> bool:
        """Whether rows can join: only caches that keep every token in one plain tensor are
        merged."""
        return self._cache is not None and _is_plain(self._cache)

    def join(self, other: Batch) -> None:
        """Take over the rows of a batch that has made its first step."""
        import torch

        if not other.rows:
            return
        with torch.inference_mode():
            columns = max(self._mask.shape[1], other._mask.shape[1])
            self._mask = torch.cat([_widened(m, columns, 1) for m in (self._mask, other._mask)])
            for mine, theirs in zip(self._cache.layers, other._cache.layers, strict=True):
                for name in ("keys", "values"):
                    parts = [_widened(getattr(part, name), columns, 2) for part in (mine, theirs)]
                    setattr(mine, name, torch.cat(parts))
        self.rows += other.rows

    def _trim(self) -> None:
        """Drop the columns in which no row has a token."""
        if not _is_plain(self._cache):
            return
        empty = int(self._mask.any(0).int().argmax())
        if empty:
            self._mask = self._mask[:, empty:]
            for layer in self._cache.layers:
                layer.keys = layer.keys[:, :, empty:]
                layer.values = layer.values[:, :, empty:]


def _is_plain(cache: Any) -> bool:
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _widened(tensor: torch.Tensor, columns: int, dim: int) -> torch.Tensor:
    """The tensor with zeros in front, so that dimension `dim` has this many entries."""
    import torch

    missing = columns - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim=dim)
