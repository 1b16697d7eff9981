"""Workloads that move values: dense and ragged batches, single trajectories, many writers."""

from __future__ import annotations

import gc
import time
from typing import Any

from tests.bench import data
from tests.bench.subjects import Dataplane, Subject
from tests.bench.workload import DROP_IN, Cast, Line, Workload, median_of_each, shuffled, timed


class BatchWorkload(Workload):
    """Shared by the workloads that put one batch and get it back."""

    batch: data.Batch

    def order(self, number: int) -> list[int]:
        """The order in which the reader asks for the rows."""
        return list(range(len(self.batch.keys)))

    def put(self, subject: Subject, number: int) -> float:
        self.batch.stamp(number)
        seconds, _ = timed(lambda: subject.put(self.batch, self.batch.keys, self.partition))
        return seconds

    def get(self, subject: Subject, number: int) -> float:
        keys = [self.batch.keys[i] for i in self.order(number)]
        names = list(self.batch.columns)
        # Let go of the last round's memory first, as a training loop does.
        self.got: Any = None
        seconds, self.got = timed(lambda: subject.get(keys, self.partition, names))
        return seconds

    def check(self, subject: Subject, number: int) -> None:
        self.batch.stamp(number)
        order = self.order(number)
        for name, column in self.batch.columns.items():
            if not subject.read(self.got, name).same_as(column.picked(order)):
                raise AssertionError(f"{subject.name} {self.name}: {name} came back different")

    def clear(self, subject: Subject) -> None:
        subject.clear(self.batch.keys, self.partition)


class DenseBatch(BatchWorkload):
    name = "dense"
    subjects = (*Workload.subjects, "memcpy")
    lines = (
        Line(
            "put_dense",
            "ms",
            "put 1024 rows x 9 fields x 8192 float32 (302 MB)",
            6,
            drop_in=DROP_IN,
        ),
        Line(
            "put_dense_memcpy",
            "ms",
            "the same, against one thread copying it into warm shared memory",
            0.7,
            against="memcpy",
        ),
        Line("get_dense", "ms", "get the same, copied, whole batch in order", 10, drop_in=DROP_IN),
        Line("view_dense", "ms", "view the same where it lies", limit=5),
    )

    def load(self) -> None:
        self.batch = data.dense(*self.scale.dense)

    def view(self, subject: Subject, number: int) -> float | None:
        if not isinstance(subject, Dataplane):
            return None
        names = list(self.batch.columns)
        begin = time.perf_counter()
        with subject.view(self.batch.keys, self.partition, names) as rows:
            seconds = time.perf_counter() - begin
            self.got = rows
            self.check(subject, number)
            self.got = rows = None
        return seconds

    def play(self, cast: Cast, number: int) -> dict[str, float]:
        put = cast.writer("put", number=number)
        found = {"put_dense": put}
        if cast.name in ("ours", "embedded", "memcpy"):
            found["put_dense_memcpy"] = put
        found["get_dense"] = cast.reader("get", number=number)
        cast.reader("check", number=number)
        if (view := cast.reader("view", number=number)) is not None:
            found["view_dense"] = view
        cast.writer("clear")
        return found


class RaggedBatch(BatchWorkload):
    name = "ragged"
    lines = (
        Line(
            "put_ragged",
            "ms",
            "put 1024 ragged rows, 6 fields, mean 1.1k tokens, with tags",
            25,
            drop_in=DROP_IN,
        ),
        Line(
            "get_ragged", "ms", "get the same, nested, in shuffled key order", 12, drop_in=DROP_IN
        ),
    )

    def load(self) -> None:
        rows, mean = self.scale.ragged
        lengths = data.long_tailed(rows, mean, seed=3)
        self.batch = data.ragged(data.keys_of(rows, "ragged"), lengths)

    def order(self, number: int) -> list[int]:
        return shuffled(len(self.batch.keys), number)

    def play(self, cast: Cast, number: int) -> dict[str, float]:
        found = {"put_ragged": cast.writer("put", number=number)}
        found["get_ragged"] = cast.reader("get", number=number)
        cast.reader("check", number=number)
        cast.writer("clear")
        return found


