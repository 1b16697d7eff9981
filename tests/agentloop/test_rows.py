"""Tags and fields of trajectories: what controllers read of them, and the way back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from agentloop.trajectory.canonicalize import canonicalize
from agentloop.trajectory.experts import expert_ids, joined_experts, traced_experts
from agentloop.trajectory.meta import policy_spans, write_train_meta
from agentloop.trajectory.positions import extended_positions
from agentloop.trajectory.rows import state_of_row, trajectory_fields, trajectory_tags
from agentloop.trajectory.state import Canonical, RolloutState, Status
from dataplane import InvalidRequest
from dataplane.fields import KNOWN_FIELDS, TRAJECTORY_TAGS
from tests.agentloop.states import IGN, agentic, canonical_states, completed, plain, tool_loop
from trainer.trajectory import Trajectory


def published(state: RolloutState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tags as a listing has them, fields as a get returns them."""
    tags = json.loads(json.dumps(trajectory_tags(state), allow_nan=False))
    fields = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in trajectory_fields(state).items()
    }
    return tags, fields


# -- tags ---------------------------------------------------------------------------------------


def test_rg_21_the_tags_of_a_row_count_prompt_and_response() -> None:
    state = plain()
    canonicalize(state)
    tags = trajectory_tags(state)
    assert (tags["prompt_len"], tags["response_len"], tags["seq_len"]) == (3, 3, 6)
    assert "num_tokens" not in tags


def test_the_tags_of_a_multi_turn_row_are_those_of_the_table() -> None:
    state = tool_loop()
    state.num_turns = 2
    state.finish_reason = "stop"
    state.reward = {"score": 1, "why": "right"}
    state.task_name, state.data_source, state.logprob_kind = "calc", "made", "processed"
    state.extra = {"group_generate_time_s": 1.5}
    canonicalize(state)
    assert trajectory_tags(state) == {
        "uid": "u", "session_id": 0, "index": 0, "status": "completed",
        "prompt_len": 2, "response_len": 6, "seq_len": 8, "policy_len": 4, "num_turns": 2,
        "min_global_steps": 7, "max_global_steps": 8, "policy_spans": [[7, 2], [8, 2]],
        "score": 1.0, "finish_reason": "stop", "task_name": "calc", "data_source": "made",
        "ids_source": "engine", "logprob_kind": "processed", "position_layout": "1d",
        "has_rollout_logprobs": True, "has_routed_experts": False, "group_generate_time_s": 1.5,
    }  # fmt: skip
    assert set(trajectory_tags(state)) <= set(TRAJECTORY_TAGS)
    assert type(trajectory_tags(state)["status"]) is str


def test_a_failed_trajectory_has_its_identity_and_its_reason_and_no_field() -> None:
    state = plain()
    state.reward = {"score": 1.0}
    canonicalize(state)
    state.fail("the judge is gone")
    assert trajectory_tags(state) == {
        "uid": "u", "session_id": 0, "index": 0, "status": "failed",
        "error_msg": "the judge is gone",
    }  # fmt: skip
    assert trajectory_fields(state) == {}
    assert Trajectory.of("u_0_0", trajectory_tags(state)).status == "failed"


def test_a_completed_trajectory_is_not_published_before_it_is_canonical() -> None:
    with pytest.raises(InvalidRequest, match="was not made canonical"):
        trajectory_tags(plain())
    scored = plain()
    canonicalize(scored)
    scored.reward = {"score": float("nan")}
    with pytest.raises(InvalidRequest, match="the score of trajectory u_0_0 is nan"):
        trajectory_tags(scored)
    with pytest.raises(ValueError, match="no canonical form"):
        write_train_meta(plain())


