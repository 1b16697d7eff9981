"""`cost` against an oracle, and the number partitioning that it stands on."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import PlanError
from trainer.plan import Plan, PlanConfig, make_plan
from trainer.plan.cost import row_cost
from trainer.plan.partition import (
    best_fit,
    equal_counts,
    fill,
    lower_bound,
    partition,
    spread,
)
from trainer.plan.trades import Trades, largest, weight

with warnings.catch_warnings():
    # What it imports to call solvers has docstrings that Python warns of when it compiles them.
    warnings.simplefilter("ignore")
    import prtpy

EXACT = 12
"""Sets of so few rows are solved to the end; larger ones for half a second at most, which can only
make the oracle's answer larger than the best one."""


def oracle(costs: Sequence[int], parts: int) -> float:
    """The largest sum of the best partition that prtpy's complete search finds."""
    time_limit = float("inf") if len(costs) <= EXACT else 0.5
    while True:
        try:
            sums = prtpy.partition(
                algorithm=prtpy.partitioning.complete_greedy,
                numbins=parts,
                items=list(costs),
                outputtype=prtpy.outputtypes.Sums,
                objective=prtpy.objectives.MinimizeLargestSum,
                time_limit=time_limit,
            )
        except TypeError:
            # It fails so when the time, which is the wall's, was over before it found anything.
            assert time_limit < 60
            time_limit *= 4
        else:
            return float(max(sums))


def excess(found: float, costs: Sequence[int], parts: int) -> float:
    """How far above the oracle; 1.0 where even the mean or the largest row is as much."""
    floor = max(sum(costs) / parts, max(costs))
    if found <= floor * 1.05 and len(costs) > EXACT:
        return 1.0
    return found / oracle(costs, parts)


def long_tailed(rng: random.Random) -> tuple[list[int], int, int]:
    """Lengths of a batch, ranks and steps."""
    ranks, steps = rng.randint(2, 8), rng.randint(1, 4)
    rows = rng.randint(ranks, ranks * steps * rng.choice([2, 4, 8, 24]))
    draw = rng.choice(
        [
            lambda: min(32_768, int(rng.lognormvariate(7, 1)) + 1),
            lambda: min(65_536, int(500 * rng.paretovariate(1.3))),
            lambda: rng.randint(20_000, 40_000) if rng.random() < 0.1 else rng.randint(50, 2_000),
        ]
    )
    return [draw() for _ in range(rows)], ranks, steps


def planned(lengths: list[int], ranks: int, steps: int, cap: int = 65_536) -> Plan:
    config = PlanConfig(cap=cap, optimizer_steps=steps, strategy="cost")
    return make_plan(lengths, config, ranks)


def work(made: Plan) -> list[list[int]]:
    """# [rank][step] cost"""
    return [
        [sum(row_cost(made.lengths[i]) for pack in step for i in pack) for step in rank]
        for rank in made.packs
    ]


@pytest.mark.parametrize("block", range(10))
def test_the_costliest_rank_is_within_five_percent_of_an_oracle(block: int) -> None:
    """1,000 sets: over the whole plan against the best ranks, and in one step against the best
    division into ranks and steps at once."""
    for seed in range(100 * block, 100 * block + 100):
        lengths, ranks, steps = long_tailed(random.Random(seed))
        costs = [row_cost(n) for n in lengths]
        cells = work(planned(lengths, ranks, steps))
        assert excess(max(map(sum, cells)), costs, ranks) <= 1.05, seed
        assert excess(max(map(max, cells)), costs, ranks * steps) <= 1.05, seed


@given(st.integers(0, 10_000), st.integers(2, 8), st.integers(1, 4))
def test_without_giants_every_step_is_even(seed: int, ranks: int, steps: int) -> None:
    """Where no row is a large part of a step, ranks reach every optimizer step together."""
    rng = random.Random(seed)
    lengths = [rng.randint(100, 2_000) for _ in range(40 * ranks * steps)]
    cells = work(planned(lengths, ranks, steps))
    for step in zip(*cells, strict=True):
        assert max(step) <= 1.01 * sum(step) / ranks
    totals = [sum(step) for step in zip(*cells, strict=True)]
    assert max(totals) <= 1.01 * min(totals)


def test_where_one_rank_has_a_giant_the_others_work_as_long_beside_it() -> None:
    """Three quarters of a rank's work: beside even shares, the other rank would idle."""
    lengths = [30_000, *[1_000] * 107]
    cells = work(planned(lengths, 2, 2))
    mean = sum(map(sum, cells)) / 2
    assert row_cost(30_000) / mean == pytest.approx(0.75, abs=0.01)
    longest = [max(step) for step in zip(*cells, strict=True)]
    assert sum(longest) <= 1.02 * mean
    assert longest[0] == pytest.approx(row_cost(30_000), rel=0.01)


def test_a_step_keeps_half_of_its_even_share() -> None:
    lengths = [60_000, *[1_000] * 200]
    cells = work(planned(lengths, 2, 4))
    even = sum(row_cost(n) for n in lengths[1:]) / 4
    assert all(sum(step) >= 0.45 * even for step in zip(*cells, strict=True))


