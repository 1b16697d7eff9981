"""Where the trajectories of a run go, and the one place that they go to: a plane.

Owns that a publication which is repeated has one effect. Through a gateway it works as it does on
the plane itself: the client has the same verbs.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agentloop.capture.ending import Ended, Identity, Rejected
from agentloop.capture.starting import RUN_TAG
from agentloop.groups.plane_clock import PlaneClock
from agentloop.groups.publish import Row, put_rows
from agentloop.trajectory.rows import trajectory_fields, trajectory_tags
from agentloop.trajectory.state import RolloutState, Status
from dataplane import AlreadyWritten, AsyncClient, DataplaneError

_log = logging.getLogger(__name__)

_QUARANTINE: Final = "quarantine."
"""What the name of the partition begins with that holds what was rejected, as at gateways."""

_MAX_REASON: Final = 2000


@dataclass(frozen=True, slots=True)
class Publication:
    """Everything of one run that is published at once."""

    identity: Identity
    ended: Ended


class Publisher(Protocol):
    """Takes the trajectories of runs."""

    async def publish(self, publication: Publication) -> None:
        """Have these trajectories exist. Repeating it after any error is safe.

        Raises:
            StaleWrite: the attempt of their group is closed; nothing is written any more.
            AlreadyWritten: there are rows of these keys that are not this run's.
            RequestError: they are refused, and so would they be again.
            DataplaneError: they could not be had; ask again.
        """
        ...

    async def begin_group(self, uid: str, n: int, declared_bytes: int | None) -> int:
        """The attempt of a group of n sessions, begun anew if there is one of this uid already.

        Raises:
            QuotaExceeded, DeadlineExceeded: there is no room for it; nothing was begun.
            DataplaneError: as the plane says.
        """
        ...

    async def end_group(self, attempt: int) -> str:
        """End a group: as `finished` if each of its trajectories is completed and every session
        has one, else as `failure`; which of them.

        Raises:
            StaleWrite: it is ended already, or began anew.
            DataplaneError: as the plane says.
        """
        ...


class PlanePublisher:
    """Puts trajectories in a partition of a plane: under the attempt of their group, which is what
    makes a late one impossible, or else only where nothing is yet."""

    def __init__(
        self, client: AsyncClient, partition_id: str, *, max_quarantined: int = 1000
    ) -> None:
        self._client = client
        self._partition_id = partition_id
        self._may_quarantine = max_quarantined
        self._clock = PlaneClock()

    async def publish(self, publication: Publication) -> None:
        identity, states = publication.identity, publication.ended.states
        rows = [_row(state, identity) for state in states]
        if identity.attempt is not None:
            # Under an open attempt a repeated put overwrites a row by itself.
            await put_rows(
                self._client, self._partition_id, rows, self._clock, attempt=identity.attempt
            )
        else:
            await self._put_new(rows, identity.run_id)
        await self._quarantine(identity, publication.ended.rejected)

    async def begin_group(self, uid: str, n: int, declared_bytes: int | None) -> int:
        return await self._client.begin_group(
            uid, self._partition_id, n=n, declared_bytes=declared_bytes
        )

    async def end_group(self, attempt: int) -> str:
        here = await self._client.kv_list(
            self._partition_id,
            where={"attempt": attempt},
            columns=["is_prompt", "n", "status", "session_id"],
        )
        sessions = {str(tags["session_id"]) for tags in here.tags if "session_id" in tags}
        due = sum(_count(tags.get("n")) for tags in here.tags if tags.get("is_prompt"))
        whole = len(sessions) == due and all(
            tags.get("status") == Status.COMPLETED for tags in here.tags if "session_id" in tags
        )
        status = "finished" if whole else "failure"
        await self._client.end_group(attempt, status)
        return status

    async def _put_new(self, rows: Sequence[Row], run_id: str) -> None:
        """Put those of the rows that are not there already from an earlier try."""
        try:
            await put_rows(self._client, self._partition_id, rows, self._clock, if_absent=True)
            return
        except AlreadyWritten:
            here = await self._client.kv_list(
                self._partition_id, where={RUN_TAG: run_id}, columns=[RUN_TAG]
            )
        mine = set(here.keys)
        left = [row for row in rows if row[0] not in mine]
        if left:
            await put_rows(self._client, self._partition_id, left, self._clock, if_absent=True)

    async def _quarantine(self, identity: Identity, rejected: Sequence[Rejected]) -> None:
        """Keep what was rejected where people look for it. The trajectories are there whatever
        becomes of this: a producer need not be allowed to write there."""
        for one in rejected[: max(0, self._may_quarantine)]:
            self._may_quarantine -= 1
            tags = {
                "reason": one.reason[:_MAX_REASON],
                "partition_id": self._partition_id,
                "uid": identity.uid,
                "session_id": identity.session_id,
                RUN_TAG: identity.run_id,
                "received_at_s": time.time(),
            }
            try:
                await self._client.kv_put(
                    f"capture/{identity.run_id}/{one.name}",
                    _QUARANTINE + self._partition_id,
                    # As JSON: what a reply holds need not be anything that a field could.
                    {"trajectory": {"evidence": json.dumps(one.evidence)}},
                    tags,
                )
            except DataplaneError as error:
                _log.warning(
                    "run %s: what was rejected (%s) is not in quarantine: %s",
                    identity.run_id, one.reason[:200], error,
                )  # fmt: skip


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _row(state: RolloutState, identity: Identity) -> Row:
    tags: dict[str, Any] = {**identity.tags, **trajectory_tags(state), RUN_TAG: identity.run_id}
    if identity.attempt is not None:
        tags["attempt"] = identity.attempt
    if identity.global_steps is not None:
        tags["global_steps"] = identity.global_steps
    return state.key, trajectory_fields(state), tags
