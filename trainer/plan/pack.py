"""Rows into packs of a fixed capacity, packs into steps: what the strategies are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, TypeVar

from trainer.plan.types import Pack, Packs

StepSplit: TypeAlias = Literal["even", "ceil"]

_Item = TypeVar("_Item")


def next_fit(order: Iterable[int], lengths: Sequence[int], cap: int) -> list[Pack]:
    """Rows in this order, a new pack whenever the open one is too full; earlier ones stay closed.

    Example: next_fit(range(4), [3, 5, 2, 4], 8) == [[0, 1], [2, 3]].
    """
    packs: list[Pack] = []
    used = cap + 1
    for i in order:
        if used + lengths[i] > cap:
            packs.append([])
            used = 0
        packs[-1].append(i)
        used += lengths[i]
    return packs


def one_or_more(rows: list[int], lengths: Sequence[int], cap: int) -> list[Pack]:
    """The rows as one pack where they fit, even if there are none; else next-fit."""
    return [rows] if sum(map(lengths.__getitem__, rows)) <= cap else next_fit(rows, lengths, cap)


def split_sizes(count: int, parts: int) -> list[int]:
    """Sizes of `parts` consecutive parts that differ by at most one, larger ones first.

    Example: split_sizes(9, 4) == [3, 2, 2, 2], where rounding up would leave one part nothing.
    """
    size, extra = divmod(count, parts)
    return [size + (part < extra) for part in range(parts)]


def split(items: Sequence[int], parts: int) -> list[list[int]]:
    """The items cut as `split_sizes` says."""
    return _cut(items, split_sizes(len(items), parts))


def step_sizes(packs: int, steps: int, how: StepSplit) -> list[int]:
    """How many packs of a rank each optimizer step trains; never more steps than packs.

    Example: 44 packs in 16 steps are 12 of 3 and 4 of 2 when split evenly. Rounding up makes 15
    steps: 14 of 3 and one of 2.
    """
    if how == "even":
        return split_sizes(packs, min(steps, packs)) if packs else []
    size = max(1, -(-packs // steps))
    return [min(size, packs - start) for start in range(0, packs, size)]


def steps_of(packs: list[Pack], steps: int, how: StepSplit) -> list[list[Pack]]:
    """The packs of one rank, in order, as optimizer steps."""
    return _cut(packs, step_sizes(len(packs), steps, how))


def level(packs: Packs) -> Packs:
    """The same with empty packs where a rank has fewer in a step than another, or fewer steps.

    Example: two ranks in one step, [[0], [1], [2]] and [[3, 4]]: the second gets two empty packs.
    """
    steps = max((len(rank) for rank in packs), default=0)
    rows = [rank + [[] for _ in range(steps - len(rank))] for rank in packs]
    most = [max(len(rank[s]) for rank in rows) for s in range(steps)]
    return [
        [step + [[] for _ in range(most[s] - len(step))] for s, step in enumerate(rank)]
        for rank in rows
    ]


def without_empty_steps(packs: Packs) -> Packs:
    """The same without the steps in which no rank has a row.

    An optimizer step on nothing still decays weights and moves along old momentum.
    """
    steps = range(len(packs[0]) if packs else 0)
    kept = [s for s in steps if any(pack for rank in packs for pack in rank[s])]
    return [[rank[s] for s in kept] for rank in packs]


def _cut(items: Sequence[_Item], sizes: Iterable[int]) -> list[list[_Item]]:
    parts: list[list[_Item]] = []
    at = 0
    for size in sizes:
        parts.append(list(items[at : at + size]))
        at += size
    return parts
