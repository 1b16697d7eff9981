"""What `check perf` measures: puts, gets and wake-ups of a plane, beside a plain copy of memory.

Owns the measurements, not where they are made: all rows go into one partition, which its maker
drops. A share of memcpy is of the same bytes in the same run, so that it says something on any
machine.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dataplane.errors import DataplaneError

if TYPE_CHECKING:
    from dataplane.client.sync import Client

ROW_TOKENS: Final = 512
"""Of one row: 4 KiB of int64, as the ids of a short answer are."""
ROUNDS: Final = 7
WARM_UP: Final = 20
WAIT_S: Final = 10.0


class Measurement(NamedTuple):
    """One measurement, in milliseconds; of bulk ones also the rate and what memcpy reached."""

    name: str
    p50_ms: float
    p99_ms: float
    times: int
    bytes: int
    mib_per_s: float | None = None
    of_memcpy: float | None = None


def measured(client: Client, partition: str, count: int, nbytes: int) -> Iterator[Measurement]:
    """Each measurement, as it is made."""
    row = np.arange(ROW_TOKENS, dtype=np.int64)

    def put_row(i: int) -> None:
        client.kv_put(f"row-{i}", partition, {"ids": row}, {"i": i})

    def put_tags(i: int) -> None:
        client.kv_put(f"row-{i}", partition, None, {"j": i})

    def get_row(i: int) -> None:
        client.kv_batch_get([f"row-{i}"], partition, ["ids"], layout="padded")

    yield _latency("put one row", put_row, count, row.nbytes)
    yield _latency("put one row's tags", put_tags, count, 0)
    yield _latency("get one row", get_row, count, row.nbytes)
    yield from _bulk(client, partition, nbytes)
    yield _wake(client, partition, count)


def _latency(name: str, act: Callable[[int], None], count: int, nbytes: int) -> Measurement:
    for i in range(min(WARM_UP, count)):
        act(i)
    spans = [_timed(lambda i=i: act(i)) for i in range(count)]
    return _measurement(name, spans, nbytes)


def _bulk(client: Client, partition: str, nbytes: int) -> Iterator[Measurement]:
    rows = 16
    source = np.random.default_rng(0).integers(0, 1 << 62, (rows, max(nbytes // rows // 8, 1)))
    keys = [f"bulk-{i}" for i in range(rows)]
    target = np.empty_like(source)

    def copy() -> None:
        np.copyto(target, source)

    def put() -> None:
        client.kv_batch_put(keys, partition, {"bulk": source})

    def get() -> None:
        client.kv_batch_get(keys, partition, ["bulk"], layout="padded")

    for act in (copy, put, get):
        act()
    # Turn by turn: what else the machine does meanwhile slows all of them alike.
    spans: dict[str, list[float]] = {"memcpy": [], "put a batch": [], "get a batch": []}
    for _ in range(ROUNDS):
        for name, act in zip(spans, (copy, put, get), strict=True):
            spans[name].append(_timed(act))
    plain_s = float(np.median(spans["memcpy"]))
    for name, taken in spans.items():
        middle_s = float(np.median(taken))
        yield _measurement(name, taken, source.nbytes)._replace(
            mib_per_s=source.nbytes / (1 << 20) / middle_s,
            of_memcpy=None if name == "memcpy" else plain_s / middle_s,
        )


def _wake(client: Client, partition: str, count: int) -> Measurement:
    """From the start of a put until a waiter of that row goes on."""
    due: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    woken: queue.SimpleQueue[float | DataplaneError] = queue.SimpleQueue()

    def wait() -> None:
        while (i := due.get()) is not None:
            try:
                client.kv_wait(partition, {"wake": i}, timeout=WAIT_S)
            except DataplaneError as error:
                woken.put(error)
                return
            woken.put(time.perf_counter())

    waiter = threading.Thread(target=wait, name="dataplane-perf", daemon=True)
    waiter.start()
    spans: list[float] = []
    try:
        for i in range(count):
            due.put(i)
            _until_it_waits(client, partition)
            began = time.perf_counter()
            client.kv_put("woken", partition, None, {"wake": i})
            at = woken.get(timeout=2 * WAIT_S)
            if isinstance(at, DataplaneError):
                raise at
            spans.append(at - began)
    finally:
        due.put(None)
    return _measurement("put until a waiter is woken", spans, 0)


def _until_it_waits(client: Client, partition: str) -> None:
    """Give the waiter's request the time to arrive."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if any(waiter.partition_id == partition for waiter in client.waiters()):
            return


def _timed(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _measurement(name: str, spans: list[float], nbytes: int) -> Measurement:
    p50, p99 = (float(value) for value in np.percentile(spans, [50, 99]))
    return Measurement(name, p50 * 1e3, p99 * 1e3, len(spans), nbytes)
