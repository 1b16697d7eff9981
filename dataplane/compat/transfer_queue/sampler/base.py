"""`BaseSampler`: who picks the rows of a claim, and what it remembers of its answers.

A sampler sees indexes only. It runs in the controller, one call at a time.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any


class BaseSampler(ABC):
    """Base of samplers, also of those that users write.

    A subclass calls `super().__init__()` and answers `sample`. What it writes in `_states`, as
    partition → task → rank → batch index → answer, is known to `has_cached_result`, forgotten by
    `clear_cache`, and part of a checkpoint.
    """

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    @abstractmethod
    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """The rows to hand out, and the rows that count as consumed by that; two empty lists if
        there are not enough yet.

        `ready_indexes` are the rows that have the wanted fields and that the task has not
        consumed. By name come `task_name`, `partition_id`, `partition` (what is known of the rows;
        `get_custom_meta(indexes)` has their tags) and all entries of the claim's `sampling_config`.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        return self.sample(*args, **kwargs)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether this rank's batch was drawn already, so that it needs no ready rows."""
        wanted = sampling_config or {}
        rank = wanted.get("dp_rank")
        if rank is None:
            return False
        answers = self._states.get(partition_id, {}).get(task_name, {}).get(rank, {})
        return wanted.get("batch_index") in answers

    def clear_cache(self, partition_id: str) -> None:
        """Forget all answers about a partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """What `load_checkpoint` takes; it does not change with later answers.

        A subclass that remembers more adds it here, in plain values: text,
        numbers, None, and lists, tuples, sets and dictionaries of such.
        """
        return {"_states": copy.deepcopy(self._states)}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Remember what another sampler of this kind did when it was saved."""
        self._states = copy.deepcopy(state["_states"])

    def _remembered(self, partition_id: str, task_name: str, rank: Any, batch_index: Any) -> Any:
        """The answer that was given before, or None."""
        answers = self._states.get(partition_id, {}).get(task_name, {}).get(rank, {})
        return answers.get(batch_index)

    def _remember(
        self, partition_id: str, task_name: str, rank: Any, batch_index: Any, answer: Any
    ) -> None:
        tasks = self._states.setdefault(partition_id, {})
        tasks.setdefault(task_name, {}).setdefault(rank, {})[batch_index] = answer
