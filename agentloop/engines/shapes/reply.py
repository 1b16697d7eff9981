"""What is read of a server's reply, whichever server it is, and the completion made of it.

Owns the normal form of replies: what a server does not say is missing in it, and the completion
says so. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy.typing as npt

from agentloop.engines.shapes import checks, experts, versions
from agentloop.engines.shapes.checks import RefusedReply
from agentloop.engines.shapes.versions import Span
from agentloop.engines.types import Completion, IdsSource, LogprobKind, Request, Sampling
from agentloop.trajectory.state import Message

OnDrift: TypeAlias = Literal["refuse", "note"]

Flavour: TypeAlias = Literal[
    "vllm", "vllm-completions", "vllm-chat", "sglang", "sglang-chat", "transformers"
]


class Tokens(Protocol):
    """The tokenizer of the model that is served, with its chat template."""

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), /
    ) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], /) -> str: ...

    def encode(self, text: str, /) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server said, with every field that it did not say as None."""

    finish_reason: object
    text: str | None = None
    token_ids: object = None
    logprobs: Sequence[object] | None = None
    logprob_ids: Sequence[int] | None = None
    """The tokens that the entries of `logprobs` name, where they name any."""
    prompt_ids: object = None
    spans: list[Span] | None = None
    label: object = None
    """Of the weights that made the whole completion, where no spans are told."""
    completion_tokens: int | None = None
    stop_reason: object = None
    tool_calls: list[Any] | None = None
    experts: object = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How one endpoint is asked and how its replies are read."""

    flavour: Flavour
    path: str
    takes_ids: bool
    """It is asked with token ids; else with messages, which its own template turns into ids."""
    body: Callable[[Request, str], dict[str, Any]]
    """(request, model) to the JSON object that is posted. The key `request_id_key` is set after."""
    read: Callable[[Mapping[str, Any]], Reply]
    request_id_key: str | None
    """The field that carries a request's id, if there is one."""
    server_ids: Callable[[str], list[str]] = lambda request_id: [request_id]
    """The names under which the server may know a request, for its abort endpoint."""
    decode_experts: Callable[..., npt.NDArray[Any]] = experts.from_npy


@dataclass(frozen=True, slots=True)
class Reading:
    """What else is needed to make a completion of a reply."""

    version: int
    """What the engine was told: of tokens whose version the server does not say."""
    tokens: Tokens | None = None
    vocab_size: int | None = None
    on_drift: OnDrift = "refuse"
    logprob_kind: LogprobKind | None = None
    """Of the log-probs that the server gives, if it is known."""
    max_experts_bytes: int = 64 << 20


@dataclass(slots=True)
class _Notes:
    """What a completion's `extra` says: only what there is to say."""

    missing: list[str] = field(default_factory=list[str])
    found: dict[str, Any] = field(default_factory=dict[str, Any])

    def as_extra(self, sampling: Sampling) -> dict[str, Any]:
        said = {name: value for name, value in self.found.items() if value not in (None, [])}
        if self.missing:
            said["missing"] = self.missing
        return {"sampling": asdict(sampling), **said}


def completion_of(reply: Reply, request: Request, shape: Shape, reading: Reading) -> Completion:
    """The completion that a reply means, checked.

    `extra` holds `sampling` (as it was asked for), and where there is something to say:
    `missing` (what the server did not say, of token_ids, logprobs, prompt_ids, versions, text,
    routed_experts), `versions_from` (spans, reply or engine), `stop_reason`, `tool_calls`,
    `prompt_drift` (first index at which the server's prompt differs from what was asked with) and
    `token_drift` (how many more tokens the server made than its text has).

    Raises:
        RefusedReply: the reply breaks a rule, which it names.
    """
    notes = _Notes()
    finish = checks.as_finish_reason(reply.finish_reason, "finish_reason")
    ids, source = _token_ids(reply, finish, reading, notes)
    if len(ids) > request.sampling.max_tokens and source == "engine":
        raise RefusedReply(
            "lengths", "token_ids", f"has {len(ids)}, over max_tokens {request.sampling.max_tokens}"
        )
    logprobs = _logprobs(reply, ids, source, request.sampling, notes)
    prompt = _prompt_ids(reply, request, shape, reading, notes)
    steps = _versions(reply, len(ids), reading, notes)
    asked = len(prompt if prompt is not None else request.token_ids)
    routed = _experts(reply, asked + len(ids) - 1, shape, request.sampling, reading, notes)
    notes.found["stop_reason"] = reply.stop_reason
    notes.found["tool_calls"] = reply.tool_calls
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        versions=steps,
        text=_text(reply, ids, source, reading, notes),
        finish_reason=finish,
        ids_source=source,
        logprob_kind=None if logprobs is None else reading.logprob_kind,
        routed_experts=routed,
        prompt_ids=prompt,
        extra=notes.as_extra(request.sampling),
    )


