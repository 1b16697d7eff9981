"""The page: head, key figures, sections, in one file that asks for nothing else.

No script, no font and no picture from elsewhere: a policy in the page forbids it besides.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from dataplane.cli.shown import age_text, short
from dataplane.report.data import Data
from dataplane.report.figures import figures
from dataplane.report.markup import Markup, joined, tag
from dataplane.report.record import PlaneRecord
from dataplane.report.run_record import RunRecord
from dataplane.report.sections import sections
from dataplane.report.style import STYLE

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(run: RunRecord | None, plane: PlaneRecord | None, *, made_at_s: float) -> str:
    """The report of a run, of a plane, or of a run and its plane, as an HTML document."""
    data = Data(run, plane)
    name = run.name if run is not None else plane.name if plane is not None else "nothing"
    title = f"{short(name, 60)}: report"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        Markup(f"<style>{STYLE}</style>"),
    )
    body = tag(
        "body",
        tag("header", tag("h1", short(name, 60)), _facts(data, made_at_s)),
        tag("main", _figures(data), sections(data)),
        tag("footer", f"Made by dataplane at {_date(made_at_s)}."),
    )
    return f'<!DOCTYPE html>\n<html lang="en">{head}{body}</html>\n'


def _facts(data: Data, made_at_s: float) -> Markup:
    facts: list[tuple[str, str]] = []
    run, plane = data.run, data.plane
    if run is not None:
        if run.run_id:
            facts.append(("run", run.run_id))
        if run.steps:
            facts.append(("last step", _date(run.steps[-1].time_s)))
    if plane is not None:
        facts.append(("plane", f"{short(plane.name, 40)} ({plane.plane_id})"))
        facts.append(("plane up", f"{age_text(plane.uptime_s)}, until {_date(plane.at_s)}"))
        facts.append(
            (
                "stores, clients",
                f"{plane.status.get('stores', 0)}, {plane.status.get('clients', 0)}",
            )
        )
        if run is None:
            facts.append(("version", plane.version))
    if run is not None and run.versions:
        facts.append(("versions", ", ".join(f"{n} {v}" for n, v in run.versions.items())))
    return tag(
        "dl",
        *(tag("div", tag("dt", name), tag("dd", text)) for name, text in facts),
        class_="facts",
    )


def _figures(data: Data) -> Markup:
    found = figures(data)
    if not found:
        return tag("p", "There is nothing to tell yet.", class_="says")
    return tag(
        "ul",
        *(
            tag("li", tag("span", name), tag("strong", value), tag("small", more))
            for name, value, more in found
        ),
        class_="figures",
        style=f"--n:{_columns(len(found))}",
        aria_label="key figures",
    )


def _columns(count: int) -> int:
    """Such that rows of at most eight are about equally full."""
    rows = -(-count // 8)
    return -(-count // rows)


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


__all__ = ["joined", "page"]
