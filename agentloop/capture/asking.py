"""What an agent asks, and what the server is asked in its place. Pure.

The agent's own fields are kept. Added is what makes the answer token-exact; filled in is what a
server would else take from its model's configuration, so that it is known what was sampled from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, cast

from agentloop.capture.plain import what_is_not_plain
from agentloop.capture.refusals import invalid
from agentloop.engines.shapes.reply import Shape
from agentloop.engines.types import Request, Sampling
from agentloop.trajectory.state import Message

UNBOUNDED: Final = 1 << 31
"""Tokens of an answer whose request sets no limit."""

FILLED: Final = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
"""Sent with OpenAI's defaults where the agent does not say them."""

REQUIRED: Final = (
    "n", "stream", "logprobs", "return_token_ids", "return_weight_versions", "return_meta_info",
    "include_reasoning",
)  # fmt: skip
"""Sent as capturing needs them, whatever the agent says."""

_NAMED_TOKENS: Final = "return_tokens_as_token_ids"
"""For vLLM servers that are too old for `return_token_ids`; it changes the log-probs' text."""

_TEXT_PARTS: Final = frozenset({"text", "refusal"})


@dataclass(frozen=True, slots=True)
class Asked:
    """A chat request of an agent."""

    body: Mapping[str, Any]
    messages: list[Message]
    streams: bool
    wants_usage: bool
    """Of a stream."""

    @property
    def foreign_part(self) -> str | None:
        """The type of a part of the prompt that is no text, if there is one."""
        for message in self.messages:
            content = message.get("content")
            for part in cast("list[Any]", content) if isinstance(content, list) else ():
                typed = isinstance(part, dict)
                kind = cast("dict[str, Any]", part).get("type") if typed else None
                if kind not in _TEXT_PARTS:
                    return str(kind)[:40]
        return None

    def wants(self, name: str) -> bool:
        """Whether the agent itself asked for a part of the answer."""
        return bool(self.body.get(name))


def asked_of(raw: bytes) -> Asked:
    """The request that a body holds.

    Raises:
        Refusal: 400: it is no JSON object, has no messages, or asks for several choices.
    """
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise invalid("the body is to be a JSON object")
    wrong = what_is_not_plain(cast("object", body))
    if wrong is not None:
        raise invalid(f"the body holds {wrong}")
    fields = cast("dict[str, Any]", body)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("`messages` is to be a list of at least one message")
    listed = cast("list[Any]", messages)
    if not all(isinstance(message, dict) for message in listed):
        raise invalid("each of `messages` is to be a JSON object")
    if fields.get("n") not in (None, 1):
        raise invalid("one choice is captured per request: ask several times instead of `n`")
    if not isinstance(fields.get("stream"), bool | None):
        raise invalid("`stream` is to be true or false")
    options = fields.get("stream_options")
    usage = cast("dict[str, Any]", options).get("include_usage") if isinstance(options, dict) else 0
    return Asked(fields, listed, bool(fields.get("stream")), bool(usage))


def forwarded(asked: Asked, shape: Shape, model: str, forced: Mapping[str, Any]) -> dict[str, Any]:
    """The body that the server gets.

    Example: a vLLM server gets, beside what the agent says, `logprobs: true`, `top_logprobs: 0`,
    `return_token_ids: true`, `return_weight_versions: true` and `stream: false`.
    """
    nobody = Request("", (), Sampling(), messages=({"role": "user", "content": ""},))
    base = shape.body(nobody, model)
    body = {name: base[name] for name in FILLED if name in base}
    body |= {name: value for name, value in asked.body.items() if value is not None}
    body |= forced
    body |= {name: base[name] for name in REQUIRED if name in base}
    body.setdefault("top_logprobs", base["top_logprobs"])
    if _NAMED_TOKENS in base and not asked.wants("logprobs"):
        body[_NAMED_TOKENS] = True
    body.pop("stream_options", None)  # refused without `stream`
    body["model"] = model
    return body


def sampling_of(body: Mapping[str, Any]) -> Sampling:
    """How the tokens of an answer to this body are drawn. Servers refuse what is no number."""
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    ids = body.get("stop_token_ids")
    return Sampling(
        max_tokens=_whole(limit, UNBOUNDED),
        temperature=_number(body.get("temperature"), 1.0),
        top_p=_number(body.get("top_p"), 1.0),
        top_k=max(0, _whole(body.get("top_k"), 0)),
        min_tokens=_whole(body.get("min_tokens"), 0),
        repetition_penalty=_number(body.get("repetition_penalty"), 1.0),
        presence_penalty=_number(body.get("presence_penalty"), 0.0),
        frequency_penalty=_number(body.get("frequency_penalty"), 0.0),
        stop=tuple(map(str, cast("list[Any]", stops))) if isinstance(stops, list) else (),
        stop_token_ids=(
            tuple(i for i in cast("list[Any]", ids) if type(i) is int)
            if isinstance(ids, list)
            else ()
        ),
        seed=body["seed"] if type(body.get("seed")) is int else None,
    )


def _number(value: object, default: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _whole(value: object, default: int) -> int:
    return int(max(-UNBOUNDED, min(_number(value, default), UNBOUNDED)))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
