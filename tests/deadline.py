"""Waiting in tests: for a condition, up to a deadline. Never for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")

POLL_S = 0.002


def eventually(condition: Callable[[], Result], what: str, *, within_s: float = 10.0) -> Result:
    """The first true result of the condition; AssertionError if there is none in time."""
    deadline = time.monotonic() + within_s
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(POLL_S)


async def eventually_async(
    condition: Callable[[], Awaitable[Result]], what: str, *, within_s: float = 10.0
) -> Result:
    """The first true result of the condition, while other tasks of the loop run."""
    deadline = time.monotonic() + within_s
    while True:
        result = await condition()
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(POLL_S)


async def until(
    condition: Callable[[], object], what: str = "it comes to that", *, within_s: float = 30.0
) -> None:
    """Returns when the condition is true, of what happens in other tasks, threads or processes."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(POLL_S)
