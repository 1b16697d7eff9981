"""Groups of numbers that trade items, so that the largest sum gets smaller.

A local search: it ends where no single trade between the largest group and another one helps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

CLOSE: Final = 1.002
"""Groups within this factor of a bound that nothing can beat are left as they are."""
_TRADES: Final = 1_000
_LOOKS: Final = 4_000_000
"""Trades made, and items looked at for them, at most."""
_FEW: Final = 32
"""Groups of so few items also trade two of them at once."""

Groups: TypeAlias = list[list[int]]
_Item: TypeAlias = tuple[int, int]
"""(cost, index)"""


def weight(costs: Sequence[int], group: Iterable[int]) -> int:
    """What the items of a group weigh together."""
    return sum(map(costs.__getitem__, group))


def largest(costs: Sequence[int], groups: Groups) -> int:
    """The weight of the heaviest group."""
    return max(weight(costs, group) for group in groups)


def is_even(sums: Sequence[int]) -> bool:
    """Whether no sum is much above the mean."""
    return max(sums) <= sum(sums) / len(sums) * CLOSE


class Trades:
    """Groups that trade items, so that the largest of them gets smaller.

    With `owners` and `limit`, groups of one owner count together too: no trade lifts the sum of
    an owner above `limit`.
    """

    def __init__(
        self,
        costs: Sequence[int],
        groups: Sequence[Sequence[int]],
        *,
        loads: Sequence[int] | None = None,
        owners: Sequence[int] | None = None,
        limit: int | None = None,
    ) -> None:
        self._members = [sorted((costs[i], i) for i in group) for group in groups]
        start = loads or [0] * len(groups)
        self._loads = [
            load + weight(costs, group) for load, group in zip(start, groups, strict=True)
        ]
        self._owners = list(owners) if owners is not None else list(range(len(groups)))
        self._limit = limit
        self._owned = dict.fromkeys(self._owners, 0)
        for owner, load in zip(self._owners, self._loads, strict=True):
            self._owned[owner] += load
        self._looks = _LOOKS

    @property
    def groups(self) -> Groups:
        """The items of each group, lightest first."""
        return [[i for _, i in group] for group in self._members]

    def lower(self, among: Sequence[int], good: float) -> Groups:
        """Trade among these groups until the largest is at most `good`, or nothing helps."""
        for _ in range(_TRADES):
            heavy = max(among, key=self._loads.__getitem__)
            if self._loads[heavy] <= good or self._looks <= 0:
                break
            found = self._best_trade(heavy, among)
            if found is None:
                break
            self._trade(heavy, *found)
        return self.groups

    def even(self, among: Sequence[int]) -> Groups:
        """Trade among these groups until the largest is close to their mean."""
        return self.lower(among, sum(self._loads[g] for g in among) / len(among) * CLOSE)

    def _best_trade(
        self, heavy: int, among: Sequence[int]
    ) -> tuple[int, tuple[_Item, ...], tuple[_Item, ...]] | None:
        """The trade after which the larger of both groups is smallest, and below `heavy` now."""
        load = self._loads[heavy]
        best = load
        found: tuple[int, tuple[_Item, ...], tuple[_Item, ...]] | None = None
        gives = _choices(self._members[heavy])
        for light in sorted(among, key=self._loads.__getitem__):
            gap = load - self._loads[light]
            if gap <= 0 or load - gap / 2 >= best:
                break  # what follows is heavier still
            most = gap - 1
            if self._limit is not None and self._owners[light] != self._owners[heavy]:
                most = min(most, self._limit - self._owned[self._owners[light]])
            if most <= 0:
                continue
            takes = _choices(self._members[light])
            self._looks -= len(gives) + len(takes)
            aim = min(gap / 2, most)
            for given, out in gives:
                # Moving m leaves the larger of load - m and load - gap + m.
                at = bisect_left(takes, (given - aim,))
                for taken, back in takes[max(at - 1, 0) : at + 1]:
                    moved = given - taken
                    if 0 < moved <= most and load - min(moved, gap - moved) < best:
                        best = load - min(moved, gap - moved)
                        found = light, out, back
        return found

    def _trade(
        self, heavy: int, light: int, out: tuple[_Item, ...], back: tuple[_Item, ...]
    ) -> None:
        for source, target, items in ((heavy, light, out), (light, heavy, back)):
            for item in items:
                self._members[source].remove(item)
                insort(self._members[target], item)
                self._loads[source] -= item[0]
                self._loads[target] += item[0]
                self._owned[self._owners[source]] -= item[0]
                self._owned[self._owners[target]] += item[0]


def _choices(members: list[_Item]) -> list[tuple[int, tuple[_Item, ...]]]:
    """None, one, and of few members two of them, ascending by what they weigh together."""
    choices: list[tuple[int, tuple[_Item, ...]]] = [(0, ())]
    choices += [(item[0], (item,)) for item in members]
    if len(members) <= _FEW:
        choices += [(a[0] + b[0], (a, b)) for n, a in enumerate(members) for b in members[n + 1 :]]
    choices.sort()
    return choices
