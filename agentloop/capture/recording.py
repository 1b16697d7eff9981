"""A server's reply as a turn of a run: checked, and put where it goes on. Pure.

Owns what a reply must say to be captured. The checks themselves are `engines.shapes`'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from agentloop.capture.asking import Asked, sampling_of
from agentloop.capture.tree import Tree, shared_messages
from agentloop.capture.turn import MAX_EVIDENCE, RefusedTurn, Turn, run_lengths
from agentloop.engines.shapes import sglang
from agentloop.engines.shapes.checks import RefusedReply, as_map
from agentloop.engines.shapes.reply import Reading, Shape, completion_of
from agentloop.engines.types import Completion, LogprobKind, Request
from agentloop.trajectory.state import Message

_KEPT: Final = ("stop_reason", "missing", "versions_from", "token_drift")
"""What is kept of a completion's `extra`."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known beside the reply."""

    shape: Shape
    logprob_kind: LogprobKind | None
    """Of the server: after temperature (processed) or before it (raw)."""
    vocab_size: int | None
    version: int | None
    """Of the policy that is served, for servers that do not say it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What an agent that asks again is answered with, and by what it is known."""

    idempotency_key: str
    digest: str
    answer: str


def read(reply: object, asked: Asked, body: Mapping[str, Any], known: Known) -> Completion:
    """The completion that a reply means; `body` is what the server was asked.

    Raises:
        RefusedReply: it breaks a rule, does not say a prompt or log-probs, or the prompt is not
            text alone, whose other parts would be missing in training.
    """
    if asked.foreign_part is not None:
        what = f"holds a part of type {asked.foreign_part}, and only text is captured"
        raise RefusedReply("prompt", "messages", what)
    sampling = sampling_of(body)
    kind = known.logprob_kind
    if known.shape.flavour == "sglang-chat":
        kind = sglang.logprob_kind(kind, sampling)
    reading = Reading(version=known.version or 0, vocab_size=known.vocab_size, logprob_kind=kind)
    request = Request("", (), sampling, messages=asked.messages)
    said = known.shape.read(as_map(reply, "reply"))
    completion = completion_of(said, request, known.shape, reading)
    if not completion.prompt_ids:
        raise RefusedReply("shape", "prompt_ids", "is missing: the server is to say what it read")
    if completion.logprobs is None:
        raise RefusedReply("shape", "logprobs", "is missing, although they were asked for")
    return completion


def turn_of(
    completion: Completion,
    number: int,
    tree: Tree,
    messages: list[Message],
    known: Known,
    kept: Kept | None = None,
) -> Turn:
    """The turn of a completion that `read` gave; `messages` are the prompt's, and the answer."""
    prompt = np.array(completion.prompt_ids, np.int32)
    place = tree.place(prompt, number)
    common = shared_messages(tree.dialogue(place.parent), messages)
    missing = completion.extra.get("missing", [])
    unknown = "versions" in missing and known.version is None
    drawn: Mapping[str, Any] = completion.extra["sampling"]
    tokens = [prompt[place.begin :], np.array(completion.token_ids, np.int32)]
    return Turn(
        number=number,
        parent=place.parent,
        tokens=np.concatenate(tokens),
        begin=len(prompt) - place.begin,
        logprobs=np.array(completion.logprobs, np.float32),
        spans=None if unknown else run_lengths(completion.versions),
        finish_reason=completion.finish_reason,
        logprob_kind=completion.logprob_kind,
        sampling={name: _plain(value) for name, value in drawn.items()},
        kept=common,
        messages=messages[common:],
        extra={name: completion.extra[name] for name in _KEPT if name in completion.extra},
        digest=None if kept is None else kept.digest,
        idempotency_key=None if kept is None else kept.idempotency_key,
        answer=None if kept is None else kept.answer,
    )


def _plain(value: Any) -> Any:
    return list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value


def refused_turn(
    error: Exception, reply: object, number: int, messages: list[Message]
) -> RefusedTurn:
    """What is kept of a reply that may not be trained on."""
    return RefusedTurn(number, str(error), messages, json.dumps(reply)[:MAX_EVIDENCE])
