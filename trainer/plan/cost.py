"""`cost`: every rank gets work of equal cost, where a row costs alpha * T + T * T.

The linear term is for the weights and the square for attention; the default alpha is that of a
model of 7 billion parameters, in units of the square (the workload estimate of verl's trainer).
Lengths spread over two orders of magnitude, so equal tokens are far from equal work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trainer.plan.job import Job
from trainer.plan.pack import level
from trainer.plan.partition import best_fit, equal_counts, lower_bound, partition, spread
from trainer.plan.trades import CLOSE, Groups, Trades, is_even, largest, weight
from trainer.plan.types import Pack, Packs

ALPHA: Final = 24_576
SLACK: Final = 1.02
"""How far the costliest rank may rise above the bound, where that makes steps shorter."""
LEAST: Final = 0.5
"""A step keeps at least this much of an even share of the work."""


def row_cost(length: int, alpha: int = ALPHA) -> int:
    """What training a row of this length costs."""
    return (alpha + length) * length


def cost(job: Job) -> Packs:
    """Ranks of equal cost over the whole plan, and in each step as far as the rows allow.

    Ranks come first. Each then spreads its rows over the steps, all by the same measure: even
    shares, or larger ones in the first steps where single rows are larger than an even share, so
    that the giants of all ranks meet and nobody waits for them twice. Trades between ranks then
    lower the costliest step. Packs of a step are made by best fit, longest rows first.

    It draws nothing at random: the same rows in another order get the same plan, up to equal rows.
    """
    rows = sorted(job.order, key=job.lengths.__getitem__, reverse=True)
    costs = [row_cost(job.lengths[i], job.cost_alpha) for i in rows]
    cells = _cells(costs, job.dp_size, job.steps)
    packs = [_packed([rows[i] for i in sorted(cell)], job) for cell in cells]
    return level([packs[at : at + job.steps] for at in range(0, len(packs), job.steps)])


def _cells(costs: Sequence[int], ranks: int, steps: int) -> Groups:
    """# [rank * steps + step] -> places in costs, which descend"""
    shares = [sorted(share) for share in partition(costs, ranks)]
    if steps == 1:
        return shares
    cells = _traded(costs, _spread(costs, shares, steps), ranks, steps)
    # Few rows a step: a rank may have been given rows that do not divide into steps.
    if largest(costs, cells) > lower_bound(costs, ranks * steps) * SLACK:
        other = _traded(costs, _grouped(costs, ranks, steps), ranks, steps)
        sums = [weight(costs, cell) for cell in other]
        heaviest = max(sum(sums[at : at + steps]) for at in range(0, len(sums), steps))
        if heaviest <= lower_bound(costs, ranks) * SLACK and max(sums) < largest(costs, cells):
            return other
    return cells


def _spread(costs: Sequence[int], shares: Groups, steps: int) -> Groups:
    """The rows of each rank spread over the steps."""
    levels = _levels(costs, shares, steps)
    loads = [max(levels) - part for part in levels]
    return [
        [share[i] for i in cell]
        for share in shares
        for cell in spread([costs[i] for i in share], loads)
    ]


def _grouped(costs: Sequence[int], ranks: int, steps: int) -> Groups:
    """Cells that are as equal as can be, as many of them to each rank, heaviest first."""
    cells = partition(costs, ranks * steps)
    sums = [weight(costs, cell) for cell in cells]
    return [
        cells[i]
        for group in equal_counts(sums, ranks)
        for i in sorted(group, key=sums.__getitem__, reverse=True)
    ]


def _traded(costs: Sequence[int], cells: Groups, ranks: int, steps: int) -> Groups:
    """The cells after trades between ranks: the costliest cell first, then each step by itself."""
    sums = [weight(costs, cell) for cell in cells]
    if all(is_even(sums[step::steps]) for step in range(steps)):
        return cells
    heaviest = max(sum(sums[at : at + steps]) for at in range(0, len(sums), steps))
    trades = Trades(
        costs,
        cells,
        owners=[rank for rank in range(ranks) for _ in range(steps)],
        limit=max(heaviest, int(lower_bound(costs, ranks) * SLACK)),
    )
    trades.lower(range(len(cells)), lower_bound(costs, len(cells)) * CLOSE)
    for step in range(steps):
        trades.even(range(step, len(cells), steps))
    return trades.groups


def _levels(costs: Sequence[int], shares: Sequence[Sequence[int]], steps: int) -> list[int]:
    """How much of a rank's work each step is meant to hold, largest first; the sum is a mean rank.

    A step holds an even part of what the steps before it left, or else the largest row that any
    rank has left for it, as long as every later step keeps its least share.
    """
    mean = sum(costs) / len(shares)
    least = LEAST * mean / steps
    levels: list[float] = []
    for step in range(steps):
        left = mean - sum(levels)
        giant = max((costs[share[step]] for share in shares if len(share) > step), default=0)
        levels.append(max(left / (steps - step), min(giant, left - least * (steps - step - 1))))
    return [round(part) for part in levels]


def _packed(rows: Sequence[int], job: Job) -> list[Pack]:
    packs = best_fit(job.lengths, rows, job.cap)
    assert packs is not None  # no limit on their number
    return packs or [[]]
