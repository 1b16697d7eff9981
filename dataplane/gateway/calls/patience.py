"""How long it is waited for a receiver who takes nothing of what it asked for.

A call that cannot send on holds memory for as long as its caller likes. It is ended instead: what
it holds is let go of at once, and its status goes behind what lies in the connection already, where
the receiver meets it should it ever read on.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from dataplane.errors import DeadlineExceeded
from dataplane.protocol.status import code_of, trailers_of


class Patience:
    """With all receivers of one gateway."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._ending: set[asyncio.Task[None]] = set()
        """Statuses that have not left yet; each ends with its call at the latest."""

    def watch(self, context: Any) -> Taking:
        """A watch over the receiver of the call under way in this task."""
        task = asyncio.current_task()
        assert task is not None
        return Taking(self, context, task)

    def end(self, context: Any, task: asyncio.Task[Any]) -> None:
        """End a call whose receiver takes nothing."""
        ending = asyncio.get_running_loop().create_task(self._refuse(context))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        task.cancel()

    async def _refuse(self, context: Any) -> None:
        error = DeadlineExceeded(
            f"nothing of the answer was taken for {self.stall_s:g} s",
            waited_s=self.stall_s,
            explanation="its receiver stopped reading; ask again",
        )
        with suppress(Exception):  # as gRPC ends what it ends; and the call may be over
            await context.abort(code_of(error), error.message, trailers_of(error))


class Taking:
    """The watch over one receiver. Ended by `rest`, and begun again by `wait`."""

    __slots__ = ("_context", "_patience", "_task", "_timer")

    def __init__(self, patience: Patience, context: Any, task: asyncio.Task[Any]) -> None:
        self._patience = patience
        self._context = context
        self._task = task
        self._timer: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        """Something is about to be sent: it is to be taken in time."""
        self.rest()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(
            self._patience.stall_s, self._patience.end, self._context, self._task
        )

    def rest(self) -> None:
        """It is not the receiver who is waited for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
