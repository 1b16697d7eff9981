"""How many prompts may be handed to producers without their answers becoming too old."""

from __future__ import annotations

import math
from fractions import Fraction

from trainer.errors import PlanError


def admission_capacity(*, max_staleness: int, version: int, batch_size: int, accepted: int) -> int:
    """How many more prompts may begin: (max_staleness + version + 1) * batch_size - accepted.

    Source: AReaL's staleness control. `version` counts the batches that were trained, so at least
    as many prompts were accepted: a counter below that was not restored with the version, and
    taking it as it is would admit all of the past again.

    Example: at version 50 with max_staleness 2 and batches of 8, of 400 accepted 24 are admitted.
    """
    for name, value, least in (
        ("max_staleness", max_staleness, 0),
        ("version", version, 0),
        ("batch_size", batch_size, 1),
        ("accepted", accepted, 0),
    ):
        if value < least:
            raise ValueError(f"{name} is a number from {least} on, not {value}")
    begun = max(accepted, version * batch_size)
    return max((max_staleness + version + 1) * batch_size - begun, 0)


def warm_up_shortfall(
    batches: float, train_batch_size: int, *, restored: int = 0, gen_batch_size: int = 1
) -> int:
    """How many prompts to submit before the first step, so that so many batches are under way.

    `restored` ones came back with a checkpoint. Batches may be a fraction; whole generation
    batches are submitted.

    Example: warm_up_shortfall(1.5, 64, restored=40) == 56.

    Raises:
        PlanError: what is missing is not a number of whole generation batches.
    """
    # As it is written: 0.29 * 100 is 28.999... in floats.
    prompts = Fraction(str(batches)) * train_batch_size
    target = math.floor(prompts / gen_batch_size) * gen_batch_size
    missing = max(target - restored, 0)
    if missing % gen_batch_size:
        raise PlanError(
            f"{missing} prompts are missing ({target} wanted, {restored} restored), which are no "
            f"whole generation batches of {gen_batch_size}"
        )
    return missing