@given(canonical_states())
def test_a_controller_reads_what_the_producer_meant(state: RolloutState) -> None:
    tags, fields = published(state)
    lengths = {name: len(value) for name, value in fields.items() if name in KNOWN_FIELDS}
    read = Trajectory.of(state.key, tags, fields, lengths)
    meta = state.meta
    assert meta is not None
    assert (read.uid, read.session_id, read.index) == (state.uid, state.session_id, state.index)
    assert read.status == "completed"
    assert read.score == (None if state.reward is None else state.reward["score"])
    for name in (
        "prompt_len", "response_len", "seq_len", "policy_len", "policy_spans", "min_global_steps",
        "max_global_steps", "position_layout", "has_rollout_logprobs", "has_routed_experts",
    ):  # fmt: skip
        assert getattr(read, name) == getattr(meta, name), name
    assert (read.num_turns, read.data_source) == (state.num_turns, state.data_source)
    assert read.seq_len == lengths["input_ids"] == lengths["labels"]
    assert read.has_rollout_logprobs == ("logprobs" in fields)


@pytest.mark.parametrize("without", ["prompt_ids", "response_ids"])
def test_ex_2_9_tags_of_a_row_without_a_prompt_are_accepted(without: str) -> None:
    state = agentic(**{without: None})
    canonicalize(state)
    read = Trajectory.of(state.key, trajectory_tags(state))
    assert (read.prompt_len, read.response_len, read.policy_len) == (2, 3, 3)


def test_spans_are_the_ages_of_the_supervised_tokens() -> None:
    labels = [IGN, 1, IGN, 2, IGN, 3]
    assert policy_spans(labels, [1, 1, 1, 2, 3]) == ((1, 2), (3, 1)), "2 supervises nothing"
    assert policy_spans(labels, [1, 1, 2, 2, 1]) == ((1, 1), (2, 1), (1, 1))
    assert policy_spans([IGN, IGN], [4]) == ()
    with pytest.raises(ValueError, match="3 policy versions for 2 tokens"):
        policy_spans([1, 2], [1, 1, 1])


def test_versions_of_a_part_of_the_response_are_not_published() -> None:
    state = completed(response_model_steps=[3, 3])
    canonicalize(state)
    tags, fields = published(state)
    assert "response_model_steps" not in fields
    assert not {"policy_spans", "min_global_steps", "max_global_steps"} & set(tags)


# -- fields -------------------------------------------------------------------------------------


def test_fields_have_the_names_dtypes_and_lengths_of_the_table() -> None:
    state = tool_loop()
    state.routed_experts = np.arange(28).reshape(7, 2, 2)
    state.reward = {"score": 1.0}
    state.extra = {"agent": "calc"}
    canonicalize(state)
    fields = trajectory_fields(state)
    arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
    assert {name: (str(a.dtype), a.shape) for name, a in arrays.items()} == {
        "input_ids": ("int64", (8,)),
        "labels": ("int64", (8,)),
        "logprobs": ("float32", (8,)),
        "response_model_steps": ("int64", (6,)),
        "routed_experts": ("uint16", (7, 4)),
    }
    for name, array in arrays.items():
        assert str(array.dtype) == KNOWN_FIELDS[name].dtype
    assert set(fields) - set(arrays) == {"messages", "reward", "extra"}
    assert fields["messages"] == state.dialogue


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("routed_experts", np.zeros((6, 2), np.int64), "routed_experts has 6 entries for 8 tokens"),
        ("routed_experts", np.full((7, 2), -1), "routed experts from -1"),
        ("position_ids", np.zeros((3, 9), np.int64), "9 positions for 8 tokens"),
        ("canonical", Canonical([1] * 8, [1] * 7, None), "labels has 7 entries for 8 tokens"),
        ("canonical", Canonical([1] * 8, [1] * 8, [0.0]), "logprobs has 1 entries for 8 tokens"),
    ],
)
def test_wrong_lengths_are_refused_as_a_put_refuses_them(name: str, value: Any, said: str) -> None:
    state = tool_loop()
    canonicalize(state)
    setattr(state, name, value)
    with pytest.raises(InvalidRequest, match=said):
        trajectory_fields(state)


