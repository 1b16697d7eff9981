"""How old the tokens of a response are, and labels without those that are too old. No I/O.

Owns the mask of the tokens that are still trained, and the explicit bake of that mask into labels.
Nothing here changes what it is given.

Steps count trainer steps: weights "of step m" are those after step m, so step t trains on what the
weights of step t - 1 made with staleness 0. Source of the arithmetic: XTuner's replay buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentloop.trajectory.meta import response_len, train_meta
from agentloop.trajectory.state import Canonical, RolloutState, TrainMeta
from dataplane.fields import IGNORED


def effective_mask(
    labels: Sequence[int] | None,
    response_model_steps: Sequence[int],
    *,
    train_step: int,
    token_threshold: int | None,
) -> list[int] | None:
    """1 for each response token that is supervised and fresh enough to be trained at this step.

    None where that does not apply: no threshold is set, no token names a version, or nothing is
    supervised anyway. The response is the last of `labels`; without labels, of a response that
    has not ended, every token counts as supervised. Whichever loop made it makes no difference.

    Example: labels [-100, -100, 3, 4] of versions [0, 4] at step 5 with threshold 4: [0, 1].

    Raises:
        ValueError: there are more versions than labels.
    """
    steps = response_model_steps
    if token_threshold is None or not steps:
        return None
    if labels is not None and len(steps) > len(labels):
        raise ValueError(f"{len(steps)} policy versions for {len(labels)} tokens")
    supervised = (
        [True] * len(steps)
        if labels is None
        else [label != IGNORED for label in labels[len(labels) - len(steps) :]]
    )
    if not any(supervised):
        return None
    return [
        # Staleness of weights of step m at step t is t - m - 1.
        int(is_supervised and train_step - step - 1 < token_threshold)
        for is_supervised, step in zip(supervised, steps, strict=True)
    ]


def effective_mask_of(
    state: RolloutState, *, train_step: int, token_threshold: int | None
) -> list[int] | None:
    """`effective_mask` of a trajectory; None unless each of its response tokens has a version."""
    canonical = state.canonical
    size = len(state.response_ids or ())
    if canonical is not None:
        size = response_len(state, canonical)
    if not size or len(state.response_model_steps) != size:
        return None
    return effective_mask(
        None if canonical is None else canonical.labels,
        state.response_model_steps,
        train_step=train_step,
        token_threshold=token_threshold,
    )


def bake(
    state: RolloutState, *, train_step: int, token_threshold: int | None
) -> tuple[Canonical, TrainMeta]:
    """The canonical form whose labels leave stale tokens out, and the meta that fits it.

    The state stays as it is: assign both to train on them. A hole never becomes a label again, and
    baking at one step and then at a later one is the same as baking at the later one.

    Raises:
        ValueError: it has no canonical form.
    """
    canonical = state.canonical
    if canonical is None:
        raise ValueError(f"trajectory {state.uid!r} has no canonical form to bake")
    mask = effective_mask_of(state, train_step=train_step, token_threshold=token_threshold)
    if mask is not None:
        prompt = len(canonical.labels) - len(mask)
        response = zip(canonical.labels[prompt:], mask, strict=True)
        kept = [label if is_kept else IGNORED for label, is_kept in response]
        canonical = replace(canonical, labels=[*canonical.labels[:prompt], *kept])
    return canonical, train_meta(state, canonical)
