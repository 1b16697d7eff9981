"""Samples of XTuner and outputs of verl, taken in and given back."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given

from agentloop.adapters import verl, xtuner
from agentloop.trajectory.canonicalize import canonicalize
from agentloop.trajectory.rows import trajectory_tags
from agentloop.trajectory.state import Canonical, RolloutState, Status
from tests.agentloop.states import IGN, agentic, canonical_states, completed
from trainer.trajectory import Trajectory

MESSAGE = [{"role": "user", "content": "2+2?"}]


def sample(**values: Any) -> dict[str, Any]:
    """EX-2.1 in XTuner's names, before it was made canonical."""
    return {
        "message": MESSAGE, "prompt_ids": [10, 11, 12], "response_ids": [20, 21, 22],
        "logprobs": [-0.1, -0.2, -0.3], "response": "4", "status": "completed",
        "finish_reason": "stop", "group_id": 2, "rollout_id": 5, "task_name": "math", **values,
    }  # fmt: skip


def canonical_sample(**values: Any) -> dict[str, Any]:
    """The same afterwards."""
    return sample(
        **{
            "input_ids": [10, 11, 12, 20, 21, 22], "labels": [IGN, IGN, IGN, 20, 21, 22],
            "logprobs": [0.0, 0.0, 0.0, -0.1, -0.2, -0.3], **values,
        }
    )  # fmt: skip


# -- XTuner -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [dict, lambda values: SimpleNamespace(**values)])
@pytest.mark.parametrize("make", [sample, canonical_sample])
def test_an_xtuner_sample_becomes_a_trajectory(make: Any, shape: Any) -> None:
    state = xtuner.from_xtuner(shape(make(reward={"score": 1.0}, error_msg=None)), uid="p7")
    canonicalize(state)
    assert state.canonical == Canonical(
        [10, 11, 12, 20, 21, 22], [IGN, IGN, IGN, 20, 21, 22], [0, 0, 0, -0.1, -0.2, -0.3]
    )
    assert state.key == "p7_5_0"
    assert (state.task_name, state.finish_reason, state.reward) == ("math", "stop", {"score": 1.0})
    assert state.response_logprobs == [-0.1, -0.2, -0.3]


def test_xtuners_own_names_of_the_meta_are_given_back() -> None:
    state = xtuner.from_xtuner(sample(), uid="p")
    canonicalize(state)
    given = xtuner.to_xtuner(state)
    assert given["num_tokens"] == 5
    assert given["extra_fields"] == {
        "supervised_tokens": 3, "train_prompt_length": 3, "train_response_length": 3,
        "position_layout": "1d", "has_rollout_logprobs": True, "has_routed_experts": False,
    }  # fmt: skip
    assert (given["group_id"], given["rollout_id"], given["uid"]) == (2, 5, 5)
    with pytest.raises(ValueError, match="no train meta"):
        xtuner.train_meta_names(completed())


def test_ex_2_9_the_prompt_length_that_xtuner_counts_is_an_alias_of_its_own() -> None:
    state = agentic(
        prompt_ids=None, response_ids=None, logprobs=None,
        input_ids=[30, 31, 40, 41], labels=[IGN, IGN, 40, 41],
    )  # fmt: skip
    canonicalize(state)
    names = xtuner.train_meta_names(state)
    assert names["num_tokens"] == 3
    assert names["train_prompt_length"] == 1
    assert names["supervised_tokens"] == 2
    assert trajectory_tags(state)["prompt_len"] == 2


def test_stale_meta_of_a_sample_is_not_taken_over() -> None:
    state = xtuner.from_xtuner(
        sample(extra_fields={"supervised_tokens": 99, "agent_name": "calc"}), uid="p"
    )
    assert state.extra == {"agent_name": "calc", "xtuner": {"group_id": 2, "rollout_id": 5}}


@pytest.mark.parametrize("mask", [[], [1, 0, 1]])
def test_rg_32_a_sample_that_carries_a_response_mask_is_refused(mask: list[int]) -> None:
    for shaped in (sample(response_mask=mask), SimpleNamespace(**sample(response_mask=mask))):
        with pytest.raises(ValueError, match="response_mask"):
            xtuner.from_xtuner(shaped, uid="p")
    assert xtuner.from_xtuner(sample(response_mask=None), uid="p").generated is None


