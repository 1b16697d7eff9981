"""vLLM: its chat, its completions, and its endpoint with token ids in and out. Pure.

Traps that are met here:
- defaults of sampling come from the model's own configuration, so every field is sent;
- chat tells the prompt's ids beside the choices, completions inside the choice;
- `logprobs` is a flag in chat and a number in the other two; 0 is the sampled token alone;
- servers without `return_token_ids` name tokens as `token_id:N` in the log-probs if asked to;
- a matched stop string stays in the ids, and only with `include_stop_str_in_output` in the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from agentloop.engines.shapes.reply import Reply, Shape
from agentloop.engines.types import Request, Sampling

_TOKEN_ID: Final = "token_id:"


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """What all three endpoints call the same."""
    fields: dict[str, Any] = {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "min_tokens": sampling.min_tokens,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": False,
    }
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    return fields


def _asks_for_ids(sampling: Sampling) -> dict[str, Any]:
    return {
        "stream": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": sampling.logprobs,
        "return_weight_versions": True,
    }


# -- POST /inference/v1/generate -----------------------------------------------------------------


def generate_body(request: Request, model: str) -> dict[str, Any]:
    """The body for tokens in, tokens out. The engine sets `output_mode`."""
    sampling = request.sampling
    return {
        "model": model,
        "token_ids": list(request.token_ids),
        "stream": False,
        "return_token_ids": True,
        "sampling_params": {
            **_sampling(sampling),
            "max_tokens": sampling.max_tokens,
            "logprobs": 0 if sampling.logprobs else None,
        },
    }


def read_generate(reply: Mapping[str, Any]) -> Reply:
    """A reply of `/inference/v1/generate`."""
    return replace(_read_choice(reply), prompt_ids=reply.get("prompt_token_ids"))


# -- POST /v1/completions ------------------------------------------------------------------------


def completions_body(request: Request, model: str) -> dict[str, Any]:
    """The body for completions, whose prompt is token ids."""
    sampling = request.sampling
    return {
        "model": model,
        "prompt": list(request.token_ids),
        **_sampling(sampling),
        "max_tokens": sampling.max_tokens,
        "logprobs": 0 if sampling.logprobs else None,
        "echo": False,
        **_asks_for_ids(sampling),
    }


def read_completions(reply: Mapping[str, Any]) -> Reply:
    """A reply of `/v1/completions`."""
    choice = only_choice(reply)
    read = replace(
        _read_choice(reply),
        prompt_ids=choice.get("prompt_token_ids"),
        logprobs=None,
        logprob_ids=None,
    )
    told = choice.get("logprobs")
    if told is None:
        return read
    table = as_map(told, "logprobs")
    values = as_list(table.get("token_logprobs"), "logprobs.token_logprobs")
    named = _named_ids(as_list(table.get("tokens"), "logprobs.tokens"))
    return _with_logprobs(read, values, named)


# -- POST /v1/chat/completions -------------------------------------------------------------------


def chat_body(request: Request, model: str) -> dict[str, Any]:
    """The body for chat: messages, which the server's template turns into ids."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "messages": list(request.messages),
        **_sampling(sampling),
        "max_completion_tokens": sampling.max_tokens,
        "logprobs": sampling.logprobs,
        "include_reasoning": True,
        **_asks_for_ids(sampling),
    }
    if sampling.logprobs:
        body["top_logprobs"] = 0
    if request.tools:
        body["tools"] = list(request.tools)
    return body


def read_chat(reply: Mapping[str, Any]) -> Reply:
    """A reply of `/v1/chat/completions`."""
    message = as_map(only_choice(reply).get("message"), "message")
    calls = message.get("tool_calls")
    return replace(
        _read_choice(reply),
        text=as_text(message.get("content")),
        prompt_ids=reply.get("prompt_token_ids"),
        tool_calls=None if calls is None else as_list(calls, "message.tool_calls"),
    )


# -- what they have in common --------------------------------------------------------------------


def _read_choice(reply: Mapping[str, Any]) -> Reply:
    """What chat and generate say in the same place."""
    choice = only_choice(reply)
    usage = reply.get("usage")
    counted = None if usage is None else as_map(usage, "usage").get("completion_tokens")
    text = choice.get("text")
    read = Reply(
        finish_reason=choice.get("finish_reason"),
        text=text if isinstance(text, str) else None,
        token_ids=choice.get("token_ids"),
        spans=versions.as_spans(choice.get("weight_versions"), "weight_versions"),
        completion_tokens=as_count(counted, "usage.completion_tokens"),
        stop_reason=choice.get("stop_reason"),
        experts=choice.get("routed_experts"),
    )
    told = choice.get("logprobs")
    content = as_map(told, "logprobs").get("content") if told is not None else None
    if content is None:
        return read
    entries = [as_map(entry, "logprobs.content") for entry in as_list(content, "logprobs.content")]
    return _with_logprobs(
        read,
        [entry.get("logprob") for entry in entries],
        _named_ids([entry.get("token_id", entry.get("token")) for entry in entries]),
    )


def _with_logprobs(read: Reply, values: list[Any], named: list[int] | None) -> Reply:
    """With log-probs; the tokens that they name are the completion, if nothing else says it."""
    ids = named if read.token_ids is None else read.token_ids
    return replace(read, logprobs=values, logprob_ids=named, token_ids=ids)


def _named_ids(tokens: list[Any]) -> list[int] | None:
    """The ids that log-prob entries name, as numbers or as `token_id:N`; None if as text."""
    ids: list[int] = []
    for index, token in enumerate(tokens):
        if type(token) is int:
            ids.append(token)
        elif isinstance(token, str) and token.startswith(_TOKEN_ID):
            number = token.removeprefix(_TOKEN_ID)
            if not (number.isascii() and number.isdigit() and len(number) <= 18):
                raise RefusedReply("ids", "logprobs", f"names the token {token!r}", index=index)
            ids.append(int(number))
        else:
            return None
    return ids


GENERATE: Final = Shape(
    "vllm",
    "/inference/v1/generate",
    takes_ids=True,
    body=generate_body,
    read=read_generate,
    request_id_key="request_id",
    server_ids=lambda request_id: [f"generate-tokens-{request_id}", request_id],
)

COMPLETIONS: Final = Shape(
    "vllm-completions",
    "/v1/completions",
    takes_ids=True,
    body=completions_body,
    read=read_completions,
    request_id_key="request_id",
    server_ids=lambda request_id: [f"cmpl-{request_id}-0", f"cmpl-{request_id}", request_id],
)

CHAT: Final = Shape(
    "vllm-chat",
    "/v1/chat/completions",
    takes_ids=False,
    body=chat_body,
    read=read_chat,
    request_id_key="request_id",
    server_ids=lambda request_id: [f"chatcmpl-{request_id}", request_id],
)
