"""Routed experts of a trajectory: which experts each input token went to, row by row. No I/O.

Row i belongs to input token i; the last token of a sequence was never an input, so N tokens have
N - 1 rows. Published as [N-1, layers * topk].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

UINT16_EXPERTS: Final = 65536
"""So many experts have ids of 16 bits."""


def joined_experts(history: npt.NDArray[Any] | None, current: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Experts of a continued response: what is known stays, and new rows follow.

    `current` covers every token that was asked with, and what came; `history` its first rows.
    Both are rows of all input tokens, so nothing is counted twice.

    Example: 5 tokens were known and have 4 rows; 2 more come, so `current` has 6 rows, and the
    result is the 4 known ones and the last 2 of `current`.

    Raises:
        ValueError: `current` has fewer rows than are known, or rows of another width.
    """
    if history is None:
        return current
    if history.shape[1:] != current.shape[1:] or len(current) < len(history):
        raise ValueError(
            f"routed experts of shape {current.shape} do not go on from those of shape "
            f"{history.shape}"
        )
    return np.concatenate([history, current[len(history) :]])


def traced_experts(pieces: Sequence[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    """Experts of a sequence that was recorded piece by piece, one row a token of each piece.

    The first row is dropped: pieces have the row of the token that led to theirs, so the rows are
    one too many in front. None if no piece has experts.

    Raises:
        ValueError: some pieces have experts and some have none.
    """
    known = [piece for piece in pieces if piece is not None]
    if not known:
        return None
    if len(known) != len(pieces):
        raise ValueError(
            f"{len(known)} of {len(pieces)} pieces of the trace have routed experts: all or none"
        )
    return np.concatenate(known)[1:]


def expert_ids(
    experts: npt.NDArray[Any], *, num_experts: int | None = None
) -> npt.NDArray[np.uint16] | npt.NDArray[np.int64]:
    """Experts as they are published: [rows, layers * topk], uint16 or int64.

    int64 where the model has more experts than 16 bits can name. Without `num_experts` the ids
    decide: name it for such models, because all rows of a partition have one dtype.

    Raises:
        ValueError: an id is below 0 or too large, or the array holds no ids.
    """
    if experts.dtype.kind not in "iu" or experts.ndim < 2:
        raise ValueError(
            f"routed experts are whole numbers of shape [rows, layers * topk], not "
            f"{experts.dtype} of shape {experts.shape}"
        )
    flat = experts.reshape(len(experts), int(np.prod(experts.shape[1:])))
    if num_experts is None and flat.dtype == np.uint16:
        return flat
    lowest, highest = (int(flat.min()), int(flat.max())) if flat.size else (0, 0)
    limit = num_experts if num_experts is not None else 2**63
    if lowest < 0 or highest >= limit:
        raise ValueError(f"routed experts from {lowest} to {highest}, of {limit} from 0 on")
    wide = (num_experts if num_experts is not None else highest + 1) > UINT16_EXPERTS
    return flat.astype(np.int64) if wide else flat.astype(np.uint16)
