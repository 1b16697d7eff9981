"""`BatchMeta`: which rows a batch has, by their indexes, and what is known of their fields.

Columnar: one list per kind of fact, all in the order of the rows. It holds no values and needs no
plane. Each row also carries the key it has in the plane, where that is known, so that its values
are read and written without a question to the controller.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from operator import index as as_index
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

from . import extra_info as infos
from . import field_schema as schemas
from .annotations import Annotated
from .columns import as_many, dictionaries, keys_by_index, must_equal
from .kv_batch_meta import own_tag, shares
from .sample_view import SampleViews

log = logging.getLogger("transfer_queue.metadata")


class BatchMeta(Annotated):
    """Rows by index, of one partition or several. `BatchMeta()` is the batch without rows.

    Raises ValueError where one of the columns has another length than `global_indexes`.
    """

    __module__ = f"{__name__.rpartition('.batch.')[0]}.metadata"

    __slots__ = (
        "_custom_backend_meta",
        "_keys",
        "custom_meta",
        "extra_info",
        "field_schema",
        "global_indexes",
        "partition_ids",
        "production_status",
    )

    global_indexes: list[int]  # [N]
    partition_ids: list[str]  # [N]
    field_schema: schemas.Schema
    production_status: npt.NDArray[np.int8]  # [N] int8, 1 where all fields of a row are there
    _custom_backend_meta: list[dict[str, Any]]  # [N]
    _keys: dict[int, str]  # by index, so that they stay right when a caller sets global_indexes

    def __init__(
        self,
        global_indexes: Sequence[int] = (),
        partition_ids: Sequence[str] = (),
        field_schema: schemas.Schema | None = None,
        production_status: npt.ArrayLike | None = None,
        extra_info: dict[str, Any] | None = None,
        custom_meta: Sequence[dict[str, Any]] | None = None,
        _custom_backend_meta: Sequence[dict[str, Any]] | None = None,
        *,
        _row_keys: Sequence[str | None] | None = None,
    ) -> None:
        self.global_indexes = list(global_indexes)
        size = len(self.global_indexes)
        self.partition_ids = list(partition_ids)
        as_many("partition_ids", self.partition_ids, size)
        self.field_schema = {name: dict(field) for name, field in (field_schema or {}).items()}
        for name, field in self.field_schema.items():
            if field.get(schemas.SHAPES) is not None:
                as_many(f"{schemas.SHAPES} of field {name!r}", field[schemas.SHAPES], size)
        if production_status is None:
            self.production_status = np.zeros(size, dtype=np.int8)
        else:
            self.production_status = np.array(production_status, dtype=np.int8, ndmin=1)
            as_many("production_status", self.production_status, size)
        self.extra_info = dict(extra_info or {})
        self.custom_meta = dictionaries("custom_meta", custom_meta, size)
        self._custom_backend_meta = dictionaries("_custom_backend_meta", _custom_backend_meta, size)
        self._row_keys = _row_keys or [None] * size

    @classmethod
    def empty(cls, extra_info: dict[str, Any] | None = None) -> BatchMeta:
        """The batch without rows."""
        return cls(extra_info=extra_info)

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in zip(self.__slots__, state, strict=True):
            setattr(self, name, value)
        if not self.production_status.flags.writeable:
            # Ray hands out arrays that lie in its own memory, and those cannot be written.
            self.production_status = self.production_status.copy()

    @property
    def _row_keys(self) -> list[str | None]:
        """The key of each row in the plane; None where it is not known."""
        return [self._keys.get(index) for index in self.global_indexes]

    @_row_keys.setter
    def _row_keys(self, keys: Sequence[str | None]) -> None:
        as_many("_row_keys", keys, self.size)
        self._keys = keys_by_index(zip(self.global_indexes, keys, strict=True))

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.global_indexes)

    def __len__(self) -> int:
        return len(self.global_indexes)

    @property
    def field_names(self) -> list[str]:
        """The fields' names, sorted."""
        return sorted(self.field_schema)

    @property
    def is_ready(self) -> bool:
        """Whether there are rows, and all of them have all of these fields."""
        return self.size > 0 and bool((self.production_status == 1).all())

    @property
    def samples(self) -> SampleViews:
        """The rows one by one, to look at."""
        return SampleViews(self)

    def get_dtypes(self, field_name: str) -> list[Any]:
        """A field's dtype, once per row. Raises KeyError for a field that is not here."""
        return [self._field(field_name).get("dtype")] * self.size

    def get_shapes(self, field_name: str) -> list[Any]:
        """A field's shape in each row. Raises KeyError for a field that is not here."""
        return schemas.row_shapes(self._field(field_name), self.size)

    def __str__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, "
            f"is_ready={self.is_ready}, global_indexes={self.global_indexes}, "
            f"extra_info={self.extra_info})"
        )

    def add_fields(self, tensor_dict: TensorDict, set_all_ready: bool = True) -> BatchMeta:
        """This batch, which now has the fields of these values too; they count as there unless
        `set_all_ready` is off. Values without rows change nothing.

        Raises ValueError where the values have another number of rows.
        """
        added = schemas.extract_field_schema(tensor_dict)
        rows = tensor_dict.batch_size[0]
        if rows == 0:
            return self
        if rows != self.size:
            raise ValueError(f"add_fields: there are {rows} rows of values for {self.size} rows")
        self.field_schema.update(added)
        if set_all_ready:
            self.production_status[:] = 1
        return self

    def select_fields(self, field_names: list[str]) -> BatchMeta:
        """The same rows with these fields; names of others are passed over."""
        wanted = set(field_names)
        chosen = self.copy()
        chosen.field_schema = {
            name: chosen.field_schema[name] for name in field_names if name in chosen.field_schema
        }
        chosen._custom_backend_meta = [
            {name: value for name, value in row.items() if name.startswith("_") or name in wanted}
            for row in chosen._custom_backend_meta
        ]
        return chosen

    def union(self, other: BatchMeta) -> BatchMeta:
        """The same rows with the fields of both. Where both say something, the other one's counts;
        a row is ready if it is in both. A side without rows says nothing.

        Raises ValueError unless both have the same rows in the same order.
        """
        if not other:
            return self.copy()
        if not self:
            return other.copy()
        must_equal("BatchMeta.union: global_indexes", self.global_indexes, other.global_indexes)
        must_equal("BatchMeta.union: partition_ids", self.partition_ids, other.partition_ids)
        united, added = self.copy(), other.copy()
        united.field_schema.update(added.field_schema)
        united.production_status = self.production_status & other.production_status
        united.extra_info.update(added.extra_info)
        for column in ("custom_meta", "_custom_backend_meta"):
            for row, more in zip(getattr(united, column), getattr(added, column), strict=True):
                row.update(more)
        united._keys = keys_by_index([*self._keys.items(), *other._keys.items()])
        return united

    def copy(self) -> BatchMeta:
        """A batch that says the same and shares nothing with this one."""
        copied = self.select_samples(range(self.size))
        copied.extra_info = copy.deepcopy(self.extra_info)
        return copied

    def select_samples(self, sample_indices: Sequence[int]) -> BatchMeta:
        """The rows at these places, in this order. Raises ValueError for a place beyond them."""
        places = self._places(sample_indices)
        return BatchMeta(
            global_indexes=[self.global_indexes[place] for place in places],
            partition_ids=[self.partition_ids[place] for place in places],
            field_schema=schemas.of_rows(self.field_schema, places),
            production_status=self.production_status[places],
            extra_info=self.extra_info,
            custom_meta=[own_tag(self.custom_meta[place]) for place in places],
            _custom_backend_meta=[
                copy.deepcopy(self._custom_backend_meta[place]) for place in places
            ],
            _row_keys=[self._keys.get(self.global_indexes[place]) for place in places],
        )

    def __getitem__(self, item: SupportsIndex | slice) -> BatchMeta:
        if isinstance(item, slice):
            return self.select_samples(range(*item.indices(self.size)))
        try:
            return self.select_samples([range(self.size)[as_index(item)]])
        except IndexError:
            raise IndexError(f"BatchMeta index out of range: {item} of {self.size} rows") from None

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """As many parts, in order; the first have one row more where it does not come out even."""
        return [
            self.select_samples(range(part.start, part.stop)) for part in shares(self.size, chunks)
        ]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """One part per partition, in the order in which they come up."""
        places: dict[str, list[int]] = {}
        for place, partition_id in enumerate(self.partition_ids):
            places.setdefault(partition_id, []).append(place)
        return [self.select_samples(part) for part in places.values()]

    @classmethod
    def concat(cls, data: list[BatchMeta], validate: bool = True) -> BatchMeta:
        """The rows of all of these, in order; empty batches say nothing.

        Raises ValueError where entries of `extra_info` differ and, unless `validate` is off, where
        fields or their dtypes do.
        """
        parts = [part for part in data or [] if part]
        if not parts:
            log.warning("BatchMeta.concat: no batch has a row; the result is empty")
            return BatchMeta()
        if validate:
            for place, part in enumerate(parts):
                schemas.must_match(parts[0].field_schema, part.field_schema, place)
        return BatchMeta(
            global_indexes=[row for part in parts for row in part.global_indexes],
            partition_ids=[row for part in parts for row in part.partition_ids],
            field_schema=schemas.concat([(part.field_schema, part.size) for part in parts]),
            production_status=np.concatenate([part.production_status for part in parts]),
            extra_info=infos.merged([part.extra_info for part in parts], of="BatchMeta.concat"),
            custom_meta=[row for part in parts for row in part.custom_meta],
            _custom_backend_meta=[row for part in parts for row in part._custom_backend_meta],
            _row_keys=[row for part in parts for row in part._row_keys],
        )

    def reorder(self, indices: Sequence[int]) -> None:
        """Put the rows in this order, here.

        Raises ValueError unless each place of the batch is named once. Nothing has moved then.
        """
        if len(indices) != self.size:
            raise ValueError(f"{len(indices)} indices do not match the batch size {self.size}")
        places = self._places(indices)
        if len(set(places)) != self.size:
            raise ValueError("Indices contain duplicates: each row is named once")
        self.field_schema = schemas.of_rows(self.field_schema, places)
        self.production_status = self.production_status[places]
        for column in (
            "global_indexes", "partition_ids", "custom_meta", "_custom_backend_meta",
        ):  # fmt: skip
            rows = getattr(self, column)
            setattr(self, column, [rows[place] for place in places])

    def _field(self, name: str) -> schemas.Field:
        if name not in self.field_schema:
            raise KeyError(f"field {name!r} is not in this batch, which has {self.field_names}")
        return self.field_schema[name]

    def _places(self, indices: Sequence[int]) -> list[int]:
        places = [as_index(place) for place in indices]
        beyond = [place for place in places if not 0 <= place < self.size]
        if beyond:
            raise ValueError(f"Sample indices must be in range [0, {self.size}): {beyond[:10]}")
        return places
