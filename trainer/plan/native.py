"""`native`: the batch in its own order, equal counts of rows to each rank and step.

Section 5.7 of XTuner's index-based packing as observed behaviour.
"""

from __future__ import annotations

from typing import Final

from trainer.plan.job import Job
from trainer.plan.pack import level, one_or_more, split
from trainer.plan.types import Packs

SLOT: Final = 1024
"""Length of a stand-in row while the plan is made, unless a pack is shorter."""


def native(job: Job) -> Packs:
    """Consecutive parts of equal count. Stand-ins fill the batch up to a multiple of the ranks:
    they take room while packs are made, and are left out of the result."""
    real = len(job.lengths)
    missing = -real % job.dp_size
    lengths = [*job.lengths, *[min(SLOT, job.cap)] * missing]
    parts = split(range(real + missing), job.dp_size)
    steps = min(len(parts[0]), job.steps)
    packs = [[one_or_more(rows, lengths, job.cap) for rows in split(part, steps)] for part in parts]
    return level([[[[i for i in p if i < real] for p in step] for step in rank] for rank in packs])
