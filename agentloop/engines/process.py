"""The process that an engine lives in: `python -m agentloop.engines.process FD FOLDER`.

Owns the side of `messages.py` that answers. It ends when its owner's end of the socket closes,
however that came about and whatever it is doing then, and takes the owner's folder with it.
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
from agentloop.engines.messages import (
    DONE,
    outcome_of,
    pack_completion,
    read_frame,
    unpack_request,
    write_frame,
)
from agentloop.engines.types import Engine, EngineError


class Server:
    """Answers one owner."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._engine: Engine | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until the owner is gone."""
        while True:
            number, verb, arguments = await read_frame(self._reader)
            if verb == "cancel":
                task = self._tasks.get(arguments)
                if task is not None:
                    task.cancel()
                continue
            task = asyncio.create_task(self._answer(number, verb, arguments))
            self._tasks[number] = task
            task.add_done_callback(lambda _, number=number: self._tasks.pop(number, None))

    async def _answer(self, number: int, verb: str, arguments: Any) -> None:
        try:
            write_frame(self._writer, [number, DONE, await self._do(verb, arguments)])
        except Exception as error:  # of the engine, or what it said does not travel
            write_frame(self._writer, [number, *outcome_of(error)])

    async def _do(self, verb: str, arguments: Any) -> Any:
        if verb == "start":
            return await self._start(**arguments)
        engine = self._engine
        if engine is None:
            raise EngineError(f"{verb} before start")
        if verb == "ping":
            return None
        if verb == "generate":
            return pack_completion(await engine.generate(unpack_request(arguments)))
        if verb == "update":
            await engine.update_weights(await _weights_in(arguments["path"]), arguments["version"])
            return engine.policy_version
        if verb == "abort":
            return await engine.abort(arguments)
        if verb == "pause":
            return await engine.pause()
        if verb == "resume":
            return await engine.resume()
        raise EngineError(f"there is no verb {verb!r}")

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
        self._engine = made
        return made.policy_version


def _make(name: str, options: Mapping[str, Any]) -> Engine:
    return load(name)(**options)


async def _weights_in(path: str) -> Mapping[str, Any]:
    from safetensors import torch as files

    return await asyncio.to_thread(cast("Any", files).load_file, path)


async def _serve(fd: int, folder: str) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    try:
        await Server(reader, writer).run()
    except EOFError:
        # The owner may have been killed, and then nobody else removes its files. Threads may be
        # in the middle of a step, and nobody is left to wait for it.
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))
