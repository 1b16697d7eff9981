"""The table of kills: every point, the seeds that were tried, and what came of the last trial."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from dataplane.testing.points import POINTS


class Trial(NamedTuple):
    point: str
    seed: int
    result: str
    seconds: float


class Table:
    """Notes trials in a file, so that several processes can."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, point: str, seed: int, result: str, seconds: float) -> None:
        line = json.dumps([point, seed, result, round(seconds, 2)]) + "\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)

    def trials(self) -> list[Trial]:
        if not self.path.exists():
            return []
        return [Trial(*json.loads(line)) for line in self.path.read_text().splitlines()]


def report(trials: list[Trial]) -> str:
    """The table as text: what happened at each point, and how to see it again."""
    by_point: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_point[trial.point].append(trial)
    width = max(map(len, POINTS))
    lines: list[str] = []
    for point in POINTS:
        tried = by_point.get(point, [])
        held = sum(trial.result == "held" for trial in tried)
        lines.append(f"{point:{width}}  {held} of {len(tried)} held")
    total = len(trials)
    held = sum(trial.result == "held" for trial in trials)
    lines.append(f"{held} of {total} kills at {len(by_point)} of {len(POINTS)} points")
    lines.append("one again: make faults FAULTS_ARGS='-k tags.put.torn'")
    return "\n".join(lines)
