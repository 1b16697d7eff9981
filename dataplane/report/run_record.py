"""A run, as its folder tells of it: plain values. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """What was logged of one training step."""

    step: int
    time_s: float
    """When it was over, in seconds since 1970."""
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run, as its folder tells of it."""

    name: str
    steps: list[Step] = field(default_factory=list[Step])
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    versions: dict[str, str] = field(default_factory=dict[str, str])
    run_id: str = ""

    def series(self, *names: str) -> list[tuple[float, float]]:
        """Steps and the first of these values that a step has."""
        found: list[tuple[float, float]] = []
        for step in self.steps:
            name = next((name for name in names if name in step.values), None)
            if name is not None:
                found.append((float(step.step), step.values[name]))
        return found
