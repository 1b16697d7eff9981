"""Charts as SVG: lines, columns, bars. Pure.

A chart is as wide as its card and keeps its proportions. Colours are classes (`c1` to `c6`), so
that the page's two schemes can have their own. What a chart shows is said in its title and
description too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from dataplane.cli.shown import age_text
from dataplane.report.markup import Markup, joined, number, shown, tag

WIDTH: Final = 640
HEIGHT: Final = 250
LEFT: Final = 62
RIGHT: Final = 14
TOP: Final = 12
BOTTOM: Final = 34
MAX_POINTS: Final = 600
"""Of a line; of more, the lowest and highest of each stretch are drawn."""

Show = Callable[[float], str]
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart, or the area under it."""

    label: str
    points: Points
    color: int
    area: bool = False
    dots: bool = False
    dashed: bool = False
    band: tuple[Points, Points] | None = None
    """The lower and the upper edge of what is shaded around it."""


def plain(value: float) -> str:
    """A number as axes have it: at most four digits."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{value:.4g}"


def clock(seconds: float) -> str:
    """A time since the begin: `15 s`, `2:30`, `1:02:30`."""
    if seconds < 60 or seconds != int(seconds):
        return age_text(seconds) if seconds else "0"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(value: float) -> str:
    """A share."""
    return f"{100 * value:.3g} %"


def ticks(low: float, high: float, most: int = 5, *, base: int = 10) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` + 1 of them; to base 2 they are round in
    KiB, MiB and so on."""
    if not high > low:
        return [low]
    step = float(base) ** math.floor(math.log((high - low) / most, base))
    for factor in (1, 2, 2.5, 5, 10, 20) if base == 10 else (1, 2, 4):
        if (high - low) / (step * factor) <= most:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


SPANS_S: Final = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
)  # fmt: skip
"""Between two ticks of an axis of seconds, as clocks have it."""


def time_ticks(low_s: float, high_s: float, most: int = 6) -> list[float]:
    """Round times between two, in seconds."""
    step: int = next((span for span in SPANS_S if (high_s - low_s) / span <= most), 0)
    if not step or high_s - low_s < SPANS_S[0] * 2:
        return ticks(low_s, high_s, most)
    return [float(n * step) for n in range(math.ceil(low_s / step), int(high_s // step) + 1)]


def thinned(points: Points, most: int = MAX_POINTS) -> Points:
    """At most about `most` points, extremes kept."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 2))
    kept: list[tuple[float, float]] = []
    for at in range(0, len(points), size):
        some = points[at : at + size]
        low, high = min(some, key=lambda p: p[1]), max(some, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept


class Frame:
    """The coordinates of a chart: what is drawn where, and its axes."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        width: float = WIDTH,
        height: float = HEIGHT,
        left: float = LEFT,
    ) -> None:
        self.left = left
        self.x_from, self.x_to = x if x[1] > x[0] else (x[0] - 0.5, x[0] + 0.5)
        self.y_from, self.y_to = y if y[1] > y[0] else (y[0], y[0] + 1)
        self.width, self.height = width, height

    def x(self, value: float) -> float:
        """Where a value of the horizontal axis is."""
        share = (value - self.x_from) / (self.x_to - self.x_from)
        return self.left + share * (self.width - self.left - RIGHT)

    def y(self, value: float) -> float:
        """Where a value of the vertical axis is."""
        share = (value - self.y_from) / (self.y_to - self.y_from)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)

    def axes(
        self,
        x_name: str,
        show_x: Show = plain,
        show_y: Show = plain,
        *,
        whole_x: bool = False,
        base: int = 10,
        times: bool = False,
    ) -> Markup:
        """Lines of the grid, numbers at them, and the name of the horizontal axis."""
        parts: list[Markup] = []
        for value in ticks(self.y_from, self.y_to, 4, base=base):
            y = self.y(value)
            parts.append(tag("line", class_="grid", x1=LEFT, x2=self.width - RIGHT, y1=y, y2=y))
            parts.append(tag("text", show_y(value), class_="tick end", x=LEFT - 8, y=y + 4))
        marks = ticks(self.x_from, self.x_to, 6)
        if times:
            marks = time_ticks(self.x_from, self.x_to)
        if whole_x:
            marks = [mark for mark in marks if mark == int(mark)]
        room = self.width - RIGHT - 8 * len(x_name) - 12
        for value in marks:
            x = self.x(value)
            if x < room:
                text = show_x(value)
                parts.append(tag("text", text, class_="tick mid", x=x, y=self.height - BOTTOM + 18))
        name_y = self.height - BOTTOM + 18
        parts.append(tag("text", x_name, class_="tick end name", x=self.width - RIGHT, y=name_y))
        foot = self.y(max(0.0, self.y_from) if self.y_from <= 0 <= self.y_to else self.y_from)
        parts.append(tag("line", class_="axis", x1=LEFT, x2=self.width - RIGHT, y1=foot, y2=foot))
        return joined(*parts)

    def path(self, points: Points, *, back: Points = ()) -> Markup:
        """The way along points, and back along others."""
        way = [f"{number(self.x(x))} {number(self.y(y))}" for x, y in [*points, *reversed(back)]]
        return Markup("M" + "L".join(way) + ("Z" if back else ""))


def drawing(
    title: str, description: str, body: str, *, width: float = WIDTH, height: float = HEIGHT,
    class_: str = "chart",
) -> Markup:  # fmt: skip
    """A picture with what it shows in words, for who does not see it."""
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        body,
        class_=class_,
        viewBox=Markup(f"0 0 {number(width)} {number(height)}"),
        role="img",
        aria_label=f"{title}: {description}",
        preserveAspectRatio="xMidYMid meet",
    )