def test_positions_are_published_where_they_are_not_simply_counted() -> None:
    for positions, shape in ((None, None), (np.arange(3), None), (np.arange(3) + 5, (6,))):
        state = completed(position_ids=positions)
        canonicalize(state)
        found = trajectory_fields(state).get("position_ids")
        assert (None if found is None else np.shape(found)) == shape


def test_ex_2_5_rg_12_a_prompt_that_ends_on_an_image_goes_on_from_its_largest_axis() -> None:
    axes = np.array([[0, 1, 2, 2, 2, 2], [0, 1, 2, 2, 3, 3], [0, 1, 2, 3, 2, 3]])
    state = completed(
        prompt_ids=[1], train_prompt_ids=[1, 2, 3, 3, 3, 3], position_ids=axes.reshape(3, 1, 6)
    )
    canonicalize(state)
    found = trajectory_fields(state)["position_ids"]
    assert isinstance(found, np.ndarray)
    assert found.shape == (3, 9)
    # A worker trains the first 8 of them: 4 and 5 on every axis.
    assert found[:, 6:].tolist() == [[4, 5, 6]] * 3
    assert (found[:, :6] == axes).all()


def test_ex_2_4_positions_go_on_by_one() -> None:
    axes = np.tile(np.arange(2), (3, 1, 1))
    assert extended_positions(axes, 3).tolist() == [[0, 1, 2]] * 3
    assert extended_positions(axes, 2).tolist() == [[0, 1]] * 3
    assert extended_positions(np.array([[0, 1]]), 3).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="2 positions for 1 tokens"):
        extended_positions(axes, 1)
    with pytest.raises(ValueError, match="neither one axis"):
        extended_positions(np.zeros((2, 4), np.int64), 5)


# -- routed experts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("highest", "num_experts", "dtype"),
    [
        (7, None, "uint16"),
        (65535, None, "uint16"),
        (65536, None, "int64"),
        (7, 65536, "uint16"),
        (7, 65537, "int64"),
    ],
)
def test_expert_ids_have_the_dtype_that_the_model_needs(
    highest: int, num_experts: int | None, dtype: str
) -> None:
    ids = expert_ids(np.array([[[0, highest]], [[1, 2]]]), num_experts=num_experts)
    assert (str(ids.dtype), ids.shape) == (dtype, (2, 2))
    assert ids.tolist() == [[0, highest], [1, 2]]


@pytest.mark.parametrize(
    ("experts", "num_experts"),
    [
        (np.array([[-1]]), None),
        (np.array([[-1]], np.int16), 8),
        (np.array([[8]]), 8),
        (np.array([[8]], np.uint16), 8),
        (np.array([[65536]]), 65536),
        (np.array([[0.5]]), None),
        (np.array([1, 2]), None),
    ],
)
def test_what_is_no_expert_is_refused(experts: np.ndarray, num_experts: int | None) -> None:
    with pytest.raises(ValueError, match="routed experts"):
        expert_ids(experts, num_experts=num_experts)


def test_experts_of_a_continued_response_are_the_known_rows_and_the_new_ones() -> None:
    # 3 prompt and 2 response tokens have 4 rows; 2 more tokens are asked for with all 5.
    history, current = np.full((4, 2), 1), np.full((6, 2), 2)
    joined = joined_experts(history, current)
    assert joined[:, 0].tolist() == [1, 1, 1, 1, 2, 2]
    assert joined_experts(None, current) is current
    assert joined_experts(history, np.full((4, 2), 2))[:, 0].tolist() == [1] * 4
    for wrong in (np.full((3, 2), 2), np.full((6, 3), 2)):
        with pytest.raises(ValueError, match="do not go on"):
            joined_experts(history, wrong)


