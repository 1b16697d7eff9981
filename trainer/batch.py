"""From the groups of a sample to what every rank does with them: from tags alone. Pure.

Owns what selection, advantages and plan make together: the work of each rank, and how many tokens
each optimizer step supervises over all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainer.advantage import AdvantageConfig, Advantages, advantages, batch_statistics, cluster
from trainer.materialize import Experts, Freshness, Teacher
from trainer.plan import Plan, PlanConfig, Topology, make_plan
from trainer.ranks.types import RankWork
from trainer.select import (
    Group,
    Selection,
    Skipped,
    fresh_policy_len,
    in_stable_order,
    off_policy_metrics,
    select_valid,
)
from trainer.trajectory import BatchTraits, Trajectory

SHUFFLE = 0x5A
"""Keeps this randomness apart from that of plans, which the same seed and step decide."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one training step does."""

    partition_id: str
    step: int
    works: list[RankWork]  # [dp]
    selection: Selection
    advantages: Advantages
    """One number for each of the selection's trajectories."""
    plan: Plan
    global_tokens: list[int]
    """Supervised tokens over all ranks. # [optimizer steps]"""
    traits: BatchTraits
    metrics: dict[str, float]
    """Statistics of the batch and its packs, and `skipped_groups`: what `response/…` is logged
    of."""
    off_policy: dict[str, float]
    """How far its rows lag behind, under `training/off_policy/…`."""

    @property
    def skipped(self) -> list[Skipped]:
        """Groups that are not trained, and why. Their rows are cleared with the batch."""
        return self.selection.skipped

    @property
    def trajectories(self) -> list[Trajectory]:
        """The rows of the plan."""
        return self.selection.trajectories


def plan_batch(
    groups: Iterable[Group],
    *,
    step: int,
    partition_id: str,
    advantage: AdvantageConfig,
    plan: PlanConfig,
    topology: Topology,
    required: Collection[str] = (),
    deterministic: bool = False,
    supervised: bool = False,
    shuffle_seed: int | None = None,
    token_threshold: int | None = None,
    teacher: Teacher | None = None,
    experts: Experts | None = None,
    raw_rewards: tuple[float, int] | None = None,
) -> Batch:
    """The work of each rank with these groups, and what is reported of it.

    Args:
        required: fields that the run cannot do without; see `select_valid`.
        deterministic: rows are taken in the order of their identity, not of their arrival.
        supervised: every advantage is 1, whatever the scores: with the loss `policy_gradient`
            that is training on the rows as they are.
        shuffle_seed: gives the advantages of the batch to other rows of it, by this seed and the
            step: a control that must learn nothing.
        token_threshold: supervised tokens of this staleness are not trained.
        raw_rewards: sum and count of all scores that producers saw.

    Raises:
        ValueError: no group is left that can be trained; a tag, a required field or a score is
            missing.
        PlanError: the rows fit no plan, or the estimator works per token.
    """
    selection = select_valid(groups, required=required, step=step)
    if deterministic:
        selection = replace(selection, groups=in_stable_order(selection.groups))
    rows = selection.trajectories
    numbers = _all_ones(selection) if supervised else advantages(selection.groups, advantage)
    if shuffle_seed is not None:
        numbers = shuffled(numbers, shuffle_seed, step)
    made = make_plan(
        [row.train_len for row in rows], plan, topology.dp_size, keys=selection.keys, step=step
    )
    fresh = None if token_threshold is None else Freshness(step, token_threshold)
    tokens = supervised_tokens(made, rows, fresh)
    traits = BatchTraits.of(rows)
    works: list[RankWork] = []
    for dp_rank in range(made.dp_size):
        part = made.for_rank(dp_rank).in_pack_order()
        works.append(
            RankWork(
                partition_id=partition_id,
                train_step=step,
                members=part.take(rows),
                part=part,
                advantages=part.take(numbers.values),
                global_tokens=tokens,
                traits=traits,
                teacher=teacher,
                experts=experts,
                fresh=fresh,
            )
        )
    metrics = {
        **batch_statistics(rows, numbers, raw_rewards=raw_rewards),
        **made.metrics(),
        "skipped_groups": len(selection.skipped),
    }
    return Batch(
        partition_id, step, works, selection, numbers, made, tokens, traits, metrics,
        off_policy_metrics(rows, step),
    )  # fmt: skip


def supervised_tokens(
    plan: Plan, rows: Sequence[Trajectory], fresh: Freshness | None = None
) -> list[int]:  # [optimizer steps]
    """How many tokens each optimizer step supervises over all ranks: what losses are divided by.

    Counted from tags; workers find the same in the labels of their packs.

    Example: ranks whose packs supervise 7, 3 and no tokens in one step: [10].
    """
    if fresh is None:
        counts = [row.policy_len for row in rows]
    else:
        counts = [fresh_policy_len(row, fresh.train_step, fresh.threshold) for row in rows]
    return [
        sum(counts[i] for rank in plan.packs for pack in rank[step] for i in pack)
        for step in range(plan.num_optimizer_steps)
    ]


def shuffled(result: Advantages, seed: int, step: int) -> Advantages:
    """The same numbers, each at another row's place: a permutation drawn from seed and step."""
    order = np.random.default_rng([seed, step, SHUFFLE]).permutation(len(result.values))
    return replace(result, values=[result.values[i] for i in order.tolist()])


def _all_ones(selection: Selection) -> Advantages:
    scores = [score for group in selection.groups for score in cluster(group, scored=False).scores]
    return Advantages([0.0 if row.is_padding else 1.0 for row in selection.trajectories], scores)
