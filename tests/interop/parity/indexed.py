"""Rows by index, as cases of the low-level client make and show them.

Indexes themselves differ by design (the drop-in never gives one out twice), so what is compared is
their order: `placed` shows each index by its place among all that the case has seen.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from tests.interop.parity.batches import batch, jagged
from tests.interop.parity.describe import describe


def some_rows(n: int) -> TensorDict:
    return batch(n=torch.arange(n), v=jagged(*[list(range(i + 1)) for i in range(n)]))


def placed(meta: Any, among: Any) -> Any:
    """A batch with places for indexes: the place in `among`, a batch or a list of indexes.

    Shapes are lists, as the peer has them once they went over its wire; before, they are tuples.
    """
    known = list(getattr(among, "global_indexes", among))
    said = describe(meta)
    for field in said["field_schema"].values():
        field["shape"] = plain(field["shape"])
        if "per_sample_shapes" in field:
            field["per_sample_shapes"] = [plain(shape) for shape in field["per_sample_shapes"]]
    places = [known.index(i) if i in known else "new" for i in meta.global_indexes]
    return {**said, "global_indexes": places}


def in_order(meta: Any) -> Any:
    """The rows by index: the peer's fetch of everything has them in the order of a set."""
    return meta.select_samples(sorted(range(len(meta)), key=meta.global_indexes.__getitem__))


def plain(shape: Any) -> Any:
    return shape["values"] if isinstance(shape, dict) else shape


def status_of(found: Any, among: Any) -> Any:
    indexes, flags = found
    if indexes is None or flags is None:
        return [indexes, flags]
    known = among.global_indexes
    return [[known.index(int(i)) for i in indexes], str(indexes.dtype), flags]
