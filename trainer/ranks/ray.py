"""A rank in a Ray actor, on whatever node Ray finds room for it."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, cast

import ray as untyped_ray
from ray.exceptions import RayActorError, RayTaskError

from trainer.plan import Topology
from trainer.ranks.outcome import Failure, Outcome, RankLost
from trainer.ranks.seat import Seat
from trainer.ranks.stages import Stage
from trainer.ranks.types import RankSettings

ray = cast("Any", untyped_ray)  # its types are partial


class _Actor(Seat):
    """What runs in the actor."""

    def meet_here(self, world_size: int) -> tuple[str, int]:
        """The address at which ranks meet: this node's, as others of the cluster know it."""
        host = ray.util.get_node_ip_address()
        return host, self.meet(host, world_size)


class RayRank:
    """A handle of a rank."""

    def __init__(self, rank: int, *, num_cpus: float, num_gpus: float) -> None:
        if not ray.is_initialized():  # an actor would start a cluster of its own, unasked
            raise RuntimeError("ranks in actors need a Ray cluster: ray.init() before this")
        self.rank = rank
        self._actor = ray.remote(_Actor).options(num_cpus=num_cpus, num_gpus=num_gpus).remote()

    async def pid(self) -> int:
        """The id of its process. RankLost if it did not come up."""
        return cast("int", await self._value(self._actor.pid.remote()))

    async def meet(self, world_size: int) -> tuple[str, int]:
        """Where ranks meet: at this one. RankLost if it did not come up."""
        found = await self._value(self._actor.meet_here.remote(world_size))
        return cast("tuple[str, int]", found)

    async def open(
        self,
        settings: RankSettings,
        topology: Topology,
        stages: Sequence[Stage],
        meeting: tuple[str, int] | None,
    ) -> Outcome:
        return await self._outcome(
            self._actor.open.remote(settings, topology, tuple(stages), self.rank, meeting)
        )

    async def ask(self, verb: str, *arguments: Any, **named: Any) -> Outcome:
        return await self._outcome(self._actor.ask.remote(verb, *arguments, **named))

    def share(self, value: object) -> object:
        """A reference, which ranks resolve: the value lies in Ray once, whoever gets it."""
        return ray.put(value)

    async def end(self) -> None:
        """Kill it, whatever it waits for."""
        ray.kill(self._actor)

    async def _outcome(self, answer: Awaitable[Any]) -> Outcome:
        try:
            return cast("Outcome", await self._value(answer))
        except RayTaskError as error:
            # Not of the body, whose errors are outcomes: arguments that cannot be read there.
            return Outcome(failure=Failure.of(cast("Exception", error.cause)))

    async def _value(self, answer: Awaitable[Any]) -> object:
        try:
            return await answer
        except RayActorError as error:
            raise RankLost(self.rank, str(error)) from None