def test_experts_of_a_trace_lose_the_first_row_and_are_there_for_all_pieces_or_none() -> None:
    pieces = [np.full((2, 2), 1), np.full((3, 2), 2)]
    traced = traced_experts(pieces)
    assert traced is not None
    assert traced[:, 0].tolist() == [1, 2, 2, 2]
    assert traced_experts([None, None]) is None
    with pytest.raises(ValueError, match="1 of 2 pieces"):
        traced_experts([pieces[0], None])


# -- and back -----------------------------------------------------------------------------------


def begun(state: RolloutState) -> RolloutState:
    """The state as its session began."""
    return RolloutState(
        state.messages, state.uid, state.session_id, prompt_ids=state.prompt_ids,
        train_prompt_ids=state.train_prompt_ids,
    )  # fmt: skip


@given(canonical_states())
def test_a_completed_row_is_read_back_as_it_was(state: RolloutState) -> None:
    found = state_of_row(begun(state), *published(state))
    if state.generated is not None and all(state.generated):
        state.generated = None
    assert found.canonical is not None
    assert state.canonical is not None
    wanted = dataclasses.replace(state, logprob_kind=None)
    assert found == wanted
    assert trajectory_tags(found) == trajectory_tags(state)


def test_slime_1440_an_interrupted_row_is_gone_on_with_from_where_it_was() -> None:
    state = completed(
        response_ids=None, response="4", extra={"tries": 2}, num_turns=1,
        conversation=[{"role": "user", "content": "2+2?"}, {"role": "tool", "content": "9"}],
    )  # fmt: skip
    state.append_generated([20, 21, 22], [-0.5, -0.25, -1.0], [4, 4, 4])
    state.append_inserted([90], 4)
    state.routed_experts = np.ones((5, 2), np.int64)
    state.status, state.finish_reason = Status.ABORTED, "abort"
    tags, fields = published(state)
    assert (tags["prompt_len"], tags["response_len"], tags["seq_len"]) == (3, 4, 7)
    assert Trajectory.of("u_0_0", tags).status == "aborted"
    found = state_of_row(begun(state), tags, fields)
    assert np.array_equal(found.routed_experts, state.routed_experts)
    found.routed_experts = state.routed_experts = None
    assert found == state
    found.append_generated([23, 24], [-0.4, -0.5], [9, 9])
    found.status = Status.COMPLETED
    canonicalize(found)
    assert found.canonical is not None
    assert found.canonical.input_ids == [10, 11, 12, 20, 21, 22, 90, 23, 24]
    assert found.canonical.labels == [IGN, IGN, IGN, 20, 21, 22, IGN, 23, 24]
    assert found.response_model_steps == [4, 4, 4, 4, 9, 9]


def test_half_an_answer_is_no_turn_of_the_conversation() -> None:
    state = completed(
        response="4, bec", status=Status.ABORTED, response_model_steps=[1, 1, 1], num_turns=0
    )
    tags, fields = published(state)
    assert fields["messages"] == state.messages
    found = state_of_row(begun(state), tags, fields)
    assert (found.conversation, found.response) == (None, "4, bec")
    assert found == state


def test_an_evaluation_counts_what_failed_without_lengths() -> None:
    state = completed(response_ids=[20, -1], error_msg="the tool is gone", reward={"score": 0.0})
    tags = trajectory_tags(state)
    assert (tags["status"], tags["score"], tags["error_msg"]) == (
        "completed", 0.0, "the tool is gone",
    )  # fmt: skip
    assert "seq_len" not in tags
    assert trajectory_fields(state) == {}


def test_an_interrupted_row_without_a_token_begins_from_its_prompt() -> None:
    state = completed(response_ids=None, status=Status.ABORTED, error_msg="stopped")
    tags, fields = published(state)
    assert fields == {}
    assert not {"prompt_len", "seq_len"} & set(tags)
    assert state_of_row(begun(state), tags, fields) == state


def test_an_interrupted_row_that_does_not_fit_together_is_not_stored() -> None:
    state = completed(status=Status.ABORTED, generated=[True])
    assert trajectory_fields(state) == {}
