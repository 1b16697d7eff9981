"""Typed trajectories for tests, with only what a test is about spelled out."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from agentloop.trajectory.state import RolloutState
from dataplane.protocol.values import to_value
from dataplane.v1 import dataplane_pb2 as pb

IGN = -100


def right(**values: Any) -> pb.Trajectory:
    """A completed one of a prompt of 2 and a response of 4, whose third token a tool put there."""
    given = {
        "uid": "u",
        "input_ids": [10, 11, 20, 21, 90, 22],
        "labels": [IGN, IGN, 20, 21, IGN, 22],
        "logprobs": [0, 0, -0.5, -0.25, 0, -1],
        "prompt_len": 2,
        "policy_spans": spans((7, 3), (8, 1)),
        "reward": 1.0,
        "finish_reason": pb.FINISH_REASON_STOP,
        "num_turns": 2,
        "ids_source": pb.IDS_SOURCE_ENGINE,
        "logprob_kind": "processed",
        **values,
    }
    return pb.Trajectory(**{name: value for name, value in given.items() if value is not None})


def spans(*runs: tuple[int, int]) -> list[pb.PolicySpan]:
    """Spans of (version, tokens) that follow each other."""
    made: list[pb.PolicySpan] = []
    at = 0
    for version, size in runs:
        made.append(pb.PolicySpan(version=version, start=at, end=at + size))
        at += size
    return made


def message_of(state: RolloutState) -> pb.Trajectory:
    """What a producer outside would send of a state that our own loops made."""
    message = pb.Trajectory(
        uid=state.uid,
        session_id=state.session_id,
        index=state.index,
        num_turns=state.num_turns,
        task_name=state.task_name,
        data_source=state.data_source or "",
        error=state.error_msg or "",
        status=f"TRAJECTORY_STATUS_{state.status.upper()}",
        finish_reason=f"FINISH_REASON_{(state.finish_reason or 'unspecified').upper()}",
        ids_source=f"IDS_SOURCE_{state.ids_source.upper()}",
        logprob_kind=state.logprob_kind or "",
    )
    if state.reward is not None:
        message.reward = state.reward["score"]
    if state.extra:
        message.extra.CopyFrom(to_value(state.extra))
    aborted = state.status == "aborted"
    prompt = state.prompt_ids or []
    response = state.response_ids or []
    mask = state.generated or [True] * len(response)
    if response:
        message.input_ids.extend([*prompt, *response])
        message.labels.extend([IGN] * len(prompt))
        message.labels.extend(t if own else IGN for t, own in zip(response, mask, strict=True))
        message.prompt_len = len(prompt)
        if state.response_logprobs is not None:
            message.logprobs.extend([0.0] * len(prompt) + state.response_logprobs)
        runs = [(version, len(list(run))) for version, run in groupby(state.response_model_steps)]
        message.policy_spans.extend(spans(*runs))
    messages = (state.conversation or state.messages) if aborted else state.dialogue
    message.messages.CopyFrom(to_value(messages))
    return message
