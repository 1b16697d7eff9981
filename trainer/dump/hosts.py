"""Where a dump runs: in a thread of this process, or in a Ray actor on this node."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol, TypeAlias, cast

from trainer.dump.body import DumpBody
from trainer.dump.request import DumpRequest

HostKind: TypeAlias = Literal["thread", "ray"]


class Host(Protocol):
    """Runs a body beside the caller."""

    async def read(self, request: DumpRequest) -> list[str]:
        """See `DumpBody.read`."""
        ...

    async def finish(self, timeout_s: float) -> list[str]:
        """See `DumpBody.finish`. The host ends with it."""
        ...


class ThreadHost:
    """A body in a thread."""

    def __init__(self, body: Callable[[type[DumpBody]], DumpBody]) -> None:
        self._body = body(DumpBody)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dump-reader")

    async def read(self, request: DumpRequest) -> list[str]:
        return await self._run(self._body.read, request)

    async def finish(self, timeout_s: float) -> list[str]:
        try:
            return await self._run(self._body.finish, timeout_s)
        finally:
            self._thread.shutdown(wait=False)

    async def _run(self, call: Callable[[Any], list[str]], argument: Any) -> list[str]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, argument)


class RayHost:
    """A body in an actor of this node: it writes to a folder of this machine."""

    def __init__(self, body: Callable[[Any], Any]) -> None:
        import ray as untyped_ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray = ray = cast("Any", untyped_ray)  # its types are partial
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_restarts": 3, "scheduling_strategy": here}
        self._actor = body(ray.remote(DumpBody).options(**options).remote)

    async def read(self, request: DumpRequest) -> list[str]:
        return await self._actor.read.remote(request)

    async def finish(self, timeout_s: float) -> list[str]:
        try:
            return await self._actor.finish.remote(timeout_s)
        finally:
            self._ray.kill(self._actor)


def host_kind() -> HostKind:
    """An actor where Ray is initialised, else a thread."""
    ray = cast("Any", sys.modules.get("ray"))
    return "ray" if ray is not None and ray.is_initialized() else "thread"
