"""SGLang: its native endpoint and its chat, both with token ids in and out. Pure.

Traps that are met here:
- the native endpoint has names of its own: `max_new_tokens`, `min_new_tokens`, `sampling_seed`;
- chat tells completions as `response_token_ids`, and takes `input_ids` past its template;
- with `no_stop_trim` ids, log-probs and text agree about a matched stop string;
- log-probs are after temperature and before top-p and top-k; greedy ones are at temperature 1;
- `weight_version` is the latest; only spans say which token is of which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agentloop.engines.shapes import versions
from agentloop.engines.shapes.checks import (
    RefusedReply,
    as_count,
    as_list,
    as_map,
    as_text,
    only_choice,
)
from agentloop.engines.shapes.experts import from_int32
from agentloop.engines.shapes.reply import Reply, Shape
from agentloop.engines.types import LogprobKind, Request, Sampling


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """What both endpoints call the same."""
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": False,
        "no_stop_trim": True,
        "skip_special_tokens": True,
    }


def logprob_kind(kind: LogprobKind | None, sampling: Sampling) -> LogprobKind | None:
    """What log-probs are of, under this sampling, at a server that applies temperature (`kind`
    is processed) or does not (raw).

    None where neither is true: what top-p, top-k or a minimum cut off is still in the sum.
    """
    if kind != "processed":
        return kind
    if sampling.temperature == 0:
        return "raw"
    return None if sampling.top_p < 1 or sampling.top_k > 0 else "processed"


# -- POST /generate ------------------------------------------------------------------------------


def generate_body(request: Request, model: str) -> dict[str, Any]:
    """The body for the native endpoint; it serves one model and takes no name."""
    sampling = request.sampling
    params = _sampling(sampling) | {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "spaces_between_special_tokens": False,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    body: dict[str, Any] = {
        "input_ids": list(request.token_ids),
        "sampling_params": params,
        "return_logprob": sampling.logprobs,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "stream": False,
    }
    # Older servers refuse fields that they do not know, so it is sent only when it is wanted.
    if sampling.routed_experts:
        body["return_routed_experts"] = True
    return body


def read_generate(reply: Mapping[str, Any]) -> Reply:
    """A reply of `/generate`. It does not say what it was asked with."""
    meta = as_map(reply.get("meta_info"), "meta_info")
    finish = as_map(meta.get("finish_reason"), "meta_info.finish_reason")
    text = reply.get("text")
    values, named = _pairs(meta)
    ids = reply.get("output_ids")
    return Reply(
        finish_reason=finish.get("type"),
        text=text if isinstance(text, str) else None,
        token_ids=named if ids is None else ids,
        logprobs=values,
        logprob_ids=named,
        spans=versions.as_spans(meta.get("weight_versions"), "weight_versions"),
        label=meta.get("weight_version"),
        completion_tokens=as_count(meta.get("completion_tokens"), "meta_info.completion_tokens"),
        stop_reason=finish.get("matched"),
        experts=meta.get("routed_experts"),
    )


# -- POST /v1/chat/completions -------------------------------------------------------------------


def chat_body(request: Request, model: str) -> dict[str, Any]:
    """The body for chat. Token ids go past the template; without any, the messages go in."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        # Token ids make them moot, and an empty list is refused.
        "messages": list(request.messages) or [{"role": "user", "content": ""}],
        **_sampling(sampling),
        "max_completion_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "logprobs": sampling.logprobs,
        "stream": False,
        "return_token_ids": True,
        "return_meta_info": True,
    }
    if sampling.logprobs:
        body["top_logprobs"] = 0
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.routed_experts:
        body["return_routed_experts"] = True
    if request.token_ids:
        body["input_ids"] = list(request.token_ids)
    elif request.tools:
        body["tools"] = list(request.tools)
    return body


def read_chat(reply: Mapping[str, Any]) -> Reply:
    """A reply of `/v1/chat/completions`."""
    choice = only_choice(reply)
    message = as_map(choice.get("message"), "message")
    meta = as_map(choice.get("meta_info") or {}, "meta_info")
    metadata = as_map(reply.get("metadata") or {}, "metadata")
    extension = as_map(reply.get("sglext") or {}, "sglext")
    calls = message.get("tool_calls")
    usage = as_map(reply.get("usage") or {}, "usage")
    values, named = _pairs(meta)
    if values is None:
        values = _chat_logprobs(choice)
    ids = choice.get("response_token_ids")
    return Reply(
        finish_reason=choice.get("finish_reason"),
        text=as_text(message.get("content")),
        token_ids=named if ids is None else ids,
        logprobs=values,
        logprob_ids=named,
        prompt_ids=choice.get("prompt_token_ids"),
        spans=versions.as_spans(metadata.get("weight_versions"), "weight_versions"),
        label=metadata.get("weight_version"),
        completion_tokens=as_count(usage.get("completion_tokens"), "usage.completion_tokens"),
        stop_reason=choice.get("matched_stop"),
        tool_calls=None if calls is None else as_list(calls, "message.tool_calls"),
        experts=extension.get("routed_experts", meta.get("routed_experts")),
    )


def _pairs(meta: Mapping[str, Any]) -> tuple[list[Any] | None, list[int] | None]:
    """Log-probs and the tokens that they name, of [[logprob, id, text or null], …]."""
    told = meta.get("output_token_logprobs")
    if told is None:
        return None, None
    field = "meta_info.output_token_logprobs"
    values: list[Any] = []
    ids: list[int] = []
    for index, entry in enumerate(as_list(told, field)):
        parts = as_list(entry, field)
        if len(parts) < 2 or type(parts[1]) is not int:
            raise RefusedReply("shape", field, "is no [logprob, id, text]", index=index)
        values.append(parts[0])
        ids.append(parts[1])
    return values, ids


def _chat_logprobs(choice: Mapping[str, Any]) -> list[Any] | None:
    told = choice.get("logprobs")
    content = as_map(told, "logprobs").get("content") if told is not None else None
    if content is None:
        return None
    return [
        as_map(entry, "logprobs.content").get("logprob")
        for entry in as_list(content, "logprobs.content")
    ]


GENERATE: Final = Shape(
    "sglang",
    "/generate",
    takes_ids=True,
    body=generate_body,
    read=read_generate,
    request_id_key="rid",
    decode_experts=from_int32,
)

CHAT: Final = Shape(
    "sglang-chat",
    "/v1/chat/completions",
    takes_ids=True,
    body=chat_body,
    read=read_chat,
    request_id_key="rid",
    decode_experts=from_int32,
)
