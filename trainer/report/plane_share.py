"""Which part of a training step's time went to calls of the plane. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlaneShare:
    """Shares of step time, over a number of steps."""

    p50: float
    p95: float
    steps: int

    def __str__(self) -> str:
        if not self.steps:
            return "plane: no step was timed"
        return (
            f"plane: {self.p50:.2%} of step time at the median, {self.p95:.2%} at p95, "
            f"over {self.steps} steps"
        )

    def values(self) -> dict[str, float]:
        """The same for a summary."""
        return {
            "plane_share_p50": self.p50,
            "plane_share_p95": self.p95,
            "plane_share_steps": self.steps,
        }


def plane_share(plane_s: Sequence[float], step_s: Sequence[float]) -> PlaneShare:
    """The share of calls in each step's time, as percentiles (nearest rank).

    Args:
        plane_s: Seconds of each step in which a call of the plane was under way.
        step_s: Seconds of each step. A step without a time is left out.

    Example: plane_share([0.1, 0.3], [1.0, 1.0]) has p50 0.1 and p95 0.3.
    """
    shares = sorted(plane / step for plane, step in zip(plane_s, step_s, strict=True) if step > 0)
    if not shares:
        return PlaneShare(0.0, 0.0, 0)
    p50, p95 = (shares[max(0, math.ceil(q * len(shares)) - 1)] for q in (0.5, 0.95))
    return PlaneShare(p50, p95, len(shares))
