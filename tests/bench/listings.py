"""Workloads that move tags only: single puts, bulk puts, and listings."""

from __future__ import annotations

import random
from typing import Any

from tests.bench import data
from tests.bench.subjects import Subject
from tests.bench.workload import DROP_IN, Cast, Line, Workload, median_of_each, timed


class TagPut(Workload):
    name = "tag"
    lines = (Line("put_tag", "ms", "tag-only put of one key, p50", 50, drop_in=DROP_IN),)

    def load(self) -> None:
        self.keys = data.keys_of(self.scale.tag_puts, "tag")

    def tags(self, number: int) -> list[data.Tags]:
        return data.tags_of(self.keys, [1000] * len(self.keys), seed=number)

    def put_each(self, subject: Subject, number: int) -> float:
        tags = self.tags(number)
        return median_of_each(
            subject.put_tags,
            [([k], self.partition, [t]) for k, t in zip(self.keys, tags, strict=True)],
        )

    def check(self, subject: Subject, number: int) -> None:
        expected = dict(zip(self.keys, self.tags(number), strict=True))
        if subject.listed(subject.list(self.partition)) != expected:
            raise AssertionError(f"{subject.name} {self.name}: the listing differs")

    def clear(self, subject: Subject) -> None:
        subject.clear(self.keys, self.partition)

    def play(self, cast: Cast, number: int) -> dict[str, float]:
        found = {"put_tag": cast.writer("put_each", number=number)}
        cast.reader("check", number=number)
        cast.writer("clear")
        return found


class Listing(Workload):
    name = "list"
    lines = (
        Line("put_tags_bulk", "ms", "tags of 100,000 keys in puts of 1,000", 9, drop_in=DROP_IN),
        Line(
            "list_all",
            "ms",
            "list 100,000 keys with 8 tags as arrays, 100 scattered changes before each",
            8,
        ),
        Line("list_since", "ms", "list what changed after 100 changes among 100,000 keys", 100),
    )
    changes = 100

    def load(self) -> None:
        count = self.scale.listed_keys
        self.keys = data.keys_of(count, "list")
        self.tags = data.tags_of(self.keys, data.long_tailed(count, 1100, seed=6), seed=6)

    def put_bulk(self, subject: Subject) -> float:
        def put_all() -> None:
            for at in range(0, len(self.keys), 1000):
                some = slice(at, at + 1000)
                subject.put_tags(self.keys[some], self.partition, self.tags[some])

        self.now = {key: dict(tag) for key, tag in zip(self.keys, self.tags, strict=True)}
        return timed(put_all)[0]

    def expect_bulk(self, subject: Subject) -> None:
        """The reader's own copy of what the writer put."""
        self.now = {key: dict(tag) for key, tag in zip(self.keys, self.tags, strict=True)}

    def changed(self, number: int, part: int) -> dict[str, data.Tags]:
        """100 keys far apart, and their tags from now on (all eight: Redis merges none)."""
        at = random.Random(2 * number + part).sample(range(len(self.keys)), self.changes)
        new = {self.keys[i]: {"status": "trained", "score": number + i / 1024} for i in at}
        for key, tags in new.items():
            self.now[key].update(tags)
        return {key: self.now[key] for key in new}

    def change(self, subject: Subject, number: int, part: int) -> None:
        for key, tags in self.changed(number, part).items():
            subject.put_tags([key], self.partition, [tags])

    def list_all(self, subject: Subject) -> float:
        self.listing: Any = None
        seconds, self.listing = timed(lambda: subject.list(self.partition))
        return seconds

    def mark(self, subject: Subject) -> None:
        self.revision = subject.revision(self.partition)

    def list_since(self, subject: Subject) -> float:
        self.listing = None
        seconds, self.listing = timed(lambda: subject.list_since(self.partition, self.revision))
        return seconds

    def check(self, subject: Subject, number: int, part: int) -> None:
        changes = self.changed(number, part)
        found = subject.listed(self.listing)
        expected = self.now if self.revision is None or part == 0 else changes
        if found != expected:
            raise AssertionError(f"{subject.name} {self.name}: the listing differs (part {part})")

    def clear(self, subject: Subject) -> None:
        for at in range(0, len(self.keys), 50_000):
            subject.clear(self.keys[at : at + 50_000], self.partition)

    def play(self, cast: Cast, number: int) -> dict[str, float]:
        found = {"put_tags_bulk": cast.writer("put_bulk")}
        cast.reader("expect_bulk")
        # A controller lists again and again: the first look at new keys is not what is timed.
        cast.reader("list_all")
        cast.reader("mark")
        cast.writer("change", number=number, part=0)
        found["list_all"] = cast.reader("list_all")
        cast.reader("check", number=number, part=0)
        cast.reader("mark")
        cast.writer("change", number=number, part=1)
        found["list_since"] = cast.reader("list_since")
        cast.reader("check", number=number, part=1)
        cast.writer("clear")
        return found
