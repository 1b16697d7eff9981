"""What agent loops ask of an inference engine, and what it answers. Owns the seam to engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

import numpy.typing as npt

from agentloop.trajectory.state import Message

if TYPE_CHECKING:
    import torch

IdsSource: TypeAlias = Literal["engine", "retokenized"]
"""Whether the engine said which tokens it made, or its text was tokenized again (may drift)."""

LogprobKind: TypeAlias = Literal["raw", "processed", "recomputed"]
"""Of which distribution: before temperature and top-p, as it was sampled from, or as a forward
pass of the trainer sees it."""

FINISHED: Final = ("stop", "length", "tool_calls", "abort")
"""Finish reasons of a request that worked."""


class EngineError(Exception):
    """An engine could not answer, and trying again did not help or would not."""


class WeightsError(EngineError):
    """Weights do not fit the model, or are not whole; nothing was replaced."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Every field is sent: servers have defaults of their own."""

    max_tokens: int = 2048
    """Of one response, all its turns together."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: bool = True
    routed_experts: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One turn to generate."""

    request_id: str
    """The same if it is asked again."""
    token_ids: Sequence[int]
    """Prompt and everything after it."""
    sampling: Sampling
    """`max_tokens` is what is left to this turn."""
    turn: int = 0
    """How many turns of the session have ended before."""
    messages: Sequence[Message] = ()
    """The conversation so far, for servers that take no token ids."""
    tools: Sequence[Mapping[str, Any]] = ()
    timeout_s: float | None = None
    """Of the whole request, retries included."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine generated in one turn."""

    token_ids: list[int]  # [C]
    logprobs: list[float] | None  # [C]
    versions: list[int]  # [C] policy version of each token
    text: str
    finish_reason: str
    """stop, length, tool_calls; abort: paused or given up, with what there was until then."""
    ids_source: IdsSource = "engine"
    logprob_kind: LogprobKind | None = None
    routed_experts: npt.NDArray[Any] | None = None  # [asked + C - 1, layers * topk]
    prompt_ids: list[int] | None = None
    """What the server says it was asked with, if it says so."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """What else the server says. `tool_calls`, in the form of OpenAI, if it parsed them itself."""


class Engine(Protocol):
    """An inference engine as agent loops see it. Safe for many coroutines of one event loop."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that a request begun now would use."""
        ...

    async def generate(self, request: Request) -> Completion:
        """One turn.

        While paused, requests end at once with finish reason `abort`: those under way with what
        they have, new ones with nothing.

        Raises:
            EngineError: it could not be had within the request's budget of time and tries.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End one request with what it has. Nothing happens if it is not under way."""
        ...

    async def pause(self) -> None:
        """End what is under way with what it has. Returns when that has been said."""
        ...

    async def resume(self) -> None:
        """Take requests again."""
        ...

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Generate with these weights from here on. Tokens made before keep their version."""
        ...

    async def close(self) -> None: ...


def as_versions(version: int, count: int) -> list[int]:
    """One version for every token."""
    return [version] * count
