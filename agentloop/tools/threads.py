"""Threads for blocking functions that may never come back.

A pool's thread that hangs would be missing from then on, and would keep the process from ending.
These are daemons: a hung one is left behind, and another takes its place, up to a limit.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class ThreadsBusy(RuntimeError):
    """There is no thread: all are taken by functions that have not come back."""


@dataclass(slots=True)
class _Job:
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class DaemonThreads:
    """Runs blocking functions beside the event loop. Safe from several loops."""

    def __init__(
        self, limit: int = 256, *, idle_s: float | None = 30.0, name: str = "tool"
    ) -> None:
        """A thread without work for `idle_s` ends; None: none ends before `close`."""
        self._limit = limit
        self._idle_s = idle_s
        self._name = name
        self._closed = False
        self._lock = threading.Lock()  # guards the rest
        self._ready = threading.Condition(self._lock)
        self._jobs: deque[_Job] = deque()
        self._idle = 0
        self._threads = 0

    def submit(
        self, function: Callable[..., _Result], *args: Any, **kwargs: Any
    ) -> asyncio.Future[_Result]:
        """Begin to run it; the future is of the running loop.

        Cancelling the future does not stop the function: its result is dropped.

        Raises:
            ThreadsBusy: as many functions as there may be threads have not come back, or it was
                closed.
        """
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        future: asyncio.Future[_Result] = loop.create_future()
        job = _Job(partial(context.run, function, *args, **kwargs), future, loop)
        with self._lock:
            if self._closed:
                raise ThreadsBusy("the thread has ended")
            if self._idle <= len(self._jobs):
                if self._threads >= self._limit:
                    raise ThreadsBusy(
                        f"{self._limit} blocking calls are under way and none has come back"
                    )
                self._threads += 1
                threading.Thread(
                    target=self._work, name=f"{self._name}-{self._threads}", daemon=True
                ).start()
            self._jobs.append(job)
            self._ready.notify()
        return future

    def close(self) -> None:
        """Let threads end once they have done what was submitted."""
        with self._lock:
            self._closed = True
            self._ready.notify_all()

    def _work(self) -> None:
        with self._lock:
            self._idle += 1
        while True:
            with self._lock:
                while not self._jobs:
                    if self._closed or not (self._ready.wait(self._idle_s) or self._jobs):
                        self._idle -= 1
                        self._threads -= 1
                        return
                self._idle -= 1
                job = self._jobs.popleft()
            try:
                result, error = job.call(), None
            except Exception as raised:
                result, error = None, raised
            except BaseException as raised:  # a tool that calls sys.exit ends itself, and no worker
                result, error = None, RuntimeError(f"{type(raised).__name__}: {raised}")
            if isinstance(error, StopIteration):  # no future takes one
                error = RuntimeError(f"StopIteration: {error}")
            with self._lock:
                self._idle += 1  # before the result is told: who has it may submit the next
            try:
                job.loop.call_soon_threadsafe(_settle, job.future, result, error)
            except RuntimeError:
                pass  # its loop has ended, and nobody waits
            del job, result, error


_THREADS = DaemonThreads()


async def in_thread(function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """What a blocking function returns, run beside the event loop.

    Raises:
        ThreadsBusy: see `DaemonThreads.submit`.
    """
    return await _THREADS.submit(function, *args, **kwargs)


class OneAtATime:
    """Runs functions of one object, one after the other; blocking ones in one thread of its own.

    A function whose caller has given up still runs, and the next one waits for it.
    """

    def __init__(self) -> None:
        self._free = asyncio.Lock()
        self._thread = DaemonThreads(1, idle_s=None, name="one")

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What it returns; a coroutine function is awaited here."""
        await self._free.acquire()
        if inspect.iscoroutinefunction(function):
            work = asyncio.ensure_future(function(*args, **kwargs))
        else:
            try:
                work = self._thread.submit(function, *args, **kwargs)
            except BaseException:
                self._free.release()
                raise
        work.add_done_callback(self._done)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if isinstance(work, asyncio.Task):
                work.cancel()  # a coroutine can be asked to stop; a thread cannot
            raise

    def close(self) -> None:
        """Let its thread end; nothing is run any more."""
        self._thread.close()

    def _done(self, work: asyncio.Future[Any]) -> None:
        self._free.release()
        if not work.cancelled():
            work.exception()  # looked at: whoever waited may have gone


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
