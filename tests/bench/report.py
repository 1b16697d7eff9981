"""The figures as a table and as bench.json: medians, ratios, and what had to be reached."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tests.bench.runner import Samples
from tests.bench.workload import Line

BESIDE = ("embedded", "drop_in", "redis", "ray_actor", "memcpy")


@dataclass(frozen=True, slots=True)
class Result:
    """One line: medians over the rounds, in the line's unit; None where not measured."""

    line: Line
    medians: dict[str, float]
    spreads: dict[str, float]
    judged: bool = True
    """Whether the run was at the size that requirements are stated for."""

    @property
    def ours(self) -> float | None:
        return self.medians.get("ours")

    @property
    def peer(self) -> float | None:
        return self.medians.get(self.line.against)

    @property
    def ratio(self) -> float | None:
        """How many times better than the peer."""
        if not self.ours or not self.peer:
            return None
        return self.ours / self.peer if self.line.higher_is_better else self.peer / self.ours

    @property
    def met(self) -> bool | None:
        """Whether the line's requirement holds; None where it has none or was not measured."""
        if not self.judged:
            return None
        if self.line.limit is not None:
            return None if self.ours is None else self.ours <= self.line.limit
        if self.line.required is None or self.ratio is None:
            return None
        return self.ratio >= self.line.required

    @property
    def drop_in(self) -> float | None:
        """How many times worse than our own client the drop-in is."""
        through = self.medians.get("drop_in")
        if not self.ours or not through:
            return None
        return self.ours / through if self.line.higher_is_better else through / self.ours

    @property
    def drop_in_met(self) -> bool | None:
        """Whether the drop-in costs no more than it may; None where nothing is said of it."""
        if not self.judged or self.line.drop_in is None or self.drop_in is None:
            return None
        return self.drop_in <= self.line.drop_in

    def as_json(self) -> dict[str, object]:
        """The object of bench.json."""
        found: dict[str, object] = {
            "name": self.line.name,
            "unit": self.line.unit,
            "ours": _round(self.ours),
            "peer": _round(self.peer),
            "ratio": _round(self.ratio),
            "required": self.line.required,
            "spread": _round(self.spreads.get("ours")),
            "peer_spread": _round(self.spreads.get(self.line.against)),
            "met": self.met,
        }
        if self.line.limit is not None:
            found["limit"] = self.line.limit
        if self.line.against != "transferqueue":
            found["against"] = self.line.against
        if self.line.drop_in is not None:
            found["drop_in_times"] = _round(self.drop_in)
            found["drop_in_limit"] = self.line.drop_in
            found["drop_in_met"] = self.drop_in_met
        found |= {n: _round(self.medians[n]) for n in BESIDE if n in self.medians}
        return found


def results(lines: Sequence[Line], samples: Samples, *, judged: bool) -> list[Result]:
    """Medians and spreads of every line that was measured at least once."""
    return [_result(line, samples[line.name], judged) for line in lines if line.name in samples]


def _result(line: Line, rounds: dict[str, list[float]], judged: bool) -> Result:
    # The processes count in seconds; the lines in milliseconds.
    factor = 1000.0 if line.unit == "ms" else 1.0
    return Result(
        line,
        {name: statistics.median(values) * factor for name, values in rounds.items()},
        {name: spread(values) for name, values in rounds.items()},
        judged,
    )


def spread(values: Sequence[float]) -> float:
    """The middle half of the rounds as a share of their median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def write_json(found: Sequence[Result], path: Path) -> None:
    """Write bench.json."""
    path.write_text(json.dumps([r.as_json() for r in found], indent=2) + "\n")


def show(found: Sequence[Result]) -> None:
    """Print the table."""
    table = Table(title="medians; ratio = how many times better than the peer", box=box.SIMPLE)
    for heading in ("name", "unit", "ours", "±", "peer", "±", "ratio", "required", *BESIDE):
        table.add_column(heading, justify="left" if heading in ("name", "unit") else "right")
    for result in found:
        line = result.line
        wanted = f"≤ {line.limit:g} {line.unit}" if line.limit is not None else ""
        if line.required is not None:
            wanted = f"{line.required:g}x"
        mark = {True: "[green]", False: "[bold red]", None: ""}[result.met]
        table.add_row(
            line.name,
            line.unit,
            _text(result.ours),
            _percent(result.spreads.get("ours")),
            _text(result.peer),
            _percent(result.spreads.get(line.against)),
            _text(result.ratio),
            f"{mark}{wanted}",
            *(_text(result.medians.get(name)) for name in BESIDE),
        )
    Console(width=140).print(table)
    missed = [r.line.name for r in found if r.met is False]
    missed += [f"{r.line.name} (drop-in)" for r in found if r.drop_in_met is False]
    if missed:
        print(f"not reached: {', '.join(missed)}")


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"
