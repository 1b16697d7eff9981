"""Trajectories for tests of pure files, with only what a test is about spelled out."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from agentloop.trajectory.canonicalize import canonicalize
from agentloop.trajectory.state import Canonical, RolloutState, Status

IGN = -100


def completed(**values: Any) -> RolloutState:
    """EX-2.1, or what is said instead: a completed trajectory that is not canonical yet."""
    values = {
        "messages": [{"role": "user", "content": "2+2?"}],
        "uid": "u",
        "prompt_ids": [10, 11, 12],
        "response_ids": [20, 21, 22],
        "status": Status.COMPLETED,
        **values,
    }
    return RolloutState(**values)


def plain() -> RolloutState:
    """EX-2.1."""
    return completed(response_logprobs=[-0.1, -0.2, -0.3])


def tool_loop() -> RolloutState:
    """EX-2.2, as its loop makes it."""
    state = completed(prompt_ids=[10, 11], response_ids=None)
    state.append_generated([20, 21], [-0.1, -0.2], [7, 7])
    state.append_inserted([90, 91], 7)
    state.append_generated([22, 2], [-0.3, -0.4], [8, 8])
    return state


def agentic(**values: Any) -> RolloutState:
    """EX-2.8: a trajectory whose loop made the canonical form itself."""
    form = {
        "input_ids": [30, 31, 40, 41, 42],
        "labels": [IGN, IGN, 40, 41, 42],
        "logprobs": [0.0, 0.0, -0.1, -0.2, -0.3],
    }
    form |= {name: values.pop(name) for name in tuple(values) if name in form}
    return completed(
        **{
            "prompt_ids": [30, 31],
            "response_ids": [40, 41, 42],
            "canonical": Canonical(**form),
            **values,
        }
    )


def baked_case(labels: list[int], steps: list[int], **values: Any) -> RolloutState:
    """A canonical trajectory of these labels, whose last tokens have these versions."""
    ids = [label if label != IGN else 900 + i for i, label in enumerate(labels)]
    size = len(steps)
    state = completed(
        prompt_ids=ids[: len(ids) - size] or None,
        response_ids=ids[len(ids) - size :],
        response_model_steps=steps,
        canonical=Canonical(ids, labels, None),
        **values,
    )
    canonicalize(state)
    assert state.status is Status.COMPLETED, state.error_msg
    return state


TURNS = st.lists(
    st.tuples(
        st.booleans(),
        st.lists(st.integers(0, 50_000), min_size=1, max_size=4),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
)
"""(generated, tokens, policy version) of each piece of a response."""


@st.composite
def canonical_states(draw: st.DrawFn) -> RolloutState:
    """Canonical trajectories as loops make them, one turn after the other."""
    has_logprobs = draw(st.booleans())
    state = completed(
        uid=draw(st.text("ab_-", min_size=1, max_size=6)),
        session_id=draw(st.integers(0, 9)),
        index=draw(st.integers(0, 3)),
        prompt_ids=draw(st.lists(st.integers(0, 50_000), min_size=1, max_size=5)),
        response_ids=None,
        num_turns=draw(st.integers(0, 5)),
        reward=draw(st.none() | st.builds(lambda x: {"score": x}, st.floats(-2, 2))),
        task_name=draw(st.sampled_from(["", "math"])),
        data_source=draw(st.none() | st.just("gsm8k")),
    )
    for generated, tokens, version in draw(TURNS):
        if generated:
            logprobs = [-0.5] * len(tokens) if has_logprobs else None
            state.append_generated(tokens, logprobs, [version] * len(tokens))
        else:
            state.append_inserted(tokens, version)
    canonicalize(state)
    assert state.status is Status.COMPLETED, state.error_msg
    return state
