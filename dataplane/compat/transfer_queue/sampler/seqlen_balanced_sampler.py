"""`SeqlenBalancedSampler`: whole groups, shared out so that all ranks get about as many tokens."""

from __future__ import annotations

import copy
import logging
from typing import Any

from .grpo_group_n_sampler import GRPOGroupNSampler
from .number_partitioning import get_seqlen_balanced_partitions, karmarkar_karp

__all__ = ["SeqlenBalancedSampler", "get_seqlen_balanced_partitions", "karmarkar_karp"]

log = logging.getLogger("transfer_queue.sampler")

LENGTH = "total_lengths"
"""The tag that has a row's number of tokens; a row without it counts as one."""


Known = tuple[str, str, int]
"""Partition, task and batch index, which goes up with each batch of a rank."""


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """One batch for `dp_size` ranks at a time, drawn by the first that asks.

    `batch_size` is what each rank gets. Groups stay whole where their number divides by the ranks;
    where it does not, rows are shared out one by one.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        """Raises ValueError unless both are positive."""
        super().__init__(n_samples_per_prompt=n_samples_per_prompt)
        if dp_size <= 0:
            raise ValueError(f"dp_size must be positive, got {dp_size}")
        self.dp_size = dp_size
        # Each rank's share of the batches that were drawn.
        self._balanced_cache: dict[Known, list[list[int]]] = {}
        # The ranks that have not asked for theirs yet. Those rows are ready and not consumed, but a
        # rank that is ahead must not get them in its next batch.
        self._waiting: dict[Known, set[int]] = {}

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """This rank's share of the batch, twice; nothing as long as there are not enough rows for
        all ranks, and for a rank beyond `dp_size`.

        Raises ValueError unless the whole batch is a multiple of the group's size.
        """
        rank: int = kwargs.get("dp_rank", 0)
        batch_index: int = kwargs.get("batch_index") or 0
        known: Known = (partition_id, task_name, batch_index)
        self._has_come_to(known, rank)
        if known not in self._balanced_cache:
            promised = self._promised(partition_id, task_name)
            free = [row for row in ready_indexes if row not in promised]
            rows = self._whole_groups(free, batch_size * self.dp_size)
            if not rows:
                return [], []
            shares = self._shared_out(rows, kwargs.get("partition"))
            self._balanced_cache[known] = shares
            self._waiting[known] = set(range(self.dp_size)) - {rank}
            for other, share in enumerate(shares):
                # Where the controller looks whether a rank needs ready rows at all.
                self._remember(partition_id, task_name, other, batch_index, (share, share.copy()))
        shares = self._balanced_cache[known]
        share: list[int] = shares[rank] if 0 <= rank < len(shares) else []
        return share.copy(), share.copy()

    def _has_come_to(self, known: Known, rank: int) -> None:
        """Keep nothing more for a rank in this batch and earlier ones: it has them, or it got its
        part of them from a controller that was started again since."""
        *place, batch_index = known
        for batch, ranks in list(self._waiting.items()):
            if [*batch[:2]] == place and batch[2] <= batch_index:
                ranks.discard(rank)
                if not ranks:
                    del self._waiting[batch]

    def _promised(self, partition_id: str, task_name: str) -> set[int]:
        """Rows of batches that were drawn whose ranks have not asked for them yet."""
        return {
            row
            for known, ranks in self._waiting.items()
            if known[:2] == (partition_id, task_name)
            for rank in ranks
            for row in self._balanced_cache[known][rank]
        }

    def _shared_out(self, rows: list[int], partition: Any) -> list[list[int]]:
        """The rows of each rank: all of these, none twice."""
        ranks, size = self.dp_size, self.n_samples_per_prompt
        if partition is None:
            log.warning("no partition to read row lengths from: all ranks get as many rows")
            least = len(rows) // ranks
            return [rows[rank * least : (rank + 1) * least] for rank in range(ranks)]
        tags = partition.get_custom_meta(rows)
        lengths = [tags.get(row, {}).get(LENGTH, 1) for row in rows]
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        if len(groups) % ranks:
            log.warning(
                "%d groups do not divide among %d ranks: groups are split. Ask for a batch_size "
                "that is a multiple of n_samples_per_prompt=%d", len(groups), ranks, size,
            )  # fmt: skip
            groups = [[row] for row in rows]
            size = 1
        weights = [sum(lengths[start : start + size]) for start in range(0, len(rows), size)]
        shares = get_seqlen_balanced_partitions(weights, ranks, equal_size=True)
        return [[row for group in share for row in groups[group]] for share in shares]

    def clear_cache(self, partition_id: str) -> None:
        """Forget all shares of a partition."""
        super().clear_cache(partition_id)
        for known in [known for known in self._balanced_cache if known[0] == partition_id]:
            del self._balanced_cache[known]
            self._waiting.pop(known, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """What `load_checkpoint` takes; it does not change with later answers."""
        more = {"_balanced_cache": self._balanced_cache, "_waiting": self._waiting}
        return {**super().save_checkpoint(), **copy.deepcopy(more)}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Remember what another sampler of this kind did when it was saved."""
        super().load_checkpoint(state)
        self._balanced_cache = copy.deepcopy(state["_balanced_cache"])
        self._waiting = copy.deepcopy(state["_waiting"])
