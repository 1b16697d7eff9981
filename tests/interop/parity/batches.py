"""Batches that cases put: short ways to say columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict


def batch(**columns: Any) -> TensorDict:
    """Columns of equal row counts as a batch."""
    first = next(iter(columns.values()))
    rows = first.size(0) if isinstance(first, torch.Tensor) else len(first)
    return TensorDict(columns, batch_size=[rows])


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def jagged(*rows: Sequence[Any] | torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Rows of any lengths along their first axis."""
    parts = [torch.as_tensor(row, dtype=dtype) for row in rows]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def strided(*rows: torch.Tensor) -> torch.Tensor:
    """Rows of any shapes of one rank."""
    return torch.nested.nested_tensor(list(rows), layout=torch.strided)


def objects(*rows: Any) -> NonTensorStack:
    """One Python value per row."""
    return NonTensorStack(*rows)
