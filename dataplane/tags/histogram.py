"""A histogram of lengths: exact up to 255, then in bins of 1 %; bounded whatever comes. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

EXACT_BITS = 8
BINS = (1 << EXACT_BITS) * (32 - EXACT_BITS)
SHOWN = 20
"""Bins that are told, and one more at most."""


class Lengths:
    """Lengths of the rows of one field."""

    __slots__ = ("_bins", "max", "min", "rows", "total")

    def __init__(self) -> None:
        self.rows = 0
        self.total = 0
        self.min = 0
        self.max = 0
        self._bins = np.zeros(BINS, np.int64)

    def add(self, length: int) -> None:
        """One more row."""
        self._bins[bin_of(length)] += 1
        self._note(length, length, 1, length)

    def add_all(self, lengths: npt.NDArray[np.int32]) -> None:
        """More rows, of these lengths."""
        if not len(lengths):
            return
        wide = lengths.astype(np.int64)
        # float64 holds every int32, and its exponent is the number of bits.
        shift = np.maximum(np.frexp(wide.astype(np.float64))[1] - EXACT_BITS, 0)
        bins = (shift << EXACT_BITS) + (wide >> shift)
        self._bins += np.bincount(bins, minlength=BINS)
        self._note(int(wide.min()), int(wide.max()), len(wide), int(wide.sum()))

    def _note(self, low: int, high: int, rows: int, total: int) -> None:
        self.min = min(self.min, low) if self.rows else low
        self.max = max(self.max, high)
        self.rows += rows
        self.total += total

    def percentile(self, share: float) -> int:
        """The length that this share of the rows does not exceed, rounded up to its bin's end."""
        if not self.rows:
            return 0
        rank = max(1, int(np.ceil(share * self.rows)))
        number = int(np.searchsorted(np.cumsum(self._bins), rank))
        return min(self.max, bin_range(number)[1])

    def told(self) -> dict[str, Any]:
        """All of it, for the wire."""
        return {
            "rows": self.rows,
            "min": self.min,
            "max": self.max,
            "mean": round(self.total / self.rows, 3) if self.rows else 0.0,
            "p50": self.percentile(0.5),
            "p90": self.percentile(0.9),
            "p99": self.percentile(0.99),
            "histogram": self._shown(),
        }

    def _shown(self) -> list[list[int]]:
        """Bins of one width, a power of two so that each of ours lies in one of them; from 10 to 21
        where there are so many lengths."""
        narrowest = bin_range(bin_of(self.max))
        width = narrowest[1] - narrowest[0] + 1
        while (self.max - self.min) // width >= SHOWN:
            width *= 2
        shown: dict[int, int] = {}
        for number in np.flatnonzero(self._bins).tolist():
            at = bin_range(number)[0] // width
            shown[at] = shown.get(at, 0) + int(self._bins[number])
        return [
            [max(self.min, at * width), min(self.max, (at + 1) * width - 1), rows]
            for at, rows in sorted(shown.items())
        ]


def bin_of(length: int) -> int:
    """The bin of a length."""
    shift = max(length.bit_length() - EXACT_BITS, 0)
    return (shift << EXACT_BITS) + (length >> shift)


def bin_range(number: int) -> tuple[int, int]:
    """The lengths of a bin, both ends included."""
    shift, low = number >> EXACT_BITS, number & ((1 << EXACT_BITS) - 1)
    return low << shift, ((low + 1) << shift) - 1
