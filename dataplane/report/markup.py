"""Elements of a page, made so that nothing in the data can become one. Pure.

Text is escaped unless it is `Markup`, which only this package makes; what does not print as itself
(control characters, marks that turn the direction of writing) is written out.
"""

from __future__ import annotations

from html import escape
from typing import Final

from dataplane.cli.shown import short, visible

MAX_TEXT: Final = 200
"""Letters of one text: the page stays small whatever it is told."""

_EMPTY: Final = frozenset({"meta", "br", "col", "hr"})


class Markup(str):
    """Text that is HTML or SVG already."""

    __slots__ = ()


def shown(text: str, most: int = MAX_TEXT) -> Markup:
    """Text as it is shown: escaped, on one line, and not too long."""
    return Markup(escape(short(visible(text[: 4 * most]), most)))


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """An element. Of attribute names a last `_` falls away and `_` stands for `-`; None is left
    out."""
    said = "".join(
        f' {_name(key)}="{_value(value)}"' for key, value in attributes.items() if value is not None
    )
    if name in _EMPTY:
        return Markup(f"<{name}{said}>")
    inner = "".join(each if isinstance(each, Markup) else shown(each) for each in children)
    return Markup(f"<{name}{said}>{inner}</{name}>")


def joined(*parts: str) -> Markup:
    """Parts one after the other; what is no `Markup` is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else shown(part) for part in parts))


def _name(key: str) -> str:
    return "viewBox" if key == "viewBox" else key.removesuffix("_").replace("_", "-")


def _value(value: str | float) -> str:
    if isinstance(value, Markup):
        return value
    if isinstance(value, str):
        return shown(value, 2000)
    return number(value)


def number(value: float) -> str:
    """A number of a drawing: a tenth of a pixel is enough."""
    return f"{value:.1f}".removesuffix(".0")
