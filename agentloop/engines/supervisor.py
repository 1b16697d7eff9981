"""What keeps an engine's process running. Owns restarts, and what a new process is told.

A process is given out when its engine has the weights and the version that were current when it
started, and is paused if that was so. What is asked of it is not looked at here.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentloop.engines.messages import ERRORS
from agentloop.engines.types import EngineError
from agentloop.processes.child import Child, ChildDied

if TYPE_CHECKING:
    import torch


class Supervisor:
    """One process after the other, the next one when the last has died. Belongs to one event
    loop."""

    def __init__(
        self,
        engine: str,
        options: Mapping[str, Any],
        *,
        max_restarts: int,
        backoff_s: float,
        max_backoff_s: float,
        start_timeout_s: float,
        weights_dir: str | None,
    ) -> None:
        self._engine = engine
        self._options = dict(options)
        self._max_restarts = max_restarts
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._start_timeout_s = start_timeout_s
        self._weights_dir = weights_dir

        self.child: Child | None = None
        """The process that is ready, if there is one."""
        self.paused = False
        """What a new process is told."""
        self.version = int(self._options.get("version", 0))
        self.restarts = 0
        self._weights: Path | None = None
        self._folder: Path | None = None
        self._files = itertools.count(1)
        self._starting: asyncio.Task[Child] | None = None
        self._deaths: list[str] = []
        """How the last ones died, since a request was answered."""
        self._broken: EngineError | None = None
        self._closed = False

    async def running(self) -> Child:
        """The process that is ready, as soon as there is one.

        Raises:
            EngineError: it cannot be started, or has died too often.
        """
        if self._closed:
            raise EngineError("the engine was closed")
        if self._broken is not None:
            raise EngineError(str(self._broken))
        if self.child is not None:
            return self.child
        if self._starting is None:
            self._start()
        assert self._starting is not None
        try:
            return await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._closed:
                raise EngineError("the engine was closed") from None
            raise

    def works(self) -> None:
        """A request was answered: deaths are counted anew."""
        self._deaths.clear()

    def _start(self) -> None:
        self._starting = asyncio.create_task(self._bring_up())
        self._starting.add_done_callback(self._has_started)

    def _has_started(self, task: asyncio.Task[Child]) -> None:
        self._starting = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._broken = error if isinstance(error, EngineError) else EngineError(repr(error))

    async def _bring_up(self) -> Child:
        while True:
            deaths = len(self._deaths)
            if deaths > self._max_restarts:
                raise EngineError(
                    f"the engine's process died {deaths} times in a row and is not started again; "
                    f"last: {self._deaths[-1]}"
                )
            if deaths:
                pause = self._backoff_s * 2 ** (deaths - 1)
                await asyncio.sleep(min(pause, self._max_backoff_s))
                self.restarts += 1
            child = await Child.spawn(
                "agentloop.engines.process", str(self.folder()),
                errors=ERRORS, on_death=self._has_died,
            )  # fmt: skip
            try:
                await self._make_ready(child)
            except (ChildDied, TimeoutError, EngineError) as error:
                child.kill()
                await child.close()
                if isinstance(error, EngineError) and not self.restarts:
                    raise  # it never ran: trying again would not help
                self._deaths.append(f"while it started, {error or 'it took too long'}")
            except BaseException:
                child.kill()
                await child.close()
                raise
            else:
                self.child = child
                return child

    async def _make_ready(self, child: Child) -> None:
        async with asyncio.timeout(self._start_timeout_s):
            paused = self.paused
            self.version = await child.call(
                "start",
                {
                    "engine": self._engine,
                    "options": self._options,
                    "weights": None if self._weights is None else str(self._weights),
                    "version": self.version,
                    "paused": paused,
                },
            )
            while paused != self.paused:  # it changed while the model was loaded
                paused = self.paused
                await child.call("pause" if paused else "resume")

    def _has_died(self, child: Child) -> None:
        if child is not self.child:
            return  # it was never ready, and who started it knows
        self.child = None
        if not self._closed:
            self._deaths.append(child.ending or "")
            self._start()

    async def close(self) -> None:
        """End the process and what is waiting for one."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        if self.child is not None:
            await self.child.close()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, True)

    # -- weights -----------------------------------------------------------------------------

    async def write_weights(self, weights: Mapping[str, torch.Tensor]) -> Path:
        """A file with these weights; `keep_weights` or `drop_weights` decides about it."""
        path = self.folder() / f"{next(self._files)}.safetensors"
        try:
            await asyncio.to_thread(_save, weights, path)
        except BaseException:
            self.drop_weights(path)
            raise
        return path

    def keep_weights(self, path: Path, version: int) -> None:
        """From now on every new process begins with this file."""
        old, self._weights, self.version = self._weights, path, version
        if old is not None:
            self.drop_weights(old)

    def drop_weights(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def folder(self) -> Path:
        """Private to this supervisor; it goes when the owner or the process does."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="engine-", dir=self._weights_dir))
        return self._folder


def _save(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write the tensors; of those that share memory, each in full."""
    from safetensors import torch as files

    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in weights.items():
        tensor = value.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    cast("Any", files).save_file(tensors, path)
