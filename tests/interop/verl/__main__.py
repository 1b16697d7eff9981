"""The command: `python -m tests.interop.verl [--against drop-in|peer] [--verl FOLDER]`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.interop.sides import SIDES, Side
from tests.interop.verl import sources
from tests.interop.verl.checks import Checks

PARTS = ("synchronous", "buffers", "asynchronous")


def main(argv: list[str]) -> int:
    """Run verl's V1 path and print what was compared; 0 if all is as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.interop.verl", description=__doc__)
    parser.add_argument("--against", choices=SIDES, default="drop-in")
    parser.add_argument("--verl", metavar="FOLDER", help="a folder with verl's package in it")
    parser.add_argument("--only", choices=PARTS, action="append", help="these parts")
    options = parser.parse_args(argv)
    try:
        sources.arrange(options.against, options.verl or os.environ.get("VERL"))
    except sources.Unavailable as missing:
        print(missing, file=sys.stderr)
        return 2
    return _run(options.against, options.only or list(PARTS))


def _run(side: Side, parts: list[str]) -> int:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("VERL_LOGGING_LEVEL", "CRITICAL")
    # The peer says at each batch that there are fewer cores than its default of eight threads.
    os.environ.setdefault("TQ_NUM_THREADS", "1")
    started = time.monotonic()
    import ray
    import transfer_queue as tq

    from tests.interop.verl import asynchronous, buffers, ranks, rollout, synchronous, trainers

    check = Checks()
    print(f"verl's V1 path on the {side}: {sources.versions()}")
    # A cluster of its own, with logical CPUs: verl's ranks and the peer's actors want one each.
    ray.init(
        address="local", num_cpus=16, object_store_memory=100 << 20, include_dashboard=False,
        log_to_driver=False,
    )  # fmt: skip
    try:
        with tempfile.TemporaryDirectory(prefix="interop-") as folder:
            # As verl's entry point does, with settings that only verl and the peer have.
            config = trainers.settings("transfer_queue.enable=true")
            tq.init(config.transfer_queue)
            if parts != ["buffers"]:
                manager, group = rollout.PlayedManager(), ranks.start()
            steps: dict[str, Callable[[], None]] = {
                "synchronous": lambda: synchronous.run(check, group, manager, Path(folder)),
                "buffers": lambda: buffers.run(check),
                "asynchronous": lambda: asynchronous.run(check, group, manager, Path(folder)),
            }
            for part in parts:
                with check.part(part):
                    steps[part]()
    finally:
        tq.close()
        tq.close()
        ray.shutdown()
    total = sum(check.counts.values())
    verdict = f"FAILED: {', '.join(check.failures)}" if check.failures else "all as expected"
    print(f"{total} checks in {time.monotonic() - started:.0f} s; {verdict}")
    return 1 if check.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
