"""The frame of every section of a report. Pure."""

from __future__ import annotations

from dataplane.report.markup import Markup, tag


def card(title: str, says: str, body: Markup | None, missing: str, *, wide: bool = False) -> Markup:
    """A section with its heading and a line that says how to read it."""
    return tag(
        "section",
        tag("h2", title),
        tag("p", says if body is not None else missing, class_="says"),
        body if body is not None else Markup(""),
        class_="card wide-card" if wide else "card",
    )
