"""The thread that owns a model: it generates, and between two tokens does what it is told.

Owns the queue of rows and the order of things. Rows that wait are settled between tokens too, so
that nothing which is paused, aborted or given up waits for the batch under way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from agentloop.engines.hf_batch import Batch, Forward
from agentloop.engines.hf_row import Row
from agentloop.engines.hf_weights import replace_weights
from agentloop.engines.types import EngineError, LogprobKind

Result = TypeVar("Result")


class Worker:
    """A model behind a queue. Its methods may be called from any thread."""

    def __init__(
        self,
        model: Any,
        *,
        version: int,
        kind: LogprobKind,
        max_batch: int,
        window_s: float,
        threads: int | None,
    ) -> None:
        self.version = version
        """Of the weights that the next token is made with."""
        self.tokens_generated = 0
        self._model = model
        self._forward = Forward(model)
        self._kind: LogprobKind = kind
        self._max_batch = max_batch
        self._window_s = window_s
        self._threads = threads
        self._changed = threading.Condition()  # guards the three below
        self._waiting: deque[Row] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closing = False
        self._batch: Batch | None = None  # the worker's own
        self._thread = threading.Thread(target=self._work, name="hf-engine", daemon=True)
        self._thread.start()

    @property
    def records_experts(self) -> bool:
        return self._forward.recorder.available

    # -- from other threads ------------------------------------------------------------------

    def submit(self, row: Row) -> None:
        """Generate this row as soon as there is room in a batch."""
        with self._changed:
            if self._closing:
                raise EngineError("the engine was closed")
            self._waiting.append(row)
            self._changed.notify()

    def command(self, act: Callable[[], Result]) -> Future[Result]:
        """Do something between two tokens; its outcome."""
        outcome: Future[Result] = Future()
        with self._changed:
            if self._closing:
                raise EngineError("the engine was closed")
            self._commands.append((act, outcome))
            self._changed.notify()
        return outcome

    def stop_rows(self) -> Future[None]:
        """End every row, waiting ones too, with what it has."""

        def act() -> None:
            for row in self._all_rows():
                row.finish("abort")
            self._settle()

        return self.command(act)

    def replace(self, weights: Any, version: int) -> Future[None]:
        """From the next token on use these weights."""

        def act() -> None:
            replace_weights(self._model, weights)
            self.version = version
            if self._batch is not None:
                self._batch.forget()

        return self.command(act)

    def close(self) -> None:
        """End the thread; rows that are left get an EngineError. Waits for the step under way."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    # -- in the thread -----------------------------------------------------------------------

    def _work(self) -> None:
        if self._threads is not None:
            import torch

            torch.set_num_threads(self._threads)
        while self._wait_for_work():
            self._obey()
            self._settle()
            try:
                self._advance()
            except Exception as error:
                failure = error if isinstance(error, EngineError) else EngineError(_told(error))
                for row in self._take_batch():
                    row.settle(failure)
        closed = EngineError("the engine was closed while the request was under way")
        with self._changed:
            waiting, commands = list(self._waiting), list(self._commands)
        for row in [*self._take_batch(), *waiting]:
            row.settle(closed)
        for _, outcome in commands:
            if outcome.set_running_or_notify_cancel():
                outcome.set_exception(closed)

    def _wait_for_work(self) -> bool:
        """False when it is time to end."""
        with self._changed:
            while not (self._closing or self._commands or self._waiting or self._batch):
                self._changed.wait()
            if self._batch is None and self._waiting and not self._commands:
                self._collect()
            return not self._closing

    def _collect(self) -> None:
        """Let requests that come together share their first step."""
        until = time.monotonic() + self._window_s
        while len(self._waiting) < self._max_batch and not (self._closing or self._commands):
            left = until - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                return

    def _obey(self) -> None:
        while True:
            with self._changed:
                if not self._commands:
                    return
                act, outcome = self._commands.popleft()
            if not outcome.set_running_or_notify_cancel():
                continue  # whoever asked was cancelled before it began
            try:
                outcome.set_result(act())
            except Exception as error:
                outcome.set_exception(error)

    def _all_rows(self) -> list[Row]:
        with self._changed:
            waiting = list(self._waiting)
        return [*(self._batch.rows if self._batch is not None else ()), *waiting]

    def _settle(self) -> None:
        """Answer the rows that have ended, and let go of those that nobody waits for."""
        for row in self._all_rows():
            if row.abort_requested:
                row.finish("abort")
        with self._changed:
            over = [row for row in self._waiting if row.finish_reason or row.abandoned]
            for row in over:
                self._waiting.remove(row)
        if self._batch is not None:
            ended = [row for row in self._batch.rows if row.finish_reason or row.abandoned]
            self._batch.leave(ended)
            over += ended
            if not self._batch.rows:
                self._batch = None
        for row in over:
            if not row.abandoned:
                row.settle(self._answer(row))

    def _answer(self, row: Row) -> Any:
        try:
            return row.completion(self._kind)
        except Exception as error:
            return EngineError(_told(error))

    def _advance(self) -> None:
        """One token for every row; rows that wait join if they can."""
        running = self._batch
        if running is not None:
            running.step(self.version)
            self.tokens_generated += len(running.rows)
        new = self._admit(running)
        if not new:
            return
        joining = Batch(self._forward, new, self._kind)
        if running is None:
            self._batch = joining
        try:
            joining.step(self.version)
        except Exception as error:
            if running is None:
                raise
            for row in new:
                row.settle(error if isinstance(error, EngineError) else EngineError(_told(error)))
            return
        self.tokens_generated += len(new)
        if running is not None:
            running.join(joining)

    def _admit(self, running: Batch | None) -> list[Row]:
        if running is not None and not running.joinable:
            return []
        with self._changed:
            room = self._max_batch - (0 if running is None else len(running.rows))
            return [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]

    def _take_batch(self) -> list[Row]:
        batch, self._batch = self._batch, None
        return [] if batch is None else batch.rows


def _told(error: Exception) -> str:
    return f"generating failed: {type(error).__name__}: {error}"
