"""The tensors of one pack, as a model and a loss take them.

Letters: L length of the pack, S sequences in it (rows, then pieces of padding), k alternatives a
token. Entry i of a row is what the model is given at i and should predict there: token i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dataplane.fields import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class PackTensors:
    """One forward and backward pass."""

    input_ids: torch.Tensor  # [1, L] int64
    labels: torch.Tensor  # [1, L] int64, -100 where nothing is trained
    position_ids: torch.Tensor  # [1, L] or [3, 1, L] int64, from 0 again in each sequence
    cu_seq_lens: torch.Tensor  # [S + 1] int32
    max_length: int
    """The longest sequence."""
    num_padding: int
    """Entries behind the rows."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Advantages, log-probs and the like, by name. # [1, L] or [1, L, k]"""
    routed_experts: torch.Tensor | None = None  # [L, layers, topk]
    multi_modal: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Images and the like of all rows together."""
    keys: Sequence[str] = ()
    """The rows, in order."""
    lengths: Sequence[int] = ()
    """T of each row. # [rows]"""

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self.columns[name]
        except KeyError:
            raise KeyError(
                f"this pack has no column {name!r}; it has {', '.join(self.columns)}"
            ) from None

    @property
    def size(self) -> int:
        """L."""
        return self.input_ids.shape[1]

    @property
    def mask(self) -> torch.Tensor:  # [1, L] bool
        """Where something is trained."""
        return self.labels != IGNORED

    @property
    def num_supervised(self) -> int:
        """How many entries are trained."""
        return int(self.mask.sum())

    @property
    def consumed_tokens(self) -> int:
        """Entries that are no padding."""
        return self.size - self.num_padding

    @property
    def attention_ratio(self) -> float:
        """What attention over the sequences costs, as a share of that over one of this length."""
        lengths = self.cu_seq_lens.diff().double()
        total = float(lengths.sum())
        return float((lengths**2).sum()) / total**2 if total else 0.0

    # -- for models --------------------------------------------------------------------------

    def model_inputs(self) -> dict[str, Any]:
        """Arguments of a transformers model.

        Without a cache: where there is one, models of transformers 5 do not look for restarting
        positions, and rows see each other.
        """
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False}

    def varlen(self) -> dict[str, Any]:
        """Arguments of flash attention over sequences of different lengths."""
        return {
            "cu_seq_lens_q": self.cu_seq_lens,
            "cu_seq_lens_k": self.cu_seq_lens,
            "max_length_q": self.max_length,
            "max_length_k": self.max_length,
        }

    def sequence_context(self) -> dict[str, Any]:
        """Arguments of an xtuner `SequenceContext`."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "num_padding": self.num_padding,
            **self.varlen(),
        }

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackTensors:
        """The same on a device. Images stay where they are: a model takes its own part of them."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return replace(
            self,
            input_ids=moved(self.input_ids),
            labels=moved(self.labels),
            position_ids=moved(self.position_ids),
            cu_seq_lens=moved(self.cu_seq_lens),
            columns={name: moved(column) for name, column in self.columns.items()},
            routed_experts=None if self.routed_experts is None else moved(self.routed_experts),
        )

    # -- what a stage made of it -------------------------------------------------------------

    def with_columns(self, **columns: torch.Tensor) -> PackTensors:
        """The pack with further columns, or others in their place."""
        for name, column in columns.items():
            if column.shape[:2] != self.labels.shape:
                raise ValueError(
                    f"column {name!r} has shape {[*column.shape]}, and the pack "
                    f"{[*self.labels.shape]}"
                )
        return replace(self, columns={**self.columns, **columns})

    def rows_of(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a stage computed for every entry, as rows to be written back under their keys.

        In full alignment: one entry a token, and 0 for the first, which nothing predicts.

        Example: of a row of 5 tokens the entries [a, b, c, d] come back as [0, a, b, c, d].
        """
        flat = values.reshape(self.size, *values.shape[2:])
        rows: dict[str, torch.Tensor] = {}
        at = 0
        for key, length in zip(self.keys, self.lengths, strict=True):
            row = flat.new_zeros((length + 1, *flat.shape[1:]))
            row[1:] = flat[at : at + length]
            rows[key] = row
            at += length
        return rows
