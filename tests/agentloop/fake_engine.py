"""An engine without a model, for a process that tests can break. Tokens say what to do."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from agentloop.engines.types import Completion, EngineError, Request, WeightsError

ANSWER, WAIT, DIE, DIE_ONCE, REFUSE, BUG, HANG = range(1, 8)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still here")


class FakeEngine:
    """Answers with the number that its weights hold, under their version."""

    def __init__(self, folder: str, version: int = 0, fail: str | None = None) -> None:
        self._folder = Path(folder)
        if fail is not None:
            raise EngineError(fail)
        if (self._folder / "die-at-start").exists():
            die()
        if (self._folder / "start-slowly").exists():
            (self._folder / "starts").touch()
            while (self._folder / "start-slowly").exists():
                time.sleep(0.005)
        self._number = 0
        self._version = version
        self._stops: dict[str, asyncio.Event] = {}
        self._paused = False

    @property
    def policy_version(self) -> int:
        return self._version

    async def generate(self, request: Request) -> Completion:
        if self._paused:
            return self._made(request, 0, "abort")
        what = request.token_ids[0]
        if what == WAIT:
            stop = self._stops.setdefault(request.request_id, asyncio.Event())
            (self._folder / f"waiting-{request.request_id}").touch()
            try:
                await stop.wait()
            finally:
                (self._folder / f"left-{request.request_id}").touch()
            return self._made(request, 1, "abort")
        if what == DIE:
            die()
        if what == DIE_ONCE:
            try:
                (self._folder / f"died-{request.request_id}").touch(exist_ok=False)
            except FileExistsError:
                return self._made(request, 2, "stop")
            die()
        if what == REFUSE:
            raise EngineError("refused, as asked")
        if what == BUG:
            raise ZeroDivisionError("a bug")
        if what == HANG:
            time.sleep(3600)  # noqa: ASYNC251 (that is the point)
        return self._made(request, 3, "length")

    def _made(self, request: Request, count: int, reason: str) -> Completion:
        return Completion(
            [self._number] * count,
            [-0.5] * count if request.sampling.logprobs else None,
            [self._version] * count,
            "text",
            reason,
            logprob_kind="processed",
            routed_experts=(
                np.arange(6, dtype=np.uint16).reshape(2, 3)
                if request.sampling.routed_experts
                else None
            ),
            extra={"asked": repr(request)},
        )

    async def abort(self, request_id: str) -> None:
        if request_id in self._stops:
            self._stops.pop(request_id).set()

    async def pause(self) -> None:
        self._paused = True
        for request_id in list(self._stops):
            await self.abort(request_id)

    async def resume(self) -> None:
        self._paused = False

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        if "bad" in weights:
            raise WeightsError("these do not fit")
        if "deadly" in weights:
            die()
        self._number, self._version = int(weights["w"][0]), version

    async def close(self) -> None: ...
