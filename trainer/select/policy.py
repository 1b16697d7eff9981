"""What a replay buffer does with groups that are old, tell nothing, or lack something: settings.

Owns their meaning and which of them go together; they are applied in eviction.py and replay.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPolicy:
    """The settings of one replay buffer; ValueError where they contradict each other."""

    mode: Literal["sync", "async", "val"] = "sync"
    max_span: int | None = None
    """async: steps that a group may be under way; None is no limit."""
    on_stale: Literal["drop", "wait"] = "drop"
    """async: evict what is older than `max_span`, or train nothing while something in flight is as
    old as that."""
    drop_identical: bool = False
    """Evict finished groups whose sessions all have the same outcome: they teach nothing."""
    outcome_tag: str = "score"
    """The tag that holds a session's outcome."""
    failed: Literal["keep", "refill_empty", "refill"] | None = None
    """Groups whose prompt failed: train what they have, replace those that have nothing, or
    replace all. `keep` unless said otherwise; async always replaces all."""
    incomplete: Literal["keep", "strict", "drop", "refill"] = "keep"
    """Groups that ended with fewer sessions than they were to have: train them, raise, train a
    smaller batch without them, or replace them."""
    train_batch_size: int | None = None
    """Groups of a training step, for the bound on what is in flight; a batch if not given."""
    gen_batch_size: int = 1
    """Prompts are submitted in multiples of this."""
    max_inflight_gen_batches: int = 1
    """sync: prompts in flight are never more than this many training batches."""
    max_refill_rounds: int | None = None
    """How often prompts are replaced for one batch before that is an error; None is no bound."""

    def __post_init__(self) -> None:
        for name in (
            "max_span",
            "train_batch_size",
            "gen_batch_size",
            "max_inflight_gen_batches",
            "max_refill_rounds",
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"replay: {name} is a number from 1 on, not {value!r}")
        choices = {
            "mode": ("sync", "async", "val"),
            "on_stale": ("drop", "wait"),
            "failed": (None, "keep", "refill_empty", "refill"),
            "incomplete": ("keep", "strict", "drop", "refill"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"replay: {name} is one of {allowed}, not {getattr(self, name)!r}")
        if self.mode != "async" and self.max_span is not None:
            raise ValueError(f"replay: max_span has no meaning in mode {self.mode!r}")
        if self.mode == "async" and self.failed not in (None, "refill"):
            raise ValueError("replay: async replaces every failed group")
        one_by_one = self.mode == "async" or self.failed in ("refill", "refill_empty")
        if one_by_one and self.gen_batch_size != 1:
            raise ValueError(
                "replay: gen_batch_size is 1 in async mode and where failed groups are replaced"
            )
        if self.train_batch_size is not None and self.gen_batch_size > self._slots(0):
            raise PlanError(
                f"replay: a generation batch of {self.gen_batch_size} prompts never fits the "
                f"{self._slots(0)} that may be in flight"
            )

    def _slots(self, batch_size: int) -> int:
        return self.max_inflight_gen_batches * (self.train_batch_size or batch_size)

    def free_slots(self, batch_size: int, in_flight: int) -> int:
        """How many prompts may join those in flight."""
        return max(self._slots(batch_size) - in_flight, 0)
