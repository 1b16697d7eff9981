"""`transformers serve`: text in, text out; no token ids, no log-probs, no versions. Pure.

Traps that are met here:
- fields that it does not know are refused (422), and many that it knows are ignored, so only what
  it acts on is sent;
- without `do_sample` it decodes greedily whatever the temperature;
- sampling goes into `generation_config`, JSON in a string; what is not in it comes from the model;
- `frequency_penalty` sets its repetition penalty, 0.0 included, so it is never sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from agentloop.engines.shapes.checks import as_count, as_list, as_map, as_text, only_choice
from agentloop.engines.shapes.reply import Reply, Shape
from agentloop.engines.types import EngineError, Request


def chat_body(request: Request, model: str) -> dict[str, Any]:
    """The body for chat.

    Raises:
        EngineError: the sampling asks for what the server cannot do.
    """
    sampling = request.sampling
    refused = {
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "stop_token_ids": bool(sampling.stop_token_ids),
    }
    if any(refused.values()):
        names = ", ".join(name for name, asked in refused.items() if asked)
        raise EngineError(f"transformers serve has no {names}: sample without, or use HFEngine")
    if not request.messages:
        raise EngineError("transformers serve takes messages, and the request has none")
    samples = sampling.temperature > 0
    config: dict[str, Any] = {
        "do_sample": samples,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if samples:
        config |= {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
    body: dict[str, Any] = {
        "model": model,
        "messages": list(request.messages),
        "max_completion_tokens": sampling.max_tokens,
        "generation_config": json.dumps(config),
        "stream": False,
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if request.tools:
        body["tools"] = list(request.tools)
    return body


def read_chat(reply: Mapping[str, Any]) -> Reply:
    """A reply of `/v1/chat/completions`; tool calls that its parser took out are text again."""
    choice = only_choice(reply)
    message = as_map(choice.get("message"), "message")
    usage = as_map(reply.get("usage") or {}, "usage")
    told = message.get("tool_calls")
    calls = None if told is None else as_list(told, "message.tool_calls")
    return Reply(
        finish_reason=choice.get("finish_reason"),
        text="\n".join(
            filter(None, [as_text(message.get("content")), *map(_as_text, calls or ())])
        ),
        completion_tokens=as_count(usage.get("completion_tokens"), "usage.completion_tokens"),
        tool_calls=calls,
    )


def _as_text(call: object) -> str:
    """A tool call in the form that models are taught most: JSON between tags."""
    function = as_map(as_map(call, "tool_calls").get("function"), "tool_calls.function")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return (
        f'<tool_call>\n{{"name": {json.dumps(function.get("name"))}, "arguments": {text}}}\n'
        "</tool_call>"
    )


CHAT: Final = Shape(
    "transformers",
    "/v1/chat/completions",
    takes_ids=False,
    body=chat_body,
    read=read_chat,
    request_id_key=None,
)
