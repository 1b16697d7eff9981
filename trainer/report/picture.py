"""A picture of a run: reward, response length, policy lag and step time over steps.

Owns which logged values are drawn and how. Needs no display.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from trainer.report.jsonl import MetricsLine, read_metrics
from trainer.report.step_line import HELD_OUT, LAG, LENGTH, REWARD, STEP_TIME, first_of

INK: Final = "#1f2933"
FAINT: Final = "#9aa5b1"
BLUE: Final = "#2f6fb5"
ORANGE: Final = "#d9772b"
GREEN: Final = "#3d8f5f"
PURPLE: Final = "#7a5ba8"

SMOOTH_FROM: Final = 30
"""Points from which on a curve is drawn as a running mean over what it is the mean of."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a panel."""

    label: str
    names: tuple[str, ...]
    """Logged values that it may be drawn from: the first that a step has."""
    color: str
    band: tuple[str, str] | None = None
    """Values between which a band is drawn around it."""
    marks: bool = False
    """Few points, each drawn as one."""

    def points(self, lines: Sequence[MetricsLine]) -> tuple[list[int], list[float]]:
        """Steps and values. A step that was logged twice, by a run that was resumed, counts as
        it was logged last."""
        found: dict[int, float] = {}
        for line in lines:
            value = first_of(line.values, self.names)
            if value is not None:
                found[line.step] = value
        return sorted(found), [found[step] for step in sorted(found)]


@dataclass(frozen=True, slots=True)
class Panel:
    """One of the picture's coordinate systems."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    reach: float = 0.0
    """What its axis goes up to at least."""


PANELS: Final = (
    Panel(
        "Reward",
        "score",
        (
            Curve("train", REWARD, BLUE),
            Curve("held-out", HELD_OUT, ORANGE, marks=True),
        ),
        reach=1.0,
    ),
    Panel(
        "Response length",
        "tokens",
        (
            Curve(
                "mean", LENGTH, GREEN,
                band=("response/response_len/min", "response/response_len/max"),
            ),
        ),
    ),
    Panel(
        "Policy lag",
        "policy versions",
        (
            Curve("newest token", LAG[:1], PURPLE),
            Curve("oldest token", LAG[1:], FAINT),
        ),
        reach=1.0,
    ),
    Panel(
        "Step time",
        "seconds",
        (
            Curve("whole step", STEP_TIME, INK),
            Curve("producing", ("time/produce_batch",), BLUE),
            Curve("training", ("time/training",), ORANGE),
        ),
    ),
)  # fmt: skip


def draw_picture(
    metrics_path: str | Path, png_path: str | Path, *, title: str | None = None
) -> Path:
    """Draw a file of metrics to a PNG; its path. What was never logged is said to be missing.

    Raises:
        FileNotFoundError: there is no such file of metrics.
        OSError: the picture cannot be written.
    """
    import matplotlib as untyped_matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib = cast("Any", untyped_matplotlib)
    lines = list(read_metrics(metrics_path))
    target = Path(png_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"font.size": 9.5, "font.family": "DejaVu Sans"}):
        # Without pyplot: no window, and nothing that is left behind in the process.
        figure = cast("Any", Figure(figsize=(11, 7), dpi=140, layout="constrained"))
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        canvas = cast("Any", FigureCanvasAgg(figure))
        axes = figure.subplots(2, 2, sharex=True)
        steps = [line.step for line in lines if _is_drawn(line.values)]
        for axis, panel in zip(axes.flat, PANELS, strict=True):
            _draw_panel(axis, panel, lines)
            if steps:
                axis.set_xlim(*_limits(min(steps), max(steps)))
        for axis in axes[-1]:
            axis.set_xlabel("step", color=INK)
        if title:
            figure.suptitle(title, fontsize=13, fontweight="bold", color=INK, x=0.01, ha="left")
        partial = target.with_name(f".{target.name}.partial")
        canvas.print_png(str(partial))
    os.replace(partial, target)
    return target


def _draw_panel(axis: Any, panel: Panel, lines: Sequence[MetricsLine]) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axis.set_ylabel(panel.unit, color=INK)
    axis.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=INK, labelsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(FAINT)
    drawn = [_draw_curve(axis, curve, lines) for curve in panel.curves]
    if not any(drawn):
        axis.text(
            0.5, 0.5, "not logged", transform=axis.transAxes, ha="center", va="center", color=FAINT
        )
        axis.set_yticks([])
        return
    # From nothing on, so that slopes are not exaggerated.
    low, high = axis.dataLim.y0, max(axis.dataLim.y1, panel.reach)
    room = 0.06 * (high - min(0.0, low)) or 1.0
    axis.set_ylim(low - room if low < 0 else -room / 4, high + room)
    if len(panel.curves) > 1:
        axis.legend(frameon=False, loc="best", fontsize=9, labelcolor=INK)


def _draw_curve(axis: Any, curve: Curve, lines: Sequence[MetricsLine]) -> bool:
    steps, values = curve.points(lines)
    if not steps:
        return False
    if curve.band is not None:
        _draw_band(axis, curve, lines)
    few = len(steps) < SMOOTH_FROM
    style: dict[str, Any] = {"color": curve.color, "label": curve.label}
    if curve.marks:
        axis.plot(
            steps, values, marker="o", markersize=5, markeredgecolor="white", linewidth=1.6,
            zorder=3, **style,
        )  # fmt: skip
    elif few:
        axis.plot(steps, values, marker="o", markersize=3, linewidth=1.6, **style)
    else:
        axis.plot(steps, values, color=curve.color, alpha=0.3, linewidth=0.9)
        axis.plot(steps, _running_mean(values), linewidth=1.9, **style)
    return True


def _draw_band(axis: Any, curve: Curve, lines: Sequence[MetricsLine]) -> None:
    assert curve.band is not None
    low, high = (
        dict(zip(*Curve("", (name,), "").points(lines), strict=True)) for name in curve.band
    )
    steps = sorted(low.keys() & high.keys())
    if len(steps) > 1:
        axis.fill_between(
            steps, [low[s] for s in steps], [high[s] for s in steps],
            color=curve.color, alpha=0.12, linewidth=0, label="shortest to longest",
        )  # fmt: skip


def _running_mean(values: Sequence[float]) -> list[float]:
    """Each value's mean with its neighbours: at an end with fewer of them."""
    reach = max(1, len(values) // 25)
    means: list[float] = []
    for i in range(len(values)):
        near = values[max(0, i - reach) : i + reach + 1]
        means.append(sum(near) / len(near))
    return means


def _is_drawn(values: Mapping[str, float]) -> bool:
    names = (curve.names for panel in PANELS for curve in panel.curves)
    return any(first_of(values, some) is not None for some in names)


def _limits(first: int, last: int) -> tuple[float, float]:
    margin = max(0.5, (last - first) * 0.02)
    return first - margin, last + margin
