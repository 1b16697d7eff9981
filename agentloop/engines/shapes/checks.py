"""What must hold of a reply before its tokens are trained on, and the error if it does not.

Owns the rules and the reading of JSON values whose type is not known. Pure: never asks a server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, cast

from agentloop.engines.types import FINISHED, EngineError

Rule: TypeAlias = Literal[
    "shape", "lengths", "ids", "logprobs", "versions", "prompt", "finish_reason", "experts"
]

FLOOR: Final = -9999.0
"""What servers write for minus infinity, which JSON does not have; no sampled token has it."""

LARGEST_VOCABULARY: Final = 1 << 31

SLACK: Final = 1e-4
"""How far rounding may lift a log-prob above 0."""


class RefusedReply(EngineError):
    """A server answered, and what it said may not be trained on.

    `rule` is the rule that it broke, `field` where, `index` at which token, if at one.
    """

    def __init__(self, rule: Rule, field: str, what: str, *, index: int | None = None) -> None:
        at = f"{field}[{index}]" if index is not None else field
        super().__init__(f"the reply breaks the rule of {rule}: {at} {what}")
        self.rule: Rule = rule
        self.field = field
        self.index = index


# -- JSON whose types are not known ------------------------------------------------------------


def as_map(value: object, field: str) -> Mapping[str, Any]:
    """`value`, which must be a JSON object."""
    if not isinstance(value, Mapping):
        raise RefusedReply("shape", field, f"is {_kind(value)} and not an object")
    return cast("Mapping[str, Any]", value)


def as_list(value: object, field: str) -> list[Any]:
    """`value`, which must be a JSON array."""
    if not isinstance(value, list):
        raise RefusedReply("shape", field, f"is {_kind(value)} and not an array")
    return cast("list[Any]", value)


def as_text(value: object) -> str:
    """`value` if it is a string, else nothing: servers write null where there is no text."""
    return value if isinstance(value, str) else ""


def as_count(value: object, field: str) -> int | None:
    """`value`, which must be a number of things, or None if it is not there."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RefusedReply("shape", field, f"is {value!r} and not a count")
    return value


def only_choice(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one choice of a reply: one was asked for."""
    choices = as_list(reply.get("choices"), "choices")
    if len(choices) != 1:
        raise RefusedReply("shape", "choices", f"has {len(choices)} entries, and 1 was asked for")
    return as_map(choices[0], "choices[0]")


def _kind(value: object) -> str:
    return "missing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


# -- what tokens are -----------------------------------------------------------------------------


def as_ids(value: object, field: str, vocab_size: int | None = None) -> list[int]:
    """Token ids: whole numbers from 0, below the size of the vocabulary where that is known."""
    ids = as_list(value, field)
    size = LARGEST_VOCABULARY if vocab_size is None else vocab_size
    for index, item in enumerate(ids):
        if type(item) is not int or not 0 <= item < size:
            limit = "" if vocab_size is None else f" of a vocabulary of {vocab_size}"
            raise RefusedReply("ids", field, f"is {item!r} and no token{limit}", index=index)
    return cast("list[int]", ids)


def as_logprobs(values: Sequence[object], field: str) -> list[float]:
    """Log-probs of sampled tokens: finite, above the floor, at most 0."""
    found: list[float] = []
    for index, item in enumerate(values):
        if isinstance(item, bool) or not isinstance(item, (int, float)):
            raise RefusedReply("logprobs", field, f"is {_kind(item)}, no number", index=index)
        if item <= FLOOR:
            raise RefusedReply(
                "logprobs",
                field,
                f"is {str(item)[:24]}: minus infinity in a server's words, which no sample has",
                index=index,
            )
        if item > SLACK or not math.isfinite(item):
            raise RefusedReply(
                "logprobs", field, f"is {str(item)[:24]}, no log-probability", index=index
            )
        found.append(min(float(item), 0.0))
    return found


def same_length(field: str, found: int, other: str, expected: int) -> None:
    """Two things that are of the same tokens are equally many."""
    if found != expected:
        raise RefusedReply("lengths", field, f"has {found} entries for {expected} of {other}")


def same_ids(field: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Two lists name the same tokens."""
    same_length(field, len(found), "token ids", len(expected))
    index = first_difference(found, expected)
    if index is not None:
        raise RefusedReply(
            "ids", field, f"names token {found[index]}, and it is {expected[index]}", index=index
        )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two lists begin to differ, the end of the shorter one included; None if nowhere.

    Example: first_difference([1, 2], [1, 2, 3]) == 2.
    """
    if list(one) == list(other):
        return None
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def as_finish_reason(value: object, field: str) -> str:
    """A finish reason that is known, in lower case."""
    reason = value.lower() if isinstance(value, str) else value
    if reason not in FINISHED:
        known = ", ".join(FINISHED)
        raise RefusedReply("finish_reason", field, f"is {value!r}, none of {known}")
    return cast("str", reason)
