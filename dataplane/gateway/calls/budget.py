"""The memory of a gateway's buffers: taken before bytes come, given back when they have gone on.

Owns who waits for room, and in which order: first come, first served, but whoever has all that is
due to it keeps nobody else waiting. That a call is not read on while it waits is what slows its
sender down. Of one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from dataplane.errors import InvalidRequest, RateLimited

if TYPE_CHECKING:
    from dataplane.gateway.call import Call

RETRY_S = 1.0
"""When to come again, for who waited in vain: nobody knows."""


class Held:
    """Room that a call has. Given back at the end of a `with` block, or by `release`; only once."""

    __slots__ = ("_budget", "_owner", "nbytes")

    def __init__(self, budget: Budget, owner: str, nbytes: int) -> None:
        self._budget = budget
        self._owner = owner
        self.nbytes = nbytes

    def release(self) -> None:
        """Give it back. Repeatable."""
        nbytes, self.nbytes = self.nbytes, 0
        self._budget._give_back(self._owner, nbytes)  # pyright: ignore[reportPrivateUsage] (of this file)

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class _Waiting:
    __slots__ = ("future", "nbytes", "owner")

    def __init__(self, owner: str, nbytes: int) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Budget:
    """Bytes that all calls together may hold, and one owner of them."""

    def __init__(
        self,
        limit_bytes: int,
        share_bytes: int | None = None,
        *,
        reclaim: Callable[[str | None], bool] | None = None,
    ) -> None:
        """`share_bytes`: what one owner may hold. `reclaim`: gives up something that nobody needs
        for sure, of one owner or (None) of any; whether there was anything."""
        self.limit_bytes = limit_bytes
        self.share_bytes = limit_bytes if share_bytes is None else min(share_bytes, limit_bytes)
        self.used_bytes = 0
        self._used_by: dict[str, int] = {}
        self._line: list[_Waiting] = []
        self._passing = False
        self._reclaim = reclaim

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._line)

    def used_by(self, owner: str) -> int:
        """Bytes that an owner holds."""
        return self._used_by.get(owner, 0)

    async def take(self, owner: str, nbytes: int, timeout: float) -> Held:
        """Room for so many bytes, once it is there.

        Raises:
            InvalidRequest: it is more than anybody may hold at once.
            RateLimited: there was none within `timeout` seconds.
        """
        if nbytes > self.share_bytes:
            raise InvalidRequest(
                f"{nbytes} bytes are more than the {self.share_bytes} that one caller may have in "
                "the gateway's memory at once"
            )
        if self._lets_in(owner, nbytes):
            return self._given(owner, nbytes)
        entry = _Waiting(owner, nbytes)
        self._line.append(entry)
        self._pass_on()  # with what can be reclaimed
        try:
            async with asyncio.timeout(timeout):
                await entry.future
        except TimeoutError:
            if not _is_given(entry.future):
                raise RateLimited(
                    f"no room for {nbytes} bytes within {timeout:.3g} s: calls under way hold "
                    f"{self.used_bytes} of the gateway's {self.limit_bytes} bytes, yours "
                    f"{self.used_by(owner)} of {self.share_bytes}",
                    retry_after_s=RETRY_S,
                    limit="buffer_bytes",
                ) from None
        except BaseException:
            if _is_given(entry.future):
                self._give_back(owner, nbytes)
            raise
        finally:
            if entry in self._line:
                self._line.remove(entry)
                self._pass_on()  # it kept others waiting
        return Held(self, owner, nbytes)

    def _given(self, owner: str, nbytes: int) -> Held:
        self._count(owner, nbytes)
        return Held(self, owner, nbytes)

    def _count(self, owner: str, nbytes: int) -> None:
        self.used_bytes += nbytes
        left = self._used_by.get(owner, 0) + nbytes
        if left:
            self._used_by[owner] = left
        else:
            self._used_by.pop(owner, None)

    def _give_back(self, owner: str, nbytes: int) -> None:
        if nbytes:
            self._count(owner, -nbytes)
            if not self._passing:
                self._pass_on()

    def _lets_in(self, owner: str, nbytes: int) -> bool:
        """Whether there is room, and nobody before who waits for the same."""
        return self._fits(owner, nbytes) and not any(
            entry.owner == owner or not self._is_over_share(entry) for entry in self._line
        )

    def _fits(self, owner: str, nbytes: int) -> bool:
        return (
            self.used_bytes + nbytes <= self.limit_bytes
            and self.used_by(owner) + nbytes <= self.share_bytes
        )

    def _is_over_share(self, entry: _Waiting) -> bool:
        return self.used_by(entry.owner) + entry.nbytes > self.share_bytes

    def _pass_on(self) -> None:
        """Let those in for whom there is room, in their order."""
        held_up: set[str] = set()
        self._passing = True  # what is reclaimed meanwhile is for who is looked at
        try:
            for entry in list(self._line):
                if entry.future.done() or entry.owner in held_up:
                    continue
                while not self._fits(entry.owner, entry.nbytes):
                    owner = entry.owner if self._is_over_share(entry) else None
                    if self._reclaim is None or not self._reclaim(owner):
                        break
                if self._fits(entry.owner, entry.nbytes):
                    self._line.remove(entry)
                    self._count(entry.owner, entry.nbytes)
                    entry.future.set_result(None)
                elif self._is_over_share(entry):
                    held_up.add(entry.owner)  # by nobody but itself
                else:
                    return
        finally:
            self._passing = False


def _is_given(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled()


async def room_for(budget: Budget, call: Call, nbytes: int, longest_s: float) -> Callable[[], None]:
    """Room for so many bytes of a call, once it is there; what gives it back, once. What is counted
    besides the bytes that travel never makes it more than anybody may hold.

    Raises as `Budget.take` and `Throttle.hold` do.
    """
    nbytes = min(nbytes, budget.share_bytes)
    throttle = call.throttle
    throttle.hold(nbytes)
    try:
        held = await budget.take(call.principal.name, nbytes, call.timeout(longest_s))
    except BaseException:
        throttle.let_go(nbytes)
        raise
    given = False

    def release() -> None:
        nonlocal given
        if not given:
            given = True
            held.release()
            throttle.let_go(nbytes)

    return release
