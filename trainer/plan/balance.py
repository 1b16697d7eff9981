"""`balance`: rows of similar length dealt to all ranks together, so that ranks get equal tokens.

Section 5.6 of XTuner's index-based packing as observed behaviour, but for the order in which its
generators would draw: randomness here decides ties and which lengths go to which step.
"""

from __future__ import annotations

from trainer.plan.job import Job
from trainer.plan.pack import level, one_or_more
from trainer.plan.types import Packs


def balance(job: Job) -> Packs:
    """Exactly the wanted number of steps; the totals of two ranks differ by one row at most."""
    ties = job.rng.permutation(len(job.lengths)).tolist()
    longest_first = sorted(ties, key=job.lengths.__getitem__, reverse=True)
    dp = job.dp_size
    deals = [longest_first[at : at + dp] for at in range(0, len(longest_first), dp)]
    cells: list[list[list[int]]] = [[[] for _ in range(job.steps)] for _ in range(dp)]
    dealt = (i for deal in job.rng.permutation(len(deals)).tolist() for i in deals[deal])
    for place, row in enumerate(dealt):
        cells[place % dp][place // dp % job.steps].append(row)
    return level([[one_or_more(rows, job.lengths, job.cap) for rows in rank] for rank in cells])
