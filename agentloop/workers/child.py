"""The child process of a ProcessWorker: `python -m agentloop.workers.child FD`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

from agentloop.assembly import Assembled, assemble, settle_memory
from agentloop.config import WorkerConfig
from agentloop.groups.job import GroupJob
from agentloop.workers.calls import Calls


class _Child:
    """Answers what the parent asks."""

    def __init__(self) -> None:
        self._assembled: Assembled | None = None
        self._closed = asyncio.Event()

    async def serve(self, sock: socket.socket) -> None:
        """Returns when the parent said so, or is gone."""
        calls = await Calls.over(
            sock,
            {
                "start": self._start,
                "run": self._run,
                "pause": self._pause,
                "resume": self._resume,
                "update_weights": self._update_weights,
                "close": self._close,
            },
        )
        gone = asyncio.create_task(calls.gone())
        closed = asyncio.create_task(self._closed.wait())
        await asyncio.wait({gone, closed}, return_when=asyncio.FIRST_COMPLETED)
        if not closed.done():
            # The parent died. Nothing here is worth keeping, and engines may not answer.
            os._exit(1)
        await gone

    async def _start(self, config: Any) -> None:
        self._assembled = await assemble(WorkerConfig.model_validate(config))
        settle_memory()

    async def _run(self, job: Any) -> Any:
        return (await self._ready().producer.run(GroupJob.of(job))).plain()

    async def _pause(self, limit_s: Any) -> None:
        await self._ready().producer.pause(limit_s)

    async def _resume(self, _: Any) -> None:
        await self._ready().producer.resume()

    async def _update_weights(self, version: Any) -> None:
        await self._ready().producer.update_weights(version)

    async def _close(self, _: Any) -> None:
        if self._assembled is not None:
            await self._assembled.close()
        self._closed.set()

    def _ready(self) -> Assembled:
        if self._assembled is None:
            raise RuntimeError("the worker was not started")
        return self._assembled


def main() -> None:
    import uvloop

    uvloop.run(_Child().serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
