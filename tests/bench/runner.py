"""Runs the workloads: every subject takes its turn in every round, so all meet the same machine."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Sequence

from tests.bench.stage import SUBJECTS, Ensemble, start_ray
from tests.bench.workload import Scale, Workload

Samples = dict[str, dict[str, list[float]]]
"""Line -> subject -> one figure per round, in seconds or in the line's own unit."""


def installed(names: Sequence[str]) -> list[str]:
    """Those of the subjects that this machine can run."""
    missing = {
        "transferqueue": importlib.util.find_spec("transfer_queue") is None,
        "redis": shutil.which("redis-server") is None or importlib.util.find_spec("redis") is None,
    }
    return [name for name in names if not missing.get(name, False)]


def run(
    workloads: list[type[Workload]], names: Sequence[str], scale: Scale, rounds: int
) -> Samples:
    """Play each workload `rounds` times after one warm-up round, and return every figure."""
    wanted = [n for n in names if any(n in workload.subjects for workload in workloads)]
    ray = start_ray() if any(SUBJECTS[name].needs_ray for name in wanted) else ""
    ensembles = {name: Ensemble(name, workloads, scale) for name in wanted}
    samples: Samples = {}
    try:
        for name, ensemble in ensembles.items():
            _say(f"starting {name}")
            ensemble.open(ray)
        for workload in workloads:
            cast = [ensembles[name] for name in wanted if name in workload.subjects]
            _play(workload, cast, scale, rounds, samples)
    finally:
        for ensemble in ensembles.values():
            ensemble.close()
        if ray:
            import ray as ray_module

            ray_module.shutdown()
    return samples


def _play(
    workload: type[Workload],
    cast: list[Ensemble],
    scale: Scale,
    rounds: int,
    samples: Samples,
) -> None:
    for ensemble in cast:
        ensemble.begin(workload)
    director = workload(scale)
    numbers = range(1, 2) if workload.once else range(rounds + 1)
    for number in numbers:
        # Another subject begins each round, so that none always follows the same one.
        turn = number % max(1, len(cast))
        for ensemble in cast[turn:] + cast[:turn]:
            begin = time.monotonic()
            figures = director.play(ensemble, number)
            shown = " ".join(f"{name} {value:.5g}" for name, value in figures.items())
            took = time.monotonic() - begin
            _say(f"{workload.name} {number}/{numbers[-1]} {ensemble.name}: {shown} ({took:.1f} s)")
            if number > 0:
                for line, value in figures.items():
                    samples.setdefault(line, {}).setdefault(ensemble.name, []).append(value)
    for ensemble in cast:
        ensemble.finish()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
