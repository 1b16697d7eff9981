"""What a planner may know of a trajectory without its tokens: lengths, policy versions, flags.

Owns `TrainMeta` being made from the canonical form. No I/O. Source of what is counted: XTuner's
`write_train_meta`; run lengths of policy versions are our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from agentloop.trajectory.positions import has_axes
from agentloop.trajectory.state import Canonical, RolloutState, TrainMeta
from dataplane.fields import IGNORED


def write_train_meta(state: RolloutState) -> None:
    """Fill `state.meta` from its canonical form. Whoever changes that calls this again.

    Raises:
        ValueError: it has no canonical form.
    """
    if state.canonical is None:
        raise ValueError(f"trajectory {state.uid!r} has no canonical form to describe")
    state.meta = train_meta(state, state.canonical)


def train_meta(state: RolloutState, canonical: Canonical) -> TrainMeta:
    """What is known of a trajectory that has this canonical form.

    Versions are those of all response tokens, so that baking labels does not change them. A
    response of which not every token has one names none.
    """
    size = len(canonical.input_ids)
    response = response_len(state, canonical)
    steps = versions_of(state, canonical)
    return TrainMeta(
        prompt_len=size - response,
        response_len=response,
        seq_len=size,
        policy_len=sum(label != IGNORED for label in canonical.labels[1:]),
        policy_spans=() if steps is None else policy_spans(canonical.labels, steps),
        min_global_steps=None if steps is None else min(steps),
        max_global_steps=None if steps is None else max(steps),
        position_layout="mrope_3d" if has_axes(state.position_ids) else "1d",
        has_rollout_logprobs=canonical.logprobs is not None,
        has_routed_experts=state.routed_experts is not None,
    )


def response_len(state: RolloutState, canonical: Canonical) -> int:
    """R: as long as `response_ids`, or everything behind the labels that lead in unsupervised.

    So prompt and response are the whole sequence, whatever of them the state names.
    """
    if state.response_ids:
        return len(state.response_ids)
    leading = 0
    for label in canonical.labels:
        if label != IGNORED:
            break
        leading += 1
    return len(canonical.labels) - leading


def versions_of(state: RolloutState, canonical: Canonical) -> list[int] | None:
    """The policy version of each response token; None unless every one is known."""
    steps = state.response_model_steps
    return steps if steps and len(steps) == response_len(state, canonical) else None


def policy_spans(
    labels: Sequence[int], response_model_steps: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """(policy version, supervised tokens) of each run of the response, in order.

    Runs that supervise nothing are left out: the spans say how many tokens of which age are
    trained, and no more.

    Example: labels [-100, 7, 8, -100, 9] and versions [1, 1, 1, 2] of the last four tokens make
    ((1, 2), (2, 1)).

    Raises:
        ValueError: there are more versions than labels.
    """
    steps = response_model_steps
    if len(steps) > len(labels):
        raise ValueError(f"{len(steps)} policy versions for {len(labels)} tokens")
    response = labels[len(labels) - len(steps) :]
    trained = (step for label, step in zip(response, steps, strict=True) if label != IGNORED)
    return tuple((step, sum(1 for _ in run)) for step, run in groupby(trained))
