"""All ranks of a run, as their driver holds them: asked together, ended together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from trainer.plan import Topology
from trainer.ranks.outcome import Failure, Outcome, RankError, RankLost
from trainer.ranks.stages import STAGES, Stage
from trainer.ranks.types import Phase, RankReport, RankSettings, RankWork

_log = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long others may take to answer after a rank failed alone: longer, and they wait for it in a
collective that it will never enter."""


class Rank(Protocol):
    """One rank, wherever it runs."""

    @property
    def rank(self) -> int: ...

    async def meet(self, world_size: int, /) -> tuple[str, int]:
        """Where ranks meet: at this one. RankLost if its process ended."""
        ...

    async def open(
        self, settings: RankSettings, topology: Topology, stages: Sequence[Stage], meeting: Any, /
    ) -> Outcome:
        """Start it. RankLost if its process ended."""
        ...

    async def ask(self, verb: str, /, *arguments: Any, **named: Any) -> Outcome:
        """Have it do something, after what it was asked before. RankLost if its process ended."""
        ...

    def share(self, value: object, /) -> object:
        """Something that several ranks are asked with, made so that it is sent once."""
        ...

    async def end(self) -> None:
        """End it now."""
        ...


class RankGroup:
    """The ranks of a run. One call at a time.

    An error of a rank is RankError. Where all ranks came back from the call the group can be used
    further (`usable`); where some still wait for the one that failed, all are ended. A rank whose
    process is gone is RankLost, and the others, which may wait for it in a collective, are ended.
    """

    def __init__(self, ranks: Sequence[Rank], topology: Topology, *, grace_s: float = GRACE_S):
        """Use `start`."""
        self._ranks = list(ranks)
        self._topology = topology
        self._grace_s = grace_s
        self._lock = asyncio.Lock()  # one call at a time
        self._ended: Exception | None = None

    @classmethod
    async def start(
        cls,
        settings: RankSettings,
        *,
        kind: Literal["local", "ray"] = "local",
        topology: Topology | None = None,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        stages: Sequence[Stage] = STAGES,
    ) -> RankGroup:
        """Ranks that have met, joined the plane and made the model.

        Args:
            kind: `local`, one rank in a thread of this process; or `ray`, an actor for each, for
                which this process has joined a cluster.
            topology: which of them share a part of a batch; without it each has its own.
            num_cpus, num_gpus: of each actor.

        Raises:
            ValueError: settings that do not fit each other.
            RankError, RankLost: a rank did not start; none is left.
        """
        topology = topology or Topology(world_size=settings.world_size)
        if topology.world_size != settings.world_size:
            raise ValueError(
                f"settings are for {settings.world_size} ranks, and the topology has "
                f"{topology.world_size}"
            )
        if kind not in ("local", "ray"):
            raise ValueError(f"ranks are 'local' or 'ray', not {kind!r}")
        if kind == "local" and settings.world_size != 1:
            raise ValueError(f"a process holds one rank, not {settings.world_size}: use kind 'ray'")
        ranks: list[Rank]
        if kind == "local":
            from trainer.ranks.local import LocalRank

            ranks = [LocalRank()]
        else:
            from trainer.ranks.ray import RayRank

            ranks = [
                RayRank(rank, num_cpus=num_cpus, num_gpus=num_gpus)
                for rank in range(settings.world_size)
            ]
        group = cls(ranks, topology)
        try:
            async with asyncio.timeout(settings.collective_timeout_s):
                meeting = None if len(ranks) == 1 else await ranks[0].meet(len(ranks))
                await group._all(lambda rank: rank.open(settings, topology, stages, meeting))
        except TimeoutError as error:
            await group._end(error)
            raise TimeoutError(
                f"{len(ranks)} ranks did not start within {settings.collective_timeout_s:g} s: is "
                f"there room for actors of {num_cpus:g} CPUs and {num_gpus:g} GPUs each?"
            ) from None
        except BaseException as error:
            await group._end(error)
            if isinstance(error, RankError):
                error.usable = False
            raise
        return group

    @property
    def ranks(self) -> Sequence[Rank]:
        """Its ranks, by number."""
        return tuple(self._ranks)

    async def begin_phase(self, phase: Phase) -> None:
        """Train by this loss from now on, with a fresh optimizer and schedule."""
        shared = self._ranks[0].share(phase)
        await self._all(lambda rank: rank.ask("begin_phase", shared))

    async def fit(self, works: Sequence[RankWork]) -> list[RankReport]:
        """Train a batch: one work for each data-parallel rank, in order; a report for each rank.
        Replicas of a part are given the same one."""
        if len(works) != self._topology.dp_size:
            raise ValueError(f"{len(works)} works for {self._topology.dp_size} data-parallel ranks")
        shared = [self._ranks[0].share(work) for work in works]
        part_of = self._topology.dp_rank
        found = await self._all(lambda rank: rank.ask("fit", shared[part_of(rank.rank)]))
        return cast("list[RankReport]", found)

    async def publish_weights(self, version: int, *, replace: bool = False) -> int:
        """Write the weights to the plane as this version; bytes written."""
        found = await self._all(lambda rank: rank.ask("publish_weights", version, replace=replace))
        return cast("int", found[0])

    async def save(self, folder: Path, *, optimizer: bool = True) -> None:
        """Write what `load` goes on from."""
        await self._all(lambda rank: rank.ask("save", str(folder), optimizer=optimizer))

    async def load(self, folder: Path) -> None:
        """Go on from what was saved, in the phase of the same name, which must have been begun."""
        await self._all(lambda rank: rank.ask("load", str(folder)))

    async def export(self, folder: Path) -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` loads."""
        await self._all(lambda rank: rank.ask("export", str(folder)))

    async def offload(self) -> None:
        """Leave the GPUs to others; does nothing on a CPU."""
        await self._all(lambda rank: rank.ask("offload"))

    async def onload(self) -> None:
        """Come back to the GPUs."""
        await self._all(lambda rank: rank.ask("onload"))

    async def close(self) -> None:
        """End all ranks, which leave the plane and each other first if they answer. Repeatable."""
        if self._ended is None:
            try:
                await self._all(lambda rank: rank.ask("close"))
            except (RankError, RankLost) as error:
                _log.warning("ranks did not close in order: %s", error)
            await self._end(RuntimeError("this group of ranks was closed"))

    # -- all ranks together ------------------------------------------------------------------

    async def _all(self, ask: Callable[[Rank], Awaitable[Outcome]]) -> list[Any]:
        """What all ranks answered."""
        async with self._lock:
            if self._ended is not None:
                raise RuntimeError(f"these ranks were ended: {self._ended}")
            tasks = [asyncio.ensure_future(_awaited(ask, rank)) for rank in self._ranks]
            try:
                return await self._answers(tasks)
            except RankError as error:
                if not error.usable:
                    await self._end(error)
                raise
            except BaseException as error:
                # Lost, or no longer waited for: what the ranks are at is unknown.
                await self._end(error)
                raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _answers(self, tasks: Sequence[asyncio.Future[Outcome]]) -> list[Any]:
        waiting = set(tasks)
        grace: float | None = None
        clock = asyncio.get_running_loop().time
        while waiting:
            limit = None if grace is None else max(0.0, grace - clock())
            done, waiting = await asyncio.wait(
                waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                failure = task.result().failure  # raises RankLost
                if failure is not None and not failure.shared and grace is None:
                    grace = clock() + self._grace_s
            if not done:
                break
        outcomes = [task.result() if task.done() else None for task in tasks]
        failures = [
            (rank.rank, outcome.failure)
            for rank, outcome in zip(self._ranks, outcomes, strict=True)
            if outcome is not None and outcome.failure is not None
        ]
        if failures:
            # The one that failed first, rather than those that heard of it.
            rank, failure = min(failures, key=lambda found: found[1].is_echo)
            usable = all(outcome is not None and not outcome.is_alone for outcome in outcomes)
            raise _error(rank, failure, usable)
        return [outcome.value for outcome in outcomes if outcome is not None]

    async def _end(self, why: BaseException) -> None:
        self._ended = why if isinstance(why, Exception) else RuntimeError(repr(why))
        await asyncio.gather(*(rank.end() for rank in self._ranks), return_exceptions=True)


async def _awaited(ask: Callable[[Rank], Awaitable[Outcome]], rank: Rank) -> Outcome:
    return await ask(rank)


def _error(rank: int, failure: Failure, usable: bool) -> RankError:
    error = RankError(rank, failure.kind, failure.message, usable=usable)
    error.add_note(f"On rank {rank}:\n{failure.trace}")
    return error
