"""`python -m tests.bench.metrics`: what metrics cost, as a ratio to requests that are not measured.

One plane in a process of its own, and two clients of it: the requests of one are measured, those of
the other are not. So nothing else differs, as it does between two processes, of which one is often
some percent faster than the other for no reason. In each round both make the same calls, in small
turns one after the other; the endpoint is scraped once a round. Printed for each call: the median
over the rounds of their ratios of medians, and the spread of the middle half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvloop

import dataplane
from dataplane.config import Config
from dataplane.host.folders import plane_folders
from dataplane.server.plane import PlaneServer, prepare_process
from dataplane.server.process import new_plane_id, serve
from tests.bench.report import spread

LIMIT = 1.03
TURN = 20
"""Calls in a row of one client."""
ROWS = 64
WIDTH = 512


def serve_plane(folder: str) -> None:
    """A plane that measures the requests of connections that are made between a line `on` and a
    line `off` of standard input, each of which it answers; it ends with standard input."""
    config = Config(runtime_dir=Path(folder), capacity_bytes=256 << 20, metrics_port=0)
    folders = plane_folders("bench-metrics", new_plane_id(), config.runtime_dir, config.shm_dir)

    async def main() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def ready(server: PlaneServer) -> None:
            meter = server.meter

            def told() -> None:
                lines = os.read(0, 4096).split()
                if not lines:
                    loop.remove_reader(0)
                    ended.set()
                for line in lines:
                    server.meter = meter if line == b"on" else None
                    print("done", flush=True)

            loop.add_reader(0, told)
            print(server.address.unix, flush=True)

        await serve(folders, config, ready=ready, until=ended)

    prepare_process()
    uvloop.run(main())


@contextmanager
def clients() -> Generator[tuple[Any, Any]]:
    """A client whose requests are not measured, and one whose requests are."""
    with tempfile.TemporaryDirectory(prefix="dpb-", dir="/tmp") as folder:
        command = [sys.executable, "-m", "tests.bench.metrics", "--serve", folder]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            made: list[Any] = []
            try:
                address = process.stdout.readline().strip()
                for switch in ("off", "on"):
                    process.stdin.write(f"{switch}\n")
                    process.stdin.flush()
                    assert process.stdout.readline() == "done\n"
                    settings = {"runtime_dir": folder}
                    client = dataplane.connect(address=address, config=settings)
                    made.append(client)
                    for call in _calls().values():
                        call(client)  # makes all connections that it needs
                yield made[0], made[1]
            finally:
                for client in made:
                    client.close()
                process.stdin.close()


def _calls() -> dict[str, Callable[[Any], object]]:
    row = {"x": torch.arange(WIDTH, dtype=torch.int64)}
    batch = {"x": torch.arange(ROWS * WIDTH, dtype=torch.int64).reshape(ROWS, WIDTH)}
    keys = [str(k) for k in range(ROWS)]
    return {
        "kv_put": lambda client: client.kv_put("k", "rows", row, {"status": "finished"}),
        "kv_batch_put": lambda client: client.kv_batch_put(keys, "batch", batch),
        "kv_batch_get": lambda client: client.kv_batch_get(keys, "batch", ["x"]),
        "tags only": lambda client: client.kv_put("k", "tags", None, {"status": "finished"}),
    }


def cost(rounds: int, turns: int) -> dict[str, list[float]]:
    """Ratios of medians, measured requests to others, by call; one for each round."""
    with clients() as (off, on):
        calls = _calls()
        target = f"http://{on.status()['metrics']}/metrics"
        ratios: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + 1):
            for name, call in calls.items():
                ratio = _ratio(call, on, off, turns)
                if number:  # the first warms up
                    ratios[name].append(ratio)
            with urllib.request.urlopen(target, timeout=10) as scraped:
                assert b"dataplane_request_duration_seconds_count" in scraped.read()
    return ratios


def _ratio(call: Callable[[Any], object], on: Any, off: Any, turns: int) -> float:
    """Of the medians of all calls of a round."""
    took: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        order = (0, 1) if turn % 2 else (1, 0)
        for which in order:
            client = (off, on)[which]
            call(client)  # finds the plane awake
            for _ in range(TURN):
                began = time.perf_counter()
                call(client)
                took[which].append(time.perf_counter() - began)
    return statistics.median(took[1]) / statistics.median(took[0])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.metrics", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="once, small, and judge nothing")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path, help="write the ratios as JSON")
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve is not None:
        serve_plane(asked.serve)
        return 0
    rounds, turns = (1, 2) if asked.smoke else (asked.rounds, 30)
    ratios = cost(rounds, turns)
    for name, found in ratios.items():
        median = statistics.median(found)
        print(f"{name:14} {median:6.3f} of what it takes unmeasured, spread {spread(found):.3f}")
    if asked.out is not None:
        asked.out.write_text(json.dumps(ratios))
    worst = max(statistics.median(found) for found in ratios.values())
    return 0 if asked.smoke else int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
