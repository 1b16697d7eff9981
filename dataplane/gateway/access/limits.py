"""How much one principal may ask for at a time: rates, open calls, bytes in memory. Pure.

Owns the limits, and the account of what a principal has used of them. Time comes from a clock that
is handed in; nothing here waits: an answer is either "go" or "come again in so many seconds".

Calls are refused when they come too fast. Bytes are not: what has arrived has arrived, so bytes run
into debt, and whoever moves them waits until it is paid. That turns a rate into flow control, and
streams of one principal share it in proportion to what they move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from typing import Final

from dataplane.errors import InvalidRequest, RateLimited

Clock = Callable[[], float]
"""Seconds, from any beginning, that never go back."""

BURST_S: Final = 1.0
"""A rate may be used up ahead for so long: after a pause so many seconds' worth goes at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a principal may use at once; None where there is no limit."""

    calls_per_s: float | None = None
    bytes_per_s: float | None = None
    """Of rows and trajectories, both ways together."""
    open_streams: int | None = None
    """Calls under way at once, of any kind: each is a stream of its connection."""
    clients: int | None = None
    """Client ids that are present at once; counted where the gateway keeps their clients."""
    inflight_bytes: int | None = None
    """What the gateway holds in memory for it: puts that are not whole yet, answers under way."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidRequest(f"limit {field.name} must be a number, not {value!r:.40}")
            if not (math.isfinite(value) and value > 0):
                raise InvalidRequest(
                    f"limit {field.name} must be greater than 0, not {value}; leave it out for "
                    "no limit"
                )


class _Bucket:
    """What is left of a rate; below 0 where more was taken than there was."""

    __slots__ = ("_at", "_clock", "_left", "burst", "rate")

    def __init__(self, rate: float, clock: Clock) -> None:
        self.rate = rate
        self.burst = max(rate * BURST_S, 1.0)
        self._clock = clock
        self._left = self.burst
        self._at = clock()

    def left(self) -> float:
        now = self._clock()
        # A clock that stands still or goes back gives nothing, and takes nothing.
        self._left = min(self.burst, self._left + max(now - self._at, 0.0) * self.rate)
        self._at = now
        return self._left

    def take_if_there(self) -> float:
        """Take one if it is there; seconds until it would be, 0 if it was taken."""
        left = self.left()
        # What is a rounding error short of one is one: else a caller who came back after exactly
        # as long as it was told would be sent away again.
        if left >= 1.0 - 1e-9:
            self._left -= 1.0
            return 0.0
        return (1.0 - left) / self.rate

    def take(self, amount: float) -> float:
        """Take it, be it there or not; seconds until the debt is paid."""
        self._left = self.left() - amount
        return max(-self._left / self.rate, 0.0)


class Throttle:
    """What one principal has under way, against its limits."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self.limits = limits
        self._calls = None if limits.calls_per_s is None else _Bucket(limits.calls_per_s, clock)
        self._bytes = None if limits.bytes_per_s is None else _Bucket(limits.bytes_per_s, clock)
        self._streams = 0
        self._held_bytes = 0

    @property
    def open_streams(self) -> int:
        """Calls under way."""
        return self._streams

    @property
    def held_bytes(self) -> int:
        """Bytes in the gateway's memory."""
        return self._held_bytes

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way and nothing owed: a new one would be no different."""
        return not (self._streams or self._held_bytes) and all(
            bucket is None or bucket.left() >= bucket.burst for bucket in (self._calls, self._bytes)
        )

    def call(self) -> float:
        """Seconds to wait before one more call may be made; 0 if it may be made now, which counts
        it."""
        return 0.0 if self._calls is None else self._calls.take_if_there()

    def bytes(self, nbytes: int) -> float:
        """Count bytes that were moved; seconds to wait before any more are."""
        return 0.0 if self._bytes is None else self._bytes.take(nbytes)

    def require_call(self) -> None:
        """Count one more call. RateLimited, saying when to come again, if it comes too soon."""
        wait_s = self.call()
        if wait_s:
            raise RateLimited(
                f"more than {self.limits.calls_per_s:g} calls/s; call again in {wait_s:.3g} s",
                retry_after_s=wait_s,
                limit="calls_per_s",
            )

    def open_stream(self) -> None:
        """One more call is under way, until `close_stream`. RateLimited if that is too many."""
        limit = self.limits.open_streams
        if limit is not None and self._streams >= limit:
            raise _too_many("open_streams", f"{limit} calls are under way already", "end one first")
        self._streams += 1

    def close_stream(self) -> None:
        """One call less is under way."""
        assert self._streams, "no call is under way"
        self._streams -= 1

    def hold(self, nbytes: int) -> None:
        """Room in the gateway's memory is taken, until `let_go` of as much. RateLimited, before it
        is taken, if that is too much at once; InvalidRequest if it always would be."""
        limit = self.limits.inflight_bytes
        if limit is not None and self._held_bytes + nbytes > limit:
            if nbytes > limit:
                raise InvalidRequest(
                    f"{nbytes} bytes at once are more than the {limit} that these credentials may "
                    "have under way (inflight_bytes); send less in one call"
                )
            raise _too_many(
                "inflight_bytes",
                f"{self._held_bytes} of {limit} bytes are under way, and {nbytes} more do not fit",
                "wait for an answer first",
            )
        self._held_bytes += nbytes

    def let_go(self, nbytes: int) -> None:
        """So much room is free again."""
        assert self._held_bytes >= nbytes, "more is let go of than was held"
        self._held_bytes -= nbytes


MAX_IDLE: Final = 1024
"""Throttles that are kept before those at rest are forgotten."""


class Throttles:
    """The throttle of each principal. Principals of one name and with equal limits share one,
    whichever of their credentials they use."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._throttles: dict[Hashable, Throttle] = {}
        self._sweep_at = MAX_IDLE

    def __len__(self) -> int:
        return len(self._throttles)

    def of(self, name: str, limits: Limits) -> Throttle:
        """The throttle of a principal."""
        throttle = self._throttles.get((name, limits))
        if throttle is None:
            if len(self._throttles) >= self._sweep_at:
                self._forget_idle()
            throttle = self._throttles[name, limits] = Throttle(limits, self._clock)
        return throttle

    def _forget_idle(self) -> None:
        self._throttles = {k: each for k, each in self._throttles.items() if not each.is_at_rest}
        self._sweep_at = max(MAX_IDLE, 2 * len(self._throttles))


def _too_many(limit: str, what: str, remedy: str) -> RateLimited:
    return RateLimited(f"{what} (limit {limit}); {remedy}", retry_after_s=0.0, limit=limit)
