"""Names, values and amounts as a message shows them: ASCII, on one line, short. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from dataplane.errors import quote

MAX_CHARS = 120
"""Characters of one piece of a message."""
MAX_NAME = 80
ITEMS = 5
"""Items of a list that are shown."""


def short(text: str, limit: int = MAX_CHARS) -> str:
    """The text in ASCII, cut where it is too long."""
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quoted(name: object) -> str:
    """A name in quotation marks, with everything escaped that is not plain."""
    return short(quote([name]), MAX_NAME)


def named(tag: str) -> str:
    """A tag's name, in quotation marks only if it is no plain word."""
    return tag if len(tag) <= 64 and tag.isascii() and tag.isidentifier() else quoted(tag)


def shown(value: object) -> str:
    """A tag's value, of which little is shown if it is long."""
    if isinstance(value, str):
        return quoted(value[:MAX_CHARS])
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[object]", value)
        texts = [shown(item) for item in items[:ITEMS]]
        if len(items) > ITEMS:
            texts.append(f"and {len(items) - ITEMS} more")
        return f"[{', '.join(texts)}]"
    return "a map" if isinstance(value, dict) else repr(value)


def size(nbytes: int) -> str:
    """Bytes as a person reads them.

    Example: `512 bytes`, `11.5 MiB`.
    """
    if nbytes < 1024:
        return many(nbytes, "byte")
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def many(count: int, what: str) -> str:
    """So many of something.

    Example: `1 row`, `3 rows`.
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


def without(fields: Collection[str]) -> str:
    """Which fields a row lacks."""
    names = ", ".join(map(quoted, list(fields)[:3]))
    return f"without {names}" + (f" and {len(fields) - 3} more" if len(fields) > 3 else "")
