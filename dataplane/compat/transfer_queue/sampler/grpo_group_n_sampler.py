"""`GRPOGroupNSampler`: the answers to one prompt together, or none of them."""

from __future__ import annotations

from typing import Any

from .base import BaseSampler


class GRPOGroupNSampler(BaseSampler):
    """Whole groups of `n_samples_per_prompt` rows with consecutive indexes.

    Rows of a prompt must be put next to each other; indexes are given in the order of the puts and
    are never given twice, so that a run of them is never made of an old row and a new one. With
    `dp_rank` and `batch_index` in the sampling configuration the answer is remembered, and
    replicas of the rank get the same one.
    """

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        """Raises ValueError unless a group has one row or more."""
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise ValueError(f"n_samples_per_prompt must be positive, got {n_samples_per_prompt}")
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """`batch_size` rows in whole groups, lowest indexes first, twice; nothing as long as there
        are less.

        Raises ValueError unless `batch_size` is a multiple of the group's size.
        """
        rank, batch_index = kwargs.get("dp_rank"), kwargs.get("batch_index")
        # Without a batch index nothing says that two claims mean the same batch: each draws anew.
        kept = rank is not None and batch_index is not None
        if kept:
            answer = self._remembered(partition_id, task_name, rank, batch_index)
            if answer is not None:
                sampled, consumed = answer
                return list(sampled), list(consumed)
        rows = self._whole_groups(ready_indexes, batch_size)
        if not rows:
            return [], []
        if kept:
            self._remember(partition_id, task_name, rank, batch_index, (rows, rows.copy()))
        return rows.copy(), rows.copy()

    def _whole_groups(self, ready_indexes: list[int], batch_size: int) -> list[int] | None:
        """The first groups that make up a batch, or None."""
        size = self.n_samples_per_prompt
        if batch_size % size:
            raise ValueError(
                f"batch_size ({batch_size}) must be a multiple of n_samples_per_prompt ({size})"
            )
        chosen: list[int] = []
        run: list[int] = []
        for index in sorted(ready_indexes):
            if len(chosen) == batch_size:
                break
            if run and index != run[-1] + 1:
                run = []
            run.append(index)
            if len(run) == size:
                chosen += run
                run = []
        return chosen if len(chosen) == batch_size else None
