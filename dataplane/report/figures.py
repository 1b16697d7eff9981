"""The key figures of a report: the few numbers that come first. Pure."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.cli.shown import age_text, bytes_text, count_text
from dataplane.report.chart import Points, percent, plain
from dataplane.report.data import Data

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
