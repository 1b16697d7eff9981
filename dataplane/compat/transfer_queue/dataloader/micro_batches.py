"""A batch cut into micro-batches: its fields and its meta at the same rows.

Pure. Rows of nested fields are copied, dense ones are views of the batch, as slices of a TensorDict
are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from tensordict import TensorDict

if TYPE_CHECKING:
    from ..metadata import BatchMeta


def chunk_batch_fn(
    td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1
) -> list[tuple[TensorDict, BatchMeta]]:
    """The batch in parts of `micro_batch_size` rows, the last of which may have fewer.

    The meta of a part is of exactly its rows. A jagged field stays jagged in the same dimension,
    also where all rows of a part are equally long.

    Raises:
        TypeError: `td` is no TensorDict.
        ValueError: the size is no positive int, or larger than the batch; `td` has no batch size.
    """
    if not isinstance(td, TensorDict):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
        raise TypeError(f"a TensorDict is cut into micro-batches, not {type(td).__name__}")
    size: Any = micro_batch_size
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise ValueError(f"micro_batch_size is a positive int, not {size!r:.80}")
    if not td.batch_size:
        raise ValueError("td has no batch size: there are no rows to cut between")
    rows = td.batch_size[0]
    if size > rows:
        raise ValueError(f"micro_batch_size {size} is more than the {rows} rows of the batch")
    nested = {
        name: value
        for name, value in cast("Any", td).items()
        if isinstance(value, torch.Tensor) and value.is_nested
    }
    dense: Any = td.exclude(*nested) if nested else td
    parts: list[tuple[TensorDict, BatchMeta]] = []
    for begin in range(0, rows, size):
        end = min(begin + size, rows)
        part: TensorDict = dense[begin:end]
        for name, value in nested.items():
            part[name] = _rows(value, begin, end)
        parts.append((part, batch_meta.select_samples(list(range(begin, end)))))
    return parts


def _rows(nested: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """A copy of some rows of a nested tensor, nested in the same way."""
    # Of jagged tensors torch knows more than its types say.
    source: Any = nested
    if source.layout is not torch.jagged or source.lengths() is not None:
        # Strided, or a view with holes between its rows.
        rows = list(source.unbind()[begin:end])
        library: Any = torch.nested
        return library.as_nested_tensor(rows, layout=source.layout)
    offsets = source.offsets()[begin : end + 1]  # [rows + 1] int64
    first, last = int(offsets[0]), int(offsets[-1])
    ragged: int = source._ragged_idx  # counts the batch as dimension 0, values have none
    values = source.values().narrow(ragged - 1, first, last - first).clone()
    return torch.nested.nested_tensor_from_jagged(values, offsets - first, jagged_dim=ragged)
