"""How far generated tokens lag behind the weights that train on them, and what is too far.

Steps count trainer steps: weights "of step m" are those after step m. Source of the arithmetic:
XTuner's replay buffer; spans and off-policy metrics follow verl's V1 trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.trajectory import Trajectory


def staleness(model_step: int, train_step: int) -> int:
    """How many steps lie between the weights that generated and the step that trains.

    0 in synchronous training, where step t trains on what the weights of step t - 1 made.
    """
    return train_step - model_step - 1


def stale_threshold(max_staleness: int, sync_interval: int = 1) -> int:
    """The staleness from which something is too old: whole periods between two weight updates.

    Example: stale_threshold(1, sync_interval=4) == 8.
    """
    if max_staleness < 0 or sync_interval < 1:
        raise ValueError(
            f"max_staleness {max_staleness} is to be 0 or more, sync_interval {sync_interval} 1 or "
            f"more"
        )
    return (max_staleness + 1) * sync_interval


def is_stale(model_step: int, train_step: int, threshold: int) -> bool:
    """Whether what these weights generate is too old for this step."""
    return staleness(model_step, train_step) >= threshold


def seq_staleness(trajectory: Trajectory, train_step: int) -> int:
    """Staleness of its oldest token; 0 if it names no version."""
    oldest = trajectory.min_global_steps
    return 0 if oldest is None else staleness(oldest, train_step)


def span(prompt_step: int, train_step: int) -> int:
    """How many steps a prompt has been under way, the present one included."""
    return train_step - prompt_step + 1


def fresh_policy_len(trajectory: Trajectory, train_step: int, token_threshold: int | None) -> int:
    """Supervised entries of labels[1:] whose tokens are fresh enough to be trained.

    Workers leave the stale ones out when they materialize the row; this is their count without a
    value. All of them if no threshold is set or the row names no versions.
    """
    if token_threshold is None or not trajectory.policy_spans:
        return trajectory.policy_len
    spans = list(trajectory.policy_spans)
    if sum(count for _, count in spans) == trajectory.policy_len + 1:
        # Without a prompt the very first token is supervised, and is no entry of labels[1:].
        first = next(i for i, (_, count) in enumerate(spans) if count)
        spans[first] = (spans[first][0], spans[first][1] - 1)
    return sum(n for step, n in spans if not is_stale(step, train_step, token_threshold))


@dataclass(frozen=True, slots=True)
class Expiry:
    """What became too old in a group."""

    expired: tuple[str, ...]
    """Keys to generate again, or all keys if the group is dropped."""
    dropped: bool
    """The group cannot be retried and goes as a whole."""


def expiry(
    members: Sequence[Trajectory],
    train_step: int,
    threshold: int,
    *,
    token_threshold: int | None = None,
    retryable: bool,
) -> Expiry:
    """Which members of a stored group are too old at this step.

    A member is if it was before, if its oldest token is, or if none of the tokens that it
    supervises is fresh. A group that may be retried keeps its fresh members; one that may not
    loses all of them.
    """
    expired = [
        member.key
        for member in members
        if member.status == "expired"
        or seq_staleness(member, train_step) >= threshold
        or (member.policy_len > 0 and not fresh_policy_len(member, train_step, token_threshold))
    ]
    dropped = bool(expired) and not retryable
    return Expiry(tuple(m.key for m in members) if dropped else tuple(expired), dropped)


def most_stale_first(values: Sequence[int]) -> list[int]:
    """Places in the order in which they are taken: most stale first, then as they came.

    Example: most_stale_first([3, 8, 3, 3]) == [1, 0, 2, 3].
    """
    return sorted(range(len(values)), key=lambda i: -values[i])


def off_policy_metrics(
    trajectories: Sequence[Trajectory], step: int, prefix: str = "training"
) -> dict[str, float]:
    """Mean, max and min over the rows that name their versions; nothing if none does.

    `span` counts the versions that one row mixes, `staleness` how far its newest tokens lag,
    `worst` its oldest. Filler rows are left out.
    """
    spans = [
        (row.min_global_steps, row.max_global_steps)
        for row in trajectories
        if not row.is_padding
        and row.min_global_steps is not None
        and row.max_global_steps is not None
    ]
    if not spans:
        return {}
    columns = {
        "span": [newest - oldest + 1 for oldest, newest in spans],
        "staleness": [staleness(newest, step) for _, newest in spans],
        "worst": [staleness(oldest, step) for oldest, _ in spans],
    }
    metrics: dict[str, float] = {}
    for name, values in columns.items():
        metrics[f"{prefix}/off_policy/{name}/mean"] = sum(values) / len(values)
        metrics[f"{prefix}/off_policy/{name}/max"] = max(values)
        metrics[f"{prefix}/off_policy/{name}/min"] = min(values)
    return metrics
