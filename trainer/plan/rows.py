"""For trainers that divide batches by rows and not by packs: how many rows, and which go where.

The protocol of verl's V1 trainer: filler rows up to a multiple of every divisor, then parts of
equal row count. Our own plans need neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.errors import PlanError
from trainer.plan.cost import ALPHA, row_cost
from trainer.plan.partition import equal_counts


def pad_to_multiple(rows: int, *divisors: int) -> int:
    """How many filler rows a batch lacks until every divisor divides it.

    Divisors are the data-parallel size and the rows of each mini-batch. Filler rows are tagged
    `is_padding`, supervise no token, and count nowhere.

    Example: pad_to_multiple(10, 4, 6) == 2.
    """
    if any(type(divisor) is not int or divisor < 1 for divisor in divisors):
        raise PlanError(f"a batch cannot be padded to a multiple of {divisors}")
    return -rows % math.lcm(*divisors)


def balance_rows(lengths: Sequence[int], parts: int, alpha: int = ALPHA) -> list[list[int]]:
    """Rows in parts of equal count and nearly equal cost: rank d gets the d-th part.

    PlanError if the rows do not divide by `parts`: pad first.

    Example: of [10, 200, 30, 150, 90, 60, 120, 40] two parts hold 340 and 360 tokens.
    """
    return equal_counts([row_cost(length, alpha) for length in lengths], parts)


def seqlen_metrics(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> dict[str, float]:
    """How even the tokens of the parts are, and would be if rows were dealt as they came."""
    size = -(-len(lengths) // len(parts))
    before = [sum(lengths[at : at + size]) for at in range(0, size * len(parts), size or 1)] or [0]
    after = [sum(lengths[i] for i in part) for part in parts]
    return {
        "global_seqlen/min": min(before),
        "global_seqlen/max": max(before),
        "global_seqlen/minmax_diff": max(before) - min(before),
        "global_seqlen/balanced_min": min(after),
        "global_seqlen/balanced_max": max(after),
        "global_seqlen/mean": sum(lengths) / len(parts),
    }
