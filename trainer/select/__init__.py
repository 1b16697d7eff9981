"""Which rows a training step takes: decided from tags, produced fields and row lengths alone.

Owns validity, staleness, eviction and refill, and how many prompts may be under way. Every decision
is a function of a snapshot that the caller took; nothing here waits, clears or submits.

    decision = decide(group_rows(rows_of(listing)), policy, step=7, batch_size=64)
    selection = select_valid(decision.selected)
"""

from __future__ import annotations

from trainer.select.capacity import admission_capacity, warm_up_shortfall
from trainer.select.eviction import Eviction
from trainer.select.groups import Group, Row, group_rows, in_stable_order, rows_of
from trainer.select.policy import ReplayPolicy
from trainer.select.replay import Decision, ReplayState, decide, sampleable_count
from trainer.select.replay_metrics import filtered_values, replay_metrics
from trainer.select.staleness import (
    Expiry,
    expiry,
    fresh_policy_len,
    is_stale,
    most_stale_first,
    off_policy_metrics,
    seq_staleness,
    span,
    stale_threshold,
    staleness,
)
from trainer.select.validity import Selection, Skipped, select_valid

__all__ = [
    "Decision",
    "Eviction",
    "Expiry",
    "Group",
    "ReplayPolicy",
    "ReplayState",
    "Row",
    "Selection",
    "Skipped",
    "admission_capacity",
    "decide",
    "expiry",
    "filtered_values",
    "fresh_policy_len",
    "group_rows",
    "in_stable_order",
    "is_stale",
    "most_stale_first",
    "off_policy_metrics",
    "replay_metrics",
    "rows_of",
    "sampleable_count",
    "select_valid",
    "seq_staleness",
    "span",
    "stale_threshold",
    "staleness",
    "warm_up_shortfall",
]
