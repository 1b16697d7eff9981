"""Token staleness, applied where labels are at hand: a token that is too old loses its label.

The tag `policy_spans` says which weights generated how many of a row's supervised tokens, in order,
so nothing beside the labels is fetched; the controller counts the same tokens without them
(`fresh_policy_len`).
"""

from __future__ import annotations

import torch

from dataplane.fields import IGNORED
from trainer.materialize.spec import Freshness
from trainer.trajectory import Trajectory


def drop_stale(
    labels: torch.Tensor,  # [T] int64, shifted
    row: Trajectory,
    fresh: Freshness,
) -> int:
    """Clear the labels of a row's stale tokens, in place; how many. Rows without spans are left
    alone.

    Without a prompt the spans may count one token more: the very first, which is no label.

    Example: with spans [[0, 2], [4, 2]], step 5 and threshold 4 the first two of four supervised
    tokens are cleared.

    Raises:
        ValueError: the spans count other tokens than the labels supervise; names the key.
    """
    spans = row.policy_spans
    if not spans or not any(fresh.is_stale(step) for step, _ in spans):
        return 0
    supervised = (labels != IGNORED).nonzero().flatten()
    flags = [flag for step, count in spans for flag in [fresh.is_stale(step)] * count]
    if row.prompt_len == 0 and len(flags) == len(supervised) + 1:
        flags = flags[1:]
    if len(flags) != len(supervised):
        raise ValueError(
            f"key {row.key!r}: policy_spans count {len(flags)} supervised tokens, and labels "
            f"{len(supervised)}"
        )
    stale = supervised[torch.tensor(flags, dtype=torch.bool, device=labels.device)]
    labels[stale] = IGNORED
    return len(stale)
