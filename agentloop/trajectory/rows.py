"""A trajectory as a row: the tags and fields that it is published with, and back. No I/O.

Owns which tags and fields of `dataplane.fields` follow from a state. Those of its group (attempt,
global_steps, shared) are the publisher's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from agentloop.trajectory.canonicalize import sequence_of
from agentloop.trajectory.experts import expert_ids
from agentloop.trajectory.meta import response_len, train_meta, versions_of
from agentloop.trajectory.positions import extended_positions, has_axes
from agentloop.trajectory.state import Canonical, Message, RolloutState, Status, TrainMeta
from dataplane import InvalidRequest
from dataplane.fields import IGNORED, KNOWN_FIELDS, TRAJECTORY_STATUSES

UNFINISHED: Final = "unfinished_response"
"""Entry of the field `extra` with the text of a response that was interrupted."""


def trajectory_tags(state: RolloutState) -> dict[str, Any]:
    """The tags that follow from a state; those that it has no value for are left out.

    A failed trajectory has its identity, its status and why it failed, and no lengths: no row of
    it is stored. So has one that an evaluation counts as completed although it failed, and its
    score. One that was interrupted has the lengths of what it has.

    Raises:
        InvalidRequest: it has not run, its score is no number, or it is completed and not
            canonical: no such row is published.
    """
    if state.status not in TRAJECTORY_STATUSES:
        raise InvalidRequest(f"trajectory {state.key} is {state.status}: it has not run")
    canonical = state.canonical is not None and state.meta is not None
    if state.status is Status.COMPLETED and not canonical and state.error_msg is None:
        raise InvalidRequest(f"trajectory {state.key} is completed, and was not made canonical")
    tags: dict[str, Any] = {
        "uid": state.uid,
        "session_id": state.session_id,
        "index": state.index,
        "status": str(state.status),
        "task_name": state.task_name or None,
        "data_source": state.data_source,
        "error_msg": state.error_msg,
        "finish_reason": state.finish_reason,
    }
    meta = _meta(state)
    if meta is not None:
        tags |= _meta_tags(meta)
        tags["num_turns"] = state.num_turns
        tags["ids_source"] = state.ids_source
        tags["logprob_kind"] = state.logprob_kind if meta.has_rollout_logprobs else None
        tags["group_generate_time_s"] = state.extra.get("group_generate_time_s")
    if state.status is not Status.FAILED:
        tags["score"] = _score(state)
    return {name: value for name, value in tags.items() if value is not None}


def trajectory_fields(
    state: RolloutState, *, num_experts: int | None = None
) -> dict[str, npt.NDArray[Any] | list[Message] | dict[str, Any]]:
    """The fields of a state's row; none if it failed or has no token.

    Fields that it has no value for are left out. Token fields are of one length N. Positions are
    stored where they are not simply 0 .. N-1.

    Raises:
        InvalidRequest: a field of a trajectory that ended has a wrong length, its routed experts
            are no ids of `num_experts` experts, or there are more positions than tokens.
    """
    sequence = _sequence(state)
    if sequence is None:
        return {}
    try:
        fields = _fields(state, sequence, num_experts)
    except ValueError as error:
        raise InvalidRequest(f"trajectory {state.key}: {error}") from error
    if state.status is not Status.ABORTED:  # what was interrupted may lack experts at its end
        _check_lengths(state, sequence, fields)
    return fields


def state_of_row(
    state: RolloutState, tags: Mapping[str, Any], fields: Mapping[str, Any]
) -> RolloutState:
    """The state that a row was published from, given the one that its session began with.

    Fields are as a get returns them, arrays or tensors. A row that is interrupted can be gone on
    with; a completed one is canonical, and is what it was.
    """
    found = replace(
        state,
        index=tags["index"],
        status=Status(tags["status"]),
        error_msg=tags.get("error_msg"),
        finish_reason=tags.get("finish_reason"),
        num_turns=tags.get("num_turns", 0),
        ids_source=tags.get("ids_source", "engine"),
        logprob_kind=tags.get("logprob_kind"),
        task_name=tags.get("task_name", state.task_name),
        data_source=tags.get("data_source", state.data_source),
    )
    if found.status is Status.FAILED or "input_ids" not in fields:
        return found
    ids: list[int] = fields["input_ids"].tolist()
    labels: list[int] = fields["labels"].tolist()
    logprobs = (
        None if "logprobs" not in fields else cast("list[float]", fields["logprobs"].tolist())
    )
    prompt: int = tags["prompt_len"]
    if found.prompt_ids is None or found.train_prompt_ids is None:
        found.prompt_ids = ids[:prompt]  # a loop with tools asks with more than the dataset's
    found.response_ids = ids[prompt:]
    mask = [label != IGNORED for label in labels[prompt:]]
    found.generated = None if all(mask) else mask
    found.response_logprobs = None if logprobs is None else logprobs[prompt:]
    if "response_model_steps" in fields:
        found.response_model_steps = fields["response_model_steps"].tolist()
    if "routed_experts" in fields:
        found.routed_experts = np.asarray(fields["routed_experts"])
    if "position_ids" in fields and found.position_ids is None:
        # Of the prompt: those of a response that goes on are made anew.
        found.position_ids = np.asarray(fields["position_ids"])[..., :prompt]
    found.multi_modal_inputs = fields.get("multi_modal_inputs", found.multi_modal_inputs)
    found.reward = fields.get("reward", {"score": tags["score"]} if "score" in tags else None)
    found.extra = dict(fields.get("extra", {}))
    messages: list[Message] = fields.get("messages", [])
    found.conversation = messages if len(messages) > len(found.messages) else None
    if found.status is Status.ABORTED:
        found.response = found.extra.pop(UNFINISHED, None)
    else:
        found.response = _answer(messages)
        found.canonical = Canonical(ids, labels, logprobs)
        found.meta = train_meta(found, found.canonical)
    return found


def _fields(
    state: RolloutState, sequence: Canonical, num_experts: int | None
) -> dict[str, npt.NDArray[Any] | list[Message] | dict[str, Any]]:
    size = len(sequence.input_ids)
    fields: dict[str, npt.NDArray[Any] | list[Message] | dict[str, Any]] = {
        "input_ids": np.array(sequence.input_ids, np.int64),
        "labels": np.array(sequence.labels, np.int64),
    }
    if sequence.logprobs is not None:
        fields["logprobs"] = np.array(sequence.logprobs, np.float32)
    versions = versions_of(state, sequence)
    if versions is not None:
        fields["response_model_steps"] = np.array(versions, np.int64)
    if state.routed_experts is not None:
        fields["routed_experts"] = expert_ids(state.routed_experts, num_experts=num_experts)
    if state.position_ids is not None:
        positions = extended_positions(state.position_ids, size)
        if has_axes(positions) or not np.array_equal(positions, np.arange(size)):
            fields["position_ids"] = positions
    if state.multi_modal_inputs:
        fields["multi_modal_inputs"] = state.multi_modal_inputs
    completed = state.status is not Status.ABORTED
    messages = state.dialogue if completed else state.conversation or state.messages
    if messages:
        fields["messages"] = messages
    if state.reward is not None:
        fields["reward"] = state.reward
    unfinished = {} if completed or not state.response else {UNFINISHED: state.response}
    if state.extra or unfinished:
        fields["extra"] = state.extra | unfinished
    return fields


def _check_lengths(state: RolloutState, sequence: Canonical, fields: Mapping[str, Any]) -> None:
    size = len(sequence.input_ids)
    due = {"full": size, "shifted": size - 1, "response": response_len(state, sequence)}
    for name, value in fields.items():
        align = KNOWN_FIELDS[name].align
        if align in due and len(value) != due[align]:
            raise InvalidRequest(
                f"trajectory {state.key}: {name} has {len(value)} entries for {size} tokens, not "
                f"{due[align]}"
            )


def _sequence(state: RolloutState) -> Canonical | None:
    if state.status is Status.FAILED:
        return None
    if state.canonical is not None or state.status is Status.COMPLETED:
        return state.canonical
    return sequence_of(state)


def _meta(state: RolloutState) -> TrainMeta | None:
    sequence = _sequence(state)
    if sequence is None:
        return None
    has_it = sequence is state.canonical and state.meta is not None
    return state.meta if has_it else train_meta(state, sequence)


def _meta_tags(meta: TrainMeta) -> dict[str, Any]:
    return {
        "prompt_len": meta.prompt_len,
        "response_len": meta.response_len,
        "seq_len": meta.seq_len,
        "policy_len": meta.policy_len,
        "policy_spans": [list(span) for span in meta.policy_spans] or None,
        "min_global_steps": meta.min_global_steps,
        "max_global_steps": meta.max_global_steps,
        "position_layout": meta.position_layout,
        "has_rollout_logprobs": meta.has_rollout_logprobs,
        "has_routed_experts": meta.has_routed_experts,
    }


def _score(state: RolloutState) -> float | None:
    score = None if state.reward is None else state.reward.get("score")
    if score is None:
        return None
    if not math.isfinite(score):
        raise InvalidRequest(f"the score of trajectory {state.key} is {score}")
    return float(score)


def _answer(messages: list[Message]) -> str | None:
    content = messages[-1].get("content") if messages else None
    is_answer = bool(messages) and messages[-1].get("role") == "assistant"
    return content if is_answer and isinstance(content, str) else None
