"""One value as a person reads it: text that cannot play with a terminal, sizes, spans, numbers.

Nothing here is for programs to read: JSON and YAML carry values as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final

ABSENT: Final = "-"
"""Stands where a row has no such value."""

NOT_TOLD: Final = "(not told)"
"""Stands where a gateway keeps who it is to itself."""

_SPANS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))
_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB")
BARS: Final = " ▏▎▍▌▋▊▉█"
COLUMNS: Final = "▁▂▃▄▅▆▇█"


def visible(text: str) -> str:
    """The text on one line, with whatever does not print as itself written out: control
    characters, escape sequences, marks that turn the direction of writing, line ends."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _written(letter) for letter in text)


def client_text(label: str, client_id: str) -> str:
    """A client as a line names it: where it runs, or else its id. A gateway tells neither to who
    may not operate."""
    return visible(label or client_id or NOT_TOLD)


def visible_lines(text: str) -> str:
    """The same of a message of ours with several lines, which stay lines."""
    return "\n".join(visible(line) for line in text.split("\n"))


def short(text: str, width: int) -> str:
    """The text, cut in its middle where it is longer."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def bytes_text(size: float | None) -> str:
    """A size: `512 B`, `4.0 KiB`, `1.5 GiB`."""
    if size is None:
        return ABSENT
    if abs(size) < 1024:
        return f"{size:.0f} B"
    unit = 0
    size /= 1024
    while abs(size) >= 1023.95 and unit < len(_UNITS) - 1:
        unit += 1
        size /= 1024
    return f"{size:.1f} {_UNITS[unit]}"


def age_text(seconds: float | None) -> str:
    """A span of time: `40 ms`, `1.5 s`, `12 min`, `3.2 h`, `8 d`."""
    if seconds is None:
        return ABSENT
    if seconds < 0.0995:
        return f"{max(seconds, 0.0) * 1000:.0f} ms"
    for size, unit in _SPANS:
        if seconds >= (100.0 if unit == "min" else size):
            return f"{_tenths(seconds / size)} {unit}"
    return f"{_tenths(seconds)} s"


def _tenths(count: float) -> str:
    """A small number to a tenth, a larger one whole."""
    return f"{count:.1f}".removesuffix(".0") if count < 9.95 else f"{count:.0f}"


def count_text(count: float | None) -> str:
    """A number of things: `950`, `12,345`."""
    return ABSENT if count is None else f"{count:,.0f}"


def share_text(part: float, whole: float) -> str:
    """A share in percent: `12 %`."""
    return ABSENT if not whole else f"{100 * part / whole:.0f} %"


def rate_text(per_s: float | None) -> str:
    """How many a second: `0.5/s`, `1,250/s`."""
    if per_s is None:
        return ABSENT
    return f"{per_s:,.0f}/s" if per_s >= 9.95 or not per_s else f"{per_s:.1f}/s"


def value_text(value: Any) -> str:
    """A tag or another small value on one line."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    if isinstance(value, (dict, list, tuple)):
        return visible(json.dumps(value, ensure_ascii=False, default=str))
    return visible(str(value))


def sparkline(counts: Sequence[float]) -> str:
    """Numbers as a line of small columns, the largest as high as a letter."""
    most = max(counts, default=0.0)
    if most <= 0:
        return COLUMNS[0] * len(counts)
    return "".join(COLUMNS[min(int(count / most * 8), 7)] for count in counts)


def bar(share: float, width: int) -> str:
    """A bar as long as the share of the width, in eighths of a letter."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (BARS[rest] if rest else "")).ljust(width)


def histogram(bins: Sequence[Sequence[float]], width: int) -> list[str]:
    """Lines that show how many rows lie in each bin of [low, high, rows]."""
    if not bins:
        return []
    most = max(rows for _, _, rows in bins) or 1
    names = [f"{low:,.0f} to {high:,.0f}" for low, high, _ in bins]
    counts = [count_text(rows) for _, _, rows in bins]
    wide, wide_counts = max(map(len, names)), max(map(len, counts))
    room = max(width - wide - wide_counts - 4, 8)
    return [
        f"{name.rjust(wide)}  {count.rjust(wide_counts)}  {_column(rows / most, room)}".rstrip()
        for name, count, (_, _, rows) in zip(names, counts, bins, strict=True)
    ]


def _column(share: float, width: int) -> str:
    """A bar that is seen if there is anything at all."""
    return bar(max(share, 1 / (8 * width)) if share else 0.0, width)


def _written(letter: str) -> str:
    code = ord(letter)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
