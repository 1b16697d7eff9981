"""A plan, and the part of it that one rank carries out.

Owns what a plan must satisfy and what is reported of it; how one is made is for the strategies.
Letters: T length of a row as it is trained (one less than its tokens), `cap` length of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from trainer.errors import PlanError

Pack: TypeAlias = list[int]
"""Rows joined in one sequence, in this order. An empty pack is trained as padding alone."""
Step: TypeAlias = list[Pack]
"""The packs of one rank between two optimizer steps, one forward-backward each."""
Packs: TypeAlias = list[list[Step]]
"""# [dp][optimizer_step][pack] -> row indices"""

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What the workers of one data-parallel rank fetch and train."""

    indices: list[int]
    """The rows of this rank, as places in the batch that was planned; ascending, unless they are
    `in_pack_order`."""
    packs: list[Step]
    """# [optimizer_step][pack] -> places in `indices`"""

    def take(self, items: Sequence[_Item]) -> list[_Item]:
        """This rank's part of something that the whole batch has one of a row: keys, advantages."""
        return [items[i] for i in self.indices]

    def in_pack_order(self) -> RankPlan:
        """The same part with its rows in the order in which packs have them: rows that are fetched
        in this order are cut into packs, and not gathered.

        Example: indices [4, 7, 9] in packs [[[2], [0, 1]]] become [9, 4, 7] in [[[0], [1, 2]]].
        """
        order = [place for step in self.packs for pack in step for place in pack]
        at = iter(range(len(order)))
        packs = [[[next(at) for _ in pack] for pack in step] for step in self.packs]
        return RankPlan([self.indices[place] for place in order], packs)

    def check_steps(self, optimizer_steps: int) -> int:
        """How many optimizer steps these are; fewer than configured is fine, more is PlanError."""
        if len(self.packs) > optimizer_steps:
            raise PlanError(
                f"the plan has {len(self.packs)} optimizer steps, and the worker is configured "
                f"for {optimizer_steps}"
            )
        return len(self.packs)


@dataclass(frozen=True, slots=True)
class Plan:
    """Every row in one pack of one optimizer step of one rank.

    All ranks have the same number of steps, and in each step the same number of packs: ranks meet
    in collectives once a pack, so the ones with less to do train empty packs.
    """

    packs: Packs  # [dp][optimizer_step][pack] -> row indices
    cap: int
    lengths: Sequence[int]  # [rows] T of each
    filler: frozenset[int] = frozenset()
    """Rows that are padding themselves (`is_padding`): what they hold counts as padding."""

    @property
    def dp_size(self) -> int:
        """How many data-parallel ranks it is for."""
        return len(self.packs)

    @property
    def num_packs(self) -> int:
        """All packs of all ranks, empty ones included."""
        return sum(len(step) for rank in self.packs for step in rank)

    @property
    def num_optimizer_steps(self) -> int:
        """How many optimizer steps every rank makes."""
        return len(self.packs[0]) if self.packs else 0

    @property
    def real_tokens(self) -> int:
        """Tokens of all rows but the filler ones."""
        return sum(self.lengths) - sum(self.lengths[i] for i in self.filler)

    @property
    def padding_tokens(self) -> int:
        """What is trained beside the real tokens, because every pack is `cap` long."""
        return self.num_packs * self.cap - self.real_tokens

    @property
    def efficiency(self) -> float:
        """Share of the trained tokens that are real; 0.0 of nothing."""
        trained = self.num_packs * self.cap
        return self.real_tokens / trained if trained else 0.0

    def metrics(self, plan_time_s: float | None = None) -> dict[str, float]:
        """What a training step logs of its plan."""
        metrics: dict[str, float] = {
            "packing/real_tokens": self.real_tokens,
            "packing/padding_tokens": self.padding_tokens,
            "packing/efficiency": self.efficiency,
            "packing/num_packs": self.num_packs,
            "packing/num_optimizer_steps": self.num_optimizer_steps,
        }
        if plan_time_s is not None:
            metrics["packing/plan_time_s"] = plan_time_s
        return metrics

    def for_rank(self, dp_rank: int) -> RankPlan:
        """The part of one data-parallel rank. Its replicas share it: make it once for them all."""
        rank = self.packs[dp_rank]
        indices = sorted(i for step in rank for pack in step for i in pack)
        place = {row: local for local, row in enumerate(indices)}
        return RankPlan(indices, [[[place[i] for i in pack] for pack in step] for step in rank])

    def check(self) -> None:
        """RuntimeError if this is no plan: a strategy that makes such a thing is broken."""
        rows = [i for rank in self.packs for step in rank for pack in step for i in pack]
        if len(rows) != len(self.lengths) or set(rows) != set(range(len(rows))):
            raise RuntimeError(f"a plan of {len(self.lengths)} rows holds {len(rows)} entries")
        for rank in self.packs:
            if [len(step) for step in rank] != [len(step) for step in self.packs[0]]:
                raise RuntimeError("ranks differ in how many packs they train in a step")
            for step in rank:
                for pack in step:
                    if sum(map(self.lengths.__getitem__, pack)) > self.cap:
                        raise RuntimeError(f"the pack {pack} is longer than {self.cap}")
