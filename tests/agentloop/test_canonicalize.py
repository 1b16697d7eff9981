"""The canonical form: built, checked, and what becomes of what does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from agentloop.groups.outcome import GroupOutcome, MemberOutcome
from agentloop.production.accounting import Window
from agentloop.trajectory.canonicalize import canonicalize, canonicalize_group, drop_failed
from agentloop.trajectory.state import Canonical, RolloutState, Status, group_status
from dataplane.fields import align
from tests.agentloop.states import (
    IGN,
    agentic,
    canonical_states,
    completed,
    plain,
    tool_loop,
)


def made(state: RolloutState, **options: Any) -> Canonical:
    canonicalize(state, **options)
    assert state.status is Status.COMPLETED, state.error_msg
    assert state.canonical is not None
    return state.canonical


def lengths(state: RolloutState) -> tuple[int, int, int, int]:
    """T, supervised, prompt, response."""
    meta = state.meta
    assert meta is not None
    assert meta.prompt_len + meta.response_len == meta.seq_len
    return meta.seq_len - 1, meta.policy_len, meta.prompt_len, meta.response_len


def shifted(form: Canonical, advantage: float) -> dict[str, list[float]]:
    """The row as a worker trains it, by the alignments of the plane."""
    size = len(form.input_ids)

    def cut(values: list[Any]) -> list[Any]:
        return align(values, "full", "shifted", prompt_len=0, total_len=size, fill=0)

    labels = cut(form.labels)
    row = {
        "input_ids": form.input_ids[:-1],
        "labels": labels,
        "advantages": [0.0 if label == IGN else advantage for label in labels],
    }
    return row if form.logprobs is None else row | {"logprobs": cut(form.logprobs)}


def test_ex_2_1_prompt_and_response_become_one_row() -> None:
    state = plain()
    form = made(state)
    assert form.input_ids == [10, 11, 12, 20, 21, 22]
    assert form.labels == [IGN, IGN, IGN, 20, 21, 22]
    assert form.logprobs == [0, 0, 0, -0.1, -0.2, -0.3]
    assert lengths(state) == (5, 3, 3, 3)
    assert shifted(form, 1.5) == {
        "input_ids": [10, 11, 12, 20, 21],
        "labels": [IGN, IGN, 20, 21, 22],
        "logprobs": [0, 0, -0.1, -0.2, -0.3],
        "advantages": [0, 0, 1.5, 1.5, 1.5],
    }


def test_ex_2_2_what_a_tool_said_is_a_hole_in_the_labels() -> None:
    state = tool_loop()
    form = made(state)
    assert state.response_ids == [20, 21, 90, 91, 22, 2]
    assert form.input_ids == [10, 11, 20, 21, 90, 91, 22, 2]
    assert form.labels == [IGN, IGN, 20, 21, IGN, IGN, 22, 2]
    assert form.logprobs == [0, 0, -0.1, -0.2, 0, 0, -0.3, -0.4]
    assert lengths(state) == (7, 4, 2, 6)
    assert shifted(form, -0.5) == {
        "input_ids": [10, 11, 20, 21, 90, 91, 22],
        "labels": [IGN, 20, 21, IGN, IGN, 22, 2],
        "logprobs": [0, -0.1, -0.2, 0, 0, -0.3, -0.4],
        "advantages": [0, -0.5, -0.5, 0, 0, -0.5, -0.5],
    }


def test_ex_2_3_a_hole_is_given_by_the_mask() -> None:
    state = plain()
    state.generated = [True, False, True]
    form = made(state)
    assert shifted(form, 1.5)["labels"] == [IGN, IGN, 20, IGN, 22]
    assert shifted(form, 1.5)["advantages"] == [0, 0, 1.5, 0, 1.5]
    assert form.logprobs == [0, 0, 0, -0.1, 0, -0.3]
    assert lengths(state)[1] == 2


def test_ex_2_4_a_multimodal_row_has_the_prompt_it_is_trained_with() -> None:
    state = completed(
        prompt_ids=[1], train_prompt_ids=[100, 101], response_ids=[102, 103],
        position_ids=np.tile(np.arange(2), (3, 1, 1)),
    )  # fmt: skip
    form = made(state)
    assert form == Canonical([100, 101, 102, 103], [IGN, IGN, 102, 103], None)
    assert lengths(state) == (3, 2, 2, 2)
    assert shifted(form, 0.25) == {
        "input_ids": [100, 101, 102],
        "labels": [IGN, 102, 103],
        "advantages": [0, 0.25, 0.25],
    }
    assert state.meta is not None
    assert state.meta.position_layout == "mrope_3d"
    assert state.prompt_ids == [1]


def test_ex_2_6_a_response_of_text_alone_is_tokenized() -> None:
    state = completed(response_ids=None, response="ok")
    form = made(state, tokenize=lambda text: [[999, 998]] if text == "ok" else [[0]])
    assert state.response_ids == [999, 998]
    assert form.labels == [IGN, IGN, IGN, 999, 998]
    assert state.ids_source == "retokenized"


def test_ex_2_7_a_member_that_is_malformed_fails_alone() -> None:
    states = [completed(prompt_ids=None), plain()]
    failed = canonicalize_group(states)
    assert [state.status for state in states] == ["failed", "completed"]
    assert [state is states[0] for state in failed] == [True], "one thing to log"
    assert states[1].canonical is not None
    assert lengths(states[1]) == (5, 3, 3, 3)
    assert group_status(state.status for state in states) == "failed"


def test_rg_16_a_malformed_sample_costs_its_group_and_not_the_producer() -> None:
    states = [completed(prompt_ids=None), plain()]
    canonicalize_group(states)
    window = Window()
    members = tuple(MemberOutcome(s.status, 3, None, s.failure) for s in states)
    window.record(GroupOutcome("u", "t", group_status(s.status for s in states), members))
    result = window.close()
    assert result.failed_samples == len(states)
    assert result.failures == {"canonicalize": 1}


def test_ex_2_8_a_form_that_a_loop_made_is_checked_and_not_changed() -> None:
    state = agentic()
    before = state.canonical
    assert made(state, tokenize=None) is before
    assert lengths(state) == (4, 3, 2, 3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"labels": [IGN, IGN, 40, 41]}, "labels length mismatch"),
        ({"labels": None}, "labels length mismatch"),
        ({"logprobs": [0.0, 0.0, -0.1]}, "logprobs length mismatch"),
        ({"logprobs": [0.0, 0.0, -0.1, float("nan"), 0.0]}, "not finite"),
        ({"response_ids": [20, 21]}, "response_ids not a suffix"),
        ({"response_ids": [40, 41]}, "response_ids not a suffix"),
        ({"response_ids": [1, 30, 31, 40, 41, 42]}, "response_ids not a suffix"),
        (
            {"input_ids": [7], "labels": [7], "logprobs": [0.0], "response_ids": [7]},
            "too short",
        ),
        ({"labels": [IGN, IGN, 40, 99, 42]}, "label 99 at 3 is not the token 41"),
        ({"labels": [IGN, 31, 40, 41, 42]}, "supervises a prompt"),
        ({"response_model_steps": [1, 1, 1, 1]}, "response_model_steps length mismatch"),
        ({"response_model_steps": [1, -1, 1]}, "policy version -1 is below 0"),
        ({"position_ids": np.zeros((3, 3), np.int64)}, "position_ids length mismatch"),
        ({"position_ids": np.zeros((2, 5), np.int64)}, "neither one axis of tokens nor three"),
        ({"position_ids": np.zeros((3, 6), np.int64)}, "6 positions for 5 tokens"),
        ({"routed_experts": np.zeros((5, 2), np.int64)}, "routed_experts length mismatch"),
        ({"routed_experts": np.full((4, 2), -1)}, "routed experts from -1"),
        ({"reward": {"score": float("inf")}}, "its score is inf"),
    ],
)
def test_ex_2_8_a_form_that_does_not_fit_fails_the_sample(wrong: dict[str, Any], said: str) -> None:
    state = agentic(**wrong)
    canonicalize(state)
    assert state.status is Status.FAILED
    assert state.error_msg is not None
    assert state.error_msg.startswith("canonicalize_train_fields failed")
    assert said in state.error_msg
    assert (state.canonical, state.meta, state.failure) == (None, None, "canonicalize")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prompt_ids": None}, "no prompt_ids"),
        ({"prompt_ids": []}, "no prompt_ids"),
        ({"train_prompt_ids": []}, "no prompt_ids"),
        ({"response_ids": []}, "its response is empty"),
        ({"response_ids": None}, "no response_ids and no text"),
        ({"response_ids": None, "response": "ok"}, "no tokenizer"),
        ({"response_ids": ["a"]}, "no token id"),
        ({"response_ids": [1.5]}, "no token id"),
        ({"response_ids": [20, -1, 22]}, "label -1"),
        ({"response_logprobs": [-0.1]}, "logprobs length mismatch"),
        ({"response_logprobs": [0.0, 0.0, 0.0, -0.1, -0.2, -0.3]}, "logprobs length mismatch"),
        ({"generated": [True]}, "generated length mismatch"),
        ({"reward": {"score": "high"}}, "TypeError"),
    ],
)
def test_what_cannot_be_built_fails_the_sample(wrong: dict[str, Any], said: str) -> None:
    state = completed(**wrong)
    canonicalize(state)
    assert state.status is Status.FAILED
    assert state.error_msg is not None
    assert state.error_msg.startswith("canonicalize_train_fields failed")
    assert said in state.error_msg
    assert state.canonical is None


def test_a_tokenizer_that_raises_fails_its_sample_only() -> None:
    def tokenize(text: str) -> list[int]:
        raise RuntimeError("no vocabulary")

    states = [completed(response_ids=None, response="ok"), plain()]
    canonicalize_group(states, tokenize)
    assert [state.status for state in states] == ["failed", "completed"]
    assert "RuntimeError: no vocabulary" in (states[0].error_msg or "")


def test_ex_2_9_without_a_prompt_the_lengths_still_add_up() -> None:
    state = agentic(
        prompt_ids=None, response_ids=None, logprobs=None,
        input_ids=[30, 31, 40, 41], labels=[IGN, IGN, 40, 41],
    )  # fmt: skip
    made(state)
    # XTuner counts a prompt of 1 here; its adapter says so, and the tags add up.
    assert lengths(state) == (3, 2, 2, 2)
    of_empty = agentic(prompt_ids=None, response_ids=[], input_ids=[30, 31], labels=[IGN, 31],
                       logprobs=None)  # fmt: skip
    made(of_empty)
    assert lengths(of_empty) == (1, 1, 1, 1)


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.COMPLETED])
def test_a_trajectory_that_is_not_completed_is_left_alone(status: Status) -> None:
    state = plain()
    state.status = status
    before = dataclasses.replace(state)
    canonicalize(state)
    assert state == before
    assert state.canonical is None


def test_a_loop_that_makes_the_form_itself_may_leave_it_out() -> None:
    state = plain()
    canonicalize(state, builds=False)
    assert (state.status, state.canonical, state.meta) == ("completed", None, None)
    checked = agentic(labels=[IGN])
    canonicalize(checked, builds=False)
    assert checked.status is Status.FAILED


@pytest.mark.parametrize(
    "wrong",
    [
        {"multi_modal_inputs": {"pixel_values": np.zeros(3)}},
        {"position_ids": np.tile(np.arange(3), (3, 1))},
    ],
)
@pytest.mark.parametrize("builds", [True, False])
def test_rg_31_a_loop_that_cannot_train_images_fails_the_sample(
    wrong: dict[str, Any], builds: bool
) -> None:
    state = plain() if builds else agentic()
    for name, value in wrong.items():
        setattr(state, name, value)
    canonicalize(state, builds=builds, multimodal=False)
    assert state.status is Status.FAILED
    assert "multimodal" in (state.error_msg or "")


def test_rg_31_the_prompt_of_several_turns_is_never_changed() -> None:
    prompt = [10, 11, 12]
    state = completed(prompt_ids=prompt, response_ids=None)
    for turn in range(3):
        state.append_generated([20 + turn], [-0.1], [1])
        state.append_inserted([90 + turn], 1)
    form = made(state, multimodal=False)
    assert state.prompt_ids is prompt
    assert prompt == [10, 11, 12]
    assert form.input_ids[3:] == state.response_ids == [20, 90, 21, 91, 22, 92]
    assert lengths(state) == (8, 3, 3, 6)


def test_rg_05_log_probs_are_as_long_as_the_row_with_zeros_before_the_response() -> None:
    for state, prompt in ((plain(), 3), (tool_loop(), 2)):
        form = made(state)
        assert form.logprobs is not None
        assert len(form.logprobs) == len(form.input_ids)
        assert form.logprobs[:prompt] == [0.0] * prompt
        assert state.meta is not None
        assert state.meta.has_rollout_logprobs
    without = made(completed())
    assert without.logprobs is None


def test_a_response_that_supervises_nothing_is_no_fault() -> None:
    state = completed(generated=[False] * 3)
    assert made(state).labels == [IGN] * 6
    assert lengths(state) == (5, 0, 3, 3)


@pytest.mark.parametrize(
    "ids",
    [torch.tensor([20, 21, 22]), torch.tensor([[20, 21, 22]]), np.array([20, 21, 22], np.int32),
     [np.int64(20), 21, torch.tensor(22)]],
)  # fmt: skip
def test_ids_of_tensors_become_lists(ids: Any) -> None:
    state = completed(response_ids=ids, response_logprobs=torch.zeros(3))
    assert made(state).input_ids == [10, 11, 12, 20, 21, 22]
    assert state.response_ids == [20, 21, 22]
    assert all(type(token) is int for token in state.response_ids)


@given(canonical_states())
def test_doing_it_again_changes_nothing(state: RolloutState) -> None:
    before = dataclasses.replace(state)
    canonicalize_group([state], tokenize=lambda text: 1 / 0)  # type: ignore[arg-type,return-value]
    assert state == before
    assert state.canonical is before.canonical


@given(canonical_states())
def test_every_row_keeps_the_convention(state: RolloutState) -> None:
    form, meta = state.canonical, state.meta
    assert form is not None
    assert meta is not None
    prompt = len(state.prompt_ids or ())
    mask = state.generated or [True] * len(state.response_ids or ())
    assert form.input_ids == state.tokens
    assert form.labels == [IGN] * prompt + [
        token if made else IGN for token, made in zip(state.response_ids or (), mask, strict=True)
    ]
    if form.logprobs is not None:
        assert form.logprobs == [0.0] * prompt + [-0.5 if made else 0.0 for made in mask]
    assert meta.prompt_len == prompt
    assert sum(count for _, count in meta.policy_spans) == meta.policy_len == sum(mask)


def test_failed_members_are_dropped_unless_nothing_would_be_left() -> None:
    good, bad = plain(), completed(status=Status.FAILED)
    assert drop_failed([bad, good]) == [good]
    assert drop_failed([bad, bad]) == [bad, bad]
