"""What others see of a partition in the controller: a sampler while it chooses, and a copy that
travels. Both read like TransferQueue's own status of a partition, and neither changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .registry import PartitionRows

if TYPE_CHECKING:
    import torch

Tags = dict[str, Any]


class PartitionView:
    """The partition that a sampler is asked about, as `partition`; as of this moment."""

    __slots__ = ("_rows", "partition_id")

    def __init__(self, rows: PartitionRows) -> None:
        self._rows = rows
        self.partition_id = rows.partition_id

    @property
    def global_indexes(self) -> set[int]:
        """Indexes of all rows, ready or not."""
        return {row.index for row in self._rows.rows}

    @property
    def total_samples_num(self) -> int:
        """How many rows there are, ready or not."""
        return len(self._rows)

    @property
    def keys_mapping(self) -> dict[str, int]:
        """The index of each key."""
        return {key: row.index for row in self._rows.rows if (key := row.shown_key) is not None}

    def get_custom_meta(self, global_indices: Iterable[int]) -> dict[int, Tags]:
        """The tags of rows, by index; rows that are not there are left out."""
        return {
            index: dict(row.tags)
            for index in global_indices
            if (row := self._rows.row(index)) is not None
        }

    def kv_retrieve_keys(self, global_indexes: Iterable[int]) -> list[str | None]:
        """The key of each row, None for rows without one."""
        return [
            None if (row := self._rows.row(index)) is None else row.shown_key
            for index in global_indexes
        ]

    def kv_retrieve_indexes(self, keys: Iterable[str]) -> list[int | None]:
        """The index of each key, None where there is no such key."""
        return [None if (row := self._rows.keyed(key)) is None else row.index for key in keys]


class PartitionSnapshot:
    """A copy of what the controller knows of a partition; for tests and for people who look.

    The status tensors have a row for every index up to the highest, as TransferQueue's do.
    """

    partition_id: str
    global_indexes: set[int]
    pre_allocated_global_indexes: set[int]
    keys_mapping: dict[str, int]
    revert_keys_mapping: dict[int, str]
    custom_meta: dict[int, Tags]
    field_name_mapping: dict[str, int]
    production_status: torch.Tensor  # [highest index + 1, F] int8
    consumption_status: dict[str, torch.Tensor]  # [highest index + 1] int8

    @classmethod
    def of(cls, rows: PartitionRows) -> PartitionSnapshot:
        """The snapshot of these rows."""
        import torch

        self = cls()
        listed = rows.rows
        self.partition_id = rows.partition_id
        self.global_indexes = {row.index for row in listed}
        self.pre_allocated_global_indexes = set(rows.ahead)
        self.keys_mapping = PartitionView(rows).keys_mapping
        self.revert_keys_mapping = {index: key for key, index in self.keys_mapping.items()}
        self.custom_meta = {row.index: dict(row.tags) for row in listed}
        self.field_name_mapping = {name: at for at, name in enumerate(rows.fields)}
        size = max(rows.indexes, default=-1) + 1
        self.production_status = torch.zeros(size, len(rows.fields), dtype=torch.int8)
        for row in listed:
            columns = [self.field_name_mapping[name] for name in row.fields]
            self.production_status[row.index, columns] = 1
        self.consumption_status = {}
        for task in rows.tasks():
            flags = self.consumption_status[task] = torch.zeros(size, dtype=torch.int8)
            indexes, consumed = rows.consumption(task)
            flags[indexes] = torch.tensor(consumed, dtype=torch.int8)
        return self

    @property
    def total_samples_num(self) -> int:
        """How many rows there are."""
        return len(self.global_indexes)

    @property
    def total_fields_num(self) -> int:
        """How many fields its rows have had."""
        return len(self.field_name_mapping)

    def __repr__(self) -> str:
        return (
            f"PartitionSnapshot({self.partition_id!r}, {self.total_samples_num} rows, "
            f"{list(self.field_name_mapping)})"
        )
