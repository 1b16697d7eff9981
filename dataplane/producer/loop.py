"""The event loop that all calls to gateways of this process run on, in a thread of its own.

gRPC's asyncio face shares one completion queue among all loops of a process, so one loop has it
all, whichever threads and loops its callers are of. A forked process has another, on which gRPC
works only where it was not used before the fork.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from dataplane.errors import InvalidRequest, PlaneLost

Result = TypeVar("Result")

END_S: Final = 5.0
"""How long the calls under way may take to end with the process."""


class CallingLoop:
    """An event loop in a thread, from its first call until the process ends."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Guards the start of the thread. Reentrant: the collector may run in the midst of `start`,
        # and a client that nobody has any more says goodbye by this loop.
        self._lock = threading.RLock()
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # Finalizers run at exit from the last to the first: whoever has this loop ends before it.
        weakref.finalize(_keeper, self._end)

    @property
    def is_here(self) -> bool:
        """Whether the caller is on its thread, where nothing may wait for it."""
        return threading.current_thread() is self._thread

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine there.

        InvalidRequest in a process that was forked since, PlaneLost in one that is ending.
        """
        if self._pid != os.getpid():
            work.close()
            raise InvalidRequest(
                "this process was forked from one that talks to a gateway, and gRPC does not "
                "live through a fork: start processes with the method `spawn` or `forkserver`, and "
                "connect() in each"
            )
        with self._lock:
            if self._ended:
                work.close()
                raise PlaneLost("this process is ending, and its calls to gateways have ended")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="dataplane-gateway-calls", daemon=True
                )
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _end(self) -> None:
        loop, thread = self._loop, self._thread
        if self._pid != os.getpid() or loop is None or thread is None:
            return

        async def end() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=END_S)
            await loop.shutdown_asyncgens()

        ending = self.start(end())
        self._ended = True
        try:
            ending.result(2 * END_S)
        except TimeoutError:
            return  # the process does not wait for it
        loop.call_soon_threadsafe(loop.stop)
        thread.join(END_S)


class _Keeper:
    """Is there until the process ends."""


_keeper = _Keeper()
_lock = threading.Lock()  # guards the only one
_only: CallingLoop | None = None


def calling_loop() -> CallingLoop:
    """The loop of this process."""
    global _only
    with _lock:
        if _only is None:
            _only = CallingLoop()
        return _only


def _after_fork() -> None:
    global _lock, _only, _inherited
    _lock = threading.Lock()  # another thread may have held it
    _inherited = _only  # never collected: what it refers to is the parent's
    _only = None


_inherited: CallingLoop | None = None

os.register_at_fork(after_in_child=_after_fork)
