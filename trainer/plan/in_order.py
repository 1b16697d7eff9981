"""`legacy` and `greedy`: rows packed as they come, packs dealt to the ranks.

Sections 5.2 to 5.5 of XTuner's index-based packing (its change 2055) as observed behaviour.
"""

from __future__ import annotations

from trainer.plan.job import Job
from trainer.plan.pack import next_fit, steps_of
from trainer.plan.types import Pack, Packs


def legacy(job: Job) -> Packs:
    """Packs dealt one by one, rank d gets every dp-th.

    Example: packs A B C D E on two ranks are A C E and B D and an empty one.
    """
    packs = _packed(job)
    return [steps_of(packs[d :: job.dp_size], job.steps, job.step_split) for d in _ranks(job)]


def greedy(job: Job) -> Packs:
    """Packs dealt in blocks, rank d gets the d-th.

    Example: packs A B C D E on two ranks are A B C and D E and an empty one.
    """
    packs = _packed(job)
    block = len(packs) // job.dp_size
    return [
        steps_of(packs[d * block : (d + 1) * block], job.steps, job.step_split) for d in _ranks(job)
    ]


def _packed(job: Job) -> list[Pack]:
    rows = range(len(job.lengths))
    order = rows if job.deterministic else job.rng.permutation(len(rows)).tolist()
    packs = next_fit(order, job.lengths, job.cap)
    return packs + [[] for _ in range(-len(packs) % job.dp_size)]


def _ranks(job: Job) -> range:
    return range(job.dp_size)
