"""Names on the command line: several in one option, and how they print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dataplane.cli.shown import short, visible
from dataplane.errors import InvalidRequest


def names_of(texts: Sequence[str] | None, option: str) -> list[str] | None:
    """The names that an option gives, separated by commas or in several options; None without it.

    InvalidRequest for an empty one.
    """
    if not texts:
        return None
    names = [name for text in texts for name in text.split(",")]
    if "" in names:
        raise InvalidRequest(f"{option} {','.join(texts)!r:.80} has an empty name in it")
    return list(dict.fromkeys(names))


def listed(names: Iterable[str], limit: int = 5, width: int = 60) -> str:
    """The first few names on one line, each cut where it is long, and that there are more."""
    shown: list[str] = []
    for name in names:
        if len(shown) == limit:
            shown.append("…")
            break
        shown.append(short(visible(name), width))
    return ", ".join(shown)
