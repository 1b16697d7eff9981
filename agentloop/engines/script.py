"""Scripts of answers, as plain data or as a function. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from agentloop.engines.types import EngineError, Request

if TYPE_CHECKING:
    from agentloop.loops.chat import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    """None: made up from the tokens and the seed."""
    finish_reason: str = "stop"
    text: str = ""
    error: str | None = None
    """Fails with this, after its time."""
    hold_after: int | None = None
    """Stops after so many tokens, until it is aborted or paused."""
    ignores_abort: bool = False
    """Answers all of it in its time, whatever is asked of the engine meanwhile."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


Script: TypeAlias = Callable[[Request], Turn]
"""The answer to a request; `request.turn` says which turn of its session it is."""


def make_script(
    entries: Sequence[Mapping[str, Any] | Turn], tokenizer: ChatTokenizer | None, seed: int
) -> Script:
    """The script with one entry for each turn of every session.

    Raises:
        ValueError: an entry is no turn.
    """
    turns = [with_logprobs(_turn(entry, tokenizer), seed) for entry in entries]

    def script(request: Request) -> Turn:
        if request.turn >= len(turns):
            raise EngineError(
                f"request {request.request_id} is of turn {request.turn}, and the script has "
                f"{len(turns)}"
            )
        return turns[request.turn]

    return script


def with_logprobs(turn: Turn, seed: int) -> Turn:
    """With made up log-probs, between -2 and 0, the same for a token every time."""
    if turn.logprobs is not None:
        return turn
    made = [-((token * 2_654_435_761 + seed) % 2048) / 1024 for token in turn.token_ids]
    return replace(turn, logprobs=made)


def _turn(entry: Mapping[str, Any] | Turn, tokenizer: ChatTokenizer | None) -> Turn:
    if isinstance(entry, Turn):
        return entry
    try:
        turn = Turn(**entry)
    except TypeError as error:
        raise ValueError(f"no turn of a script: {dict(entry)!r}: {error}") from error
    if turn.text and not turn.token_ids:
        if tokenizer is None:
            raise ValueError(f"the script says {turn.text!r}: a text needs a tokenizer")
        ends = tokenizer.eos_ids[:1] if turn.finish_reason != "length" else ()
        turn = replace(turn, token_ids=[*tokenizer.encode(turn.text), *ends])
    if turn.logprobs is not None and len(turn.logprobs) != len(turn.token_ids):
        raise ValueError(
            f"{len(turn.logprobs)} log-probs for {len(turn.token_ids)} tokens in {dict(entry)!r}"
        )
    return turn
