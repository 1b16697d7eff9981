"""Between two waits: a sample becomes the work of every rank. Holds keys and tags, never a value.

What is decided is decided in batch.py; here it is timed, told in the log, and written back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dataplane import AsyncClient
from trainer.advantage import AdvantageConfig
from trainer.batch import Batch, plan_batch
from trainer.materialize import Experts, Teacher
from trainer.plan import PlanConfig, Topology
from trainer.select import Group

__all__ = ["Batch", "Controller", "plan_batch", "write_advantages"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """Plans the batches of one partition; what its settings mean is said at `plan_batch`."""

    partition_id: str
    advantage: AdvantageConfig
    plan: PlanConfig
    topology: Topology
    required: tuple[str, ...] = ()
    deterministic: bool = False
    supervised: bool = False
    shuffle_seed: int | None = None
    token_threshold: int | None = None
    teacher: Teacher | None = None
    experts: Experts | None = None

    def batch(
        self, groups: Iterable[Group], step: int, *, raw_rewards: tuple[float, int] | None = None
    ) -> Batch:
        """The batch of these groups, with the time that planning took; skipped groups are logged,
        for they should not be there. Errors are those of `plan_batch`."""
        began = time.monotonic()
        batch = plan_batch(
            groups,
            step=step,
            partition_id=self.partition_id,
            advantage=self.advantage,
            plan=self.plan,
            topology=self.topology,
            required=self.required,
            deterministic=self.deterministic,
            supervised=self.supervised,
            shuffle_seed=self.shuffle_seed,
            token_threshold=self.token_threshold,
            teacher=self.teacher,
            experts=self.experts,
            raw_rewards=raw_rewards,
        )
        for skip in batch.skipped:
            _log.warning("step %d leaves out group %s: %s", step, skip.uid, skip.reason)
        took = batch.plan.metrics(time.monotonic() - began)
        return replace(batch, metrics={**batch.metrics, **took})


async def write_advantages(
    client: AsyncClient, batch: Batch, *, timeout: float | None = None
) -> None:
    """Put each trained row's advantage beside its other tags. KeyNotFound names rows that are
    gone; nothing was written then."""
    await client.kv_batch_put(
        batch.selection.keys,
        batch.partition_id,
        None,
        [{"advantage": value} for value in batch.advantages.values],
        must_exist=True,
        timeout=timeout,
    )
