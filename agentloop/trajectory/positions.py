"""Positions of a trajectory's tokens, from what a processor made of its prompt. No I/O.

A processor of multimodal prompts gives three axes [3, P] for the training prompt. What is
published covers all N tokens, [3, N]: a worker cuts the last column with the last input. Text needs
none: positions are 0 .. N-1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def has_axes(position_ids: npt.NDArray[Any] | None) -> bool:
    """Whether these are positions on three axes, of a multimodal prompt."""
    return position_ids is not None and position_ids.ndim > 1 and len(position_ids) == 3


def extended_positions(
    position_ids: npt.NDArray[Any], total_len: int
) -> npt.NDArray[np.int64]:  # [N] or [3, N]
    """Positions of a prompt, as [P], [1, P], [3, P] or [3, 1, P], gone on with to N tokens.

    What follows is text: each further token has the position after the last one, which is the
    largest of all axes: a prompt that ends on an image has its axes end at different positions.

    Example: axes that end at 2, 3 and 3 go on with 4, 5, 6 on each.

    Raises:
        ValueError: there are more positions than tokens, or they have no such shape.
    """
    shape = position_ids.shape
    if position_ids.ndim == 3 and shape[1] == 1:
        position_ids = position_ids[:, 0]
    if position_ids.ndim == 2 and shape[0] == 1:
        position_ids = position_ids[0]
    if position_ids.ndim not in (1, 2) or (position_ids.ndim == 2 and len(position_ids) != 3):
        raise ValueError(f"positions of shape {shape} are neither one axis of tokens nor three")
    known = position_ids.shape[-1]
    if known > total_len:
        raise ValueError(f"{known} positions for {total_len} tokens")
    first = int(position_ids.max()) + 1 if position_ids.size else 0
    more = np.arange(first, first + total_len - known, dtype=np.int64)
    following = np.broadcast_to(more, (*position_ids.shape[:-1], len(more)))
    return np.concatenate([position_ids.astype(np.int64), following], axis=-1)