def legend(entries: Sequence[tuple[str, int]]) -> Markup:
    """Which colour is what."""
    return tag(
        "ul",
        *(
            tag("li", tag("i", class_=f"key b{color}"), tag("span", label))
            for label, color in entries
        ),
        class_="legend",
    )


def line_chart(
    title: str,
    lines: Sequence[Line],
    x_name: str,
    *,
    show_x: Show = plain,
    show_y: Show = plain,
    reach: float | None = None,
    limit: tuple[str, float] | None = None,
    whole_x: bool = False,
    base: int = 10,
    times: bool = False,
    named: bool = False,
) -> Markup:
    """Lines over one axis.

    `reach`: up to where the vertical axis goes at least; `limit`: a level that is drawn if it is
    not far above everything; `times`: the horizontal axis is seconds; `named`: a single line has
    its legend too."""
    lines = [line for line in lines if line.points]
    edges = [edge for line in lines if line.band for edge in line.band]
    every = [point for points in [*(line.points for line in lines), *edges] for point in points]
    xs, ys = [x for x, _ in every], [y for _, y in every]
    low, high = min(0.0, *ys), max(0.0, *ys, reach if reach is not None else -math.inf)
    drawn_limit = limit if limit is not None and limit[1] <= 4 * max(ys) else None
    if drawn_limit:
        high = max(high, drawn_limit[1])
    frame = Frame((min(xs), max(xs)), (low, high + 0.06 * (high - low)))
    parts: list[Markup] = [
        frame.axes(x_name, show_x, show_y, whole_x=whole_x, base=base, times=times)
    ]
    for line in lines:
        parts.append(_line(frame, line, show_x, show_y, x_name))
    if drawn_limit:
        y = frame.y(drawn_limit[1])
        parts.append(tag("line", class_="limit", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
    said = "; ".join(
        f"{line.label} from {show_y(line.points[0][1])} to {show_y(line.points[-1][1])}, at most "
        f"{show_y(max(y for _, y in line.points))}"
        for line in lines
    )
    entries = [(line.label, line.color) for line in lines]
    if drawn_limit:
        entries.append((f"{drawn_limit[0]} {show_y(drawn_limit[1])}", 9))
    keys = legend(entries) if named or len(entries) > 1 else Markup("")
    return joined(keys, drawing(title, said, joined(*parts)))


def _line(frame: Frame, line: Line, show_x: Show, show_y: Show, x_name: str) -> Markup:
    points = thinned(line.points)
    parts: list[Markup] = []
    if line.band is not None:
        low, high = (thinned(edge) for edge in line.band)
        parts.append(tag("path", class_=f"band f{line.color}", d=frame.path(high, back=low)))
    if line.area:
        foot = [(points[0][0], 0.0), (points[-1][0], 0.0)]
        parts.append(tag("path", class_=f"band f{line.color}", d=frame.path(points, back=foot)))
    dash = " dashed" if line.dashed else ""
    if len(points) > 1:
        parts.append(tag("path", class_=f"line s{line.color}{dash}", d=frame.path(points)))
    if line.dots or len(points) <= 40:
        for x, y in points:
            said = tag("title", f"{line.label}: {show_y(y)} at {x_name} {show_x(x)}")
            parts.append(
                tag("circle", said, class_=f"f{line.color}", cx=frame.x(x), cy=frame.y(y), r=3.2)
            )
    return joined(*parts)


def column_chart(
    title: str,
    columns: Sequence[tuple[float, float, Sequence[float]]],
    labels: Sequence[str],
    colors: Sequence[int],
    x_name: str,
    *,
    show_x: Show = plain,
    show_y: Show = plain,
    whole_x: bool = False,
    width: float = WIDTH,
) -> Markup:
    """Columns from one value to another, of parts that stand on each other."""
    top = max((sum(parts) for _, _, parts in columns), default=1.0) or 1.0
    span = (min(low for low, _, _ in columns), max(high for _, high, _ in columns))
    frame = Frame(span, (0.0, top * 1.06), width=width)
    drawn: list[Markup] = [frame.axes(x_name, show_x, show_y, whole_x=whole_x)]
    for low, high, parts in columns:
        at = 0.0
        x, wide = frame.x(low), frame.x(high) - frame.x(low)
        gap = min(2.0, wide * 0.12)
        for label, color, part in zip(labels, colors, parts, strict=True):
            if part <= 0:
                continue
            tall = frame.y(at) - frame.y(at + part)
            said = tag("title", f"{label}: {show_y(part)} at {x_name} {show_x((low + high) / 2)}")
            drawn.append(
                tag("rect", said, class_=f"f{color}", x=x + gap / 2, y=frame.y(at + part),
                    width=max(0.4, wide - gap), height=max(0.3, tall))
            )  # fmt: skip
            at += part
    total = [sum(part[i] for _, _, part in columns) for i in range(len(labels))]
    said = "; ".join(f"{label}: {show_y(t)} in all" for label, t in zip(labels, total, strict=True))
    used = [(lbl, c) for lbl, c, t in zip(labels, colors, total, strict=True) if t > 0]
    keys = legend(used) if len(labels) > 1 else Markup("")
    return joined(keys, drawing(title, said, joined(*drawn), width=width))


def histogram(values: Sequence[int], most: int = 24) -> list[tuple[float, float, list[float]]]:
    """Columns that say how many values lie in each bin of equal width."""
    low, high = min(values), max(values)
    width = max(1, math.ceil((high - low + 1) / most))
    bins = [0.0] * ((high - low) // width + 1)
    for value in values:
        bins[(value - low) // width] += 1
    return [(low + i * width - 0.5, low + (i + 1) * width - 0.5, [n]) for i, n in enumerate(bins)]


def bar_rows(rows: Sequence[tuple[str, str, float, str, int]]) -> Markup:
    """Bars with their texts beside them: name, more of it, share of the longest, value, colour."""
    return tag(
        "ol",
        *(
            tag(
                "li",
                tag("span", tag("b", name), Markup(" "), tag("small", more), class_="what"),
                tag(
                    "span",
                    tag(
                        "i", class_=f"b{color}", style=Markup(f"width:{max(0.5, 100 * share):.1f}%")
                    ),
                    class_="bar",
                ),
                tag("span", value, class_="value"),
            )
            for name, more, share, value, color in rows
        ),
        class_="bars",
    )


__all__ = [
    "Frame", "Line", "bar_rows", "column_chart", "drawing", "histogram", "legend", "line_chart",
    "percent", "plain", "shown", "ticks",
]  # fmt: skip
