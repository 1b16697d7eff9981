"""Samples of XTuner's rollouts as trajectories, and back.

Takes anything shaped like its RolloutState: an object with those attributes, or a mapping. Owns
the names: what is one thing under two names is translated here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from agentloop.adapters.sample import flat, has, read, text
from agentloop.trajectory.canonicalize import Tokenize, canonicalize
from agentloop.trajectory.experts import traced_experts
from agentloop.trajectory.positions import has_axes
from agentloop.trajectory.rows import state_of_row, trajectory_fields, trajectory_tags
from agentloop.trajectory.state import Canonical, RolloutState, Status
from dataplane.fields import IGNORED

OTHER: Final = "xtuner"
"""Entry of `extra` with what a trajectory of ours has no place for."""

_OTHER_NAMES: Final = (
    "group_id", "rollout_id", "tools", "tool_choice", "sample_params", "tool_calls",
    "seq_staleness", "proxy_attn_flops", "teacher_targets",
)  # fmt: skip

_META_NAMES: Final = (
    "supervised_tokens", "train_prompt_length", "train_response_length", "position_layout",
    "has_rollout_logprobs", "has_routed_experts",
)  # fmt: skip


def sampler_ids(prompts_drawn: int, prompt_repeat_k: int) -> tuple[int, list[int]]:
    """group_id and the rollout_ids that XTuner's sampler gives to the prompt it draws next.

    They repeat when a run is resumed, so they name no row by themselves.

    Example: sampler_ids(2, 2) == (2, [4, 5]).
    """
    first = prompts_drawn * prompt_repeat_k
    return prompts_drawn, list(range(first, first + prompt_repeat_k))


def from_xtuner(sample: object, *, uid: str, session_id: int | None = None) -> RolloutState:
    """A sample as a trajectory in the making, canonical or not as the sample is.

    Args:
        uid: names its prompt, once in a run.
        session_id: which of the prompt's runs it is; its rollout_id, if not given.

    Raises:
        ValueError: it carries `response_mask`, which labels replaced, or a reference to an object
            that is to be resolved first, or it has no messages.
    """
    if has(sample, "response_mask"):
        raise ValueError(
            "the sample carries response_mask, which says the same as labels: write labels, with "
            "-100 where it is 0"
        )
    if not has(sample, "message"):
        raise ValueError("the sample has no message: the one field that every sample has")
    # Each of the two fills the other where it is missing.
    rollout_id = read(sample, "rollout_id" if has(sample, "rollout_id") else "uid")
    if session_id is None:
        session_id = 0 if rollout_id is None else int(rollout_id)
    extra = dict(read(sample, "extra_fields") or {})
    train_prompt_ids = flat(extra.pop("train_prompt_ids", None))
    for name in _META_NAMES:
        extra.pop(name, None)
    other = {name: _plain(read(sample, name)) for name in _OTHER_NAMES if has(sample, name)}
    if has(sample, "session_id"):
        other["session_id"] = str(read(sample, "session_id"))  # 128 bits are no msgpack integer
    source = read(sample, "data_source")
    if isinstance(source, Mapping):
        weights = cast("Mapping[str, float]", source)
        other["data_source"] = dict(weights)
        source = max(weights, key=lambda name: weights[name]) if weights else None
    state = RolloutState(
        messages=list(read(sample, "message")),
        uid=uid,
        session_id=session_id,
        index=int(extra.get("agent_trace_segment_index", 0)),
        task_name=read(sample, "task_name") or "",
        data_source=source,
        row={"reward_model": read(sample, "reward_model")} if has(sample, "reward_model") else {},
        prompt_ids=flat(read(sample, "prompt_ids")),
        train_prompt_ids=train_prompt_ids,
        position_ids=_positions(read(sample, "position_ids")),
        multi_modal_inputs=_multi_modal(read(sample, "mm_info")),
        response=read(sample, "response"),
        response_ids=flat(read(sample, "response_ids")),
        response_model_steps=flat(read(sample, "response_model_steps")) or [],
        routed_experts=_experts(read(sample, "routed_experts")),
        finish_reason=text(read(sample, "finish_reason")),
        status=Status(text(read(sample, "status", "init")) or "init"),
        error_msg=read(sample, "error_msg"),
        reward=read(sample, "reward"),
        extra=extra | ({OTHER: other} if other else {}),
    )
    state.num_turns = int(extra.get("agent_tool_turns", 0)) + (1 if state.response_ids else 0)
    _take_response(state, sample)
    return state


def to_xtuner(state: RolloutState) -> dict[str, Any]:
    """The keyword arguments of XTuner's RolloutState that say the same, its train meta included."""
    extra = {name: value for name, value in state.extra.items() if name != OTHER}
    other: dict[str, Any] = dict(state.extra.get(OTHER, {}))
    rollout_id = other.get("rollout_id", state.session_id)
    if state.index and "agent_trace_segment_index" not in extra:
        extra["agent_trace_segment_index"] = state.index
    if state.train_prompt_ids is not None:
        extra["train_prompt_ids"] = state.train_prompt_ids
    canonical = state.canonical
    sample: dict[str, Any] = {
        **{name: other[name] for name in _OTHER_NAMES if name in other},
        "message": state.messages,
        "task_name": state.task_name or None,
        "data_source": other.get("data_source", state.data_source),
        "reward_model": state.row.get("reward_model"),
        "mm_info": state.multi_modal_inputs,
        "rollout_id": rollout_id,
        "uid": rollout_id,
        "session_id": int(other["session_id"]) if "session_id" in other else None,
        "prompt_ids": state.prompt_ids,
        "tokens": state.tokens,
        "position_ids": state.position_ids,
        "response": state.response,
        "response_ids": state.response_ids,
        "logprobs": [] if state.response_ids == [] else state.response_logprobs,
        "response_model_steps": state.response_model_steps,
        "routed_experts": state.routed_experts,
        "finish_reason": state.finish_reason,
        "status": str(state.status),
        "error_msg": state.error_msg,
        "reward": state.reward,
        "input_ids": None,
        "labels": None,
    }
    if has_axes(state.position_ids):
        sample["position_ids"] = cast("Any", state.position_ids).reshape(3, 1, -1)
    if canonical is not None:
        meta = train_meta_names(state)
        sample["num_tokens"] = meta.pop("num_tokens")
        sample["input_ids"] = canonical.input_ids
        sample["labels"] = canonical.labels
        sample["logprobs"] = canonical.logprobs
        extra |= meta
    sample["extra_fields"] = extra
    return sample


