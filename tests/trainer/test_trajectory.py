"""Trajectories are read from tags alone, and whoever did not write them is named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.rows import tags, trajectory
from trainer.trajectory import BatchTraits, Trajectory


def test_a_trajectory_is_what_its_tags_say() -> None:
    row = Trajectory.of(
        "anything",
        tags(
            "p7", 4, 2, prompt=2, response=6, policy_len=4, score=1, min_global_steps=3,
            max_global_steps=5, policy_spans=[[3, 2], [5, 2]], num_turns=2, task_name="sum",
            data_source="gen", position_layout="mrope_3d", has_rollout_logprobs=True,
            has_routed_experts=False, is_padding=False,
        ),
    )  # fmt: skip
    assert row == Trajectory(
        key="anything", uid="p7", session_id=4, index=2, status="completed", score=1.0,
        prompt_len=2, response_len=6, seq_len=8, policy_len=4, min_global_steps=3,
        max_global_steps=5, policy_spans=((3, 2), (5, 2)), num_turns=2, task_name="sum",
        data_source="gen", position_layout="mrope_3d", has_rollout_logprobs=True,
    )  # fmt: skip
    assert row.train_len == 7


@pytest.mark.parametrize(
    ("prompt", "response", "policy", "train_len"), [(3, 3, 3, 5), (2, 6, 4, 7), (2, 2, 2, 3)]
)
def test_ex_2_lengths_of_the_canonical_examples(
    prompt: int, response: int, policy: int, train_len: int
) -> None:
    row = trajectory(prompt=prompt, response=response, policy_len=policy)
    assert (row.train_len, row.policy_len) == (train_len, policy)


def test_rg_21_prompt_and_training_length_are_two_things() -> None:
    row = trajectory(prompt=3, response=3)
    assert (row.prompt_len, row.response_len, row.train_len) == (3, 3, 5)


@pytest.mark.parametrize(
    "tag",
    ["uid", "session_id", "index", "status", "prompt_len", "response_len", "seq_len", "policy_len"],
)
def test_a_missing_tag_is_named_with_its_key_and_who_should_have_written_it(tag: str) -> None:
    its = tags()
    del its[tag]
    with pytest.raises(ValueError, match=rf"'k'.*'{tag}'.*write_train_meta"):
        Trajectory.of("k", its)


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        ("prompt_len", -1),
        ("prompt_len", True),
        ("response_len", 1.5),
        ("seq_len", "6"),
        ("seq_len", 7),
        ("policy_len", 6),
        ("uid", 3),
        ("session_id", 1.0),
        ("session_id", False),
        ("status", 0),
        ("score", "1"),
        ("score", True),
        ("policy_spans", [[1]]),
        ("policy_spans", [[1, -1]]),
        ("policy_spans", 3),
        ("policy_spans", [3]),
        ("position_layout", "2d"),
        ("has_routed_experts", 1),
        ("is_padding", "no"),
        ("num_turns", "two"),
        ("task_name", 5),
        ("min_global_steps", -1),
    ],
)
def test_a_tag_of_another_kind_is_named_with_its_key(tag: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"'{tag}' of key 'k'"):
        Trajectory.of("k", tags(**{tag: value}))


def test_a_failed_session_needs_no_lengths() -> None:
    its = {"uid": "u", "session_id": 1, "index": 0, "status": "failed", "error_msg": "boom"}
    row = Trajectory.of("k", its)
    assert (row.seq_len, row.policy_len, row.score) == (0, 0, None)


def test_flags_that_are_missing_follow_from_the_fields() -> None:
    its = tags()
    assert not Trajectory.of("k", its).has_rollout_logprobs
    assert Trajectory.of("k", its, fields=["logprobs"]).has_rollout_logprobs
    by_length = Trajectory.of("k", its, lengths={"logprobs": -1, "routed_experts": 5})
    assert (by_length.has_rollout_logprobs, by_length.has_routed_experts) == (False, True)
    said = Trajectory.of("k", tags(has_rollout_logprobs=False), fields=["logprobs"])
    assert not said.has_rollout_logprobs


def test_rg_40_traits_are_of_the_batch_and_not_of_a_rank() -> None:
    plain = trajectory()
    rich = trajectory(
        session=1, position_layout="mrope_3d", has_rollout_logprobs=True, has_routed_experts=True
    )
    assert BatchTraits.of([plain, rich]) == BatchTraits("mrope_3d", True, True)
    assert BatchTraits.of([plain]) == BatchTraits.of([]) == BatchTraits("1d", False, False)


def test_rg_28_two_trajectories_of_one_session_are_two() -> None:
    first, second = trajectory("u", 0, 0), trajectory("u", 0, 1)
    assert first.session_id == second.session_id
    assert len({first.key, second.key}) == 2
