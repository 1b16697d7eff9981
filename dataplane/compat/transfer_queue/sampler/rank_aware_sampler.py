"""`RankAwareSampler`: each data-parallel rank draws for itself, and its replicas get the same."""

from __future__ import annotations

from typing import Any

from .base import BaseSampler


class RankAwareSampler(BaseSampler):
    """The first rows that are ready, drawn once per rank and batch index.

    Whoever of a rank asks first draws; everybody who asks for the same rank and batch index after
    that gets the same rows, until the partition's cache is cleared.
    """

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        dp_rank: int,
        batch_index: int,
        task_name: str,
        partition_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """This rank's rows, twice; nothing as long as there are less than `batch_size`.

        Raises ValueError for a negative rank.
        """
        if dp_rank < 0:
            raise ValueError(f"dp_rank {dp_rank} must be greater than or equal to 0")
        rows = self._remembered(partition_id, task_name, dp_rank, batch_index)
        if rows is None:
            rows = ready_indexes[:batch_size]
            if len(rows) < batch_size:
                return [], []
            self._remember(partition_id, task_name, dp_rank, batch_index, rows)
        # Copies, so that nothing a caller does with them changes what replicas get.
        return list(rows), list(rows)
