"""What an agent is answered: the server's reply less what only capturing asked for. Pure.

Owns both forms, the whole answer and its stream. A stream is made of an answer that is whole:
servers lose tokens when they stream themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from agentloop.capture.asking import Asked

_ADDED: Final[Mapping[str, str]] = {
    "token_ids": "return_token_ids",
    "prompt_token_ids": "return_token_ids",
    "response_token_ids": "return_token_ids",
    "weight_versions": "return_weight_versions",
    "meta_info": "return_meta_info",
}
"""Parts of a reply, and the field of a request that asks for each."""

DONE: Final = b"data: [DONE]\n\n"


def answer_of(reply: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """The answer of an agent; `reply` stays as it is.

    Everything is left as the server says it, but for token ids, weight versions, `meta_info` and
    log-probs that the agent did not ask for itself.
    """
    answer = _without(reply, asked)
    choices = reply.get("choices")
    if isinstance(choices, list):
        answer["choices"] = [
            _choice(cast("dict[str, Any]", choice), asked) if isinstance(choice, dict) else choice
            for choice in cast("list[Any]", choices)
        ]
    return answer


def chunks_of(answer: Mapping[str, Any], *, usage: bool, created: int) -> Iterator[bytes]:
    """The answer as server-sent events: role, reasoning, text, tool calls, finish reason, usage if
    it is wanted, and the end.

    `created` stands where the server does not say when it answered, in seconds since 1970.
    """
    head = {
        "id": answer.get("id") or "chatcmpl-capture",
        "object": "chat.completion.chunk",
        "created": answer.get("created") or created,
        "model": answer.get("model") or "",
    }
    for name in ("system_fingerprint", "service_tier"):
        if answer.get(name) is not None:
            head[name] = answer[name]
    choices = cast("list[dict[str, Any]]", answer.get("choices") or [])
    for choice in choices:
        for part in _parts(choice):
            yield _event({**head, "choices": [part]} | ({"usage": None} if usage else {}))
    if usage:
        yield _event({**head, "choices": [], "usage": answer.get("usage")})
    yield DONE


def message_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The assistant's message, as it is put in a conversation: what it does not say is left out."""
    choices = cast("list[Any]", answer.get("choices") or [{}])
    message: dict[str, Any] = cast("dict[str, Any]", choices[0]).get("message") or {}
    said = {name: value for name, value in message.items() if value not in (None, [])}
    return {"role": "assistant", "content": message.get("content") or ""} | said


def _choice(choice: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    kept = _without(choice, asked)
    if not asked.wants("logprobs") and "logprobs" in kept:
        kept["logprobs"] = None
    return kept


def _without(part: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    return {
        name: value
        for name, value in part.items()
        if name not in _ADDED or asked.wants(_ADDED[name])
    }


def _parts(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The deltas of one choice."""
    index = choice.get("index", 0)
    message = cast("Mapping[str, Any]", choice.get("message") or {})

    def part(
        delta: Mapping[str, Any], finish: object = None, logprobs: object = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    yield part({"role": "assistant", "content": ""})
    for name in ("reasoning", "reasoning_content", "refusal"):
        if message.get(name):
            yield part({name: message[name]})
    logprobs = choice.get("logprobs")
    if message.get("content") or logprobs:
        yield part({"content": message.get("content") or ""}, logprobs=logprobs)
    for position, call in enumerate(cast("list[dict[str, Any]]", message.get("tool_calls") or [])):
        function = cast("dict[str, Any]", call.get("function") or {})
        named = {"name": function.get("name"), "arguments": ""}
        kind = call.get("type") or "function"
        begun = {"index": position, "id": call.get("id"), "type": kind, "function": named}
        yield part({"tool_calls": [begun]})
        arguments = {"arguments": function.get("arguments") or ""}
        yield part({"tool_calls": [{"index": position, "function": arguments}]})
    last = part({}, choice.get("finish_reason"))
    for name in ("stop_reason", "matched_stop", *_ADDED):
        if choice.get(name) is not None:
            last[name] = choice[name]
    yield last


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
