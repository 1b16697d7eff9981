"""What a trainer samples from: groups of a partition, claimed until they are trained and cleared.

    buffer = ReplayBuffer(client, ReplayPolicy(), partition_id="train")
    sample = await buffer.sample(step, batch_size=32)
    ...                          # train it
    await buffer.finish(sample)  # its rows are gone, trajectories and prompts

It holds keys and tags, never a value. The rules are those of `trainer.select`; waiting, claiming
and clearing are done here and in sampling.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dataplane import AsyncClient, Claim
from trainer.replay_buffer.holdings import release
from trainer.replay_buffer.sampling import Search
from trainer.replay_buffer.source import Refill, Source, clear_groups
from trainer.select import Group, ReplayPolicy, filtered_values, replay_metrics

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch of groups that this consumer holds."""

    step: int
    groups: tuple[Group, ...]
    """Oldest prompts first."""
    claims: tuple[Claim, ...]
    """They hold exactly `keys`."""
    metrics: Mapping[str, float]
    """What the way to the batch cost: evicted groups, under `training/…` or `validation/…`."""
    filtered: Mapping[float, int]
    """How many groups were evicted for each outcome that all of their sessions had."""

    @property
    def keys(self) -> list[str]:
        """Of every row of the batch, prompts and failed sessions included: what `finish` clears."""
        return [key for group in self.groups for key in group.all_keys]


class ReplayBuffer:
    """Samples of one partition for one task. Groups are counted by prompts.

    Rows of a sample stay claimed for as long as this client is connected, however long training
    takes: there is nothing to renew. If its process dies they are offered again `lease_s` later.
    Consumers of the same task never get the same group.
    """

    def __init__(
        self,
        client: AsyncClient,
        policy: ReplayPolicy,
        *,
        partition_id: str,
        refill: Refill | None = None,
        task: str = "train",
        lease_s: float = 30.0,
        timeout_s: float = 600.0,
        deterministic: bool = False,
    ) -> None:
        """
        Args:
            refill: submits so many prompts more, in place of evicted ones; a policy that evicts
                needs it. It may return at once, or when they have ended.
            timeout_s: the longest that `sample` waits, `refill` included.
            deterministic: which groups are taken depends on their uids and not on which of them
                ended first.

        Raises:
            ValueError: the policy replaces groups, and there is no `refill`.
        """
        if refill is None and replaces(policy):
            raise ValueError(
                "replay: this policy replaces groups (async mode, drop_identical, failed or "
                "incomplete 'refill'), so the buffer needs `refill`"
            )
        if not timeout_s > 0:
            raise ValueError(f"replay: timeout_s is a number above 0, not {timeout_s!r}")
        self._source = Source(
            client=client,
            policy=policy,
            partition_id=partition_id,
            task=task,
            lease_s=lease_s,
            timeout_s=timeout_s,
            refill=refill,
            deterministic=deterministic,
        )

    @property
    def plane_time_s(self) -> float:
        """Seconds in calls of the plane so far, without waits for groups to end."""
        return self._source.clock.seconds

    async def sample(self, step: int, batch_size: int) -> Sample:
        """The next so many groups, as soon as there are as many that may be trained.

        Groups that the policy evicts are cleared on the way, and replaced. A sample that fails, or
        is cancelled, holds nothing.

        Raises:
            DeadlineExceeded: not enough groups came; `.explanation` says on whom it waited.
            Starved: nothing is under way that could fill the batch.
            PlanError: the policy's bound on replacements is passed, a group is incomplete and may
                not be, or has no trajectory. Says how many there were.
        """
        search = Search(self._source, step, batch_size)
        try:
            groups, claims = await search.run()
        except BaseException:
            await _to_its_end(search.let_go())
            raise
        prefix = "validation" if self._source.policy.mode == "val" else "training"
        return Sample(
            step,
            groups,
            claims,
            replay_metrics(search.decisions, prefix),
            filtered_values(search.decisions),
        )

    async def finish(self, sample: Sample) -> None:
        """Commit a sample and clear its groups, whole: trajectories and prompts in one clear.

        Nothing that is written later revives a key. It may be repeated.

        Raises:
            ClaimLost: this client was cut off for so long that groups were offered to another
                consumer. These are left alone; all others are committed and cleared.
        """
        lost = await clear_groups(self._source, sample.groups, sample.claims)
        if lost is not None:
            raise lost

    async def give_back(self, sample: Sample) -> None:
        """Let a sample be sampled again, by anybody."""
        with self._source.clock.call():
            await release(self._source.client, sample.claims)


def replaces(policy: ReplayPolicy) -> bool:
    """Whether groups that are evicted are submitted anew."""
    if policy.mode == "val":
        return False
    return (
        policy.mode == "async"
        or policy.drop_identical
        or policy.failed in ("refill", "refill_empty")
        or policy.incomplete == "refill"
    )


async def _to_its_end(work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of some work that must be done, also by a task that is cancelled once more."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
