"""Which weights made which token, as servers say it.

Owns the labels of weights and their spans over a completion. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from agentloop.engines.shapes.checks import RefusedReply, as_count, as_list, as_map

_LABEL: Final = re.compile(
    r"(?:[A-Za-z_]*[^0-9A-Za-z]|v|step|version)?([0-9]{1,18})", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a completion, and the label of the weights that made them."""

    label: object
    start: int
    end: int


def version_of(label: object) -> int | None:
    """The policy version that a server's label of its weights names; None if it names none.

    Labels are free text: only a number, alone or behind a word, counts.
    Example: version_of("120") == version_of("v120") == version_of("weights@120") == 120;
    version_of("default") is None.
    """
    if isinstance(label, int) and not isinstance(label, bool):
        return label if 0 <= label < 10**18 else None
    found = _LABEL.fullmatch(label.strip()) if isinstance(label, str) else None
    return int(found[1]) if found else None


def as_spans(value: object, field: str) -> list[Span] | None:
    """The spans that a reply holds; None if it holds none."""
    if value is None:
        return None
    spans: list[Span] = []
    for index, item in enumerate(as_list(value, field)):
        span = as_map(item, f"{field}[{index}]")
        start = as_count(span.get("start"), f"{field}[{index}].start")
        end = as_count(span.get("end"), f"{field}[{index}].end")
        if start is None or end is None:
            raise RefusedReply("versions", field, "has no start or no end", index=index)
        spans.append(Span(span.get("version"), start, end))
    return spans


def per_token(spans: list[Span], count: int, field: str, *, fallback: int) -> list[int]:
    """The version of each of `count` tokens. `fallback` stands where a label names no version.

    Raises:
        RefusedReply: the spans leave a gap, overlap or end elsewhere, or a version goes down.
    """
    versions: list[int] = []
    for index, span in enumerate(spans):
        if span.start != len(versions) or span.end < span.start:
            raise RefusedReply(
                "versions",
                field,
                f"is of tokens {span.start} to {span.end} where {len(versions)} follows",
                index=index,
            )
        if span.end > count:  # before memory is taken for it
            raise RefusedReply(
                "versions", field, f"ends at token {span.end}, and there are {count}", index=index
            )
        named = version_of(span.label)
        version = fallback if named is None else named
        if versions and version < versions[-1]:
            raise RefusedReply(
                "versions", field, f"goes down from {versions[-1]} to {version}", index=index
            )
        versions += [version] * (span.end - span.start)
    if len(versions) != count:
        what = f"ends at token {len(versions)}, and there are {count}"
        raise RefusedReply("versions", field, what)
    return versions