def train_meta_names(state: RolloutState) -> dict[str, Any]:
    """The meta of a trajectory under the names that XTuner's `write_train_meta` gives it.

    `train_prompt_length` is the prompt that the state names; without one it counts what shifted
    labels leave out, as XTuner does. Our tag `prompt_len` always adds up to the whole row.

    Raises:
        ValueError: it was not made canonical.
    """
    if state.canonical is None or state.meta is None:
        raise ValueError(f"trajectory {state.uid!r} was not made canonical: it has no train meta")
    prompt = state.train_prompt_ids if state.train_prompt_ids is not None else state.prompt_ids
    return {
        "num_tokens": state.meta.seq_len - 1,
        "supervised_tokens": state.meta.policy_len,
        "train_prompt_length": len(prompt) if prompt is not None
        else sum(label == IGNORED for label in state.canonical.labels[1:]),
        "train_response_length": len(state.response_ids or ()),
        "position_layout": state.meta.position_layout,
        "has_rollout_logprobs": state.meta.has_rollout_logprobs,
        "has_routed_experts": state.meta.has_routed_experts,
    }  # fmt: skip


def row_of(
    sample: object, *, uid: str, session_id: int | None = None, tokenize: Tokenize | None = None
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Key, tags and fields of a sample's row. A completed one is made canonical, or has failed.

    Raises:
        ValueError: as `from_xtuner`.
    """
    state = from_xtuner(sample, uid=uid, session_id=session_id)
    canonicalize(state, tokenize)
    fields = trajectory_fields(state)
    return state.key, trajectory_tags(state), fields | (_teacher(sample) if fields else {})


def sample_of_row(tags: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The sample that says what a row says; its message is the whole conversation."""
    start = RolloutState(list(fields.get("messages", [])), tags["uid"], tags["session_id"])
    return to_xtuner(state_of_row(start, tags, fields))


def _take_response(state: RolloutState, sample: object) -> None:
    """Log-probs and mask: of the whole row in a canonical sample, of the response in others."""
    ids, labels = flat(read(sample, "input_ids")), flat(read(sample, "labels"))
    logprobs = flat(read(sample, "logprobs"))
    size = len(state.response_ids or ())
    if ids is None:
        state.response_logprobs = logprobs if size else None
        return
    if size and labels is not None:
        mask = [label != IGNORED for label in labels[-size:]]
        state.generated = None if all(mask) else mask
    if size and logprobs is not None:
        state.response_logprobs = logprobs[-size:]
    if state.status is Status.COMPLETED:
        state.canonical = Canonical(ids, labels or [], logprobs)


def _teacher(sample: object) -> dict[str, npt.NDArray[Any]]:
    targets = read(sample, "teacher_targets")
    if targets is None:
        return {}
    return {
        "teacher_ids": np.array(read(targets, "tokens"), np.int64),
        "teacher_logprobs": np.array(read(targets, "logprobs"), np.float32),
    }


def _experts(experts: Any) -> npt.NDArray[Any] | None:
    if experts is None:
        return None
    is_trace = isinstance(experts, (list, tuple))
    pieces: list[Any] = [*experts] if is_trace else [experts]
    for piece in pieces:
        _refuse_reference("routed_experts", piece)
    arrays = [np.asarray(piece) for piece in pieces]
    return traced_experts(arrays) if is_trace else arrays[0]


def _multi_modal(info: Any) -> dict[str, Any] | None:
    if info is None:
        return None
    names = ("pixel_values", "image_grid_thw", "num_img_tokens")
    found = {name: read(info, name) for name in names if has(info, name)}
    if "pixel_values" in found:
        _refuse_reference("pixel_values", found["pixel_values"])
    return found or None


def _refuse_reference(name: str, value: object) -> None:
    if not hasattr(value, "shape") and not isinstance(value, (list, tuple)):
        raise ValueError(
            f"{name} is a {type(value).__name__} and no array: get what it refers to first"
        )


def _positions(position_ids: Any) -> npt.NDArray[np.int64] | None:
    if position_ids is None:
        return None
    positions: npt.NDArray[np.int64] = np.asarray(position_ids, np.int64)
    if positions.ndim == 3 and positions.shape[1] == 1:
        return positions[:, 0]
    return positions[0] if positions.ndim == 2 and len(positions) == 1 else positions


def _plain(value: Any) -> Any:
    """Records of XTuner as maps."""
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in cast("list[Any]", value)]
    return value.model_dump() if hasattr(value, "model_dump") else value
