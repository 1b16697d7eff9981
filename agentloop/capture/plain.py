"""What of JSON from outside may be kept: what tags and fields of a plane can carry. Pure.

JSON has numbers of any size, and texts that are no Unicode. They are refused where they come in,
and not when a run has ended and nothing can be mended any more.
"""

from __future__ import annotations

import math
from typing import Any, Final, cast

MAX_DEPTH: Final = 32
"""Of objects and arrays within each other."""

_INTS: Final = range(-(1 << 63), 1 << 63)


def what_is_not_plain(value: object) -> str | None:
    """Why a value cannot be kept; None if it can.

    Example: of {"a": [1 << 70]} it is "a number of more than 64 bits".
    """
    left: list[tuple[object, int]] = [(value, 0)]
    while left:
        item, depth = left.pop()
        if isinstance(item, str):
            if not _is_unicode(item):
                return "a text with half a character (a lone surrogate)"
        elif isinstance(item, bool) or item is None:
            continue
        elif isinstance(item, int):
            if item not in _INTS:
                return "a number of more than 64 bits"
        elif isinstance(item, float):
            if not math.isfinite(item):
                return "a number that is not finite"
        elif depth >= MAX_DEPTH:
            return f"more than {MAX_DEPTH} levels of objects and arrays"
        elif isinstance(item, dict):
            entries = cast("dict[Any, Any]", item)
            left += [(part, depth + 1) for entry in entries.items() for part in entry]
        else:
            left += [(part, depth + 1) for part in cast("list[Any]", item)]
    return None


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
