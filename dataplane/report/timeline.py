"""The timeline of groups: a bar a group, in as many lanes as there were groups at once. Pure.

A bar's parts say what the group waited for: its rows, a consumer, the training step. Of
thousands the newest are drawn; those that took longest are listed by name.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

from dataplane.cli.shown import age_text, short
from dataplane.report.chart import Frame, bar_rows, clock, drawing, legend, time_ticks
from dataplane.report.markup import Markup, joined, tag
from dataplane.report.record import GroupLife

WIDTH: Final = 1310
MAX_BARS: Final = 900
MAX_LANES: Final = 40
LEAST_S: Final = 1e-3

PRODUCED, ASIDE, USED, BAD, OPEN = 1, 8, 3, 5, 2
"""Colours of the parts of a bar."""
NAMES: Final = (
    ("being produced", PRODUCED), ("whole, unclaimed", ASIDE), ("claimed until cleared", USED),
    ("ended badly", BAD), ("still open", OPEN),
)  # fmt: skip


def timeline(groups: Sequence[GroupLife], begin_s: float, end_s: float) -> Markup:
    """The timeline, of each partition by itself; times count from `begin_s`."""
    drawn = _chosen(groups)
    by_partition: dict[str, list[GroupLife]] = {}
    for group in drawn:
        by_partition.setdefault(group.partition_id, []).append(group)
    parts: list[Markup] = []
    y, hidden = 8.0, len(groups) - len(drawn)
    since, until = drawn[0].begun_s, max(_until(group, end_s) for group in drawn)
    window = (since - begin_s, max(until, since + LEAST_S) - begin_s)
    frame = Frame(window, (0.0, 1.0), width=WIDTH, left=8)
    for partition_id, those in sorted(by_partition.items(), key=lambda item: item[1][0].begun_s):
        lanes, left = _lanes(those, end_s)
        hidden += left
        tall = 14.0 if len(lanes) <= 4 else 9.0 if len(lanes) <= 16 else 5.0
        count = f"{len(those)} groups" if len(those) > 1 else "1 group"
        parts.append(
            tag("text", f"{short(partition_id, 40)}: {count}", class_="part", x=8, y=y + 13)
        )
        y += 22
        for lane in lanes:
            for group in lane:
                parts += _bar(frame, group, begin_s, end_s, y, tall - 1.2)
            y += tall
        y += 14
    height = y + 30
    axis = _axis(frame, height)
    said = f"{len(drawn)} of {len(groups)} groups; times in seconds since the plane began"
    note = Markup("")
    if hidden:
        note = tag("p", f"{hidden:,} groups are not drawn: the newest are.", class_="note")
    used = {color for group in drawn for color, _, _ in spans(group, end_s)}
    keys = legend([(name, color) for name, color in NAMES if color in used])
    picture = drawing(
        "Timeline of groups", said, joined(axis, *parts), width=WIDTH, height=height, class_="wide"
    )
    return joined(keys, picture, note)


def longest(groups: Sequence[GroupLife], end_s: float, most: int = 6) -> Markup:
    """The groups that took longest from begin to clear, by name."""
    chosen = sorted(groups, key=lambda g: g.begun_s - _until(g, end_s))[:most]
    took = [max(0.0, _until(group, end_s) - group.begun_s) for group in chosen]
    return bar_rows([
        (
            short(group.uid, 48),
            f"{short(group.partition_id, 40)}, {short(group.status, 20)}: {group.rows} rows of "
            f"{group.sessions} sessions",
            span / (took[0] or 1.0),
            age_text(span),
            OPEN if group.is_open else PRODUCED if group.status == "finished" else BAD,
        )
        for group, span in zip(chosen, took, strict=True)
    ])  # fmt: skip


def _until(group: GroupLife, end_s: float) -> float:
    """Where its bar ends."""
    return spans(group, end_s)[-1][2]


def _axis(frame: Frame, height: float) -> Markup:
    """Lines at round times from top to bottom."""
    parts: list[Markup] = []
    for at in time_ticks(frame.x_from, frame.x_to, 8):
        x = frame.x(at)
        parts.append(tag("line", class_="grid", x1=x, x2=x, y1=0, y2=height - 24))
        if x < WIDTH - 40:
            parts.append(
                tag(
                    "text",
                    clock(at),
                    class_="tick mid" if at else "tick",
                    x=x,
                    y=height - 6,
                )
            )
    return joined(*parts)


def spans(group: GroupLife, end_s: float) -> list[tuple[int, float, float]]:
    """The parts of a group's bar: colour, from, to."""
    if group.is_open:
        return [(OPEN, group.begun_s, end_s)]
    gone = group.cleared_s if group.cleared_s is not None else end_s
    ended = group.ended_s if group.ended_s is not None else gone
    if group.status not in ("finished", "running"):
        return [(BAD, group.begun_s, max(ended, group.begun_s))]
    found = [(PRODUCED, group.begun_s, ended)]
    claimed = group.claimed_s
    if claimed is None:
        return [*found, (ASIDE, ended, gone)]
    return [*found, (ASIDE, ended, max(claimed, ended)), (USED, max(claimed, ended), gone)]


def _chosen(groups: Sequence[GroupLife]) -> list[GroupLife]:
    """The newest, and all that are open, by begin."""
    by_begin = sorted(groups, key=lambda g: (g.is_open, g.begun_s))
    return sorted(by_begin[-MAX_BARS:], key=lambda g: g.begun_s)


def _lanes(groups: Sequence[GroupLife], end_s: float) -> tuple[list[list[GroupLife]], int]:
    """Groups such that no two of a lane overlap, and how many found none."""
    lanes: list[list[GroupLife]] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    left = 0
    for group in groups:
        while busy and busy[0][0] <= group.begun_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        elif len(lanes) < MAX_LANES:
            lane = len(lanes)
            lanes.append([])
        else:
            left += 1
            continue
        lanes[lane].append(group)
        heapq.heappush(busy, (spans(group, end_s)[-1][2], lane))
    return lanes, left


def _bar(
    frame: Frame, group: GroupLife, begin_s: float, end_s: float, y: float, tall: float
) -> list[Markup]:
    title = tag("title", _said(group, begin_s))
    parts: list[Markup] = []
    for color, since, until in spans(group, end_s):
        x = frame.x(since - begin_s)
        wide = frame.x(until - begin_s) - x
        if wide > 0.3 or color in (PRODUCED, BAD, OPEN):
            parts.append(
                tag("rect", class_=f"f{color}", x=x, y=y, width=max(1.2, wide), height=tall)
            )
    return [tag("g", title, *parts)]


def _said(group: GroupLife, begin_s: float) -> str:
    words = [
        f"{short(group.uid, 48)} ({group.status}): {group.rows} rows of {group.sessions} sessions"
    ]
    for name, at in (
        ("begun", group.begun_s), ("first row", group.first_row_s), ("ended", group.ended_s),
        ("claimed", group.claimed_s), ("committed", group.committed_s),
        ("cleared", group.cleared_s),
    ):  # fmt: skip
        if at is not None:
            words.append(f"{name} {at - begin_s:.2f} s")
    return ", ".join(words)
