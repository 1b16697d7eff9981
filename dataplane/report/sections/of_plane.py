"""The sections about a plane: groups, lengths of rows, lag, bytes, waits and traffic. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from dataplane.cli.shown import age_text, bytes_text, short
from dataplane.report.chart import (
    Line,
    Points,
    bar_rows,
    clock,
    column_chart,
    histogram,
    line_chart,
    percent,
    plain,
)
from dataplane.report.data import Data
from dataplane.report.markup import Markup, joined, tag
from dataplane.report.sections.card import card
from dataplane.report.timeline import longest, timeline

MAX_LINES: Final = 6
MAX_WAITS: Final = 10


def groups(data: Data) -> Markup:
    """The timeline."""
    plane = data.plane
    body = None
    if plane is not None and plane.groups:
        body = joined(
            timeline(plane.groups, data.begin_s, plane.at_s),
            tag("h3", "Those that took longest"),
            longest(plane.groups, plane.at_s),
        )
        left = plane.groups_left_out
        if left or plane.gone:
            why = f"{left:,} older groups are left out" if left else "Older groups may be missing"
            body = joined(
                body, tag("p", f"{why}: the plane remembers its last requests.", class_="note")
            )
    return card(
        "Timeline of groups",
        "A bar is a group, from its begin to its clear; its colours say what it was waiting for.",
        body,
        "No group is remembered: none was begun, or the plane keeps no lineage.",
        wide=True,
    )


def lengths(data: Data) -> Markup:
    """How long rows were."""
    missing = "No row with lengths in its tags is remembered."
    says = "Tokens of the last rows that the plane remembers, by how many rows."
    found = {} if data.plane is None else data.plane.lengths
    if not found:
        return card("Lengths", says, None, missing, wide=True)
    partition_id = "train" if "train" in found else max(found, key=lambda p: _count(found[p]))
    parts: list[Markup] = []
    for name, title, color in (
        ("prompt_len", "Prompt", 6), ("response_len", "Response", 1), ("seq_len", "Sequence", 4),
    ):  # fmt: skip
        values = found[partition_id].get(name)
        if not values:
            continue
        ordered = sorted(values)
        p50, p99 = (ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.5, 0.99))
        said = f"median {p50:,}, p99 {p99:,}, longest {ordered[-1]:,}"
        chart = column_chart(
            f"{title} lengths", histogram(values), ["rows"], [color], "tokens", show_y=plain,
            show_x=lambda x: f"{x:,.0f}", whole_x=True, width=430,
        )  # fmt: skip
        parts.append(tag("div", tag("h3", title), tag("p", said, class_="note"), chart))
    if not parts:
        return card("Lengths", says, None, missing, wide=True)
    rows = _count(found[partition_id])
    told = f"Tokens of the last {rows:,} rows of {short(partition_id, 40)}, by how many rows."
    return card("Lengths", told, tag("div", *parts, class_="three"), "", wide=True)


def lag(data: Data) -> Markup:
    """How far tasks are behind."""
    body = None
    if data.plane is not None:
        samples, begin = data.plane.samples, data.begin_s
        lines: list[Line] = []
        most = sorted(samples.lags, key=lambda each: -max((v or 0) for v in [*each[2], 0]))
        for partition_id, task, values in most[:MAX_LINES]:
            points = [
                (at - begin, value)
                for at, value in zip(samples.times_s, values, strict=False)
                if value is not None
            ]
            if points:
                label = f"{short(task, 30)} in {short(partition_id, 30)}"
                lines.append(Line(label, points, len(lines) + 1))
        if lines:
            body = line_chart(
                "Lag of tasks",
                lines,
                "time",
                times=True,
                show_x=clock,
                show_y=plain,
                reach=1,
                named=True,
            )
    return card(
        "Lag of tasks", "Rows that are there and that a task has not committed.", body,
        "No task has claimed anything.",
    )  # fmt: skip


def memory(data: Data) -> Markup:
    """Bytes over time."""
    used, held = data.column("used_bytes"), data.column("held_bytes")
    body = None
    says = "Bytes of rows, values and tags, at their most in each stretch of time."
    if used and data.plane is not None:
        capacity = data.plane.capacity_bytes
        most = max(v for _, v in used)
        if capacity:
            share = percent(most / capacity)
            says += f" At most {bytes_text(most)}, which is {share} of {bytes_text(capacity)}."
        lines = [Line("used", used, 1, area=True)]
        if any(v for _, v in held):
            lines.append(Line("reserved for groups", held, 2))
        body = line_chart(
            "Bytes over time", lines, "time", times=True, show_x=clock, show_y=_bytes, base=2,
            limit=("capacity", float(capacity)) if capacity else None,
        )  # fmt: skip
    return card("Bytes", says, body, "The plane was not asked.")


def waiting(data: Data) -> Markup:
    """How many waited, over time."""
    lines = [
        Line(label, points, color)
        for label, points, color in (
            ("for rows", data.column("waiting_rows"), 1),
            ("for a claim", data.column("waiting_claims"), 3),
            ("for room", data.column("waiting_room"), 5),
            ("open groups", data.column("open_groups"), 8),
        )
        if any(v for _, v in points)
    ]  # fmt: skip
    body = None
    if lines:
        body = line_chart(
            "Waiting requests over time",
            lines,
            "time",
            times=True,
            show_x=clock,
            reach=1,
            named=True,
        )
    return card(
        "Waiting requests", "How many requests waited at once, and how many groups were open.",
        body,
        "Nobody was seen waiting, and no group was open when the plane was looked at.",
    )  # fmt: skip


def traffic(data: Data) -> Markup:
    """Rows a second."""
    lines = [
        Line(label, rates, color)
        for label, rates, color in (
            ("put", _rates(data.column("rows_put")), 1),
            ("got", _rates(data.column("rows_got")), 3),
            ("cleared", _rates(data.column("rows_cleared")), 8),
        )
        if any(v for _, v in rates)
    ]  # fmt: skip
    body = None
    if lines:
        body = line_chart("Rows a second", lines, "time", times=True, show_x=clock, show_y=plain)
    return card(
        "Rows a second", "Rows that were put, looked up to be read, and cleared.", body,
        "Nothing was put while the plane was looked at.",
    )  # fmt: skip


def waits(data: Data) -> Markup:
    """Who waited for what, and how long."""
    found = [] if data.plane is None else data.plane.samples.waits[:MAX_WAITS]
    body = None
    if found:
        most = max(each.waited_s for each in found) or 1.0
        what = {"rows": "rows", "claim": "a claim", "room": "room", "changes": "changes"}
        color = {"rows": 1, "claim": 3, "room": 5}
        body = bar_rows([
            (
                f"{what.get(each.kind, each.kind)} in {short(each.partition_id, 30)}"
                + (f" ({short(each.what, 60)})" if each.what else ""),
                short(each.label, 48),
                each.waited_s / most,
                age_text(each.waited_s),
                color.get(each.kind, 8),
            )
            for each in found
        ])  # fmt: skip
    return card(
        "Who waited for what",
        "Counted once a second: shorter waits are seen now and then, longer ones for certain.",
        body, "Nobody was seen waiting.", wide=True,
    )  # fmt: skip


def _rates(points: Points) -> Points:
    """What grows, by the second."""
    return [
        (x2, max(0.0, y2 - y1) / (x2 - x1)) for (x1, y1), (x2, y2) in pairwise(points) if x2 > x1
    ]


def _count(by_name: dict[str, list[int]]) -> int:
    return max((len(values) for values in by_name.values()), default=0)


def _bytes(value: float) -> str:
    return bytes_text(value).replace(".0 ", " ")
