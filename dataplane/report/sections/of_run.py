"""The sections about a run: reward, time, padding and staleness over its steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from dataplane.cli.shown import age_text
from dataplane.report.chart import Line, column_chart, line_chart, percent
from dataplane.report.data import Data
from dataplane.report.markup import Markup
from dataplane.report.sections.card import card

MAX_COLUMNS: Final = 120
"""Of a chart of steps: of more steps, neighbours are drawn as one, by their mean."""
PADDING: Final = "response/packing/padding_tokens"
REAL: Final = "response/packing/real_tokens"
STAGES: Final = (
    ("producing", ("produce_batch", "load_debug_rollout"), 1),
    ("training", ("training",), 3),
    ("weights", ("sync_weight", "final_offload", "onload"), 4),
    ("evaluation", ("evaluation",), 2),
    ("saving", ("save_ckpt", "save_hf", "save_debug_rollout", "dump"), 5),
    ("taking and clearing", ("sample", "plan", "clear"), 6),
)
"""Timers of a step, by what a person calls them, and their colours."""


def reward(data: Data) -> Markup:
    """The score over steps."""
    train = data.series("response/rewards/mean", "response/raw_rewards/mean")
    held = data.series("eval/reward/mean", "eval/accuracy")
    greedy = data.series("eval/greedy/reward/mean")
    body = None
    if train or held or greedy:
        body = line_chart(
            "Reward over steps",
            [
                Line("train", train, 1),
                Line("held out", held, 2, dots=True),
                Line("held out, greedy", greedy, 3, dots=True, dashed=True),
            ],
            "step", reach=1.0, whole_x=True,
        )  # fmt: skip
    return card(
        "Reward", "Mean score of each step's rows, and of prompts held out.", body,
        "No step has logged a reward.",
    )  # fmt: skip


def stages(data: Data) -> Markup:
    """Where the time of steps went."""
    run = data.run
    steps = [] if run is None else [step for step in run.steps if "time/step" in step.values]
    says = "Seconds of each step, by what they went to."
    if not steps:
        return card("Time of a step", says, None, "No step was timed.")
    rows: list[tuple[float, list[float]]] = []
    for step in steps:
        parts = [sum(step.values.get(f"time/{n}", 0.0) for n in names) for _, names, _ in STAGES]
        rest = max(0.0, step.values["time/step"] - sum(parts))
        rows.append((float(step.step), [*parts, rest]))
    names = [*(name for name, _, _ in STAGES), "the rest"]
    colors = [*(color for _, _, color in STAGES), 8]
    whole = sum(sum(parts) for _, parts in rows) or 1.0
    shares = [sum(parts[i] for _, parts in rows) / whole for i in range(len(names))]
    top = sorted(zip(shares, names, strict=True), reverse=True)[:3]
    said = ", ".join(f"{name} {share:.0%}" for share, name in top if share >= 0.005)
    body = column_chart(
        "Time of each step", _columns(rows), names, colors, "step", show_y=_seconds, whole_x=True
    )
    return card("Time of a step", f"{says} In all: {said}.", body, "")


def padding(data: Data) -> Markup:
    """What of a step's packs was filled up."""
    run = data.run
    rows = [] if run is None else [
        (float(s.step), [s.values[PADDING] / max(1.0, s.values[PADDING] + s.values[REAL])])
        for s in run.steps
        if PADDING in s.values and REAL in s.values
    ]  # fmt: skip
    body = None
    says = "Share of the packed tokens that are filling."
    if rows and run is not None:
        tokens = [sum(s.values.get(name, 0.0) for s in run.steps) for name in (PADDING, REAL)]
        says += (
            f" In all {percent(tokens[0] / max(1.0, sum(tokens)))} of {sum(tokens):,.0f} tokens."
        )
        body = column_chart(
            "Padding of each step", _columns(rows), ["padding"], [2], "step", show_y=percent,
            whole_x=True,
        )  # fmt: skip
    return card("Padding", says, body, "No step has logged what it packed.")


def staleness(data: Data) -> Markup:
    """How old the policy was that made a step's rows."""
    name = "training/off_policy/staleness/"
    mean = data.series(f"{name}mean")
    body = None
    if mean:
        low, high = data.series(f"{name}min"), data.series(f"{name}max")
        band = (low, high) if len(low) == len(high) == len(mean) > 1 else None
        body = line_chart(
            "Staleness over steps",
            [
                Line("oldest token, mean", data.series("training/off_policy/worst/mean"), 8),
                Line("newest token, mean and range", mean, 4, band=band),
            ],
            "step", reach=1.0, whole_x=True,
        )  # fmt: skip
    return card(
        "Staleness", "Policy versions between the one that made a token and the one trained.", body,
        "No step has logged it.",
    )  # fmt: skip


def _columns(rows: Sequence[tuple[float, Sequence[float]]]) -> list[
    tuple[float, float, Sequence[float]]
]:  # fmt: skip
    """Columns of steps; neighbours are one, by their mean, where there are too many."""
    size = -(-len(rows) // MAX_COLUMNS)
    made: list[tuple[float, float, Sequence[float]]] = []
    for at in range(0, len(rows), size):
        some = rows[at : at + size]
        means = [fmean(parts) for parts in zip(*(parts for _, parts in some), strict=True)]
        made.append((some[0][0] - 0.5, some[-1][0] + 0.5, means))
    return made


def _seconds(value: float) -> str:
    return age_text(value) if value else "0"