def test_rows_share_packs_as_tightly_as_they_fit() -> None:
    made = planned([6, 6, 6, 2, 2, 2], 1, 1, cap=8)
    assert sorted(map(sorted, made.packs[0][0])) == [[0, 3], [1, 4], [2, 5]]


def test_alpha_says_how_much_attention_counts() -> None:
    assert [row_cost(n, 10) for n in (0, 1, 5)] == [0, 11, 75]
    lengths = [8, 5, 4, 4, 4]

    def shares(alpha: int) -> list[list[int]]:
        config = PlanConfig(cap=32, strategy="cost", cost_alpha=alpha)
        made = make_plan(lengths, config, 2)
        return sorted(sorted(lengths[i] for i in rank[0][0]) for rank in made.packs)

    assert shares(10**9) == [[4, 4, 5], [4, 8]]
    assert shares(0) == [[4, 4, 4, 5], [8]]


# -- number partitioning --------------------------------------------------------------------

COSTS = st.lists(st.integers(0, 1_000), max_size=24)
PARTS = st.integers(1, 8)


def sums(costs: Sequence[int], groups: Sequence[Sequence[int]]) -> list[int]:
    return [sum(costs[i] for i in group) for group in groups]


def test_trades_find_what_greedy_misses() -> None:
    costs = [8, 7, 6, 5, 4]
    assert sorted(sums(costs, fill(costs, [0, 0]))) == [13, 17]
    assert sums(costs, partition(costs, 2)) == [15, 15]


@given(COSTS, PARTS)
def test_a_partition_holds_every_item_once_between_bound_and_greedy(
    costs: list[int], parts: int
) -> None:
    groups = partition(costs, parts)
    assert len(groups) == parts
    assert sorted(i for group in groups for i in group) == list(range(len(costs)))
    greedy = max(sums(costs, fill(costs, [0] * parts)))
    assert lower_bound(costs, parts) <= max(sums(costs, groups)) <= greedy
    assert partition(costs, parts) == groups


@given(st.lists(st.integers(1, 1_000), min_size=1, max_size=9), st.integers(1, 5))
def test_no_partition_is_below_the_bound_and_ours_is_near_the_best(
    costs: list[int], parts: int
) -> None:
    best = oracle(costs, parts)
    assert lower_bound(costs, parts) <= best + 1e-9
    assert largest(costs, partition(costs, parts)) <= 1.05 * best


@given(COSTS, st.lists(st.integers(0, 2_000), min_size=1, max_size=6))
def test_spreading_over_loads_is_no_worse_than_filling(costs: list[int], loads: list[int]) -> None:
    def highest(groups: Any) -> int:
        return max(a + b for a, b in zip(loads, sums(costs, groups), strict=True))

    groups = spread(costs, loads)
    assert sorted(i for group in groups for i in group) == list(range(len(costs)))
    assert highest(groups) <= highest(fill(costs, loads))


@given(COSTS, st.integers(1, 4), st.integers(1, 3), st.randoms())
def test_no_trade_lifts_an_owner_above_its_limit(
    costs: list[int], owners: int, each: int, rng: Any
) -> None:
    groups: list[list[int]] = [[] for _ in range(owners * each)]
    for i in range(len(costs)):
        rng.choice(groups).append(i)
    owner = [group // each for group in range(len(groups))]

    def of_owners(now: Any) -> list[int]:
        return [sum(sums(costs, now)[o * each : (o + 1) * each]) for o in range(owners)]

    limit = max(of_owners(groups))
    trades = Trades(costs, groups, owners=owner, limit=limit)
    after = trades.lower(range(len(groups)), 0)
    assert sorted(i for group in after for i in group) == list(range(len(costs)))
    assert max(of_owners(after)) <= limit
    assert max(sums(costs, after)) <= max(sums(costs, groups))


def test_trades_end_where_they_are_good_enough() -> None:
    costs = [3, 3, 3, 3]
    assert Trades(costs, [[0, 1, 2, 3], []]).lower(range(2), 12) == [[0, 1, 2, 3], []]
    evened = Trades(costs, [[0, 1, 2, 3], []]).even(range(2))
    assert sums(costs, evened) == [6, 6]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(50, 100))
def test_bins_hold_what_fits(sizes: list[int], cap: int) -> None:
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    bins = best_fit(sizes, order, cap)
    assert bins is not None
    assert sorted(i for group in bins for i in group) == list(range(len(sizes)))
    assert all(weight(sizes, group) <= cap for group in bins)
    # No two bins fit in one: each row went to the fullest that took it.
    assert len(bins) <= 1 or sum(sorted(sums(sizes, bins))[:2]) > cap
    if bins:
        assert best_fit(sizes, order, cap, len(bins)) == bins
        assert best_fit(sizes, order, cap, len(bins) - 1) is None


def test_parts_of_equal_count_need_a_multiple() -> None:
    assert equal_counts([], 3) == [[], [], []]
    with pytest.raises(PlanError, match="5 rows do not divide into 2 parts"):
        equal_counts([1] * 5, 2)
    with pytest.raises(PlanError, match="1 part or more, not 0"):
        partition([1], 0)