def test_rg_42_a_canonical_sample_that_goes_on_gives_its_response_part_only() -> None:
    state = xtuner.from_xtuner(
        canonical_sample(status="aborted", response_model_steps=[1, 1, 1]), uid="p"
    )
    assert (state.canonical, state.response_logprobs) == (None, [-0.1, -0.2, -0.3])
    state.append_generated([23], [-0.4], [2])
    state.status = Status.COMPLETED
    canonicalize(state)
    given = xtuner.to_xtuner(state)
    assert given["response_ids"] == [20, 21, 22, 23]
    assert given["input_ids"] == [10, 11, 12, 20, 21, 22, 23]
    assert given["logprobs"] == [0, 0, 0, -0.1, -0.2, -0.3, -0.4]
    assert (given["num_tokens"], given["extra_fields"]["supervised_tokens"]) == (6, 4)


def test_rg_08_a_sample_that_is_reset_has_nothing_of_its_response() -> None:
    state = xtuner.from_xtuner(canonical_sample(reward={"score": 1.0}), uid="p")
    canonicalize(state)
    state.reset()
    given = xtuner.to_xtuner(state)
    assert (given["input_ids"], given["labels"], given["reward"]) == (None, None, None)
    assert (given["response"], given["response_ids"], given["logprobs"]) == ("", [], [])
    assert (given["tokens"], given["response_model_steps"]) == ([10, 11, 12], [])
    assert "num_tokens" not in given
    assert "supervised_tokens" not in given["extra_fields"]


def test_everything_that_an_xtuner_sample_says_is_said_again() -> None:
    original = canonical_sample(
        session_id=2**100 + 1, data_source={"gsm8k": 0.2, "aime": 0.8},
        reward_model={"ground_truth": "4"}, reward={"score": 1.0},
        mm_info={"image_grid_thw": np.array([[1, 4, 4]]), "pixel_values": None},
        position_ids=np.tile(np.arange(3), (3, 1, 1)), response_model_steps=[3, 3, 4],
        routed_experts=np.zeros((5, 2, 2), np.int64), tools=[{"name": "calc"}], seq_staleness=1,
        sample_params=SimpleNamespace(model_dump=lambda: {"top_p": 1.0}),
        extra_fields={"agent_trace_segment_index": 1, "agent_tool_turns": 2},
    )  # fmt: skip
    state = xtuner.from_xtuner(original, uid="p")
    canonicalize(state)
    assert state.status is Status.COMPLETED, state.error_msg
    assert (state.index, state.num_turns, state.data_source) == (1, 3, "aime")
    msgpack.packb(state.extra)  # it can be published
    given = xtuner.to_xtuner(state)
    for name in (
        "message", "session_id", "group_id", "rollout_id", "data_source", "reward_model", "reward",
        "prompt_ids", "response", "response_ids", "response_model_steps", "input_ids", "labels",
        "logprobs", "status", "finish_reason", "tools", "seq_staleness", "task_name",
    ):  # fmt: skip
        assert given[name] == original[name], name
    assert given["position_ids"].shape == (3, 1, 3)
    assert given["sample_params"] == {"top_p": 1.0}
    assert list(given["mm_info"]) == ["image_grid_thw"]
    assert given["extra_fields"]["agent_trace_segment_index"] == 1
    assert given["extra_fields"]["position_layout"] == "mrope_3d"
    assert given["routed_experts"].shape == (5, 4)


def test_the_training_prompt_of_a_multimodal_sample_goes_in_and_out() -> None:
    state = xtuner.from_xtuner(
        sample(prompt_ids=[1], logprobs=None, response_ids=torch.tensor([102, 103]),
               extra_fields={"train_prompt_ids": [100, 101]}),
        uid="p",
    )  # fmt: skip
    canonicalize(state)
    given = xtuner.to_xtuner(state)
    assert given["input_ids"] == [100, 101, 102, 103]
    assert (given["prompt_ids"], given["logprobs"]) == ([1], None)
    assert given["extra_fields"]["train_prompt_ids"] == [100, 101]
    assert given["extra_fields"]["train_prompt_length"] == 2


def test_a_row_of_an_xtuner_sample_has_its_teachers_targets() -> None:
    key, tags, fields = xtuner.row_of(
        sample(teacher_targets={"kind": "topk", "tokens": [[1, 2]] * 3,
                                "logprobs": [[-1.0, -2.0]] * 3}),
        uid="p",
    )  # fmt: skip
    assert key == "p_5_0"
    assert Trajectory.of(key, tags).policy_len == 3
    assert (fields["teacher_ids"].dtype, fields["teacher_ids"].shape) == (np.int64, (3, 2))
    assert fields["teacher_logprobs"].dtype == np.float32


