"""Which rank trains which rows when: an index-only plan, made by the controller.

Owns the way from lengths to `[dp][optimizer_step][pack] -> rows`. Never holds a value, draws no
random number that its arguments did not decide, and knows the engine only as a `Topology`.

    plan = make_plan(lengths, PlanConfig(cap=8192, optimizer_steps=2), topology.dp_size, keys=keys)
    mine = plan.for_rank(topology.dp_rank(rank))
"""

from __future__ import annotations

from trainer.plan.planner import STRATEGIES, PlanConfig, agreed_cap, make_plan
from trainer.plan.rows import balance_rows, pad_to_multiple, seqlen_metrics
from trainer.plan.topology import Topology
from trainer.plan.types import Plan, RankPlan

__all__ = [
    "STRATEGIES",
    "Plan",
    "PlanConfig",
    "RankPlan",
    "Topology",
    "agreed_cap",
    "balance_rows",
    "make_plan",
    "pad_to_multiple",
    "seqlen_metrics",
]
