"""The process that an engine lives in: `python -m agentloop.engines.process FD FOLDER`.

Owns what the verbs do to the engine. It ends when its owner's end of the socket closes, however
that came about and whatever it is doing then, and takes the owner's folder with it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from typing import Any, cast

from agentloop.dotted import load
from agentloop.engines.messages import ERRORS, pack_completion, unpack_request
from agentloop.engines.types import Engine, EngineError
from agentloop.processes.calls import Calls, Handler


class _Host:
    """Holds the engine, and answers for it."""

    def __init__(self) -> None:
        self._made: Engine | None = None
        self.verbs: Mapping[str, Handler] = {
            "start": lambda body: self._start(**body),
            "generate": self._generate,
            "update": self._update,
            "abort": lambda request_id: self._engine.abort(request_id),
            "pause": lambda _: self._engine.pause(),
            "resume": lambda _: self._engine.resume(),
            "ping": self._ping,
        }

    @property
    def _engine(self) -> Engine:
        if self._made is None:
            raise EngineError("it was not started")
        return self._made

    async def _ping(self, _: Any) -> None:
        pass

    async def _generate(self, request: Any) -> Any:
        return pack_completion(await self._engine.generate(unpack_request(request)))

    async def _update(self, body: Any) -> int:
        await self._engine.update_weights(await _weights_in(body["path"]), body["version"])
        return self._engine.policy_version

    async def _start(
        self,
        engine: str,
        options: dict[str, Any],
        weights: str | None,
        version: int | None,
        paused: bool,
    ) -> int:
        """The engine, with the weights that it is to have before it generates anything."""
        # In a thread, so that an owner that ends meanwhile is noticed.
        made = await asyncio.to_thread(_make, engine, options)
        if weights is not None and version is not None:
            await made.update_weights(await _weights_in(weights), version)
        if paused:
            await made.pause()
        self._made = made
        return made.policy_version


def _make(name: str, options: Mapping[str, Any]) -> Engine:
    return load(name)(**options)


async def _weights_in(path: str) -> Mapping[str, Any]:
    from safetensors import torch as files

    return await asyncio.to_thread(cast("Any", files).load_file, path)


async def _serve(fd: int, folder: str) -> None:
    calls = await Calls.over(socket.socket(fileno=fd), _Host().verbs, ERRORS)
    await calls.gone()
    # The owner may have been killed, and then nobody else removes its files. Threads may be in the
    # middle of a step, and nobody is left to wait for it.
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))
