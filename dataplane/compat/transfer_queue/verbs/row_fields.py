"""What fields of rows are: dtype and shapes as `BatchMeta.field_schema` says it, looked up in the
plane for the rows that a batch has. Letters: N rows, R dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.get import resolve
from dataplane.client.reading import FieldRows
from dataplane.codec.dtypes import dtype_of
from dataplane.codec.shapes import OBJECT
from dataplane.errors import PartitionNotFound, SchemaMismatch

from ..control.answers import Answer

Field = dict[str, Any]


def placeholder() -> Field:
    """A field that no row has yet."""
    return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}


class _FieldRows:
    """What is known of one field's rows in a batch."""

    def __init__(self, count: int) -> None:
        self.shapes: list[tuple[int, ...] | None] = [None] * count
        self.dtypes: dict[str, None] = {}

    def as_schema(self) -> Field:
        """The field's entry; a field that changed its dtype among the rows has the one that holds
        all of them."""
        if OBJECT in self.dtypes:
            return {**placeholder(), "is_non_tensor": True}
        distinct = {shape for shape in self.shapes if shape is not None}
        dtypes = [dtype_of(name) for name in self.dtypes]
        dtype = dtypes[0]
        for other in dtypes[1:]:
            dtype = torch.promote_types(dtype, other)
        field: Field = {
            "dtype": dtype,
            "shape": torch.Size(next(iter(distinct))) if len(distinct) == 1 else None,
            "is_nested": len(distinct) > 1,
            "is_non_tensor": False,
        }
        if len(distinct) > 1:
            field["per_sample_shapes"] = self.shapes
        return field


def schema_of(
    core: Core, deadline: float, *, partition_id: str, told: Answer, fields: Sequence[str]
) -> Verb[dict[str, Field]]:
    """Dtype and shapes of fields, as the rows have them now. One question for each set of fields
    that rows have."""
    found: dict[str, _FieldRows] = {}
    for code, names in enumerate(told.sets):
        mine = [name for name in fields if name in names]
        if not mine:
            continue
        places: dict[str, list[int]] = {}
        for place, (key, of) in enumerate(zip(told.keys, told.codes, strict=True)):
            if of == code:
                places.setdefault(key, []).append(place)
        for kept, listed in (
            yield from _field_rows(core, deadline, partition_id, list(places), mine)
        ):
            for field in listed:
                into = found.setdefault(field.name, _FieldRows(len(told.keys)))
                into.dtypes[field.schema.dtype] = None
                for key, shape in zip(kept, _shapes(field), strict=True):
                    for place in places[key]:
                        into.shapes[place] = shape
    return {name: found[name].as_schema() for name in fields if name in found}


def _field_rows(
    core: Core, deadline: float, partition_id: str, keys: list[str], fields: list[str]
) -> Verb[list[tuple[list[str], list[FieldRows]]]]:
    """Where fields lie, in several parts where a field changed its kind among the rows."""
    try:
        plan = yield from resolve(core, keys, partition_id, fields, True, deadline)
        return [(plan.keys, plan.fields)]
    except PartitionNotFound:
        return []
    except SchemaMismatch:
        if len(keys) < 2:
            raise
    half = len(keys) // 2
    first = yield from _field_rows(core, deadline, partition_id, keys[:half], fields)
    rest = yield from _field_rows(core, deadline, partition_id, keys[half:], fields)
    return [*first, *rest]


def _shapes(field: FieldRows) -> list[tuple[int, ...]]:
    """The shape of each row; scalars count as one entry, as TransferQueue has it. # [N, R]"""
    if not field.schema.rank:
        return [(1,)] * len(field.nbytes)
    return [tuple(shape) for shape in field.shape.tolist()]
