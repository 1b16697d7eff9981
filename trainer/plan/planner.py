"""From lengths to a plan: settings, checks before and after, and the choice of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from trainer.errors import PlanError
from trainer.plan.balance import balance
from trainer.plan.cost import ALPHA, cost
from trainer.plan.in_order import greedy, legacy
from trainer.plan.job import Job
from trainer.plan.native import native
from trainer.plan.pack import StepSplit, without_empty_steps
from trainer.plan.types import Packs, Plan

STRATEGIES: Final[Mapping[str, Callable[[Job], Packs]]] = MappingProxyType(
    {"legacy": legacy, "greedy": greedy, "balance": balance, "native": native, "cost": cost}
)

SEED: Final = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """How batches are planned; the same for every step of a run."""

    cap: int
    """Length of a pack, in tokens as they are trained (one less than a row has)."""
    optimizer_steps: int = 1
    """Optimizer steps a batch is divided into, at most: few rows make fewer steps."""
    mini_batch_rows: int | None = None
    """Rows of one optimizer step over all ranks. Where it is given, a batch makes as many steps
    as it has such mini-batches, and `optimizer_steps` does not count."""
    strategy: str = "legacy"
    """One of `STRATEGIES`."""
    step_split: StepSplit = "even"
    """How `legacy` and `greedy` divide a rank's packs: steps differ by one pack at most, or each
    holds the mean rounded up and the last ones less, so that there may be fewer."""
    deterministic: bool = False
    """`legacy` and `greedy` take rows as they come instead of shuffling them."""
    seed: int | None = None
    """Of all randomness; 42 if not given. It is mixed with the number of the training step."""
    cost_alpha: int = ALPHA
    """`cost`: what a token costs besides attention, which costs a row its length squared."""
    drop_empty_steps: bool = True
    """Leave out optimizer steps in which no rank has a row (`balance` can make some)."""

    def __post_init__(self) -> None:
        for name in ("cap", "optimizer_steps", "mini_batch_rows"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"plan: {name} is a number from 1 on, not {value!r}")
        for name in ("cost_alpha", "seed"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"plan: {name} is a number from 0 on, not {value!r}")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"plan: strategy {self.strategy!r} is none of {', '.join(STRATEGIES)}")
        if self.step_split not in ("even", "ceil"):
            raise ValueError(f"plan: step_split is 'even' or 'ceil', not {self.step_split!r}")

    def steps_for(self, rows: int, dp_size: int) -> int:
        """Optimizer steps for a batch of so many rows. PlanError if no mini-batch divides by the
        data-parallel size."""
        if self.mini_batch_rows is None:
            return self.optimizer_steps
        if self.mini_batch_rows % dp_size:
            raise PlanError(
                f"a mini-batch of {self.mini_batch_rows} rows does not divide by the "
                f"data-parallel size {dp_size}"
            )
        return max(1, -(-rows // self.mini_batch_rows))


def make_plan(
    lengths: Sequence[int],
    config: PlanConfig,
    dp_size: int,
    *,
    keys: Sequence[str] | None = None,
    step: int = 0,
    filler: Collection[int] = (),
) -> Plan:
    """The plan of a batch, from the lengths of its rows alone.

    Args:
        lengths: T of each row, one less than its tokens. # [rows]
        dp_size: parts to divide the batch into: `Topology.dp_size`.
        keys: names rows in errors, and decides between equal rows in `cost`, whose plan then does
            not depend on the order of the rows.
        step: number of the training step, so that steps are shuffled differently.
        filler: places of rows that are padding themselves.

    The same arguments give the same plan. No rows make no steps.

    Example: make_plan([3, 5, 2, 4, 6, 1], PlanConfig(cap=8, optimizer_steps=2, strategy="greedy",
    deterministic=True), 2).packs == [[[[0, 1]], [[2, 3]]], [[[4, 5]], [[]]]].

    Raises:
        PlanError: a row is longer than a pack (named by its key), or a mini-batch does not divide.
    """
    if type(dp_size) is not int or dp_size < 1:
        raise ValueError(f"a batch is divided into 1 part or more, not {dp_size!r}")
    lengths = [int(length) for length in lengths]
    if keys is not None and len(keys) != len(lengths):
        raise ValueError(f"{len(keys)} keys for {len(lengths)} rows")
    if any(not 0 <= i < len(lengths) for i in filler):
        raise ValueError(f"filler rows {sorted(filler)} of a batch of {len(lengths)}")
    _check_lengths(lengths, config.cap, keys)
    steps = config.steps_for(len(lengths), dp_size)
    rows = range(len(lengths))
    packs: Packs = [[] for _ in range(dp_size)]
    if lengths:
        job = Job(
            lengths=lengths,
            cap=config.cap,
            dp_size=dp_size,
            steps=steps,
            step_split=config.step_split,
            deterministic=config.deterministic,
            rng=np.random.default_rng([SEED if config.seed is None else config.seed, step]),
            cost_alpha=config.cost_alpha,
            order=rows if keys is None else sorted(rows, key=keys.__getitem__),
        )
        packs = STRATEGIES[config.strategy](job)
    if config.drop_empty_steps:
        packs = without_empty_steps(packs)
    plan = Plan(packs, config.cap, lengths, frozenset(filler))
    plan.check()
    return plan


def agreed_cap(asked: int | None, configured: int) -> int:
    """The pack length that workers are configured for; ValueError if the caller means another.

    Workers would pack to the caller's length without a word, and compile or allocate for theirs.
    """
    if asked is not None and asked != configured:
        raise ValueError(
            f"pack_max_length {asked} was asked for, and the workers are configured with "
            f"{configured}"
        )
    return configured


def _check_lengths(lengths: Sequence[int], cap: int, keys: Sequence[str] | None) -> None:
    if not lengths:
        return
    for extreme in (max(lengths), min(lengths)):
        if 0 <= extreme <= cap:
            continue
        row = lengths.index(extreme)
        name = f"row {row}" if keys is None else f"row {row} (key {keys[row]!r})"
        if extreme < 0:
            raise ValueError(f"{name} has length {extreme}")
        over = sum(length > cap for length in lengths)
        raise PlanError(
            f"{name} is {extreme} tokens long, more than a pack holds ({cap}); "
            f"{over} of {len(lengths)} rows are too long"
        )
