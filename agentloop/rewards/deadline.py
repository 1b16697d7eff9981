"""Runs judges' code so that it ends: within its time, and never with another error than ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agentloop.rewards.types import RewardError
from agentloop.tools.threads import DaemonThreads

T = TypeVar("T")


async def within(work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
    """What the coroutine returns.

    One that overruns is cancelled and not waited for: it may ignore that.

    Raises:
        RewardError: it raised (SystemExit too), was cancelled from inside, or overran.
    """
    task = asyncio.ensure_future(_contained(work, what))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise RewardError(f"{what} did not answer within {timeout_s:g} s")
        if task.cancelled():
            raise RewardError(f"{what} was cancelled from inside")
        return task.result()
    finally:
        if not task.done():
            task.add_done_callback(_forget)
            task.cancel()


async def _contained(work: Coroutine[Any, Any, T], what: str) -> T:
    # Here and not around the await above: a SystemExit that leaves a task ends the event loop.
    try:
        return await work
    except (Exception, SystemExit) as error:
        raise failure(what, error) from error


def _forget(task: asyncio.Future[Any]) -> None:
    """Nobody asks for this answer any more, and asyncio must not warn that nobody did."""
    if not task.cancelled():
        task.exception()


def failure(what: str, error: BaseException) -> RewardError:
    """The error that says who failed and with what."""
    if isinstance(error, RewardError):
        return RewardError(f"{what}: {error}")
    try:
        text = str(error)[:500]
    except Exception:
        text = "(its text cannot be had)"
    return RewardError(f"{what} raised {type(error).__name__}: {text}")


class Threads:
    """Runs blocking calls beside the event loop, and gives up those that overrun.

    Nothing can stop a thread, so those given up are counted, and too many of them end the service:
    a judge that always hangs must not fill the process with threads.

    For the coroutines of one event loop.
    """

    def __init__(self, limit: int, *, overrun_limit: int = 16) -> None:
        if limit < 1 or overrun_limit < 1:
            raise ValueError(f"threads: at least 1; got {limit} and {overrun_limit}")
        self._free = asyncio.Semaphore(limit)
        self._threads = DaemonThreads(limit + overrun_limit, name="reward")
        self._overrun_limit = overrun_limit
        self.overrunning = 0
        """Calls that were given up and still run."""

    async def call(self, work: Callable[[], T], timeout_s: float, what: str) -> T:
        """What `work` returns. Its time begins when a thread is free for it.

        Raises:
            RewardError: it raised, overran, or too many calls before it never came back.
        """
        async with self._free:
            if self.overrunning >= self._overrun_limit:
                raise RewardError(
                    f"{what} is not called again: {self.overrunning} calls of it overran and "
                    f"still hold their threads"
                )
            answer = self._threads.submit(work)
            try:
                await asyncio.wait({answer}, timeout=timeout_s)
            finally:
                if not answer.done():
                    self.overrunning += 1
                    answer.add_done_callback(self._came_back)
            if not answer.done():
                raise RewardError(f"{what} did not answer within {timeout_s:g} s")
        try:
            return answer.result()
        except Exception as error:
            raise failure(what, error) from error

    def _came_back(self, answer: asyncio.Future[Any]) -> None:
        self.overrunning -= 1
        _forget(answer)
