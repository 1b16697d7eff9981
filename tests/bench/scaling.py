"""Workloads that look at what grows: with keys, with rounds, with clients. Of this project only."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from tests.bench import data
from tests.bench.footprint import descriptors, footprint, own_bytes
from tests.bench.rows import RaggedBatch, Trajectories
from tests.bench.subjects import Dataplane, Subject
from tests.bench.workload import Cast, Line, times_of_each


class ManyKeys(Trajectories):
    name = "many_keys"
    subjects = ("ours",)
    once = True
    lines = (
        Line("put_one_1m_keys", "x", "kv_put with 1,000,000 keys there over with 1,000", limit=1.5),
        Line("tag_store_1m_keys", "GB", "tag store, 1,000,000 keys, 8 tags, 4 fields", limit=2),
        Line("worst_slice", "ms", "longest hold of the tag store's loop so far", limit=2),
    )
    batch_rows = 1000
    before = 1000

    def load(self) -> None:
        super().load()
        names = data.TRAJECTORY_FIELDS
        self.small = data.ragged(data.keys_of(self.batch_rows, "x"), [4] * self.batch_rows, names)

    def fill(self, subject: Subject, begin: int, end: int) -> None:
        for at in range(begin, end, self.batch_rows):
            subject.put(self.small, self.some_keys(at), self.partition)

    def some_keys(self, at: int) -> list[str]:
        return [f"many-{i // 8:06d}_{i % 8}_0" for i in range(at, at + self.batch_rows)]

    def list_status(self, subject: Dataplane) -> int:
        """A listing of the whole partition: it must not hold the loop either."""
        return len(subject.client.kv_list(self.partition, columns=["status"]))

    def clear_many(self, subject: Dataplane) -> None:
        subject.client.kv_clear(None, self.partition, where={})

    def sizes(self, subject: Dataplane) -> tuple[int, float]:
        status = subject.status()
        return footprint(status).tag_store_bytes, status["worst_slice_ms"] / 1000

    def play(self, cast: Cast, number: int) -> dict[str, float]:
        count = self.scale.many_keys
        cast.writer("fill", begin=0, end=self.before)
        cast.writer("put_each", number=0)  # warms both ends
        few = cast.writer("put_each", number=number)
        cast.writer("fill", begin=self.before, end=count)
        many = cast.writer("put_each", number=number)
        listed = cast.reader("list_status")
        if listed != count + len(self.make_keys()):
            raise AssertionError(f"{cast.name} {self.name}: {listed} keys listed")
        own, slice_s = cast.writer("sizes")
        cast.writer("clear_many")
        _, slice_after_s = cast.writer("sizes")
        return {
            "put_one_1m_keys": many / few,
            "tag_store_1m_keys": own / 1e9,
            "worst_slice": max(slice_s, slice_after_s),
        }

    def make_keys(self) -> list[str]:
        return data.keys_of(self.scale.puts, "one")


class FlatMemory(RaggedBatch):
    name = "flat"
    subjects = ("ours",)
    once = True
    lines = (
        Line("flat_segments", "x", "segment files after 200 put/clear rounds over 20", limit=1.05),
        Line(
            "flat_memory",
            "x",
            "servers and segments over 200 such rounds, once the bounded history is full",
            limit=1.05,
        ),
        Line("used_after_clear", "bytes", "bytes in use after the last clear", limit=0),
    )

    def rounds(self, subject: Dataplane, count: int) -> None:
        for _ in range(count):
            subject.put(self.batch, self.batch.keys, self.partition)
            subject.clear(self.batch.keys, self.partition)

    def history_is_full(self, subject: Dataplane) -> bool:
        return subject.status()["history_floor"] > 0

    def sizes(self, subject: Dataplane) -> tuple[int, int, int]:
        """Bytes of segments, of everything, and in use."""
        # Blocks are freed after the clear's answer; they must be, and soon.
        deadline = time.monotonic() + 10
        while (found := footprint(subject.status())).used_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        return found.segment_bytes, found.all_bytes, found.used_bytes

    def play(self, cast: Cast, number: int) -> dict[str, float]:
        count = self.scale.flat_rounds
        cast.writer("rounds", count=count // 10)
        early, _, _ = cast.writer("sizes")
        cast.writer("rounds", count=count - count // 10)
        late, _, _ = cast.writer("sizes")
        # The history of changes grows up to its bound (a million keys), and then no more.
        for _ in range(5):
            if cast.writer("history_is_full"):
                break
            cast.writer("rounds", count=count)
        _, before, _ = cast.writer("sizes")
        cast.writer("rounds", count=count)
        _, after, used = cast.writer("sizes")
        return {
            "flat_segments": late / early,
            "flat_memory": after / before,
            "used_after_clear": used,
        }


class ManyClients(Trajectories):
    name = "clients"
    subjects = ("ours",)
    writers_needed = 5
    once = True
    lines = (
        Line("put_one_2000_clients", "x", "kv_put p99 with 2,000 clients attached", limit=2),
        Line("client_memory", "KB", "memory per attached client, its own and the servers'"),
        Line("client_descriptors", "fds", "descriptors per attached client, both ends"),
    )

    def slowest(self, subject: Subject) -> float:
        """p99 of one active client's puts, the median of five tries."""
        tags = self.batch.tags or []
        found: list[float] = []
        for _ in range(6):
            seconds = times_of_each(
                subject.put_row,
                zip(
                    self.batch.keys,
                    [self.partition] * len(tags),
                    self.rows,
                    tags,
                    strict=True,
                ),
            )
            found.append(statistics.quantiles(seconds, n=100)[98])
        return statistics.median(found[1:])

    def attach(self, subject: Dataplane, index: int, count: int) -> tuple[int, int]:
        """Attach so many clients in this process; its own bytes and descriptors for them."""
        if index == 0:
            return 0, 0
        pid = os.getpid()
        before = own_bytes(pid), descriptors(pid)
        self.crowd: list[Any] = [subject.another() for _ in range(count)]
        for client in self.crowd:
            client.kv_list(self.partition, limit=1)
        return own_bytes(pid) - before[0], descriptors(pid) - before[1]

    def detach(self, subject: Subject, index: int) -> None:
        for client in self.crowd if index else ():
            client.close()

    def servers(self, subject: Dataplane) -> tuple[int, int]:
        found = footprint(subject.status())
        return found.all_bytes, found.descriptors

    def play(self, cast: Cast, number: int) -> dict[str, float]:
        alone = cast.writer("slowest")
        before: Sequence[int] = cast.writer("servers")
        crowds = min(self.writers_needed, self.scale.writers) - 1
        count = self.scale.clients // crowds
        own: list[Sequence[int]] = cast.writers("attach", count=count)
        after: Sequence[int] = cast.writer("servers")
        crowded = cast.writer("slowest")
        cast.writers("detach")
        cast.writer("clear")
        bytes_, fds = (sum(each[i] for each in own) + after[i] - before[i] for i in (0, 1))
        attached = count * crowds
        return {
            "put_one_2000_clients": crowded / alone,
            "client_memory": bytes_ / attached / 1e3,
            "client_descriptors": fds / attached,
        }