def nothing(request: Request) -> Completion:
    """What a request is answered with that was given up before anything came."""
    return Completion(
        token_ids=[],
        logprobs=[] if request.sampling.logprobs else None,
        versions=[],
        text="",
        finish_reason="abort",
        extra={"sampling": asdict(request.sampling)},
    )


def _token_ids(
    reply: Reply, finish: str, reading: Reading, notes: _Notes
) -> tuple[list[int], IdsSource]:
    if reply.token_ids is not None:
        ids = checks.as_ids(reply.token_ids, "token_ids", reading.vocab_size)
        if reply.completion_tokens is not None:
            checks.same_length("token_ids", len(ids), "usage", reply.completion_tokens)
        return ids, "engine"
    if finish == "abort" and not reply.text:
        return [], "engine"
    if reading.tokens is None:
        raise RefusedReply(
            "shape", "token_ids", "is missing, and the engine has no tokenizer to tokenize the text"
        )
    notes.missing.append("token_ids")
    ids = list(reading.tokens.encode(reply.text or ""))
    made = reply.completion_tokens
    # The text has no end token; the count shows that one was made.
    if finish == "stop" and made == len(ids) + 1 and reading.tokens.eos_ids:
        ids.append(reading.tokens.eos_ids[0])
    if made is not None and made != len(ids):
        notes.found["token_drift"] = made - len(ids)
    return ids, "retokenized"


def _logprobs(
    reply: Reply, ids: list[int], source: IdsSource, sampling: Sampling, notes: _Notes
) -> list[float] | None:
    if not sampling.logprobs:
        return None
    if reply.logprobs is None and not ids and source == "engine":
        return []
    if reply.logprobs is None or source == "retokenized":
        notes.missing.append("logprobs")
        return None
    checks.same_length("logprobs", len(reply.logprobs), "token ids", len(ids))
    if reply.logprob_ids is not None:
        checks.same_ids("logprobs", reply.logprob_ids, ids)
    return checks.as_logprobs(reply.logprobs, "logprobs")


def _prompt_ids(
    reply: Reply, request: Request, shape: Shape, reading: Reading, notes: _Notes
) -> list[int] | None:
    if reply.prompt_ids is None:
        if not shape.takes_ids:
            notes.missing.append("prompt_ids")
            notes.found["prompt_drift"] = _template_drift(request, reading)
        return None
    said = checks.as_ids(reply.prompt_ids, "prompt_ids", reading.vocab_size)
    index = checks.first_difference(said, request.token_ids) if request.token_ids else None
    if index is None:
        return said
    if reading.on_drift == "refuse":
        raise RefusedReply(
            "prompt",
            "prompt_ids",
            "differs from what was asked with: the server's template or tokenizer is another. "
            "Ask with token ids, or take replies with on_drift='note'",
            index=index,
        )
    notes.found["prompt_drift"] = index
    return said


def _template_drift(request: Request, reading: Reading) -> int | None:
    """Where the chat template departs from what was asked with, as the tokenizer here has it."""
    if reading.tokens is None or not request.token_ids or not request.messages:
        return None
    rendered = reading.tokens.prompt(request.messages, request.tools)
    return checks.first_difference(rendered, request.token_ids)


def _versions(reply: Reply, count: int, reading: Reading, notes: _Notes) -> list[int]:
    if reply.spans is not None:
        steps = versions.per_token(reply.spans, count, "weight_versions", fallback=reading.version)
        told = [versions.version_of(span.label) for span in reply.spans]
        if None in told:
            notes.missing.append("versions")
        named = any(version is not None for version in told) or not told
        notes.found["versions_from"] = "spans" if named else "engine"
        return steps
    version = versions.version_of(reply.label)
    if version is None:
        notes.missing.append("versions")
    notes.found["versions_from"] = "engine" if version is None else "reply"
    return [reading.version if version is None else version] * count


def _experts(
    reply: Reply,
    rows: int,
    shape: Shape,
    sampling: Sampling,
    reading: Reading,
    notes: _Notes,
) -> npt.NDArray[Any] | None:
    if not sampling.routed_experts:
        return None
    if reply.experts is None:
        notes.missing.append("routed_experts")
        return None
    return shape.decode_experts(reply.experts, rows=rows, max_bytes=reading.max_experts_bytes)


def _text(reply: Reply, ids: list[int], source: IdsSource, reading: Reading, notes: _Notes) -> str:
    # Decoded here where it can be: a server's parsers cut reasoning and tool calls out of it.
    if source == "engine" and reading.tokens is not None:
        return reading.tokens.decode(ids)
    if reply.text is None and ids:
        notes.missing.append("text")
    return reply.text or ""
