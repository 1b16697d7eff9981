"""Statuses, keys and token lists of a trajectory in the making, with the specification's values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.adapters.xtuner import from_xtuner, sampler_ids
from agentloop.trajectory.canonicalize import canonicalize
from agentloop.trajectory.rows import trajectory_tags
from agentloop.trajectory.state import (
    RolloutState,
    Status,
    group_status,
    status_of,
    trajectory_key,
)
from tests.agentloop.states import IGN, agentic, completed, plain, tool_loop


def test_ex_1_the_sampler_names_the_third_prompt_of_two_repeats() -> None:
    assert sampler_ids(2, 2) == (2, [4, 5])
    group_id, rollout_ids = sampler_ids(2, 2)
    sample = {"message": [{"role": "user", "content": "?"}], "group_id": group_id}
    mirrored = [
        from_xtuner({**sample, name: rollout_ids[0]}, uid="p").session_id
        for name in ("rollout_id", "uid")
    ]
    assert mirrored == [4, 4]


@pytest.mark.parametrize(
    ("members", "group"),
    [
        ("completed completed", "completed"),
        ("completed failed aborted", "failed"),
        ("aborted expired", "aborted"),
        ("expired completed", "expired"),
        ("filtered completed", "filtered"),
    ],
)
def test_ex_1_the_status_of_a_group_follows_from_its_members(members: str, group: str) -> None:
    assert group_status(map(Status, members.split())) == group


@pytest.mark.parametrize("members", [[], [Status.INIT], [Status.COMPLETED, Status.ARCHIVED]])
def test_a_group_with_a_member_that_has_not_run_has_no_status(members: list[Status]) -> None:
    with pytest.raises(ValueError, match="has no status yet"):
        group_status(members)


def test_a_member_that_has_not_run_is_never_published() -> None:
    state = completed(status=Status.INIT)
    canonicalize(state)
    assert state.canonical is None
    with pytest.raises(ValueError, match="has not run"):
        trajectory_tags(state)


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("STOP", "completed"),
        ("length", "completed"),
        ("tool_calls", "completed"),
        ("abort", "aborted"),
        ("error", "failed"),
        (None, "failed"),
        ("weird", "failed"),
    ],
)
def test_ex_1_a_finish_reason_means_a_status(reason: str | None, status: str) -> None:
    assert status_of(reason) == status


def test_rg_28_segments_and_prompts_of_a_resumed_sampler_have_keys_of_their_own() -> None:
    sample = {
        "message": [{"role": "user", "content": "?"}],
        "group_id": 2,
        "rollout_id": 4,
        "session_id": 2**100,
        "response_ids": [5],
    }
    keys = [
        from_xtuner(sample | {"extra_fields": {"agent_trace_segment_index": segment}}, uid=uid).key
        for uid in ("first-epoch", "second-epoch")
        for segment in (0, 1)
    ]
    assert len(set(keys)) == 4


_IDENTITY = st.tuples(st.text("a_1-", min_size=1), st.integers(0, 99), st.integers(0, 99))


@given(_IDENTITY, _IDENTITY)
def test_rg_28_two_identities_never_share_a_key(
    one: tuple[str, int, int], other: tuple[str, int, int]
) -> None:
    assert (trajectory_key(*one) == trajectory_key(*other)) == (one == other)


@pytest.mark.parametrize("identity", [("", 0, 0), ("u", -1, 0), ("u", 0, -1)])
def test_a_key_without_an_identity_is_refused(identity: tuple[str, int, int]) -> None:
    with pytest.raises(ValueError, match="needs a uid"):
        trajectory_key(*identity)


# -- the response grows -------------------------------------------------------------------------


def per_token_lists(state: RolloutState) -> list[int]:
    mask = state.generated if state.generated is not None else state.response_ids
    lists = (state.response_ids, mask, state.response_logprobs, state.response_model_steps)
    return [len(values or ()) for values in lists]


def test_slime_1440_a_resumed_response_has_every_list_as_long_as_its_tokens() -> None:
    state = completed(response_ids=None, status=Status.ABORTED)
    state.append_generated([1, 2, 3], [-1.0, -2.0, -3.0], [4, 4, 4])
    state.append_generated([5, 6], [-5.0, -6.0], [9, 9])
    assert per_token_lists(state) == [5, 5, 5, 5]
    assert state.response_model_steps == [4, 4, 4, 9, 9]


def test_slime_1440_the_mask_grows_with_what_is_inserted_and_what_follows() -> None:
    state = tool_loop()
    assert per_token_lists(state) == [6, 6, 6, 6]
    assert state.generated == [True, True, False, False, True, True]
    assert state.response_logprobs == [-0.1, -0.2, 0.0, 0.0, -0.3, -0.4]


def test_a_response_that_begins_with_inserted_tokens_has_zeros_for_them() -> None:
    state = completed(response_ids=None)
    state.append_inserted([90], 3)
    state.append_generated([20], [-0.5], [3])
    assert state.response_logprobs == [0.0, -0.5]


@pytest.mark.parametrize(
    ("tokens", "logprobs", "versions", "said"),
    [
        ([1, 2], [-1.0], [3, 3], "1 log-probs for 2 tokens"),
        ([1, 2], [-1.0, -1.0], [3], "1 policy versions for 2 tokens"),
        ([1], None, [3], "some turns"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_appended(
    tokens: list[int], logprobs: list[float] | None, versions: list[int], said: str
) -> None:
    state = tool_loop()
    before = dataclasses.replace(state)
    with pytest.raises(ValueError, match=said):
        state.append_generated(tokens, logprobs, versions)
    assert state == before


@pytest.mark.parametrize("logprobs", [None, []])
def test_a_turn_that_was_ended_before_it_began_says_nothing_of_log_probs(
    logprobs: list[float] | None,
) -> None:
    state = completed(response_ids=None)
    state.append_generated([], logprobs, [])
    state.append_generated([20], None, [3])
    assert (state.response_ids, state.response_logprobs) == ([20], None)
    with_some = tool_loop()
    with_some.append_generated([], logprobs, [])
    assert per_token_lists(with_some) == [6, 6, 6, 6]


def test_tokens_without_a_version_are_not_followed_by_others() -> None:
    state = completed(response_ids=[20, 21])
    with pytest.raises(ValueError, match="2 tokens of the response have no policy version"):
        state.append_generated([22], None, [5])
    with pytest.raises(ValueError, match="2 tokens of the response have no policy version"):
        state.append_inserted([22], 5)
    state.fill_versions(4)
    state.append_generated([22], None, [5])
    assert state.response_model_steps == [4, 4, 5]


def test_a_response_that_is_cut_is_cut_in_every_list() -> None:
    state = tool_loop()
    state.routed_experts = np.zeros((7, 4), np.uint16)
    state.truncate(3)
    assert per_token_lists(state) == [3, 3, 3, 3]
    assert len(state.routed_experts) == 4
    canonicalize(state)
    assert state.status is Status.COMPLETED


# -- leaving and beginning anew -----------------------------------------------------------------


def test_rg_08_reset_leaves_nothing_of_the_response() -> None:
    state = completed(
        response="4", response_logprobs=[-0.1, -0.2, -0.3], response_model_steps=[1, 1, 1],
        reward={"score": 1.0}, finish_reason="stop", num_turns=2, extra={"tag": 1},
        conversation=[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        routed_experts=np.zeros((5, 2), np.uint16), ids_source="retokenized", logprob_kind="raw",
    )  # fmt: skip
    canonicalize(state)
    assert state.meta is not None
    state.reset()
    assert (state.canonical, state.meta, state.reward, state.finish_reason) == (None,) * 4
    assert (state.response, state.response_ids, state.response_model_steps) == ("", [], [])
    assert (state.response_logprobs, state.generated, state.routed_experts) == (None,) * 3
    assert (state.ids_source, state.logprob_kind, state.num_turns) == ("engine", None, 0)
    assert state.conversation is None
    assert state.status is Status.COMPLETED, "a reset does not change the status"
    assert (state.prompt_ids, state.extra, state.uid) == ([10, 11, 12], {"tag": 1}, "u")
    assert state.tokens == [10, 11, 12]
    state.append_generated([77], [-1.0], [2])
    canonicalize(state)
    assert state.canonical is not None
    assert state.canonical.input_ids == [10, 11, 12, 77]
    assert state.canonical.labels == [IGN, IGN, IGN, 77]


def test_what_is_discarded_is_as_if_it_had_never_run() -> None:
    state = plain()
    canonicalize(state)
    for _ in range(2):
        state.discard()
        assert state == RolloutState([{"role": "user", "content": "2+2?"}])
        assert state.status is Status.INIT


def test_rg_42_a_canonical_trajectory_goes_on_from_its_response() -> None:
    state = plain()
    state.response_model_steps = [1, 1, 1]
    canonicalize(state)
    state.leave_completed(Status.ABORTED)
    assert (state.canonical, state.meta) == (None, None)
    state.append_generated([23], [-0.4], [2])
    state.status = Status.COMPLETED
    canonicalize(state)
    assert state.response_ids == [20, 21, 22, 23]
    assert state.canonical is not None
    assert state.canonical.input_ids == [10, 11, 12, 20, 21, 22, 23]
    assert state.canonical.logprobs == [0, 0, 0, -0.1, -0.2, -0.3, -0.4]
    assert state.meta is not None
    assert (state.meta.seq_len - 1, state.meta.policy_len) == (6, 4)


def test_rg_42_mask_and_log_probs_that_only_the_canonical_form_had_are_kept() -> None:
    state = agentic(labels=[IGN, IGN, 40, IGN, 42], response_model_steps=[1, 1, 1])
    canonicalize(state)
    state.leave_completed(Status.ABORTED)
    state.append_generated([43], [-0.4], [2])
    state.status = Status.COMPLETED
    canonicalize(state)
    assert state.canonical is not None
    assert state.canonical.labels == [IGN, IGN, 40, IGN, 42, 43]
    # A hole is nothing that was generated, whatever log-prob it came with.
    assert state.canonical.logprobs == [0, 0, -0.1, 0, -0.3, -0.4]


def test_a_failure_says_why_and_of_which_kind() -> None:
    state = plain()
    state.fail("the tool is gone", "tool")
    assert (state.status, state.error_msg, state.failure) == ("failed", "the tool is gone", "tool")
