"""Weights shared out so that all shares weigh about the same: Karmarkar and Karp's largest
differencing method.

Every weight, or every block of as many weights as there are shares, begins as a division of its
own. The two divisions whose heaviest and lightest shares differ most become one, heavy shares
joined to light ones, until one division is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

Share = tuple[Any, int, list[tuple[int, Any]]]
"""What a share weighs, how many items it has, and each item with its weight. Shares are compared
in this order, so that ties are broken the same way in every process."""


class CannotPartition(ValueError, AssertionError):
    """There is no such division of these weights."""


class _Division:
    """Shares from the heaviest to the lightest, and its place among other divisions."""

    __slots__ = ("shares",)

    def __init__(self, shares: list[Share]) -> None:
        self.shares = sorted(shares, reverse=True)

    def joined(self, other: _Division) -> _Division:
        """Both, the heaviest share of one with the lightest of the other."""
        return _Division(
            [
                (mine[0] + theirs[0], mine[1] + theirs[1], mine[2] + theirs[2])
                for mine, theirs in zip(self.shares, reversed(other.shares), strict=True)
            ]
        )

    def __lt__(self, other: _Division) -> bool:
        # The heap gives the least: the most uneven one comes first.
        mine, theirs = self._unevenness(), other._unevenness()
        return mine > theirs if mine != theirs else self.shares[0] > other.shares[0]

    def _unevenness(self) -> Any:
        return self.shares[0][0] - self.shares[-1][0]


def karmarkar_karp(
    seqlen_list: Sequence[Any], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """The items of each of `k_partitions` shares, heaviest share first, by their places.

    With `equal_size`, shares have as many items. Raises CannotPartition where that cannot be, or
    there are no items.
    """
    ascending = sorted((weight, place) for place, weight in enumerate(seqlen_list))
    if k_partitions < 1 or not ascending:
        raise CannotPartition(
            f"{len(ascending)} items cannot be shared out in {k_partitions} parts: there must be "
            "one of each or more"
        )
    if equal_size and len(ascending) % k_partitions:
        raise CannotPartition(
            f"{len(ascending)} items cannot be shared out in {k_partitions} parts of one size: "
            "their number is no multiple of it"
        )
    block = k_partitions if equal_size else 1
    nothing: Share = (0, 0, [])
    divisions = [
        _Division(
            [(weight, 1, [(place, weight)]) for weight, place in ascending[start : start + block]]
            + [nothing] * (k_partitions - block)
        )
        for start in range(0, len(ascending), block)
    ]
    heapq.heapify(divisions)
    while len(divisions) > 1:
        first = heapq.heappop(divisions)
        heapq.heapreplace(divisions, first.joined(divisions[0]))
    return [[place for place, _ in share[2]] for share in divisions[0].shares]


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[Any], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """The same with the items of each share in ascending order, and no share empty.

    Raises CannotPartition also where there are fewer items than shares.
    """
    if len(seqlen_list) < k_partitions:
        raise CannotPartition(
            f"{len(seqlen_list)} items are too few for {k_partitions} parts: one would be empty"
        )
    return [sorted(share) for share in karmarkar_karp(seqlen_list, k_partitions, equal_size)]
