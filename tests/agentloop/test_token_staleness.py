"""Versions of tokens and labels without stale ones, with the specification's values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentloop.trajectory.canonicalize import canonicalize
from agentloop.trajectory.rows import trajectory_fields, trajectory_tags
from agentloop.trajectory.staleness import (
    bake,
    effective_mask,
    effective_mask_of,
)
from agentloop.trajectory.state import RolloutState, Status
from dataplane.fields import align
from tests.agentloop.states import IGN, baked_case, canonical_states, completed, plain
from trainer.materialize.freshness import drop_stale
from trainer.materialize.spec import Freshness
from trainer.select.staleness import fresh_policy_len
from trainer.trajectory import Trajectory

EX_7_2 = ([IGN, IGN, 20, 21, IGN, 22, 2], [0, 0, 4, 4, 4])
AGENTIC = [IGN, IGN, 30, IGN, 40, IGN, 32]


def mask_of(state: RolloutState, step: int, threshold: int | None) -> list[int] | None:
    return effective_mask_of(state, train_step=step, token_threshold=threshold)


def baked(state: RolloutState, step: int, threshold: int | None) -> RolloutState:
    canonical, meta = bake(state, train_step=step, token_threshold=threshold)
    return dataclasses.replace(state, canonical=canonical, meta=meta)


def labels_of(state: RolloutState) -> list[int]:
    assert state.canonical is not None
    return state.canonical.labels


def supervised(state: RolloutState) -> int:
    assert state.meta is not None
    return state.meta.policy_len


def test_ex_7_1_tokens_get_the_version_they_were_put_with_and_keep_it() -> None:
    state = completed(response_ids=[20], status=Status.ABORTED)
    state.fill_versions(1)
    assert state.response_model_steps == [1]
    state.response_ids = [20, 21, 22]
    state.fill_versions(3)
    state.fill_versions(9)
    assert state.response_model_steps == [1, 3, 3]


@pytest.mark.parametrize(
    ("step", "threshold", "mask", "labels", "count"),
    [
        (5, 4, [0, 0, 0, 1, 1], [IGN, IGN, IGN, IGN, IGN, 22, 2], 2),
        (5, 8, [1, 1, 0, 1, 1], EX_7_2[0], 4),
        (9, 4, [0, 0, 0, 0, 0], [IGN] * 7, 0),
        (5, None, None, EX_7_2[0], 4),
    ],
)
def test_ex_7_2_baking_leaves_stale_tokens_out(
    step: int, threshold: int | None, mask: list[int] | None, labels: list[int], count: int
) -> None:
    state = baked_case(*EX_7_2)
    assert mask_of(state, step, threshold) == mask
    after = baked(state, step, threshold)
    assert labels_of(after) == labels
    assert supervised(after) == count


def test_ex_7_2_nothing_is_changed_where_no_threshold_is_set() -> None:
    state = baked_case(*EX_7_2)
    canonical, meta = bake(state, train_step=5, token_threshold=None)
    assert canonical is state.canonical
    assert meta == state.meta


def test_rg_09_baking_again_and_again_is_baking_once_at_the_end() -> None:
    state = baked_case(*EX_7_2)
    assert baked(baked(state, 5, 4), 6, 4) == baked(state, 6, 4)
    assert labels_of(baked(state, 6, 4)) == [IGN, IGN, IGN, IGN, IGN, 22, 2]
    assert baked(baked(baked(state, 5, 4), 6, 4), 9, 4) == baked(state, 9, 4)
    assert baked(baked(state, 5, 4), 5, 4) == baked(state, 5, 4)


def test_rg_26_the_meta_of_baked_labels_counts_them() -> None:
    state = baked_case(*EX_7_2)
    after = baked(state, 5, 4)
    assert (supervised(state), supervised(after)) == (4, 2)
    assert sum(label != IGN for label in labels_of(after)[1:]) == 2
    before, now = state.meta, after.meta
    assert before is not None
    assert now is not None
    assert now.policy_spans == ((4, 2),)
    unchanged = ("prompt_len", "response_len", "seq_len", "min_global_steps", "max_global_steps")
    assert [getattr(now, name) for name in unchanged] == [
        getattr(before, name) for name in unchanged
    ]


def test_baking_changes_neither_the_state_nor_anything_but_labels() -> None:
    state = baked_case(*EX_7_2)
    before = dataclasses.replace(state)
    canonical, _ = bake(state, train_step=9, token_threshold=4)
    assert state == before
    assert labels_of(state) == EX_7_2[0]
    assert state.canonical is not None
    assert canonical.input_ids == state.canonical.input_ids


def test_ex_7_3_more_masks() -> None:
    state = baked_case([IGN, IGN, 3, 4], [0, 4])
    assert mask_of(state, 5, 4) == [0, 1]
    assert labels_of(baked(state, 5, 4)) == [IGN, IGN, IGN, 4]
    assert mask_of(state, 5, 8) == [1, 1]
    assert labels_of(baked(baked(state, 5, 4), 9, 4)) == [IGN] * 4 == labels_of(baked(state, 9, 4))


def test_ex_7_3_a_member_whose_supervised_tokens_are_all_stale_has_an_empty_mask() -> None:
    assert mask_of(baked_case([IGN, IGN, 3, IGN], [0, 4]), 5, 4) == [0, 0]


@pytest.mark.parametrize(
    ("steps", "mask", "labels"),
    [
        ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [IGN] * 7),
        ([0, 4, 4, 4, 4], [0, 0, 1, 0, 1], [IGN, IGN, IGN, IGN, 40, IGN, 32]),
        ([4, 4, 4, 4, 4], [1, 0, 1, 0, 1], AGENTIC),
    ],
)
def test_ex_7_3_agentic_rows_follow_the_same_rule(
    steps: list[int], mask: list[int], labels: list[int]
) -> None:
    state = baked_case(AGENTIC, steps)
    assert mask_of(state, 5, 4) == mask
    assert labels_of(baked(state, 5, 4)) == labels


def test_rg_07_a_canonical_row_of_a_plain_loop_is_masked() -> None:
    state = completed(response_ids=[20, 21], response_model_steps=[0, 4])
    canonicalize(state)
    assert mask_of(state, 5, 4) == [0, 1]


def test_rg_10_ex_7_3_a_row_without_a_prompt_is_masked() -> None:
    state = baked_case([3, 4], [0, 4])
    assert mask_of(state, 5, 4) == [0, 1]
    assert labels_of(baked(state, 5, 4)) == [IGN, 4]


def test_a_mask_that_does_not_apply_is_none() -> None:
    assert effective_mask([1], [0], train_step=5, token_threshold=None) is None
    assert effective_mask([1], [], train_step=5, token_threshold=4) is None
    assert effective_mask([IGN, IGN], [0, 0], train_step=5, token_threshold=4) is None
    assert mask_of(plain(), 5, 4) is None, "no token names a version"
    part = completed(response_model_steps=[0])
    canonicalize(part)
    assert mask_of(part, 5, 4) is None, "not every token names one"


def test_a_response_that_has_no_labels_yet_counts_as_supervised() -> None:
    state = completed(status=Status.ABORTED, response_model_steps=[0, 4, 4])
    assert mask_of(state, 5, 4) == [0, 1, 1]


def test_more_versions_than_labels_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 policy versions for 1 tokens"):
        effective_mask([1], [0, 0], train_step=5, token_threshold=4)
    with pytest.raises(ValueError, match="no canonical form"):
        bake(plain(), train_step=5, token_threshold=4)


@given(
    canonical_states(),
    st.integers(0, 14),
    st.integers(0, 5),
    st.none() | st.integers(1, 6),
    st.booleans(),
)
def test_masking_by_tags_and_at_convert_is_the_same_as_baking(
    state: RolloutState, step: int, later: int, threshold: int | None, has_prompt: bool
) -> None:
    if not has_prompt:
        assert state.canonical is not None
        size = len(state.response_ids or ())
        labels = state.canonical.labels[-size:]
        if size < 2:
            return
        state = baked_case(labels, state.response_model_steps)
    after = baked(state, step, threshold)

    # The controller counts from the tag.
    read = Trajectory.of(state.key, trajectory_tags(state))
    assert fresh_policy_len(read, step, threshold) == supervised(after)
    # It goes on counting right from the tags of baked rows.
    again = Trajectory.of(state.key, trajectory_tags(after))
    assert fresh_policy_len(again, step, threshold) == supervised(after)

    # A worker leaves them out of the shifted labels.
    labels = torch.from_numpy(np.asarray(trajectory_fields(state)["labels"]))
    shifted: torch.Tensor = align(
        labels, "full", "shifted", prompt_len=read.prompt_len, total_len=read.seq_len, fill=IGN
    ).clone()
    if threshold is not None:
        drop_stale(shifted, read, Freshness(step, threshold))
    assert shifted.tolist() == labels_of(after)[1:]

    # Holes stay, and baking later is the same whether or not it was baked before.
    assert baked(after, step + later, threshold) == baked(state, step + later, threshold)
    assert all(
        new in (IGN, old) for new, old in zip(labels_of(after), labels_of(state), strict=True)
    )
    canonicalize(after)
    assert after.status is Status.COMPLETED, after.error_msg
