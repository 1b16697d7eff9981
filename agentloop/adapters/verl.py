"""Outputs of verl's agent loops as trajectories, and back; its alignments as ours.

Takes anything shaped like an AgentLoopOutput or like a row of its store: an object with those
attributes, or a mapping. verl keeps response-long rows, and its workers answer in rows where index
i belongs to token i + 1; here index i belongs to token i of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from agentloop.adapters.sample import flat, read
from agentloop.trajectory.canonicalize import canonicalize
from agentloop.trajectory.rows import trajectory_fields, trajectory_tags
from agentloop.trajectory.state import Message, RolloutState, Status
from dataplane.fields import align

_Row = TypeVar("_Row")

_VERSIONS = ("min_global_steps", "max_global_steps")


def from_verl(
    output: object,
    *,
    uid: str,
    session_id: int,
    index: int = 0,
    messages: Sequence[Message] = (),
    task_name: str = "",
    data_source: str | None = None,
) -> RolloutState:
    """An output as a completed trajectory that is still to be made canonical.

    A mask of None supervises the whole response. Tokens have the policy version that the output
    names if it names one; of two, oldest and newest, nobody knows which token has which. Raw media
    stay behind.

    Raises:
        ValueError: the mask or the log-probs are not as long as the response.
    """
    response = flat(_first(output, "response_ids", "responses")) or []
    prompt = flat(_first(output, "prompt_ids", "prompts"))
    mask = flat(read(output, "response_mask"))
    logprobs = flat(_first(output, "response_logprobs", "rollout_log_probs"))
    for name, values in (("response_mask", mask), ("response_logprobs", logprobs)):
        if values is not None and len(values) != len(response):
            raise ValueError(f"{name} has {len(values)} entries for {len(response)} tokens")
    extra: dict[str, Any] = dict(read(output, "extra_fields") or {})
    info: dict[str, Any] = dict(extra.pop("reward_extra_info", None) or {})
    score = _score(output)
    oldest, newest = (extra.get(name) for name in _VERSIONS)
    known = oldest is not None and oldest == newest
    metrics = read(output, "metrics")
    if metrics is not None:
        extra["metrics"] = metrics.model_dump() if hasattr(metrics, "model_dump") else metrics
    return RolloutState(
        messages=list(messages or read(output, "raw_prompt") or ()),
        uid=uid,
        session_id=session_id,
        index=index,
        task_name=task_name,
        data_source=data_source if data_source is not None else read(output, "data_source"),
        prompt_ids=prompt,
        position_ids=_positions(read(output, "position_ids")),
        multi_modal_inputs=read(output, "multi_modal_inputs") or None,
        response_ids=response,
        generated=None if mask is None else [bool(entry) for entry in mask],
        response_logprobs=logprobs,
        response_model_steps=[int(cast("int", oldest))] * len(response) if known else [],
        routed_experts=_experts(read(output, "routed_experts"), len(prompt or ()) + len(response)),
        num_turns=int(read(output, "num_turns") or 0),
        status=Status.COMPLETED,
        reward=None if score is None else {**info, "score": score},
        extra=extra,
    )


def to_verl(state: RolloutState) -> dict[str, Any]:
    """The arguments of an AgentLoopOutput that says the same."""
    response = state.response_ids or []
    generated = state.generated if state.generated is not None else [True] * len(response)
    reward = dict(state.reward or {})
    score = reward.pop("score", None)
    extra = {name: value for name, value in state.extra.items() if name != "metrics"}
    if state.response_model_steps:
        steps = state.response_model_steps
        extra |= dict(zip(_VERSIONS, (min(steps), max(steps)), strict=True))
    if reward:
        extra["reward_extra_info"] = reward
    return {
        "prompt_ids": list(state.prompt_ids or ()),
        "response_ids": list(response),
        "response_mask": [int(entry) for entry in generated],
        "response_logprobs": state.response_logprobs,
        "routed_experts": state.routed_experts,
        "reward_score": score,
        "num_turns": state.num_turns,
        "metrics": state.extra.get("metrics", {}),
        "extra_fields": extra,
    }


def row_of(
    output: object,
    *,
    uid: str,
    session_id: int,
    index: int = 0,
    messages: Sequence[Message] = (),
    task_name: str = "",
    data_source: str | None = None,
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Key, tags and fields of an output's row. It is made canonical, or has failed.

    An output that mixes policy versions has the tags of its oldest and newest, and no spans.

    Raises:
        ValueError: as `from_verl`.
    """
    state = from_verl(
        output, uid=uid, session_id=session_id, index=index, messages=messages,
        task_name=task_name, data_source=data_source,
    )  # fmt: skip
    canonicalize(state)
    tags = trajectory_tags(state)
    if state.status is Status.COMPLETED:
        named = {name: state.extra[name] for name in _VERSIONS if state.extra.get(name) is not None}
        tags |= {name: int(version) for name, version in named.items()}
    return state.key, tags, trajectory_fields(state)


def full_of_worker(values: _Row, *, fill: float = 0.0) -> _Row:
    """What a worker of verl says of a row of N tokens, in full alignment.

    Its index i belongs to token i + 1, and its last entry to a token that is not there.

    Example: [a, b, c] of three tokens becomes [0.0, a, b].
    """
    total = len(cast("Any", values))
    kept = cast("_Row", cast("Any", values)[:-1])
    return align(
        kept, "shifted", "full", prompt_len=0, total_len=total, fill=fill, name="worker output"
    )


def response_of_worker(values: _Row, prompt_len: int) -> _Row:
    """The same for the tokens of the response only, R entries.

    Raises:
        ValueError: there is no prompt, whose last entry belongs to the first response token.
    """
    if prompt_len < 1:
        raise ValueError("a response without a prompt: no entry belongs to its first token")
    total = len(cast("Any", values))
    return align(
        full_of_worker(values), "full", "response", prompt_len=prompt_len, total_len=total, fill=0
    )


def full_of_response(values: _Row, prompt_len: int, *, fill: float = 0.0) -> _Row:
    """A row of R entries in full alignment: `fill` for each token of the prompt.

    Example: [a, b] after a prompt of three tokens becomes [0.0, 0.0, 0.0, a, b].
    """
    total = prompt_len + len(cast("Any", values))
    return align(values, "response", "full", prompt_len=prompt_len, total_len=total, fill=fill)


def _first(output: object, *names: str) -> Any:
    return next((value for name in names if (value := read(output, name)) is not None), None)


def _score(output: object) -> float | None:
    score = read(output, "reward_score")
    if score is None:
        scores = flat(read(output, "rm_scores"))  # zeros, with the score at the last token
        score = None if scores is None else sum(scores)
    return None if score is None else float(score)


def _experts(experts: Any, total_len: int) -> npt.NDArray[Any] | None:
    """Rows of all input tokens; verl has one more, of zeros, for the last."""
    return None if experts is None else np.asarray(experts)[: max(total_len - 1, 0)]


def _positions(position_ids: Any) -> npt.NDArray[np.int64] | None:
    """Of four axes the first is that of text, which the three multimodal ones replace."""
    if position_ids is None:
        return None
    positions: npt.NDArray[np.int64] = np.asarray(position_ids, np.int64)
    return positions[1:] if positions.ndim == 2 and len(positions) == 4 else positions