def test_a_malformed_xtuner_sample_becomes_a_row_that_says_why() -> None:
    key, tags, fields = xtuner.row_of(sample(logprobs=[-0.1]), uid="p")
    assert (key, tags["status"], fields) == ("p_5_0", "failed", {})
    assert "logprobs length mismatch" in tags["error_msg"]


def test_a_row_is_given_back_as_a_sample() -> None:
    original = canonical_sample(
        logprobs=[0.0, 0.0, 0.0, -0.5, -0.25, -1.0], reward={"score": 1.0},
        response_model_steps=[3, 3, 4],
    )  # fmt: skip
    _, tags, fields = xtuner.row_of(original, uid="p")
    given = xtuner.sample_of_row(tags, fields)
    for name in ("prompt_ids", "response_ids", "input_ids", "labels", "logprobs", "reward",
                 "response_model_steps", "status", "response", "group_id"):  # fmt: skip
        assert given[name] == original[name], name
    assert given["num_tokens"] == 5


@pytest.mark.parametrize("name", ["routed_experts", "pixel_values"])
def test_references_are_to_be_resolved_first(name: str) -> None:
    reference = SimpleNamespace(hex="ff")
    wrong = (
        {"routed_experts": reference}
        if name == "routed_experts"
        else {"mm_info": {"pixel_values": reference}}
    )
    with pytest.raises(ValueError, match=f"{name} is a SimpleNamespace"):
        xtuner.from_xtuner(sample(**wrong), uid="p")


def test_experts_of_a_trace_are_joined_without_their_first_row() -> None:
    pieces = [np.full((3, 2), 1), torch.full((3, 2), 2)]
    state = xtuner.from_xtuner(sample(routed_experts=pieces), uid="p")
    canonicalize(state)
    assert state.routed_experts is not None
    assert state.routed_experts[:, 0].tolist() == [1, 1, 2, 2, 2]


def test_a_sample_without_a_message_is_none() -> None:
    with pytest.raises(ValueError, match="no message"):
        xtuner.from_xtuner({"prompt_ids": [1]}, uid="p")


@given(canonical_states())
def test_any_trajectory_survives_the_way_through_xtuners_shape(state: RolloutState) -> None:
    found = xtuner.from_xtuner(xtuner.to_xtuner(state), uid=state.uid, session_id=state.session_id)
    canonicalize(found)
    assert found.canonical == state.canonical
    assert found.meta == state.meta
    assert found.index == state.index


# -- verl ---------------------------------------------------------------------------------------


def output(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "prompt_ids": [10, 11, 12], "response_ids": [20, 21, 22],
            "response_mask": [1, 0, 1], "response_logprobs": [-0.1, 0.0, -0.3],
            "reward_score": 1, "num_turns": 3, "metrics": {"tool_calls": 0.5},
            "extra_fields": {"min_global_steps": 4, "max_global_steps": 4,
                             "reward_extra_info": {"acc": 1}}, **values,
        }
    )  # fmt: skip


def test_rg_05_an_output_of_verl_has_zeros_for_its_prompt() -> None:
    state = verl.from_verl(output(), uid="p", session_id=1, messages=MESSAGE)
    canonicalize(state)
    assert state.canonical == Canonical(
        [10, 11, 12, 20, 21, 22], [IGN, IGN, IGN, 20, IGN, 22], [0, 0, 0, -0.1, 0, -0.3]
    )
    assert state.meta is not None
    assert (state.meta.policy_len, state.meta.policy_spans) == (2, ((4, 2),))
    without = verl.from_verl(output(response_logprobs=None), uid="p", session_id=1)
    canonicalize(without)
    assert without.canonical is not None
    assert without.canonical.logprobs is None


def test_a_mask_of_none_supervises_the_whole_response() -> None:
    state = verl.from_verl(output(response_mask=None), uid="p", session_id=0)
    canonicalize(state)
    assert state.canonical is not None
    assert state.canonical.labels == [IGN, IGN, IGN, 20, 21, 22]
    empty = verl.from_verl(output(response_mask=[0, 0, 0]), uid="p", session_id=0)
    canonicalize(empty)
    assert empty.meta is not None
    assert empty.meta.policy_len == 0


