"""What an operator asks, on the asyncio client: part of `AsyncClient`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.inspecting import (
    claims_and_tasks,
    inspect_keys,
    partition_stats,
    revision_before,
    store_holdings,
    tally_rows,
    who_waits,
)
from dataplane.client.recording import plane_record, samples_taken
from dataplane.client.tags import Where
from dataplane.inspection import (
    ClaimReport,
    KeyReport,
    PartitionStats,
    StoreReport,
    Tally,
    TaskReport,
    Waiter,
)
from dataplane.report.record import PlaneRecord, PlaneSamples
from dataplane.types import Revision

Result = TypeVar("Result")


class AsyncInspector(ABC):
    _core: Core

    @abstractmethod
    async def _drive(self, verb: Verb[Result], deadline: float) -> Result: ...

    @abstractmethod
    def _deadline(self, timeout: float | None) -> float: ...

    async def inspect(
        self, keys: Sequence[str], partition_id: str, *, timeout: float | None = None
    ) -> list[KeyReport | None]:
        """See `Client.inspect`."""
        deadline = self._deadline(timeout)
        return await self._drive(inspect_keys(self._core, keys, partition_id, deadline), deadline)

    async def tally(
        self,
        partition_id: str,
        *,
        where: Where | None = None,
        until: Revision | None = None,
        timeout: float | None = None,
    ) -> Tally:
        """See `Client.tally`."""
        deadline = self._deadline(timeout)
        return await self._drive(
            tally_rows(self._core, partition_id, where, until, deadline), deadline
        )

    async def stats(self, partition_id: str, *, timeout: float | None = None) -> PartitionStats:
        """See `Client.stats`."""
        deadline = self._deadline(timeout)
        return await self._drive(partition_stats(self._core, partition_id, deadline), deadline)

    async def claims(
        self, partition_id: str | None = None, *, timeout: float | None = None
    ) -> list[ClaimReport]:
        """See `Client.claims`."""
        deadline = self._deadline(timeout)
        found = await self._drive(claims_and_tasks(self._core, partition_id, deadline), deadline)
        return found[0]

    async def tasks(
        self, partition_id: str | None = None, *, timeout: float | None = None
    ) -> list[TaskReport]:
        """See `Client.tasks`."""
        deadline = self._deadline(timeout)
        found = await self._drive(claims_and_tasks(self._core, partition_id, deadline), deadline)
        return found[1]

    async def waiters(self, *, timeout: float | None = None) -> list[Waiter]:
        """See `Client.waiters`."""
        deadline = self._deadline(timeout)
        return await self._drive(who_waits(self._core, deadline), deadline)

    async def holdings(self, *, timeout: float | None = None) -> list[StoreReport]:
        """See `Client.holdings`."""
        deadline = self._deadline(timeout)
        return await self._drive(store_holdings(self._core, deadline), deadline)

    async def samples(self, *, timeout: float | None = None) -> PlaneSamples:
        """See `Client.samples`."""
        deadline = self._deadline(timeout)
        return await self._drive(samples_taken(self._core, deadline), deadline)

    async def record(self, *, timeout: float | None = None) -> PlaneRecord:
        """See `Client.record`."""
        deadline = self._deadline(timeout)
        return await self._drive(plane_record(self._core, deadline), deadline)

    async def revision_before(
        self, age_s: float, *, timeout: float | None = None
    ) -> Revision | None:
        """See `Client.revision_before`."""
        deadline = self._deadline(timeout)
        return await self._drive(revision_before(self._core, age_s, deadline), deadline)
