"""Several tasks in one run: their names, and how a batch is divided between them. No I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction


def split_by_weight(batch: int, weights: Sequence[float]) -> list[int]:
    """How many of `batch` prompts each task gets, in the order of the weights.

    Each gets the whole part of its share; what is left goes to the largest fractions, and among
    equal ones to the task that comes first. Shares are exact: 0.1 is a tenth.

    Example: split_by_weight(7, [1, 2, 0]) == [2, 5, 0].

    Raises:
        ValueError: there is no task, a weight is negative or not finite, all of them are 0, or
            `batch` is negative.
    """
    if not weights:
        raise ValueError("there is no task to divide a batch between")
    if batch < 0:
        raise ValueError(f"a batch of {batch} prompts cannot be divided")
    for weight in weights:
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"weight {weight} of a task is to be a number from 0 on")
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    if total == 0:
        raise ValueError(f"the weights of all {len(weights)} tasks are 0: none gets a prompt")
    shares = [batch * weight / total for weight in exact]
    counts = [math.floor(share) for share in shares]
    # A stable sort: equal fractions keep the order of the tasks.
    by_fraction = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_fraction[: batch - sum(counts)]:
        counts[i] += 1
    return counts


def check_names(train: Iterable[str], evaluations: Iterable[str] = ()) -> None:
    """Refuse tasks that could be taken for each other.

    Rows of both kinds of task lie in one plane: an evaluation named like a task that is trained
    would be given the leftovers of training.

    Raises:
        ValueError: there is no task to train, a name is empty or given twice, or an evaluation has
            the name of a task that is trained.
    """
    train, evaluations = list(train), list(evaluations)
    if not train:
        raise ValueError("there is no task")
    for kind, names in (("task", train), ("evaluation", evaluations)):
        if "" in names:
            raise ValueError(f"a {kind} has no name")
        twice = [name for name, times in Counter(names).items() if times > 1]
        if twice:
            raise ValueError(f"{kind} {', '.join(map(repr, twice))} is named twice")
    both = [name for name in evaluations if name in train]
    if both:
        raise ValueError(
            f"evaluation {', '.join(map(repr, both))} has the name of a task that is trained: give "
            f"it another one"
        )
