"""Single rows of a `BatchMeta`, to look at: nothing is copied, and nothing can be set."""

from __future__ import annotations

from collections.abc import Iterator
from operator import index as as_index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, SupportsIndex

from .field_schema import SHAPES

if TYPE_CHECKING:
    from .batch_meta import BatchMeta


class SampleView:
    """One row of a batch."""

    __slots__ = ("_batch", "_place")

    def __init__(self, batch: BatchMeta, place: int) -> None:
        self._batch = batch
        self._place = place

    @property
    def global_index(self) -> int:
        """The row's index in the instance."""
        return self._batch.global_indexes[self._place]

    @property
    def partition_id(self) -> str:
        """The partition it lies in."""
        return self._batch.partition_ids[self._place]

    @property
    def production_status(self) -> int:
        """1 if all of the batch's fields are there, else 0."""
        return int(self._batch.production_status[self._place])

    @property
    def custom_meta(self) -> MappingProxyType[str, Any]:
        """Its tag."""
        return MappingProxyType(self._batch.custom_meta[self._place])

    @property
    def fields(self) -> MappingProxyType[str, MappingProxyType[str, Any]]:
        """What is known of each field, with this row's `shape`."""
        described: dict[str, MappingProxyType[str, Any]] = {}
        for name, field in self._batch.field_schema.items():
            row = {key: value for key, value in field.items() if key != SHAPES}
            if field.get(SHAPES) is not None:
                row["shape"] = field[SHAPES][self._place]
            described[name] = MappingProxyType(row)
        return MappingProxyType(described)

    def __repr__(self) -> str:
        return (
            f"SampleView(global_index={self.global_index}, partition_id={self.partition_id!r}, "
            f"production_status={self.production_status}, "
            f"fields={list(self._batch.field_schema)})"
        )


class SampleViews:
    """All rows of a batch, one by one."""

    __slots__ = ("_batch",)

    def __init__(self, batch: BatchMeta) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch)

    def __getitem__(self, item: SupportsIndex) -> SampleView:
        place = range(len(self))[as_index(item)]
        return SampleView(self._batch, place)

    def __iter__(self) -> Iterator[SampleView]:
        return (SampleView(self._batch, place) for place in range(len(self)))
