"""Pieces of a recorded conversation, joined to one trajectory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from agentloop.trajectory.canonicalize import canonicalize
from agentloop.trajectory.state import Canonical, RolloutState, Status
from agentloop.trajectory.trace import Piece, fill_from_trace
from tests.agentloop.states import IGN, completed


def experts(rows: int, value: int) -> Any:
    return np.full((rows, 2), value)


PROMPT = Piece([10, 11], routed_experts=experts(2, 0))
TURN = Piece([20, 21], [20, 21], [-0.1, -0.2], [3, 3], experts(2, 1))
TOOL = Piece([90], routed_experts=experts(1, 2))
LAST = Piece([22], [22], [-0.3], [4], experts(1, 3))


def begun() -> RolloutState:
    return completed(prompt_ids=[10, 11], response_ids=None)


def test_pieces_become_one_canonical_row_in_their_order() -> None:
    state = begun()
    fill_from_trace(state, [PROMPT, TURN, TOOL, LAST])
    canonicalize(state, builds=False)
    assert state.status is Status.COMPLETED, state.error_msg
    assert state.canonical == Canonical(
        [10, 11, 20, 21, 90, 22], [IGN, IGN, 20, 21, IGN, 22], [0, 0, -0.1, -0.2, 0, -0.3]
    )
    assert state.response_ids == [20, 21, 90, 22]
    assert state.response_model_steps == [3, 3, 3, 4]
    assert state.routed_experts is not None
    assert state.routed_experts[:, 0].tolist() == [0, 1, 1, 2, 3]
    assert state.meta is not None
    assert (state.meta.policy_len, state.meta.policy_spans) == (3, ((3, 2), (4, 1)))
    built = dataclasses.replace(state, canonical=None, meta=None)
    canonicalize(built)
    assert built.canonical == state.canonical


def test_a_row_is_trimmed_to_what_the_policy_said_last() -> None:
    state = begun()
    fill_from_trace(state, [PROMPT, TURN, TOOL, Piece([30], [IGN])], trims=True)
    assert state.response_ids == [20, 21]
    with pytest.raises(ValueError, match="no piece of the trace was generated"):
        fill_from_trace(begun(), [PROMPT, TOOL], trims=True)


def test_without_log_probs_or_versions_the_row_has_none() -> None:
    state = begun()
    fill_from_trace(state, [Piece([10, 11]), Piece([20], [20]), Piece([90])])
    canonicalize(state, builds=False)
    assert state.canonical is not None
    assert state.canonical.logprobs is None
    assert (state.response_model_steps, state.routed_experts) == ([], None)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([Piece([10, 12]), TURN], "does not begin with its prompt"),
        ([PROMPT, dataclasses.replace(TURN, routed_experts=None)], "1 of 2 pieces"),
        ([PROMPT, TURN, dataclasses.replace(LAST, logprobs=None)], "some have none"),
        ([PROMPT, dataclasses.replace(TURN, labels=[20])], "1 entries of labels"),
        ([PROMPT, dataclasses.replace(TURN, logprobs=[-0.1])], "1 entries of logprobs"),
        ([PROMPT, dataclasses.replace(TURN, versions=[1])], "1 entries of versions"),
    ],
)
def test_a_trace_that_does_not_fit_leaves_the_state_as_it_was(
    pieces: list[Piece], said: str
) -> None:
    state = begun()
    before = dataclasses.replace(state)
    with pytest.raises(ValueError, match=said):
        fill_from_trace(state, pieces)
    assert state == before
