"""A torch data loader over a `StreamingDataset`, which makes the batches itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict
from torch.utils.data import DataLoader

from .streaming_dataset import StreamingDataset

if TYPE_CHECKING:
    from ..metadata import BatchMeta


def _as_it_is(item: Any) -> Any:
    """What the dataset yields is a batch already. A function of the module, so that workers that
    are spawned can have it."""
    return item


class StreamingDataLoader(DataLoader[Any]):
    """Iterates over the micro-batches of a dataset: `(TensorDict, BatchMeta)`.

    With workers each of them has a client of its own, and worker `i` of `n` asks for the batches
    `i`, `i + n`, …: no batch is asked for by two of them.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        super().__init__(  # pyright: ignore[reportUnknownMemberType] (torch's own annotations)
            dataset=dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_as_it_is if collate_fn is None else collate_fn,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        self._streaming = dataset

    def reset(self) -> None:
        """Begin again with the first batch of the partition; see `StreamingDataset.reset`."""
        self._streaming.reset()

    def step(self, partition_id: str) -> None:
        """Go on with another partition, and let go of the batches of this one."""
        self._streaming.step(partition_id)

    def get_buffer(self) -> list[tuple[TensorDict, BatchMeta]]:
        """The batches that `reset` can replay, the oldest first."""
        return self._streaming.buffer
