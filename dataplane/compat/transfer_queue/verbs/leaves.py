"""A TensorDict's leaves as columns with one entry per row, as TransferQueue reads them on a put."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from dataplane.codec.columns import Whole


def as_columns(data: TensorDictBase, count: int) -> TensorDictBase | Mapping[str, Any]:
    """The leaves as the plane takes them: a list or an array that one `NonTensorData` holds for the
    whole batch is one value per row, and a row that is an array stays one.

    Raises TypeError for a `NonTensorData` of anything else: it would be the same for all rows.
    """
    odd: dict[str, Any] = {}
    leaves: dict[str, Any] = dict(cast("Any", data).items())
    for name, leaf in leaves.items():
        if isinstance(leaf, NonTensorStack):
            rows = leaf.tolist()
        elif isinstance(leaf, NonTensorData):
            rows = _rows(name, leaf.data, count)
        else:
            continue
        odd[name] = [kept(row) for row in rows]
    return {**leaves, **odd} if odd else data


def kept(row: Any) -> Any:
    """A value of one row, marked where the plane would make something else of it."""
    if not isinstance(row, np.ndarray):
        return row
    array = cast("Any", row)
    # An array of objects holds references; what it holds is kept as a list.
    return array.tolist() if array.dtype.kind in "OUS" else Whole(array)


def _rows(name: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, np.ndarray):
        value = list(cast("Any", value))
    if isinstance(value, list):
        listed = cast("list[Any]", value)
        if len(listed) == count:
            return listed
    raise TypeError(
        f"field {name!r} is one NonTensorData for the whole batch: give one value per row, as a "
        f"list or NonTensorStack of {count}"
    )
