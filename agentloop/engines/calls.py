"""Requests that are under way at a server, and how they end before the server is done.

Owns their deadline and the order in which ending goes: the server is asked to give back what it
has, and what does not come in time ends here with nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agentloop.engines.http import EngineTimeout
from agentloop.engines.shapes.reply import nothing
from agentloop.engines.types import Completion, EngineError, Request


class Stopped(Exception):
    """A request that is to end early met an error, so nothing came."""


@dataclass(eq=False, slots=True)
class Call:
    """One request under way."""

    request: Request
    given_up: asyncio.Future[None]
    """Done: whatever the server may still say, the request ends with nothing."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: bool = False
    """It is to end early: a failure now means that nothing came."""
    server_ids: list[str] = field(default_factory=list[str])
    """How the server knows it, while it has it."""
    version: int = 0
    """What the engine was told when the server was asked."""

    @classmethod
    def of(cls, request: Request) -> Call:
        return cls(request, asyncio.get_running_loop().create_future())

    def give_up(self) -> None:
        self.stopping = True
        if not self.given_up.done():
            self.given_up.set_result(None)


class Calls:
    """The requests of one engine that are under way."""

    def __init__(self, grace_s: float) -> None:
        """`grace_s`: how long a server may take to give back what it has."""
        self._grace_s = grace_s
        self._under_way: set[Call] = set()

    def named(self, request_id: str) -> list[Call]:
        return [call for call in self._under_way if call.request.request_id == request_id]

    def all(self) -> list[Call]:
        return list(self._under_way)

    async def run(
        self, request: Request, answer: Callable[[Call], Awaitable[Completion]], limit_s: float
    ) -> Completion:
        """What `answer` gives, or an empty completion if the call is given up before.

        Raises:
            EngineTimeout: neither happened within `limit_s`.
            EngineError: as `answer` raised it.
        """
        call = Call.of(request)
        self._under_way.add(call)
        work = asyncio.ensure_future(answer(call))
        try:
            await asyncio.wait(
                {work, call.given_up}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            if work.done():
                return work.result()
            if call.stopping:
                return nothing(request)
            raise EngineTimeout(f"request {request.request_id} had no answer within {limit_s:g} s")
        except Stopped:
            return nothing(request)
        finally:
            # Closing its connection is how a server learns that nobody waits any more.
            work.cancel()
            try:
                await asyncio.gather(work, return_exceptions=True)
            finally:
                self._under_way.discard(call)
                call.ended.set()

    async def stop(
        self, calls: Sequence[Call], order: Callable[[list[Call]], Awaitable[bool]]
    ) -> None:
        """End these calls, and return when they have ended.

        `order` tells the server to end those that it has, and says whether it does.
        """
        for call in calls:
            call.stopping = True
            if not call.server_ids:
                call.give_up()
        try:
            async with asyncio.timeout(self._grace_s):
                if await order([call for call in calls if call.server_ids]):
                    await _all_ended(calls)
        except (TimeoutError, EngineError):
            pass  # what the server has is lost
        await self.drop(calls)

    async def drop(self, calls: Sequence[Call]) -> None:
        """End these calls with nothing, whatever the server has."""
        for call in calls:
            call.give_up()
        await _all_ended(calls)


async def _all_ended(calls: Sequence[Call]) -> None:
    for call in calls:
        await call.ended.wait()
