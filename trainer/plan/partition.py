"""Numbers in groups of equal sums: which items go together so that the largest sum is small.

Owns number partitioning, and knows of no rows, ranks or packs. Costs are integers, so sums are
exact. Equal costs in the same order give the same groups.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from trainer.errors import PlanError
from trainer.plan.trades import CLOSE, Groups, Trades, is_even, largest, weight

_CELLS: Final = 400_000
"""Items times parts up to which more than the greedy search is tried; beyond it is close anyway."""

_Tree: TypeAlias = "int | tuple[_Tree, _Tree] | None"
"""The items of a group as they were joined; flattened once, at the end."""
_State: TypeAlias = tuple[int, int, list[tuple[int, _Tree]]]
"""(-spread, number, groups ascending by sum)"""


def partition(costs: Sequence[int], parts: int) -> Groups:
    """Indices of `costs` in `parts` groups, the largest sum as small as this search finds it.

    First each item, heaviest first, to the lightest group (Graham 1969). Where that is not close
    to `lower_bound`, Karmarkar-Karp differencing and bin packing by bisection (MULTIFIT) compete,
    and the best of the three is improved by trades. Groups may be empty.

    Example: of 8, 7, 6, 5, 4 in two groups the greedy search makes 13 and 17, and trades 15 and 15.
    """
    if parts < 1:
        raise PlanError(f"rows are divided among 1 part or more, not {parts}")
    order = _heaviest_first(costs)
    good = lower_bound(costs, parts) * CLOSE
    best = fill(costs, [0] * parts)
    heaviest = largest(costs, best)
    if heaviest > good and len(costs) * parts <= _CELLS:
        rivals = (_differenced(costs, order, parts), _bisected(costs, order, parts, heaviest))
        best = min((best, *rivals), key=lambda groups: largest(costs, groups))
        best = Trades(costs, best).lower(range(parts), good)
    return best


def spread(costs: Sequence[int], loads: Sequence[int]) -> Groups:
    """Indices in as many groups as there are loads, sums and loads together about even."""
    groups = fill(costs, loads)
    if is_even([load + weight(costs, group) for load, group in zip(loads, groups, strict=True)]):
        return groups
    return Trades(costs, groups, loads=loads).even(range(len(groups)))


def lower_bound(costs: Sequence[int], parts: int) -> float:
    """What the largest sum cannot go below: the mean, the largest item, or items that must meet.

    Of the j * parts + 1 heaviest items some j + 1 share a group, and weigh no less than the
    lightest j + 1 of them.
    """
    if not costs:
        return 0
    descending = sorted(costs, reverse=True)
    bound = max(descending[0], sum(descending) / parts)
    for j in range(1, min((len(descending) - 1) // parts, 8) + 1):  # more: the mean is the bound
        bound = max(bound, sum(descending[j * parts - j : j * parts + 1]))
    return bound


def fill(costs: Sequence[int], loads: Sequence[int]) -> Groups:
    """Each item, heaviest first, to the group with the least load; groups begin with `loads`."""
    groups: Groups = [[] for _ in loads]
    heap = [(load, group) for group, load in enumerate(loads)]
    heapq.heapify(heap)
    for item in _heaviest_first(costs):
        load, group = heap[0]
        groups[group].append(item)
        heapq.heapreplace(heap, (load + costs[item], group))
    return groups


def best_fit(
    sizes: Sequence[int], order: Iterable[int], cap: int, bins: int | None = None
) -> Groups | None:
    """Bins of at most `cap`: each item, in this order, to the fullest bin that takes it.

    None if that needs more than `bins`. No item may be larger than `cap`.
    """
    groups: Groups = []
    room: list[tuple[int, int]] = []  # (free, bin), ascending
    for item in order:
        at = bisect_left(room, (sizes[item], -1))
        if at < len(room):
            free, number = room.pop(at)
        else:
            free, number = cap, len(groups)
            if number == bins:
                return None
            groups.append([])
        groups[number].append(item)
        insort(room, (free - sizes[item], number))
    return groups


def equal_counts(costs: Sequence[int], parts: int) -> Groups:
    """Indices in `parts` groups of equal count, their sums as equal as differencing makes them.

    Each run of `parts` items that follow each other by cost is dealt one to a group, so counts
    stay equal however the runs are joined. PlanError if the items do not divide by `parts`.
    """
    if parts < 1 or len(costs) % parts:
        raise PlanError(f"{len(costs)} rows do not divide into {parts} parts of equal count")
    ascending = sorted(range(len(costs)), key=costs.__getitem__)
    states: list[_State] = []
    for start in range(0, len(costs), parts):
        groups: list[tuple[int, _Tree]] = [(costs[i], i) for i in ascending[start : start + parts]]
        states.append((groups[0][0] - groups[-1][0], start, groups))
    return [sorted(group) for group in _joined(states, parts)]


def _heaviest_first(costs: Sequence[int]) -> list[int]:
    return sorted(range(len(costs)), key=costs.__getitem__, reverse=True)  # stable all the same


def _differenced(costs: Sequence[int], order: Sequence[int], parts: int) -> Groups:
    """Karmarkar and Karp 1982: join the two partial partitions that are most uneven, largest group
    with smallest, until one is left."""
    states: list[_State] = []
    for number, item in enumerate(order):
        empty: list[tuple[int, _Tree]] = [(0, None)] * (parts - 1)
        states.append((-costs[item], number, [*empty, (costs[item], item)]))
    return _joined(states, parts)


def _joined(states: list[_State], parts: int) -> Groups:
    if not states:
        return [[] for _ in range(parts)]
    heapq.heapify(states)
    number = max(state[1] for state in states)
    while len(states) > 1:
        first, second = heapq.heappop(states)[2], heapq.heappop(states)[2]
        both: list[tuple[int, _Tree]] = [
            (a[0] + b[0], (a[1], b[1])) for a, b in zip(first, reversed(second), strict=True)
        ]
        both.sort(key=lambda group: group[0])
        number += 1
        heapq.heappush(states, (both[0][0] - both[-1][0], number, both))
    return [_leaves(tree) for _, tree in states[0][2]]


def _leaves(tree: _Tree) -> list[int]:
    found: list[int] = []
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, tuple):
            todo += node
        elif node is not None:
            found.append(node)
    return found


def _bisected(costs: Sequence[int], order: Sequence[int], parts: int, limit: int) -> Groups:
    """MULTIFIT (Coffman, Garey and Johnson 1978): the smallest bin, found by halving, of which
    `parts` are enough. At `limit` they are known to be."""
    low, high = max(-(-sum(costs) // parts), costs[order[0]]), limit
    best = [list(order)]
    while low < high:
        middle = (low + high) // 2
        groups = best_fit(costs, order, middle, parts)
        if groups is None:
            low = middle + 1
        else:
            best, high = groups, middle
    return best + [[] for _ in range(parts - len(best))]