@pytest.mark.parametrize("name", ["response_mask", "response_logprobs"])
def test_an_output_whose_lists_differ_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has 2 entries for 3 tokens"):
        verl.from_verl(output(**{name: [1, 1]}), uid="p", session_id=0)


def test_an_output_is_given_back_as_it_was() -> None:
    state = verl.from_verl(output(), uid="p", session_id=1)
    canonicalize(state)
    assert verl.to_verl(state) == vars(output()) | {"routed_experts": None}


def test_a_row_of_an_output_that_mixes_versions_names_oldest_and_newest() -> None:
    versions = {"min_global_steps": 3, "max_global_steps": 5}
    key, tags, fields = verl.row_of(
        output(extra_fields=versions), uid="p", session_id=1, index=2, messages=MESSAGE,
        task_name="math", data_source="gsm8k",
    )  # fmt: skip
    read = Trajectory.of(key, tags)
    assert (key, read.min_global_steps, read.max_global_steps) == ("p_1_2", 3, 5)
    assert read.policy_spans == ()
    assert "response_model_steps" not in fields
    assert (read.score, read.num_turns, read.task_name, read.data_source) == (
        1.0, 3, "math", "gsm8k",
    )  # fmt: skip
    _, failed, none = verl.row_of(output(prompt_ids=[]), uid="p", session_id=1)
    assert (failed["status"], none) == ("failed", {})


def test_a_row_of_verls_store_becomes_a_trajectory() -> None:
    state = verl.from_verl(
        {
            "prompts": torch.tensor([10, 11, 12]), "responses": torch.tensor([20, 21, 22]),
            "response_mask": torch.tensor([1, 0, 1]),
            "rollout_log_probs": torch.tensor([-0.5, 0.0, -0.25]),
            "rm_scores": torch.tensor([0.0, 0.0, 0.75]), "raw_prompt": MESSAGE,
            "routed_experts": torch.ones(6, 2, dtype=torch.int16), "data_source": "gsm8k",
            "position_ids": torch.arange(24).reshape(4, 6),
        },
        uid="p",
        session_id=0,
    )  # fmt: skip
    canonicalize(state)
    assert state.status is Status.COMPLETED, state.error_msg
    assert state.canonical is not None
    assert state.canonical.logprobs == [0, 0, 0, -0.5, 0, -0.25]
    assert (state.reward, state.messages, state.data_source) == (
        {"score": 0.75}, MESSAGE, "gsm8k",
    )  # fmt: skip
    assert state.routed_experts is not None
    assert state.routed_experts.shape == (5, 2)
    assert state.meta is not None
    assert state.meta.position_layout == "mrope_3d"
    assert state.position_ids is not None
    assert state.position_ids[0].tolist() == [6, 7, 8, 9, 10, 11], "the axis of text is left out"


@pytest.mark.parametrize("of", [list, np.array, torch.tensor])
def test_rg_05_what_a_worker_says_of_the_next_token_is_moved_to_that_token(of: Any) -> None:
    # Prompt of 3, response of 2: index i is about token i + 1, the last about no token.
    worker = of([0.1, 0.2, 0.3, 0.4, 0.5])

    def same(values: Any, wanted: list[float]) -> bool:
        return [round(float(value), 6) for value in values] == wanted

    full = verl.full_of_worker(worker)
    assert same(full, [0.0, 0.1, 0.2, 0.3, 0.4])
    response = verl.response_of_worker(worker, 3)
    assert same(response, [0.3, 0.4])
    assert same(full[3:], [0.3, 0.4])
    assert same(verl.full_of_response(response, 3), [0.0, 0.0, 0.0, 0.3, 0.4])
    assert same(verl.full_of_worker(worker[:1]), [0.0])
    with pytest.raises(ValueError, match="without a prompt"):
        verl.response_of_worker(worker, 0)


@given(canonical_states())
def test_any_trajectory_survives_the_way_through_verls_shape(state: RolloutState) -> None:
    found = verl.from_verl(
        verl.to_verl(state), uid=state.uid, session_id=state.session_id, index=state.index
    )
    canonicalize(found)
    assert found.canonical == state.canonical
    assert found.reward == state.reward


def test_the_adapters_import_neither_project() -> None:
    code = (
        "import sys, agentloop.adapters.xtuner, agentloop.adapters.verl;"
        "print({'xtuner', 'verl', 'torch', 'ray', 'transformers'} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.strip() == "set()"
