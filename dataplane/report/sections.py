"""The sections of a report: each from its part of the data to what is seen of it. Pure.

A section without data says so in a sentence, and in which case there would be some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Final

from dataplane.cli.shown import age_text, bytes_text, count_text, short
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
from dataplane.report.markup import Markup, joined, tag
from dataplane.report.record import PlaneRecord
from dataplane.report.run_record import RunRecord
from dataplane.report.timeline import longest, timeline

MAX_COLUMNS: Final = 120
"""Of a chart of steps: of more steps, neighbours are drawn as one, by their mean."""
MAX_LINES: Final = 6
MAX_WAITS: Final = 10
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


class Data:
    """What the report is about. Either may be missing."""

    def __init__(self, run: RunRecord | None, plane: PlaneRecord | None) -> None:
        self.run = run
        self.plane = plane

    @property
    def begin_s(self) -> float:
        """Where the plane's times count from."""
        assert self.plane is not None
        times = self.plane.samples.times_s
        known = [group.begun_s for group in self.plane.groups[:1]]
        return min([self.plane.at_s - self.plane.uptime_s, *times[:1], *known])

    def column(self, name: str) -> Points:
        """A column of the plane's samples over seconds since its begin."""
        if self.plane is None:
            return []
        samples = self.plane.samples
        values = samples.columns.get(name, [])
        return [(at - self.begin_s, v) for at, v in zip(samples.times_s, values, strict=False)]

    def series(self, *names: str) -> Points:
        """A logged value over steps."""
        return [] if self.run is None else self.run.series(*names)


def card(title: str, says: str, body: Markup | None, missing: str, *, wide: bool = False) -> Markup:
    """A section with its heading and a line that says how to read it."""
    return tag(
        "section",
        tag("h2", title),
        tag("p", says if body is not None else missing, class_="says"),
        body if body is not None else Markup(""),
        class_="card wide-card" if wide else "card",
    )


def sections(data: Data) -> Markup:
    """All of them, in order."""
    return joined(
        groups(data), reward(data), stages(data), lengths(data), padding(data), staleness(data),
        lag(data), memory(data), waiting(data), traffic(data), waits(data),
    )  # fmt: skip


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


# -- numbers ---------------------------------------------------------------------------------


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


def _rates(points: Points) -> Points:
    """What grows, by the second."""
    return [
        (x2, max(0.0, y2 - y1) / (x2 - x1)) for (x1, y1), (x2, y2) in pairwise(points) if x2 > x1
    ]


def _count(by_name: dict[str, list[int]]) -> int:
    return max((len(values) for values in by_name.values()), default=0)


def _seconds(value: float) -> str:
    return age_text(value) if value else "0"


def _bytes(value: float) -> str:
    return bytes_text(value).replace(".0 ", " ")


Figure = tuple[str, str, str]
"""A key figure: what it is, its value, and a word on it."""


def figures(data: Data) -> list[Figure]:
    """The few numbers that come first."""
    found: list[Figure] = []
    run, plane = data.run, data.plane
    if run is not None and run.steps:
        found.append(("steps", count_text(len(run.steps)), f"up to step {run.steps[-1].step}"))
        wall = run.summary.get("wall_s")
        if isinstance(wall, (int, float)):
            found.append(("time", age_text(float(wall)), "from begin to end"))
        _first_to_last(found, "reward", data.series("response/rewards/mean"), plain)
        held = data.series("eval/reward/mean", "eval/accuracy")
        _first_to_last(found, "held-out reward", held, plain)
        speed = [v for _, v in data.series("throughput/e2e_effective_tgs")]
        if speed:
            found.append(("tokens a second", plain(speed[-1]), "per rank, from begin to end"))
        share = run.summary.get("plane_share_p50")
        if isinstance(share, (int, float)):
            found.append(("plane's share", percent(float(share)), "of a step's time, median"))
    if plane is not None:
        ended: dict[str, int] = plane.status.get("groups", {})
        whole = ended.get("finished", 0)
        bad = sum(n for status, n in ended.items() if status not in ("finished", "running"))
        still = plane.status.get("open_groups", 0)
        found.append(("groups finished", count_text(whole), f"{bad:,} failed, {still:,} open"))
        used = [v for _, v in data.column("used_bytes")]
        if used:
            of = bytes_text(plane.capacity_bytes)
            found.append(("most bytes at once", bytes_text(max(used)), f"of {of}"))
        keys: int = plane.status.get("keys", 0)
        found.append(("keys left", count_text(keys), "in the plane, weights included"))
        refused: int = plane.status.get("refused", 0)
        if refused:
            found.append(("refused puts", count_text(refused), "nothing was changed by them"))
    return found


def _first_to_last(
    found: list[Figure], name: str, points: Points, show: Callable[[float], str]
) -> None:
    if points:
        last = show(round(points[-1][1], 3))
        more = f"{show(round(points[0][1], 3))} at first" if len(points) > 1 else "one step has it"
        found.append((name, last, more))
