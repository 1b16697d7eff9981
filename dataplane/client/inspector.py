"""What an operator asks, on the blocking client: part of `Client`. It changes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from dataplane.client.core import Core
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


class Inspector(ABC):
    _core: Core

    @abstractmethod
    def _drive(self, verb: Generator[Any, Any, Result], deadline: float) -> Result: ...

    @abstractmethod
    def _deadline(self, timeout: float | None) -> float: ...

    def inspect(
        self, keys: Sequence[str], partition_id: str, *, timeout: float | None = None
    ) -> list[KeyReport | None]:
        """What the plane knows of each key, in the order asked for; None for a key that is not
        there: tags, where each field lies, group, producer, tasks. No value is read."""
        deadline = self._deadline(timeout)
        return self._drive(inspect_keys(self._core, keys, partition_id, deadline), deadline)

    def tally(
        self,
        partition_id: str,
        *,
        where: Where | None = None,
        until: Revision | None = None,
        timeout: float | None = None,
    ) -> Tally:
        """How many rows match and how large they are, of one moment: what a clear would remove.

        With `until`, rows that changed after that revision are left out.
        """
        deadline = self._deadline(timeout)
        return self._drive(tally_rows(self._core, partition_id, where, until, deadline), deadline)

    def stats(self, partition_id: str, *, timeout: float | None = None) -> PartitionStats:
        """What a partition is made of: bytes by field, producer, age; lengths.

        Goes through all rows, in slices: what changes meanwhile is counted as it was or as it is.
        """
        deadline = self._deadline(timeout)
        return self._drive(partition_stats(self._core, partition_id, deadline), deadline)

    def claims(
        self, partition_id: str | None = None, *, timeout: float | None = None
    ) -> list[ClaimReport]:
        """What is claimed, of one partition or of all: by whom, since when, for how long."""
        deadline = self._deadline(timeout)
        return self._drive(claims_and_tasks(self._core, partition_id, deadline), deadline)[0]

    def tasks(
        self, partition_id: str | None = None, *, timeout: float | None = None
    ) -> list[TaskReport]:
        """How far each task has come, in one partition or in all."""
        deadline = self._deadline(timeout)
        return self._drive(claims_and_tasks(self._core, partition_id, deadline), deadline)[1]

    def waiters(self, *, timeout: float | None = None) -> list[Waiter]:
        """Every request that waits at the tag store, the longest first: for rows, changes, a claim,
        or room under a quota."""
        deadline = self._deadline(timeout)
        return self._drive(who_waits(self._core, deadline), deadline)

    def holdings(self, *, timeout: float | None = None) -> list[StoreReport]:
        """What every value store has in use, who reads and writes there, and blocks that nothing
        refers to. One that cannot be asked is in it too, and says why."""
        deadline = self._deadline(timeout)
        return self._drive(store_holdings(self._core, deadline), deadline)

    def samples(self, *, timeout: float | None = None) -> PlaneSamples:
        """The plane's sizes over time, from its start on: rows, bytes, who waits, how tasks lag.

        At most 2,000 points, one a second at first; a plane that is started again begins anew."""
        deadline = self._deadline(timeout)
        return self._drive(samples_taken(self._core, deadline), deadline)

    def record(self, *, timeout: float | None = None) -> PlaneRecord:
        """What a report tells of the plane, of now: its sizes over time, its last groups.

        Give it to `write_report`, or keep it: after the plane has ended nobody can ask."""
        deadline = self._deadline(timeout)
        return self._drive(plane_record(self._core, deadline), deadline)

    def revision_before(self, age_s: float, *, timeout: float | None = None) -> Revision | None:
        """The last revision that is known to be `age_s` old; None if the plane remembers none.

        With `kv_clear(…, until=revision)` it removes what has not changed for that long.
        """
        deadline = self._deadline(timeout)
        return self._drive(revision_before(self._core, age_s, deadline), deadline)
