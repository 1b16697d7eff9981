"""One training step in the few numbers that a person watches. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

REWARD: Final = ("response/rewards/mean", "response/raw_rewards/mean")
HELD_OUT: Final = ("eval/reward/mean", "eval/accuracy")
LENGTH: Final = ("response/response_len/mean",)
LAG: Final = ("training/off_policy/staleness/mean", "training/off_policy/worst/mean")
STEP_TIME: Final = ("time/step",)
"""Where each number is found among the logged values; the first that is there."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """A step as it is shown. None: not known of this step."""

    step: int
    total: int | None = None
    reward: float | None = None
    held_out: float | None = None
    length: float | None = None
    lag: float | None = None
    step_s: float | None = None
    plane_share: float | None = None
    """Of the step's time."""

    @classmethod
    def of(
        cls,
        step: int,
        values: Mapping[str, float],
        *,
        total: int | None = None,
        plane_s: float | None = None,
    ) -> StepLine:
        """The line of a step, from its logged values and the seconds that the plane took of it."""
        step_s = first_of(values, STEP_TIME)
        return cls(
            step=step,
            total=total,
            reward=first_of(values, REWARD),
            held_out=first_of(values, HELD_OUT),
            length=first_of(values, LENGTH),
            lag=first_of(values, LAG),
            step_s=step_s,
            plane_share=plane_s / step_s if plane_s is not None and step_s else None,
        )

    def cells(self) -> dict[str, str]:
        """The numbers as text, by the names of their columns; those that are not known are ""."""
        return {
            "step": str(self.step) if self.total is None else f"{self.step}/{self.total}",
            "reward": _text(self.reward, ".3f"),
            "held-out": _text(self.held_out, ".3f"),
            "length": _text(self.length, ".1f"),
            "lag": _text(self.lag, ".2f"),
            "time": _text(self.step_s, ".2f", " s"),
            "plane": _text(self.plane_share, ".1%"),
        }

    def __str__(self) -> str:
        return "  ".join(f"{name} {cell}" for name, cell in self.cells().items() if cell)


def first_of(values: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    """The first of these that is there."""
    return next((values[name] for name in names if name in values), None)


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
