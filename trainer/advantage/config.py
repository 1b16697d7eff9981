"""How advantages are estimated: settings, and what an estimator needs of its rows."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from trainer.errors import PlanError

Estimator: TypeAlias = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "pass_at_k",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
]

BY_GROUP: Final = ("grpo", "dr_grpo", "rloo", "opo", "pass_at_k")
"""They compare the sessions of one prompt."""
BY_BATCH: Final = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""They compare all rows of the batch."""
BY_TOKEN: Final = ("gae",)
"""They differ by token, so workers compute them."""

EPS: Final = 1e-8
PASS_AT_K_EPS: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """How advantages are estimated; ValueError if that makes no sense."""

    estimator: Estimator | None = "grpo"
    """None: every advantage is 0, which is for rows that only a distillation loss trains."""
    task_adv_weight: float = 1.0
    """0: as None, and rows need no score. Other weights are applied by the loss, not here."""
    std: Literal["sample", "population", "none"] = "sample"
    """grpo, dr_grpo: what deviations are divided by: n - 1, n, or nothing at all."""
    eps: float | None = None
    """Added to divisors; 1e-8, of pass_at_k 1e-6, if not given."""
    max_length: int = 32_768
    """dr_grpo: the constant that response lengths are divided by."""
    k: int = 4
    """pass_at_k: of how many attempts one is to succeed."""
    lengths: Literal["response", "policy"] = "response"
    """dr_grpo, opo: the length of a session's response with its tool tokens, or without."""
    session: Literal["first", "last"] = "first"
    """Which trajectory of a session stands for it: its first, or the one of highest index. The
    latter is verl's rule: where that one supervises nothing, all of its session get 0."""
    gamma: float = 1.0
    """gae: discount of the value that follows."""
    lam: float = 1.0
    """gae: discount of the advantage that follows."""

    def __post_init__(self) -> None:
        known = (None, *BY_GROUP, *BY_BATCH, *BY_TOKEN)
        choices: dict[str, tuple[object, ...]] = {
            "estimator": known,
            "std": ("sample", "population", "none"),
            "lengths": ("response", "policy"),
            "session": ("first", "last"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"advantage: {name} is one of {', '.join(map(str, allowed))}, not "
                    f"{getattr(self, name)!r}"
                )
        for name in ("max_length", "k"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"advantage: {name} is a number from 1 on, not {value!r}")
        if not (math.isfinite(self.task_adv_weight) and self.task_adv_weight >= 0):
            raise ValueError(
                f"advantage: task_adv_weight is a number from 0 on, not {self.task_adv_weight}"
            )
        if self.eps is not None and not (math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(f"advantage: eps is a number above 0, not {self.eps}")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"advantage: {name} is from 0 to 1, not {getattr(self, name)}")

    @property
    def estimates(self) -> bool:
        """Whether scores are looked at at all."""
        return self.estimator is not None and self.task_adv_weight > 0

    @property
    def by_token(self) -> bool:
        """Whether advantages are columns that workers compute, and not one number a row."""
        return self.estimates and self.estimator in BY_TOKEN

    def divisor_eps(self, default: float = EPS) -> float:
        """What is added to divisors."""
        return default if self.eps is None else self.eps

    def check_fields(self, fields: Collection[str]) -> None:
        """PlanError if the estimator needs a field that no stage of this run produces."""
        if self.by_token and "values" not in fields:
            raise PlanError(
                f"estimator {self.estimator!r} needs the field 'values', which a critic writes; "
                f"this run has {', '.join(sorted(fields)) or 'no fields'}"
            )
