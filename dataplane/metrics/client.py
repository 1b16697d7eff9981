"""What the clients of one process measure, and what its program says of itself, on a port.

Off until somebody asks: `serve_metrics`. From then on all clients of the process count their calls.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Generator, Mapping
from time import perf_counter
from typing import Any, Final, TypeVar, cast

from dataplane.client.core import Core
from dataplane.client.effects import Ask, Run
from dataplane.errors import InvalidRequest
from dataplane.metrics.endpoint import Endpoint
from dataplane.metrics.reading import Reading
from dataplane.metrics.serving import LOCAL
from dataplane.metrics.timing import Histogram
from dataplane.release import release

Result = TypeVar("Result")

VERBS: Final = {
    "put_row": "kv_put",
    "put_batch": "kv_batch_put",
    "get_batch": "kv_batch_get",
    "view_batch": "kv_view",
    "list_rows": "kv_list",
    "clear_rows": "kv_clear",
    "wait_rows": "kv_wait",
    "watch_once": "kv_watch",
    "claim_rows": "kv_claim",
    "commit_claim": "kv_commit",
    "release_claim": "kv_release",
    "begin_group": "begin_group",
    "end_group": "end_group",
    "explain": "explain",
    "plane_status": "status",
    "create_partition": "kv_create_partition",
    "list_partitions": "kv_list_partitions",
    "seal_partition": "kv_seal_partition",
    "drop_partition": "kv_drop_partition",
    "save_checkpoint": "save_checkpoint",
    "load_checkpoint": "load_checkpoint",
}
"""Verbs by the functions that make them; all others are `other`."""
OTHER: Final = "other"
PUTS: Final = frozenset(("kv_put", "kv_batch_put"))
GETS: Final = frozenset(("kv_batch_get",))
WAITS: Final = frozenset(("kv_wait", "kv_watch", "kv_claim"))
MAX_VALUES: Final = 512
"""Names that a program may say something under."""


class ClientMeter:
    """Counts the calls of all clients of a process. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._durations: dict[str, Histogram] = {}
        self._failures: dict[tuple[str, str], int] = {}
        self._moved: dict[str, int] = {}

    def measured(self, verb: Generator[Any, Any, Result]) -> Generator[Any, Any, Result]:
        """The same verb, with a clock around it."""
        name = VERBS.get(cast("Any", verb).__name__, OTHER)
        began = perf_counter()
        moved = 0
        failed = ""
        try:
            value: Any = None
            error: BaseException | None = None
            while True:
                effect = verb.send(value) if error is None else verb.throw(error)
                value = error = None
                # Small puts travel with a request; all else is copied, whichever way it came.
                if effect.__class__ is Ask:
                    moved += cast("Ask", effect).payload_bytes
                elif effect.__class__ is Run:
                    moved += cast("Run", effect).nbytes
                try:
                    value = yield effect
                except GeneratorExit:
                    verb.close()
                    raise
                except BaseException as thrown:
                    error = thrown
        except StopIteration as end:
            return end.value
        except BaseException as error:
            failed = type(error).__name__
            raise
        finally:
            self._count(name, perf_counter() - began, moved, failed)

    def _count(self, name: str, seconds: float, moved: int, failed: str) -> None:
        with self._lock:
            histogram = self._durations.get(name)
            if histogram is None:
                histogram = self._durations[name] = Histogram()
            histogram.add(seconds)
            if failed:
                self._failures[name, failed] = self._failures.get((name, failed), 0) + 1
            if moved and (name in PUTS or name in GETS):
                self._moved[name] = self._moved.get(name, 0) + moved

    def read(self, reading: Reading) -> None:
        """Add what was counted."""
        with self._lock:
            durations = {name: of.copy() for name, of in self._durations.items()}
            failures, moved = dict(self._failures), dict(self._moved)
        reading.counts("client_call_duration_seconds", ())
        for name, histogram in durations.items():
            reading.set("client_call_duration_seconds", histogram, name)
        reading.counts("client_calls_failed_total", failures.items())
        for of, verbs in (("put", PUTS), ("got", GETS)):
            found = (((name,), n) for name, n in moved.items() if name in verbs)
            reading.counts(f"client_{of}_bytes_total", found)
        waits = (((name,), of.sum_s) for name, of in durations.items() if name in WAITS)
        reading.counts("client_waiting_seconds_total", waits)


class ProcessMetrics:
    """The endpoint of a process that uses planes. A context that closes it at its end."""

    def __init__(self, port: int, host: str) -> None:
        self._began = time.time()
        self._lock = threading.Lock()  # guards what the program said
        self._values: dict[str, float] = {}
        self._step: int | None = None
        if not 0 <= port < 65536:
            raise InvalidRequest(f"a port is a number from 0 to 65535, not {port!r:.80}")
        with _serving_lock:
            self._meter = Core.meter or ClientMeter()
            self._endpoint = Endpoint(self._read, host=host, port=port, loop=None)
            Core.meter = self._meter
            _serving.add(self)

    @property
    def target(self) -> str:
        """Where it listens, as `host:port`."""
        return self._endpoint.target

    def tell(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Show these values, each until the next of its name. What is not finite is left out."""
        with self._lock:
            for name, value in values.items():
                known = name in self._values or len(self._values) < MAX_VALUES
                if known and math.isfinite(value):
                    self._values[name] = float(value)
            if step is not None:
                self._step = step

    def close(self) -> None:
        """Stop listening. Repeatable. Clients count no more after the last endpoint."""
        self._endpoint.close()
        with _serving_lock:
            _serving.discard(self)
            if not _serving:
                Core.meter = None

    def __enter__(self) -> ProcessMetrics:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _read(self) -> Reading:
        reading = Reading()
        reading.set("build_info", 1, "", "", "client", release())
        reading.set("start_time_seconds", self._began)
        self._meter.read(reading)
        with self._lock:
            reading.counts("run_value", (((name,), v) for name, v in self._values.items()))
            if self._step is not None:
                reading.set("run_step", self._step)
        return reading


def serve_metrics(port: int = 0, *, host: str = LOCAL) -> ProcessMetrics:
    """An endpoint for Prometheus with what the clients of this process do: calls by verb, their
    durations and errors, bytes put and got, time in verbs that wait. `tell` adds values of one's
    own.

    Any port with 0 (`.target` says which); should it be taken, another one, and the log says so.

    InvalidRequest: there is no such host here.

    Example: `with dataplane.serve_metrics(9420) as metrics: metrics.tell({"time/step": 1.5}, 3)`
    """
    return ProcessMetrics(port, host)


_serving_lock = threading.Lock()  # guards the set, and whether clients count
_serving: set[ProcessMetrics] = set()
