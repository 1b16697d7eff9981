"""What a step logs of its batch: scores, advantages and lengths, under XTuner's names.

Filler rows are in none of it, and no number is ever NaN: these go into JSON lines.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trainer.advantage.batch import Advantages
from trainer.trajectory import Trajectory


def batch_statistics(
    trajectories: Sequence[Trajectory],
    result: Advantages,
    *,
    raw_rewards: tuple[float, int] | None = None,
) -> dict[str, float]:
    """The statistics of a batch, from tags and scalar advantages.

    Rewards count once a session, lengths once a trajectory. An advantage counts once for every
    token that its trajectory supervises, so prompts, tool tokens and padding never enter.
    Statistics of nothing are 0.0.

    Args:
        raw_rewards: sum and count of the scores that producers saw, groups that were filtered
            included; the rewards of the batch stand in where there were none.
    """
    rows = [
        (row, value)
        for row, value in zip(trajectories, result.values, strict=True)
        if not row.is_padding
    ]
    policy = [row.policy_len for row, _ in rows]
    supervised = [(value, row.policy_len) for row, value in rows if row.policy_len > 0]
    tokens = sum(policy)
    seen, count = raw_rewards or (0.0, 0)
    rewards = _spread("rewards", result.session_scores)
    metrics: dict[str, float] = {
        "batch_size": len(rows),
        "training_samples": len(rows),
        "training_tokens": sum(row.train_len for row, _ in rows),
        **rewards,
        "raw_rewards/mean": seen / count if count else rewards["rewards/mean"],
        **_spread("advantages", [value for value, _ in supervised]),
        **_spread("response_len", policy),
        "response_len/std": statistics.stdev(policy) if len(policy) > 1 else 0.0,
        **_spread("prompt_len", [row.prompt_len for row, _ in rows]),
    }
    if tokens:
        metrics["advantages/mean"] = sum(value * n for value, n in supervised) / tokens
    turns = [row.num_turns for row, _ in rows if row.num_turns is not None]
    if turns:
        metrics.update(_spread("tool_turns", turns))
    return metrics


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    values = values or [0.0]
    return {
        f"{name}/mean": sum(values) / len(values),
        f"{name}/min": min(values),
        f"{name}/max": max(values),
    }
