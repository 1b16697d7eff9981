"""Numbers written into the columns of packs.

In numpy: its copies of runs this short take half the time of torch's, and torch works on larger
ones in several threads, which costs milliseconds where cores are busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dataplane.fields import IGNORED
from trainer.trajectory import Trajectory


def fill_runs(
    matrix: torch.Tensor,  # [packs, cap, ...]
    values: torch.Tensor,  # [entries, ...]
    runs: Sequence[Sequence[tuple[int, int]]],  # [packs][runs] (start, end) in values
    pad: float,
) -> None:
    """The runs of each pack one after the other, and `pad` behind them."""
    same = matrix.dtype == values.dtype and values.device.type == "cpu"
    # Two types of one kind have a type of numpy's; torch converts the others.
    target: Any = matrix.numpy() if same else matrix
    source: Any = values.detach().numpy() if same else values
    for pack, spans in zip(target, runs, strict=True):
        at = 0
        for start, end in spans:
            pack[at : at + end - start] = source[start:end]
            at += end - start
        pack[at:] = pad


def spread(
    matrix: torch.Tensor,  # [packs, cap]
    numbers: Sequence[Sequence[float]],  # [packs][rows]
    sequences: Sequence[Sequence[int]],  # [packs][rows, then pieces of padding] lengths
) -> None:
    """The number of each row on all of its entries; 0 on padding."""
    flat: list[float] = []
    for own, lengths in zip(numbers, sequences, strict=True):
        flat += own
        flat += [0.0] * (len(lengths) - len(own))
    counts = [length for lengths in sequences for length in lengths]
    matrix.view(-1).numpy()[:] = np.repeat(np.asarray(flat, np.float64), counts)


def clear_unsupervised(matrix: torch.Tensor, labels: torch.Tensor, value: float) -> None:
    """`value` wherever there is no label. # both [packs, cap]"""
    np.copyto(matrix.numpy(), value, where=labels.numpy() == IGNORED, casting="unsafe")


def numbers_of(
    name: str,
    given: Sequence[float] | None,
    members: Sequence[Trajectory],
    places: Sequence[int],
) -> list[float]:
    """The numbers of the members in these places. ValueError if there are none, not one a member,
    or one that is not finite."""
    if not places:
        return []
    if given is None or len(given) != len(members):
        have = "none" if given is None else str(len(given))
        raise ValueError(f"{name}: one number a row is needed, {len(members)}; there are {have}")
    numbers = [given[place] for place in places]
    for place, number in zip(places, numbers, strict=True):
        if not math.isfinite(number):
            raise ValueError(f"key {members[place].key!r}: {name} has {number} for it")
    return numbers
