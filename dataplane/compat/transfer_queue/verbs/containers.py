"""What a get of this face returns: rows as TransferQueue hands them out.

Owns the rule that the container follows from the rows that are there: scalars dense, equal or
ragged rows jagged, rows that differ in two dimensions strided nested, everything else a
NonTensorStack. (Our own client goes by the schema instead, see codec/containers.py.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from dataplane.codec.containers import FieldData, Offsets, as_list, nested
from dataplane.codec.shapes import OBJECT


def leaf(field: FieldData, offsets: Offsets) -> Any:
    """The rows of one field; B of them, at least one."""
    if field.dtype == OBJECT:
        return stack(cast("list[Any]", as_list(field)))
    if field.rank:
        if field.rank == 1:
            field.ragged_dim = 0
        else:
            differ = np.flatnonzero((field.shapes != field.shapes[0]).any(axis=0))
            if len(differ) > 1:
                return joined(cast("list[Any]", as_list(field)))
            # Where no row differs, the first dimension is the one that could have.
            field.ragged_dim = int(differ[0]) if len(differ) else 0
    return nested(field, offsets)


def joined(rows: Sequence[Any]) -> Any:
    """Rows from several reads, or of several shapes, as one leaf; dtypes are promoted."""
    if not all(isinstance(row, torch.Tensor) for row in rows):
        return stack(rows)
    ranks = {row.ndim for row in rows}
    if len(ranks) > 1:
        return stack(rows)
    dtypes = {row.dtype for row in rows}
    if len(dtypes) > 1:
        common = reduce(torch.promote_types, dtypes)
        rows = [row.to(common) for row in rows]
    if ranks == {0}:
        return torch.stack(list(rows))
    shapes = np.array([row.shape for row in rows])
    one_differs = (shapes != shapes[0]).any(axis=0).sum() <= 1
    layout = torch.jagged if one_differs else torch.strided
    return cast("Any", torch.nested).as_nested_tensor(list(rows), layout=layout)


def stack(values: Sequence[Any]) -> Any:
    """Values that are no tensors, one per row. `td[name]` of it is a list."""
    return NonTensorStack(*values)


def batch(leaves: dict[str, Any], rows: int) -> TensorDict:
    """The leaves as a TensorDict of batch size [rows]; without leaves of batch size [0]."""
    return TensorDict(leaves, batch_size=[rows if leaves else 0])