class Trajectories(BatchWorkload):
    """Rows that are put one by one, and got in one call."""

    name = "one"
    lines = (
        Line(
            "put_one",
            "ms",
            "kv_put of one 57 KB trajectory (4 fields + tags), p50",
            20,
            drop_in=DROP_IN,
        ),
    )

    def load(self) -> None:
        count = self.scale.puts
        # 24 bytes a token (two int64, two float32): 57,000 bytes.
        self.make(data.keys_of(count, "one"), [2375] * count)

    def make(self, keys: list[str], lengths: list[int]) -> None:
        self.batch = data.ragged(keys, lengths, data.TRAJECTORY_FIELDS, seed=4)
        columns = {name: column.rows() for name, column in self.batch.columns.items()}
        self.rows: list[data.Row] = [
            {name: rows[i] for name, rows in columns.items()} for i in range(len(keys))
        ]

    def order(self, number: int) -> list[int]:
        return shuffled(len(self.batch.keys), number)

    def put_each(self, subject: Subject, number: int) -> float:
        """Put every row by itself, and return the median."""
        self.batch.stamp(number)
        return median_of_each(
            subject.put_row,
            zip(
                self.batch.keys,
                [self.partition] * len(self.rows),
                self.rows,
                self.batch.tags or [],
                strict=True,
            ),
        )

    def play(self, cast: Cast, number: int) -> dict[str, float]:
        found = {"put_one": cast.writer("put_each", number=number)}
        cast.reader("get", number=number)
        cast.reader("check", number=number)
        cast.writer("clear")
        return found


class ScatteredGet(Trajectories):
    name = "scattered"
    lines = (
        Line(
            "get_scattered",
            "ms",
            "get 1,000 separately written trajectories (36 MB), nested",
            8,
            drop_in=DROP_IN,
        ),
    )

    def load(self) -> None:
        rows, mean = self.scale.scattered
        self.make(data.keys_of(rows, "scattered"), data.long_tailed(rows, mean, seed=5))

    def play(self, cast: Cast, number: int) -> dict[str, float]:
        cast.writer("put_each", number=number)
        found = {"get_scattered": cast.reader("get", number=number)}
        cast.reader("check", number=number)
        cast.writer("clear")
        return found


class SixWriters(Trajectories):
    name = "six"
    writers_needed = 6
    lines = (
        Line(
            "put_six_writers",
            "puts/s",
            "6 writer processes, each putting 57 KB trajectories one by one",
            25,
            higher_is_better=True,
            drop_in=DROP_IN,
        ),
    )

    def load(self) -> None:
        self.make(data.keys_of(16, "six"), [2375] * 16)

    def put_until(
        self, subject: Subject, number: int, index: int, start: float, seconds: float
    ) -> tuple[int, float]:
        """Put from `start` on for so many seconds; how many, and when the last was done."""
        self.batch.stamp(number)
        gc.collect()
        time.sleep(max(0.0, start - time.monotonic()))
        tags = self.batch.tags or []
        count, now = 0, start
        while count == 0 or now < start + seconds:
            which = count % len(self.rows)
            subject.put_row(f"w{index}-{count}", self.partition, self.rows[which], tags[which])
            count, now = count + 1, time.monotonic()
        return count, now

    def check_all(self, subject: Subject, number: int, counts: list[int]) -> None:
        """Every key is listed; each writer's first and last rows are what was put."""
        self.batch.stamp(number)
        expected = {f"w{i}-{n}" for i, count in enumerate(counts) for n in range(count)}
        if set(subject.listed(subject.list(self.partition))) != expected:
            raise AssertionError(f"{subject.name} {self.name}: the listing misses keys")
        picked = [(i, n) for i, count in enumerate(counts) for n in {0, count - 1}]
        keys = [f"w{i}-{n}" for i, n in picked]
        got = subject.get(keys, self.partition, list(self.batch.columns))
        order = [n % len(self.rows) for _, n in picked]
        for name, column in self.batch.columns.items():
            if not subject.read(got, name).same_as(column.picked(order)):
                raise AssertionError(f"{subject.name} {self.name}: {name} came back different")

    def clear_all(self, subject: Subject, counts: list[int]) -> None:
        keys = [f"w{i}-{n}" for i, count in enumerate(counts) for n in range(count)]
        subject.clear(keys, self.partition)

    def play(self, cast: Cast, number: int) -> dict[str, float]:
        start = time.monotonic() + 0.3
        done: list[tuple[int, float]] = cast.writers(
            "put_until", number=number, start=start, seconds=self.scale.six_seconds
        )
        counts = [count for count, _ in done]
        cast.reader("check_all", number=number, counts=counts)
        cast.writer("clear_all", counts=counts)
        return {"put_six_writers": sum(counts) / (max(end for _, end in done) - start)}
