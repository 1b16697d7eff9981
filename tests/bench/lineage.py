"""`python -m tests.bench.lineage`: what lineage costs puts and gets, on against off.

The same requests go to two tag stores in this process, with their journals, in turns: what it costs
is the difference of the CPU time that the fastest calls take, and it is shown as a share of what a
client waits for one, which is measured on a live plane without lineage. `--trace` asks a live plane
for traces of a full ring, and how long one slice of them held the loop.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

import dataplane
from dataplane import Client
from dataplane.codec.encode import encode_batch
from dataplane.codec.tags import pack_tags_many
from dataplane.server.tag_service import TagService
from dataplane.tags.journal import FileJournal
from dataplane.tags.lineage.lineage import Lineage
from dataplane.tags.resolve import resolve
from dataplane.tags.store import TagStore
from dataplane.wire.messages import PutMeta

FIELDS = ("input_ids", "labels", "logprobs", "old_logprobs", "rm_scores", "values")
ROWS = 512
TOKENS = 256
RING_BYTES = 32 << 20
TRAIN = "train"


def tags_of(number: int) -> dict[str, Any]:
    return {
        "uid": f"u{number // 8}", "session_id": number % 8, "index": 0, "status": "completed",
        "prompt_len": 64, "response_len": TOKENS - 64, "seq_len": TOKENS, "policy_len": 100,
        "global_steps": 1, "min_global_steps": 1, "max_global_steps": 1, "score": 0.5,
    }  # fmt: skip


KEYS = [f"u{i // 8}_{i % 8}_0" for i in range(ROWS)]
TAGS = [tags_of(i) for i in range(ROWS)]


def columns(rows: int) -> dict[str, list[torch.Tensor]]:
    return {name: [torch.zeros(TOKENS)] * rows for name in FIELDS}


# -- the tag store alone ---------------------------------------------------------------------


class Store:
    """A tag store and its journal, without sockets."""

    def __init__(self, folder: Path, lineage: Lineage | None) -> None:
        journal = FileJournal(folder / "journal-00000001", "plane", 1)
        journal.lineage = lineage
        self.service = TagService(TagStore(1), journal, on_destroy=lambda: None, lineage=lineage)
        self._numbers = count(1)
        self._encoded = {rows: encode_batch(KEYS[:rows], columns(rows)) for rows in (1, ROWS)}
        self._packed = {rows: pack_tags_many(TAGS[:rows]) for rows in (1, ROWS)}

    def put(self, rows: int) -> Callable[[], object]:
        """The next put of so many rows, as it comes from a value store."""
        number = next(self._numbers)
        encoded = self._encoded[rows]
        meta = PutMeta(TRAIN, KEYS[:rows], 0, number, number - 1, None, None).pack()
        template, tags = (
            bytes(bytearray(encoded.template.blob)),
            bytes(bytearray(self._packed[rows])),
        )
        block = [number, 1, 4096 * number, encoded.nbytes, template, rows, encoded.lengths]
        return lambda: self.service.putting.put("client", meta, tags, block, "s0")

    def get(self, rows: int) -> Callable[[], object]:
        """A get of two fields, as far as the tag store has to do with it."""
        keys = [str(bytearray(key.encode()), "utf-8") for key in KEYS[:rows]]

        def ask() -> None:
            partition = self.service.store.partition(TRAIN)
            answer = resolve(partition, keys, ["input_ids", "labels"], drop_missing=False)
            self.service.tracing.got("client", TRAIN, keys, answer)

        return ask


def fastest_us(make: Callable[[], Callable[[], object]], calls: int) -> float:
    took: list[int] = []
    for _ in range(calls):
        ask = make()
        began = time.thread_time_ns()
        ask()
        took.append(time.thread_time_ns() - began)
    took.sort()
    return statistics.mean(took[: calls // 4]) / 1e3


def compare(waits: dict[str, float], rounds: int) -> None:
    """A line for each of what is measured."""
    with tempfile.TemporaryDirectory(prefix="lin-") as one, tempfile.TemporaryDirectory() as other:
        on = Store(Path(one), Lineage(RING_BYTES))
        off = Store(Path(other), None)
        for name, (verb, rows) in MEASURED.items():
            calls = 4000 if rows == 1 else 80
            more: list[float] = []
            base: list[float] = []
            for number in range(rounds + 1):
                order = (on, off) if number % 2 else (off, on)
                took = {
                    store is on: fastest_us(partial(getattr(store, verb), rows), calls)
                    for store in order
                }
                if number:  # the first one warms up
                    more.append(took[True] - took[False])
                    base.append(took[False])
            low, mid, high = min(more), statistics.median(more), max(more)
            print(
                f"{name:22} tag store {statistics.median(base):8.1f} us, lineage {mid:+6.2f} us "
                f"({low:+.2f} to {high:+.2f}); a client waits {waits[name]:8.1f} us: "
                f"{100 * mid / waits[name]:+.2f} %"
            )


# -- a live plane ----------------------------------------------------------------------------


class Plane:
    """What a client waits for."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.fields = {rows: columns(rows) for rows in (1, ROWS)}
        self.put(ROWS)

    def put(self, rows: int) -> None:
        self.client.kv_batch_put(KEYS[:rows], TRAIN, self.fields[rows], TAGS[:rows])

    def get(self, rows: int) -> None:
        self.client.kv_batch_get(KEYS[:rows], TRAIN, ["input_ids", "labels"])

    def wait_us(self, verb: str, rows: int) -> float:
        """The fastest tenth of calls: other processes make the others wait."""
        took: list[float] = []
        calls = 1000 if rows == 1 else 60
        for _ in range(calls):
            began = time.perf_counter()
            getattr(self, verb)(rows)
            took.append(time.perf_counter() - began)
        took.sort()
        return 1e6 * statistics.mean(took[: calls // 10])


MEASURED = {
    "put of 1 row": ("put", 1),
    f"put of {ROWS} rows": ("put", ROWS),
    "get of 1 row": ("get", 1),
    f"get of {ROWS} rows": ("get", ROWS),
}


def traces(plane: Plane) -> None:
    """How long traces of a full ring take."""
    client = plane.client
    number = 0
    while not client.trace(since=0, limit=1).gone:
        for _ in range(2000):
            client.kv_put(f"x{number}_0_0", TRAIN, tags=tags_of(8 * number))
            number += 1
        plane.put(ROWS)
    before = client.status()["worst_slice_ms"]
    for uid in ("u10", "u50", "nobody"):
        began = time.perf_counter()
        found = client.trace(uid=uid, timeout=120)
        took = time.perf_counter() - began
        print(
            f"trace of {uid:7} {1e3 * took:7.1f} ms, {len(found.rows)} rows of {found.next} "
            f"requests, {found.gone} gone"
        )
    after = client.status()["worst_slice_ms"]
    print(f"longest slice {before:.2f} ms before, {after:.2f} ms after")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.lineage", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--trace", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lin-") as folder:
        settings = {"host": "embedded", "runtime_dir": folder, "capacity_bytes": 1 << 30}
        for lineage in ("off", "on") if asked.trace else ("off",):
            client = dataplane.init({**settings, "lineage": lineage}, name=f"lineage-{lineage}")
            try:
                plane = Plane(client)
                if lineage == "off":
                    waits = {name: plane.wait_us(*what) for name, what in MEASURED.items()}
                    compare(waits, asked.rounds)
                else:
                    traces(plane)
            finally:
                client.close(destroy=True)


if __name__ == "__main__":
    main()
