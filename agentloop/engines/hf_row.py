"""One request while it is generated: what it has so far, and what ends it. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from agentloop.engines.hf_sampling import Context
from agentloop.engines.types import Completion, EngineError, LogprobKind, Request

Decode: TypeAlias = Callable[[Sequence[int], bool], str]
"""Text of token ids, with or without special tokens."""

_TAIL_TOKENS: Final = 8
"""Decoded before what a stop string could reach: a window may begin inside a character."""


@dataclass(slots=True, eq=False)
class Row:
    """A request in a batch."""

    request: Request
    limit: int
    """Tokens that it may have: its own limit, or what the model's context leaves."""
    eos_ids: frozenset[int]
    seed: int
    decode: Decode
    settle: Callable[[Completion | EngineError], None]
    """Gives the answer to whoever asked. Called once."""

    made: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    experts: list[npt.NDArray[np.uint16]] = field(default_factory=list[Any])  # rows of tokens fed
    experts_known: int = 0

    finish_reason: str | None = None
    stop_reason: int | str | None = None
    abort_requested: bool = False
    abandoned: bool = False
    """Nobody waits for it any more."""
    _ends: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self._ends = self.eos_ids.union(self.request.sampling.stop_token_ids)

    @property
    def tokens(self) -> list[int]:
        return [*self.request.token_ids, *self.made]

    @property
    def context(self) -> Context:
        request = self.request
        return Context(request.sampling, request.token_ids, self.made, self._ends, self.seed)

    def take(self, token: int, logprob: float, version: int) -> None:
        """Append a token, and find out whether it is the last."""
        self.made.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        sampling = self.request.sampling
        if len(self.made) >= sampling.min_tokens:
            if token in self.eos_ids:
                self.finish_reason = "stop"
            elif token in sampling.stop_token_ids:
                self.finish_reason, self.stop_reason = "stop", token
            elif (found := self._stop_string()) is not None:
                self.finish_reason, self.stop_reason = "stop", found
        if self.finish_reason is None and len(self.made) >= self.limit:
            self.finish_reason = "length"

    def _stop_string(self) -> str | None:
        """The stop string that the newest token completed. Tokens are never cut: it stays in."""
        stops = self.request.sampling.stop
        if not stops:
            return None
        # A token is a byte at least. What ended before the newest one was found then, or came
        # too early; a character that the newest one completes is not there yet.
        reach = max(len(stop.encode()) for stop in stops) + _TAIL_TOKENS
        text = self.decode(self.made[-reach:], False)
        old = len(self.decode(self.made[-reach:-1], False).rstrip("\ufffd"))
        ends = {stop: text.rfind(stop) + len(stop) for stop in stops if stop in text}
        return next((stop for stop, end in ends.items() if end > old), None)

    def take_experts(self, routed: npt.NDArray[np.uint16], first: int) -> None:
        """Experts of the tokens from place `first` on; what is known of a token stays.

        After new weights the whole row is computed again; its older tokens were generated with
        the routing that they had then.
        """
        if self.request.sampling.routed_experts:
            new = routed[self.experts_known - first :]
            self.experts.append(new)
            self.experts_known += len(new)

    def finish(self, reason: str) -> None:
        """End it from outside."""
        self.finish_reason = self.finish_reason or reason

    def completion(self, kind: LogprobKind) -> Completion:
        """The answer. At temperature 0 log-probs are `raw`: nothing was sampled."""
        request, sampling = self.request, self.request.sampling
        known = len(request.token_ids) + len(self.made) - 1
        experts = np.concatenate(self.experts)[:known] if self.experts else None
        return Completion(
            token_ids=list(self.made),
            logprobs=list(self.logprobs) if sampling.logprobs else None,
            versions=list(self.versions),
            text=self.decode(self.made, True),
            finish_reason=self.finish_reason or "abort",
            ids_source="engine",
            logprob_kind=(kind if sampling.temperature else "raw") if sampling.logprobs else None,
            routed_experts=experts,
            prompt_ids=list(request.token_ids),
            extra={} if self.stop_reason is None else {"stop_reason": self.stop_reason},
        )
