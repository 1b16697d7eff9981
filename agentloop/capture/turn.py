"""One turn of a run: the tokens that were sent and those that were made, and its plain form. Pure.

A turn is kept relative to the one that it goes on from, so that a conversation of n turns takes
memory for its tokens once and not n times. What a reply must fulfil to become a turn is
recording.py's.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from agentloop.trajectory.state import Message

Ids: TypeAlias = npt.NDArray[np.int32]

OVERHEAD: Final = 1024
"""What a turn takes in memory beside its tokens and texts, in bytes, generously."""

MAX_EVIDENCE: Final = 64 << 10
"""Bytes that are kept of a reply that was refused."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A request that was answered with tokens that may be trained on."""

    number: int
    """Requests of a run are counted as they come, from 0."""
    parent: int | None
    """The turn whose tokens, prompt and completion, this one's prompt begins with."""
    tokens: Ids
    """Those after the parent's: what is left of the prompt, then the completion."""
    begin: int
    """Where in `tokens` the completion begins."""
    logprobs: npt.NDArray[np.float32]  # of the completion
    spans: tuple[tuple[int, int], ...] | None
    """(policy version, tokens) over the completion; None if nobody says the version."""
    finish_reason: str
    logprob_kind: str | None
    sampling: Mapping[str, Any]
    """How its tokens were drawn."""
    kept: int
    """So many messages of the parent's dialogue are the first of this turn's prompt."""
    messages: Sequence[Message]
    """Those of the prompt after them, and the answer."""
    extra: Mapping[str, Any]
    """What else the server said, as plain data: stop reason, tool calls, what was missing."""
    digest: str | None = None
    """Of the request, if it has an idempotency key."""
    idempotency_key: str | None = None
    answer: str | None = None
    """What the agent was answered, as JSON, if it may ask again."""

    @property
    def completion(self) -> Ids:
        return self.tokens[self.begin :]

    @property
    def between(self) -> Ids:
        """Tokens of the prompt after the parent's; the whole prompt where there is no parent."""
        return self.tokens[: self.begin]

    @property
    def versions(self) -> list[int] | None:
        """The policy version of each token of the completion."""
        if self.spans is None:
            return None
        return [version for version, count in self.spans for _ in range(count)]

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        texts = len(json.dumps([self.messages, self.extra])) + len(self.answer or "")
        return self.tokens.nbytes + self.logprobs.nbytes + texts + OVERHEAD


@dataclass(frozen=True, slots=True)
class RefusedTurn:
    """A request whose reply may not be trained on. The agent was answered all the same."""

    number: int
    reason: str
    messages: Sequence[Message]
    evidence: str
    """The begin of the reply, as JSON."""

    @property
    def nbytes(self) -> int:
        return len(self.evidence) + len(json.dumps(self.messages)) + OVERHEAD


def run_lengths(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(version, how many) of each run. Example: [3, 3, 4] makes ((3, 2), (4, 1))."""
    return tuple((version, sum(1 for _ in run)) for version, run in groupby(versions))


# -- the plain form ------------------------------------------------------------------------------


def to_plain(turn: Turn) -> dict[str, Any]:
    """A turn as JSON can carry it; arrays are base64 of little-endian bytes."""
    plain = {part.name: getattr(turn, part.name) for part in fields(turn)}
    plain["tokens"] = _packed(turn.tokens, "<i4")
    plain["logprobs"] = _packed(turn.logprobs, "<f4")
    return {name: value for name, value in plain.items() if value is not None}


def of_plain(plain: Mapping[str, Any]) -> Turn:
    """The turn of such a form.

    Raises:
        ValueError: it is none, or its parts do not fit together.
    """
    try:
        tokens = _unpacked(plain["tokens"], "<i4").astype(np.int32)
        logprobs = _unpacked(plain["logprobs"], "<f4").astype(np.float32)
        spans = plain.get("spans")
        turn = Turn(
            number=_count(plain["number"]),
            parent=None if plain.get("parent") is None else _count(plain["parent"]),
            tokens=tokens,
            begin=_count(plain["begin"]),
            logprobs=logprobs,
            spans=(
                None
                if spans is None
                else tuple((_count(version), _count(size)) for version, size in spans)
            ),
            finish_reason=_text(plain["finish_reason"]),
            logprob_kind=plain.get("logprob_kind"),
            sampling=dict(plain["sampling"]),
            kept=_count(plain["kept"]),
            messages=[dict(message) for message in plain["messages"]],
            extra=dict(plain["extra"]),
            digest=plain.get("digest"),
            idempotency_key=plain.get("idempotency_key"),
            answer=plain.get("answer"),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"it is no turn: {type(error).__name__} {error}") from None
    made = len(turn.tokens) - turn.begin
    spanned = made if turn.spans is None else sum(count for _, count in turn.spans)
    if made < 0 or made != len(turn.logprobs) or made != spanned:
        raise ValueError(
            f"turn {turn.number} has {made} tokens, {len(turn.logprobs)} log-probs and "
            f"{spanned} tokens with a version"
        )
    return turn


def refused_to_plain(turn: RefusedTurn) -> dict[str, Any]:
    """A refused turn as JSON can carry it."""
    return {part.name: getattr(turn, part.name) for part in fields(turn)}


def refused_of_plain(plain: Mapping[str, Any]) -> RefusedTurn:
    """The refused turn of such a form. ValueError if it is none."""
    try:
        messages = [dict(message) for message in plain["messages"]]
        return RefusedTurn(
            _count(plain["number"]), _text(plain["reason"]), messages, _text(plain["evidence"])
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no refused turn: {type(error).__name__} {error}") from None


def _packed(array: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode()


def _unpacked(text: str, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} is no count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value
