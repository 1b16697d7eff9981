"""The low-level client: rows by index, in batches that say which task may have them.

Owns the names and signatures of the blocking methods; see async_client.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from . import checkpoint
from .async_client import AsyncTransferQueueClient, partition_names, warn_of_nothing
from .control.answers import Status, all_set, as_status
from .verbs import row_values, rows

if TYPE_CHECKING:
    from tensordict import TensorDict

    from .metadata import BatchMeta

__all__ = ["AsyncTransferQueueClient", "TransferQueueClient"]


class TransferQueueClient(AsyncTransferQueueClient):
    """Rows by index, for threads and for coroutines."""

    # -- batches -----------------------------------------------------------------------------

    def get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """A batch of rows that have all of these fields.

        `fetch` hands out rows that the task has not had, as the sampler chooses; from then on they
        are consumed, also if this client should die. Where there are not enough, the batch is empty
        if the instance is in polling mode, and else this waits. `force_fetch` is every row there
        is, whatever was produced or consumed. `insert` makes new rows without values.

        Raises:
            DeadlineExceeded: not enough came ready in time; it says what is missing.
            ValueError: the sampler refuses; the mode is none.
        """
        return self._link.run(
            self._get_meta(data_fields, batch_size, partition_id, mode, task_name, sampling_config),
            self._wait_s(),
        )

    def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Merge a batch's custom meta into its rows' tags."""
        self._link.run(self._of(row_values.set_custom_meta, meta=metadata))

    def put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: rows.Parser = None,
    ) -> BatchMeta:
        """Write values to a batch's rows, or without one to new rows of a partition; the batch,
        which has the fields now. Rows of one partition are written all or none, and with them the
        custom meta that was set since the batch was read.

        Raises:
            KeyNotFound: rows of the batch were cleared; they do not come back.
            ValueError: the batch is empty, or there is neither a batch nor a partition.
        """
        return self._link.run(self._put(data, metadata, partition_id, data_parser))

    def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The values of a batch's fields, in the order of its rows.

        Raises:
            StorageKeyNotFoundError: rows were cleared since.
            FieldNotFound: not all of the rows have all of the fields.
        """
        return self._link.run(self._of(row_values.get_data, meta=metadata))

    def clear_partition(self, partition_id: str) -> None:
        """Take a partition away with all its rows. None of this name is only warned of."""
        if not self._link.run(self._asking("clear_partition", partition_id)):
            warn_of_nothing(partition_id)

    def clear_samples(self, metadata: BatchMeta) -> None:
        """Remove a batch's rows, tags and values. Those that are gone are no error."""
        self._link.run(self._of(row_values.clear_samples, meta=metadata))

    # -- statuses ----------------------------------------------------------------------------

    def get_consumption_status(self, task_name: str, partition_id: str) -> Status:
        """Indexes [N] int64 of a partition, and [N] int8: 1 where the task consumed the row.
        (None, None) without such a partition."""
        return as_status(self._link.run(self._asking("consumption", task_name, partition_id)))

    def get_production_status(self, data_fields: list[str], partition_id: str) -> Status:
        """Indexes [N] int64 of a partition, and [N, F] int8: 1 where the row has the field.
        (None, None) without such a partition, or if no row of it has had one of the fields."""
        return as_status(
            self._link.run(self._asking("production", list(data_fields or ()), partition_id))
        )

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether there are rows, and the task has consumed all of them."""
        return all_set(*self.get_consumption_status(task_name, partition_id))

    def check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        """Whether all rows have all of these fields."""
        return all_set(*self.get_production_status(data_fields, partition_id), of_none=True)

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Forget what a task, or every task, consumed. True, also without such a partition."""
        self._link.run(self._asking("reset_consumption", partition_id, task_name))
        return True

    def get_partition_list(self) -> list[str]:
        """The names of the partitions that there are."""
        return self._link.run(partition_names)

    # -- keys --------------------------------------------------------------------------------

    def kv_retrieve_meta(
        self, keys: list[str] | str, partition_id: str, create: bool = False
    ) -> BatchMeta:
        """The rows of keys as a batch, in their order, with the fields that all of them have. Keys
        that do not exist are left out, or made with `create`.

        Raises ValueError if there are no keys, TypeError if they are no strings.
        """
        return self._link.run(self._meta_of_keys(keys, partition_id, create))

    def kv_retrieve_keys(
        self, global_indexes: list[int] | int, partition_id: str
    ) -> list[str | None]:
        """The key of each row, None for one that is not there or has none.

        Raises PartitionNotFound, a RuntimeError, without such a partition.
        """
        return self._link.run(self._keys_of(global_indexes, partition_id))

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Partition -> key -> tag; of one partition or of all."""
        return self._link.run(self._listing(partition_id))

    # -- checkpoints -------------------------------------------------------------------------

    def save_controller_checkpoint(self, path: str) -> None:
        """Write which indexes are taken and what the sampler remembers into a file, as JSON."""
        self._link.run(self._of(checkpoint.save_controller, path=path), self._wait_s())

    def load_controller_checkpoint(self, path: str) -> None:
        """Have the controller go by the rows that there are, and by what such a file says."""
        self._link.run(self._of(checkpoint.load_controller, path=path), self._wait_s())

    def save_storage_checkpoint(self, checkpoint_dir: str) -> None:
        """Save all rows into a folder, as of one moment; see checkpoint.py."""
        self._link.run(
            partial(checkpoint.save_storage, checkpoint_dir=checkpoint_dir), self._wait_s()
        )

    def load_storage_checkpoint(self, checkpoint_dir: str) -> None:
        """Put the rows of such a folder in the place of all that there are, or change nothing."""
        self._link.run(
            partial(checkpoint.load_storage, checkpoint_dir=checkpoint_dir), self._wait_s()
        )
