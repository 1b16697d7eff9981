"""Positions of the tokens of a pack: from 0 again in every row and in every piece of padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trainer.materialize.spec import PADDING_CHUNK


def padding_chunks(size: int) -> list[int]:
    """The sequences that padding is cut into.

    Example: padding_chunks(3067) == [1024, 1024, 1019].
    """
    whole, rest = divmod(size, PADDING_CHUNK)
    return [PADDING_CHUNK] * whole + ([rest] if rest else [])


def restarting(
    lengths: Sequence[int], *, out: torch.Tensor | None = None
) -> torch.Tensor:  # [sum(lengths)] int64
    """0, 1, ... for each of the sequences; in `out` if given."""
    found = torch.empty(sum(lengths), dtype=torch.int64) if out is None else out
    target = found.numpy()  # numpy copies pieces this short in half the time
    count = np.arange(max(lengths, default=0))
    at = 0
    for length in lengths:
        target[at : at + length] = count[:length]
        at += length
    return found


def three_axes(
    given: Sequence[torch.Tensor | None],  # [3, P], one a row; None of rows of text
    lengths: Sequence[int],
    keys: Sequence[str],
) -> torch.Tensor:  # [3, 1, sum(lengths)]
    """The positions of rows on three axes; those of text count up on all of them."""
    parts = [
        restarting([length]).expand(3, -1) if axes is None else extended(axes, length, key)
        for axes, length, key in zip(given, lengths, keys, strict=True)
    ]
    joined = torch.cat(parts, 1) if parts else torch.zeros((3, 0), dtype=torch.int64)
    return joined[:, None]


def extended(axes: torch.Tensor, length: int, key: str) -> torch.Tensor:  # [3, length]
    """Three-axes positions for the first `length` tokens of a row.

    Those of a whole row are cut. Those of the prompt alone go on from the largest of all axes, on
    every axis: a text token has one position, whichever axis the images before it stretched.

    Raises:
        ValueError: no three axes, or more positions than the row has tokens; names the key.
    """
    if axes.ndim != 2 or axes.shape[0] != 3:
        raise ValueError(f"key {key!r}: positions of shape {[*axes.shape]}, not [3, N]")
    axes = axes.to(torch.int64)
    have = axes.shape[1]
    if have > length + 1:
        raise ValueError(f"key {key!r}: {have} positions for {length + 1} tokens")
    if have >= length:
        return axes[:, :length]
    top = int(axes.max()) if have else -1
    more = torch.arange(top + 1, top + 1 + length - have)
    return torch.cat([axes, more.expand(3, -1)], 1)
