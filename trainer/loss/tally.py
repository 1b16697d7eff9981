"""Metrics of packs on their way to one number over all packs of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch


class Tally:
    """Adds up metrics of fixed names: those with `max` or `min` in their name by the largest or the
    smallest, others by their mean over the packs that had any.

    Ranks reduce the three vectors, all of them the same ones whatever their packs were.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._maxima = [n for n in names if "max" in n]
        self._minima = [n for n in names if "min" in n and "max" not in n]
        self._means = [n for n in names if "max" not in n and "min" not in n]
        self._max = dict.fromkeys(self._maxima, -math.inf)
        self._min = dict.fromkeys(self._minima, math.inf)
        self._sum = dict.fromkeys(self._means, 0.0)
        self._packs = 0.0

    def add(self, metrics: Mapping[str, float] | None) -> None:
        """Count one pack; None for one that supervises nothing, and is left out."""
        if metrics is None:
            return
        self._packs += 1
        for name in self._means:
            self._sum[name] += metrics[name]
        for name in self._maxima:
            self._max[name] = max(self._max[name], metrics[name])
        for name in self._minima:
            self._min[name] = min(self._min[name], metrics[name])

    def vectors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """To be reduced over ranks by sum, by maximum and by minimum. # float64"""
        sums = [self._packs, *self._sum.values()]
        parts = (sums, list(self._max.values()), list(self._min.values()))
        total, largest, smallest = (torch.tensor(part, dtype=torch.float64) for part in parts)
        return total, largest, smallest

    def result(
        self, reduced: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    ) -> dict[str, float]:
        """The metrics, of what was reduced or of this rank alone; 0.0 where no pack had any."""
        total, largest, smallest = self.vectors() if reduced is None else reduced
        packs = float(total[0])
        if not packs:
            return dict.fromkeys((*self._means, *self._maxima, *self._minima), 0.0)
        found = {n: float(v) / packs for n, v in zip(self._means, total[1:], strict=True)}
        found |= {n: float(v) for n, v in zip(self._maxima, largest, strict=True)}
        return found | {n: float(v) for n, v in zip(self._minima, smallest, strict=True)}
