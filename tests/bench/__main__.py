"""`python -m tests.bench`: run the workloads, print the table, write bench.json."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.bench import report, runner
from tests.bench.listings import Listing, TagPut
from tests.bench.packs import FetchAndPack
from tests.bench.rows import DenseBatch, RaggedBatch, ScatteredGet, SixWriters, Trajectories
from tests.bench.scaling import FlatMemory, ManyClients, ManyKeys
from tests.bench.subjects import NAMES
from tests.bench.workload import FULL, SMOKE, Workload

WORKLOADS: tuple[type[Workload], ...] = (
    DenseBatch,
    RaggedBatch,
    Trajectories,
    SixWriters,
    TagPut,
    Listing,
    ScatteredGet,
    FetchAndPack,
    FlatMemory,
    ManyKeys,
    ManyClients,
)


def main() -> int:
    """Run what the command line asks for; 1 if `--check` found a requirement missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="everything once, at a small size")
    parser.add_argument("--only", help="lines or workloads to run, with commas between")
    parser.add_argument("--subjects", help=f"of {', '.join(NAMES)}; default: all installed")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds after the warm-up")
    parser.add_argument("--out", type=Path, help="default: bench.json, or bench-smoke.json")
    parser.add_argument("--check", action="store_true", help="fail when a requirement is missed")
    asked = parser.parse_args()

    only = set(asked.only.split(",")) if asked.only else set[str]()
    workloads = [
        w for w in WORKLOADS if not only or w.name in only or only & {n.name for n in w.lines}
    ]
    unknown = only - {w.name for w in WORKLOADS} - {n.name for w in WORKLOADS for n in w.lines}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    names = runner.installed(asked.subjects.split(",") if asked.subjects else NAMES)
    rounds = 1 if asked.smoke else asked.rounds

    samples = runner.run(workloads, names, SMOKE if asked.smoke else FULL, rounds)
    found = report.results(
        [line for w in workloads for line in w.lines], samples, judged=not asked.smoke
    )
    report.show(found)
    out = asked.out or Path("bench-smoke.json" if asked.smoke else "bench.json")
    report.write_json(found, out)
    print(f"{len(found)} lines, {rounds} rounds each, in {out}")
    return 1 if asked.check and any(r.met is False or r.drop_in_met is False for r in found) else 0


if __name__ == "__main__":
    sys.exit(main())
