"""A partition as the samples of one buffer share it: its groups as they are now, and their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dataplane import AsyncClient, Claim, ClaimLost, PartitionNotFound
from trainer.replay_buffer.holdings import commit
from trainer.replay_buffer.snapshot import Snapshot
from trainer.select import Group, ReplayPolicy

Refill = Callable[[int], Awaitable[object]]
"""Submits so many prompts more."""


class PlaneClock:
    """Seconds spent in calls of the plane, waits for what does not exist yet left out."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def call(self) -> Generator[None]:
        """Around a call that the plane can answer at once."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where samples come from and by which rules; shared by all samples of a buffer."""

    client: AsyncClient
    policy: ReplayPolicy
    partition_id: str
    task: str
    lease_s: float
    timeout_s: float
    refill: Refill | None
    deterministic: bool
    snapshot: Snapshot = field(default_factory=Snapshot)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Guards the snapshot: changes are taken in in their order."""
    clock: PlaneClock = field(default_factory=PlaneClock)

    @property
    def sees_all(self) -> bool:
        """Whether all groups that ended are judged together, and not only as many as are needed:
        where the surplus goes, and where it must not matter which of them ended first."""
        keeps_none = self.policy.mode == "sync" and self.policy.drop_identical
        return keeps_none or self.deterministic

    async def groups(self) -> list[Group]:
        """All groups there are now."""
        async with self.lock:
            with self.clock.call():
                try:
                    changes = await self.client.kv_list(
                        self.partition_id, since=self.snapshot.revision
                    )
                except PartitionNotFound:
                    self.snapshot.forget()
                else:
                    self.snapshot.take(changes)
            found = self.snapshot.groups()
        return sorted(found, key=lambda group: group.uid) if self.deterministic else found


async def clear_groups(
    source: Source, groups: Sequence[Group], claims: Sequence[Claim]
) -> ClaimLost | None:
    """Finish these claims of rows of groups, and clear the groups, whole and in one clear, so that
    nothing that is written later revives a key.

    Groups of which the prompt's row was not held any more are left as they are, for they may be
    somebody else's by now: the error that named them, if there are any.
    """
    with source.clock.call():
        ended = await commit(source.client, claims)
        mine = [group for group in groups if group.prompt_key not in ended.lost]
        keys = [key for group in mine for key in group.all_keys]
        await source.client.kv_clear(keys, source.partition_id, retire=True)
    return ended.error if len(mine) < len(groups) else None
