"""Memory that the packs of a plan lie in: one matrix a column, a row of it each pack.

A worker keeps one for its whole run: touching fresh memory costs several times the copy into it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class PackMemory:
    """Room for the packs of one plan after the other. What was made in it before is overwritten:
    be through with the packs of the last plan first."""

    def __init__(self, *, pin_memory: bool = False) -> None:
        self._pin = pin_memory
        self._matrices: dict[str, torch.Tensor] = {}

    def take(
        self, name: str, packs: int, cap: int, dtype: torch.dtype, trail: Sequence[int] = ()
    ) -> torch.Tensor:  # [packs, cap, trail ...]
        """One column of all packs, not filled yet."""
        matrix = self._matrices.get(name)
        fits = (
            matrix is not None
            and len(matrix) >= packs
            and matrix.shape[1:] == (cap, *trail)
            and matrix.dtype == dtype
        )
        if matrix is None or not fits:
            matrix = torch.empty((packs, cap, *trail), dtype=dtype, pin_memory=self._pin)
            self._matrices[name] = matrix
        return matrix[:packs]
