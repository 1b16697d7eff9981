"""`python -m tests.fuzz`: fuzz every decoder; exit status 1 if anything was found.

Each target runs in a process of its own, one after the other. What is found is kept beside the
tests, in `tests/fuzz/failed`, and is replayed by them from then on.
"""

from __future__ import annotations

import argparse
import fnmatch
import logging
import sys
import time
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Fuzz the targets that were asked for, and say what came of each."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=0, help="per target (default: 600)")
    parser.add_argument("--runs", type=int, default=0, help="per target, instead of --seconds")
    parser.add_argument(
        "--target", action="append", default=[], metavar="NAME", help="only this one; * fits all"
    )
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock")
    parser.add_argument("--corpus", type=Path, help="keep what leads somewhere new in this folder")
    parser.add_argument("--failed", type=Path, help="keep findings in this folder")
    parser.add_argument("--list", action="store_true", help="only name the targets")
    asked = parser.parse_args(arguments)
    try:
        import atheris
    except ImportError:
        print("atheris is not installed: pip install atheris", file=sys.stderr)
        return 2
    # What is imported from here on counts its own branches.
    with atheris.instrument_imports(include=["dataplane"], enable_loader_override=False):
        from tests.fuzz import running
        from tests.fuzz.targets import TARGETS
    logging.disable(logging.CRITICAL)  # what is refused is logged, thousands of times a second
    names = [
        name
        for name in TARGETS
        if not asked.target or any(fnmatch.fnmatch(name, pattern) for pattern in asked.target)
    ]
    if not names:
        print(f"there is no such target; there are {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    if asked.list:
        print("\n".join(names))
        return 0
    seconds = asked.seconds or (0 if asked.runs else 600)
    seed = asked.seed if asked.seed is not None else int(time.time()) & 0x7FFFFFFF
    print(f"seed {seed}", flush=True)
    well = True
    for name in names:
        outcome = running.run_target(
            TARGETS[name], atheris, seed=seed or 1, runs=asked.runs, seconds=seconds,
            failed=asked.failed or running.FAILED, corpus=asked.corpus,
        )  # fmt: skip
        print(outcome.line(), flush=True)
        if not outcome.is_well:
            print(outcome.said, flush=True)
            well = False
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
