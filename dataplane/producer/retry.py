"""When a call may be tried again, and after how long. Pure: time and chance are arguments.

Owns the pauses, which grow and are drawn at random so that producers do not come back together,
and the budget, which bounds all repetitions of a producer: a gateway in trouble gets a little more
than its usual calls, never a multiple of them. Whether a repetition is harmless is for who asks.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How patient a producer is. The deadline of a call bounds it in any case."""

    first_pause_s: float = 0.05
    """The first pause is up to this, each further one up to twice the one before."""
    last_pause_s: float = 5.0
    share: float = 0.2
    """Repetitions for each call that is made."""
    per_s: float = 1.0
    """Repetitions a second in any case."""
    burst: float = 20.0
    """Repetitions that may be saved up."""

    def __post_init__(self) -> None:
        if not (
            0 < self.first_pause_s <= self.last_pause_s
            and self.share >= 0
            and self.per_s > 0
            and self.burst >= 1
        ):
            raise InvalidRequest(f"a retry policy of positive numbers is due, not {self}")

    def pause_s(self, tries: int, chance: float) -> float:
        """How long to wait after so many tries; `chance` is drawn evenly from [0, 1)."""
        longest = self.first_pause_s * 2.0 ** min(tries - 1, 30)
        return min(longest, self.last_pause_s) * chance


class RetryBudget:
    """Repetitions that a producer may still make: a bucket that calls and time fill."""

    def __init__(self, policy: RetryPolicy, now: float) -> None:
        self._policy = policy
        self._tokens = policy.burst
        self._at = now

    def called(self, now: float) -> None:
        """A call is made for the first time."""
        self._fill(now)
        self._tokens = min(self._policy.burst, self._tokens + self._policy.share)

    def wait_s(self, now: float) -> float:
        """How long until another repetition is within the budget; taken by `take`."""
        self._fill(now)
        return max(0.0, (1.0 - self._tokens) / self._policy.per_s)

    def take(self, now: float) -> None:
        """One repetition is made, or will be after the time that `wait_s` says."""
        self._fill(now)
        self._tokens -= 1.0

    def _fill(self, now: float) -> None:
        passed = max(0.0, now - self._at)
        self._at = now
        self._tokens = min(self._policy.burst, self._tokens + passed * self._policy.per_s)
