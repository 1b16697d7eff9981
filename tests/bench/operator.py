"""`python -m tests.bench.operator`: what an operator waits for on a plane of 1,000,000 keys.

The commands are run as an operator runs them, each a process of its own; what a command itself took
is told beside it. Meanwhile a client puts rows, one after the other: how long its puts take while
half of the keys are cleared is told beside how long they take while nothing else goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

import dataplane
from dataplane import Client

KEYS = 1_000_000
BATCH = 10_000
LIMITS = {"status": 1.0, "partitions": 1.0, "keys": 1.0, "clear": 10.0}
"""Seconds."""
PUT_P99_S = 0.020
ROUNDS = 5


def fill(client: Client, partition_id: str, keys: int) -> float:
    """Rows as agent loops write them, tags and a small field; seconds that it took."""
    chance = np.random.default_rng(0)
    started = time.monotonic()
    for at in range(0, keys, BATCH):
        names = [f"{i // 8:07d}_{i % 8}_0" for i in range(at, at + BATCH)]
        lengths = chance.integers(100, 8000, BATCH).tolist()
        tags = [
            {
                "uid": f"{i // 8:07d}", "session_id": i % 8, "index": 0,
                "status": "completed" if i % 2 else "failed",
                "seq_len": lengths[i - at], "global_steps": i // 1000, "score": i % 3 / 2,
            }
            for i in range(at, at + BATCH)
        ]  # fmt: skip
        client.kv_batch_put(names, partition_id, {"reward": np.zeros(BATCH, np.float32)}, tags)
    return time.monotonic() - started


class Putting:
    """A client of its own process's that puts a row, again and again."""

    def __init__(self, address: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.operator", "--put-to", address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._child.stdout is not None
        self._child.stdout.readline()

    def during(self, work: Callable[[], float | None]) -> tuple[float | None, list[float]]:
        """The result of some work, and how long each put took meanwhile, in seconds."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write("start\n")
        self._child.stdin.flush()
        self._child.stdout.readline()
        result = work()
        self._child.stdin.write("stop\n")
        self._child.stdin.flush()
        return result, json.loads(self._child.stdout.readline())

    def end(self) -> None:
        """End the process."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(30)


def put_until_told(address: str) -> None:
    """The other end of `Putting`."""
    client = dataplane.connect(address=address)
    row = {"reward": np.zeros(1, np.float32)}
    client.kv_put("warm", "others", row, {"n": 0})
    print("ready", flush=True)
    while sys.stdin.readline():
        stop = threading.Event()
        threading.Thread(target=set_when_told, args=(stop,)).start()
        took: list[float] = []
        print("going", flush=True)
        while not stop.is_set():
            started = time.perf_counter()
            client.kv_put(f"k{len(took) % 500}", "others", row, {"n": len(took)})
            took.append(time.perf_counter() - started)
            time.sleep(0.0005)
        print(json.dumps(took), flush=True)
    client.close()


def set_when_told(stop: threading.Event) -> None:
    """Set it when a line comes."""
    sys.stdin.readline()
    stop.set()


@contextlib.contextmanager
def plane(folder: Path) -> Generator[str]:
    """`dataplane serve` in a process of its own; its address."""
    child = subprocess.Popen(
        [sys.executable, "-m", "dataplane.cli.main", "serve", "--name", "operator",
         "--runtime-dir", str(folder), "--capacity-bytes", str(1 << 30)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        yield next(
            word for line in child.stdout for word in line.split() if word.endswith("plane.sock")
        )
    finally:
        child.terminate()
        child.wait(60)


def command(address: str, *arguments: str) -> float:
    """Seconds that a command took, from its start to its end."""
    environ = os.environ | {"DATAPLANE_ADDRESS": address}
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "dataplane.cli.main", *arguments, "--output", "json"],
        env=environ, stdout=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    return time.monotonic() - started


def p99(took: list[float]) -> float:
    """The 99th percentile."""
    return sorted(took)[int(0.99 * (len(took) - 1))]


def measure(keys: int, rounds: int) -> dict[str, Any]:
    """Everything, in seconds."""
    found: dict[str, Any] = {"keys": keys}
    with tempfile.TemporaryDirectory(prefix="dp-") as folder, plane(Path(folder)) as address:
        client = dataplane.connect(address=address, config={"timeout_s": 120})
        found["fill_s"] = fill(client, "train", keys)
        started = [command(address, "status", "--help") for _ in range(rounds)]
        found["start of the command"] = started
        for name, arguments in {
            "status": ("status",),
            "partitions": ("partitions",),
            "keys": ("keys", "train", "--limit", "20"),
            "keys --sort": ("keys", "train", "--limit", "20", "--sort", "-seq_len"),
        }.items():
            found[name] = [command(address, *arguments) for _ in range(rounds)]
        putting = Putting(address)
        try:
            _, alone = putting.during(lambda: time.sleep(3))
            found["put p99 alone"] = p99(alone)
            for name, arguments in {
                "keys": ("keys", "train", "--limit", "20", "--sort", "-seq_len"),
                "stats": ("stats", "train"),
                "clear": ("clear", "train", "--where", '{"status": "failed"}', "--yes"),
            }.items():
                took, meanwhile = putting.during(partial(command, address, *arguments))
                found.setdefault(name, []).append(took)
                found[f"put p99 during {name}"] = p99(meanwhile)
                found[f"put worst during {name}"] = max(meanwhile)
                found[f"puts during {name}"] = len(meanwhile)
        finally:
            putting.end()
        left = client.tally("train").rows
        assert left == keys - keys // 2, left
        found["worst slice, ms"] = client.status()["worst_slice_ms"]
        client.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="20,000 keys, one round, no verdict")
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--put-to", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.put_to:
        put_until_told(given.put_to)
        return
    found = measure(20_000 if given.smoke else given.keys, 1 if given.smoke else ROUNDS)
    for name, value in found.items():
        if isinstance(value, list):
            value = cast("list[float]", value)
            limit = LIMITS.get(name)
            verdict = "" if limit is None or given.smoke else f", limit {limit:g} s"
            worst = f"{max(value):.3f}"
            print(f"{name:26} {statistics.median(value):8.3f} s  worst {worst}{verdict}")
        elif name.startswith("put"):
            limit = f", limit {PUT_P99_S * 1e3:g} ms" if " p99 during clear" in name else ""
            shown = f"{value * 1e3:8.3f} ms" if isinstance(value, float) else f"{value:8}"
            print(f"{name:26} {shown}{limit}")
        else:
            print(f"{name:26} {value:8.6g}")


if __name__ == "__main__":
    main()
