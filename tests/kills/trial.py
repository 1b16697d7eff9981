"""One trial: a process dies at a point while clients are at work, and nobody may notice."""

from __future__ import annotations

import time

from dataplane.testing.points import POINTS
from tests.kills.planes import Killed, nth_of
from tests.kills.table import Table
from tests.kills.work import work_for

TRIES = 4
"""Runs of the work within which a point must be come to."""


def kill_at(plane: Killed, point: str, seed: int, table: Table) -> None:
    """Let the process die at a point, and see that everything is as it was told."""
    verb = POINTS[point].verb
    work = work_for(verb)
    began = time.monotonic()
    for run in range(TRIES):
        plane.arm(point, max(1, nth_of(verb, seed) >> run))
        work(plane, seed + 100 * run)
        if plane.fired():
            break
    else:
        table.note(point, seed, "not come to", 0.0)
        raise AssertionError(f"nothing came to {point} in {TRIES} runs")
    plane.is_back(time.monotonic())
    plane.is_empty()
    table.note(point, seed, "held", time.monotonic() - began)
