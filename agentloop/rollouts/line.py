"""One line of production: tasks whose groups lie in one partition, and the manager that runs them.

Owns what of the plane a line has to know to go on after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentloop.config import TaskConfig
from agentloop.datasets import Sampler
from agentloop.groups.plane_clock import PlaneClock
from agentloop.production.accounting import ProduceResult
from agentloop.production.manager import RolloutManager
from agentloop.production.prompt_rows import PromptRows
from agentloop.production.prompts import managed
from agentloop.production.seats import Seats
from agentloop.rollouts.supply import PromptSupply
from dataplane import AsyncClient, Client, PartitionNotFound

UNTRAINED: Final = {"status": {"in": ["pending", "running", "finished"]}}
"""Prompts that something is still to come of."""

MANY: Final = 10_000
"""Prompts that are remembered before the plane is asked which of them are there."""


class Line:
    """Draws prompts on and on, and has them run."""

    def __init__(
        self,
        client: AsyncClient,
        seats: Seats,
        tasks: Sequence[tuple[TaskConfig, Sampler]],
        *,
        partition_id: str,
        clock: PlaneClock,
        persist_prompts: bool,
        reissues: int,
    ) -> None:
        self.partition_id = partition_id
        self._rows = PromptRows(client, partition_id)
        self._supply = PromptSupply({task.name: sampler for task, sampler in tasks})

        def managed_task(task: TaskConfig) -> Any:
            return managed(task, partition_id, lambda: self._supply.next_row(task.name))

        self._manager = RolloutManager(
            client,
            seats,
            [managed_task(task) for task, _ in tasks],
            partition_id=partition_id,
            persist_prompts=persist_prompts,
            reissues=reissues,
            clock=clock,
        )

    async def produce(self, batch_size: int, train_step: int) -> ProduceResult:
        """See `RolloutManager.produce`."""
        if self._supply.unfinished > MANY:
            self._supply.settle(await self._there())
        return await self._manager.produce(batch_size, train_step)

    async def recover(self, train_step: int) -> int:
        """See `RolloutManager.recover`. What is in the plane is not drawn again."""
        taken_over = await self._manager.recover(train_step)
        self._supply.found(await self._there())
        return taken_over

    def state(self, reader: Client) -> dict[str, Any]:
        """Plain data that `restore` goes on from. Asks the plane, and waits for its answer."""
        there: set[str] = set()
        if self._supply.unfinished:
            try:
                listing = reader.kv_list(self.partition_id, where={"is_prompt": True, **UNTRAINED})
                there = {str(tags["uid"]) for tags in listing.tags}
            except PartitionNotFound:
                pass
        return self._supply.state(there)

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `PromptSupply.restore`."""
        self._supply.restore(state)

    async def _there(self) -> set[str]:
        return {str(tags["uid"]) for tags in await self._rows.prompts(UNTRAINED)}
