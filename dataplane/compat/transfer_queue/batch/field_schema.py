"""What is known of a batch's fields: of each its dtype, shape and kind, and each row's shape where
rows differ.

A schema is a plain dictionary, name → {dtype, shape, is_nested, is_non_tensor} and, for some,
`per_sample_shapes`, which is the only part that has one entry per row.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict

log = logging.getLogger("transfer_queue.metadata")

Field = dict[str, Any]
Schema = dict[str, Field]

SHAPES = "per_sample_shapes"


def extract_field_schema(data: TensorDict) -> Schema:
    """The schema of a batch's values; `{}` for one without rows.

    A dense field of one number per row counts as rows of one element. Raises ValueError for a
    field that has another number of rows than the batch.
    """
    if not data.batch_size:
        raise ValueError("these values have no batch dimension: there are no rows in them")
    size = data.batch_size[0]
    if size == 0:
        log.warning("values without rows have no field schema")
        return {}
    columns = cast(Any, data).items()  # its types are incomplete
    return {name: _field(name, value, size) for name, value in columns}


def _field(name: str, value: Any, size: int) -> Field:
    if not isinstance(value, torch.Tensor):
        _as_many(name, len(value), size)
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    if value.is_nested:
        rows = value.unbind()
        _as_many(name, len(rows), size)
        return {
            "dtype": value.dtype,
            "shape": rows[0].shape,
            "is_nested": True,
            "is_non_tensor": False,
            SHAPES: [tuple(row.shape) for row in rows],
        }
    _as_many(name, value.shape[0] if value.dim() else 0, size)
    return {
        "dtype": value.dtype,
        "shape": value.shape[1:] if value.dim() > 1 else torch.Size([1]),
        "is_nested": False,
        "is_non_tensor": False,
    }


def _as_many(name: str, rows: int, size: int) -> None:
    if rows != size:
        raise ValueError(
            f"Inconsistent batch dimension for field {name!r}: it has {rows} rows, the batch {size}"
        )


def of_rows(schema: Schema, rows: Sequence[int]) -> Schema:
    """The schema of these rows of a batch; nothing in it is shared."""
    chosen: Schema = {}
    for name, field in schema.items():
        shapes = field.get(SHAPES)
        # Not a deepcopy of all of it, which would visit every row's shape.
        chosen[name] = {key: copy.deepcopy(value) for key, value in field.items() if key != SHAPES}
        if shapes is not None:
            chosen[name][SHAPES] = [shapes[row] for row in rows]
    return chosen


def must_match(first: Schema, other: Schema, place: int) -> None:
    """Raises ValueError unless the batch at this place has batch 0's fields and dtypes."""
    odd = sorted(first.keys() ^ other.keys())
    if odd:
        raise ValueError(
            f"BatchMeta.concat: field_names mismatch: {odd} are in batch 0 or in batch {place}, "
            "not in both"
        )
    for name, field in first.items():
        mine, theirs = field.get("dtype"), other[name].get("dtype")
        if mine != theirs:
            raise ValueError(
                f"BatchMeta.concat: field {name!r} dtype mismatch: {mine} in batch 0, {theirs} in "
                f"batch {place}"
            )


def row_shapes(field: Field, size: int) -> list[Any]:
    """One shape per row of a batch of this size."""
    shapes = field.get(SHAPES)
    return list(shapes) if shapes is not None else [field.get("shape")] * size


def concat(parts: Sequence[tuple[Schema, int]]) -> Schema:
    """The schema of batches behind each other, each given with its size: the first one's fields.

    Rows keep their own shapes: where batches differ, the result lists them one by one.
    """
    together: Schema = {}
    for name, first in parts[0][0].items():
        fields = [(schema.get(name, {}), size) for schema, size in parts]
        nested = any(field.get("is_nested", False) for field, _ in fields)
        together[name] = {
            "dtype": first.get("dtype"),
            "shape": None if nested else first.get("shape"),
            "is_nested": nested,
            "is_non_tensor": first.get("is_non_tensor", False),
        }
        if (
            nested
            or any(field.get(SHAPES) is not None for field, _ in fields)
            or any(field.get("shape") != first.get("shape") for field, _ in fields)
        ):
            together[name][SHAPES] = [
                shape for field, size in fields for shape in row_shapes(field, size)
            ]
    return together
