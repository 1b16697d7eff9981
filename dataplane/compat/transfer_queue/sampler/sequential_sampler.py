"""`SequentialSampler`: rows in the order in which they came."""

from __future__ import annotations

from typing import Any

from .base import BaseSampler


class SequentialSampler(BaseSampler):
    """The first rows that are ready; fewer where there are fewer. It remembers nothing."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """The first `batch_size` ready rows, twice."""
        rows = ready_indexes[:batch_size]
        return rows, rows.copy()
