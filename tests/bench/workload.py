"""What a workload is: data, steps that are timed, figures, and what they must reach.

A workload exists twice. In a subject's processes its steps run: each gets the subject first,
times the call and nothing else, and returns seconds. In the runner's process `play` says who
does which step in which order, and names the figures. Every round checks, outside the timed
part, that what came back is what was put, bit for bit.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything; `FULL` is what the requirements are stated for."""

    dense: tuple[int, int, int]  # rows, fields, width
    ragged: tuple[int, int]  # rows, mean tokens
    puts: int
    tag_puts: int
    six_seconds: float
    writers: int
    """At most so many writer processes."""
    listed_keys: int
    scattered: tuple[int, int]  # rows, mean tokens
    many_keys: int
    flat_rounds: int
    clients: int


FULL = Scale(
    dense=(1024, 9, 8192),
    ragged=(1024, 1100),
    puts=200,
    tag_puts=300,
    six_seconds=1.5,
    writers=6,
    listed_keys=100_000,
    scattered=(1000, 1500),
    many_keys=1_000_000,
    flat_rounds=200,
    clients=2000,
)
SMOKE = Scale(
    dense=(32, 3, 256),
    ragged=(32, 100),
    puts=10,
    tag_puts=10,
    six_seconds=0.2,
    writers=2,
    listed_keys=2_000,
    scattered=(20, 100),
    many_keys=4_000,
    flat_rounds=10,
    clients=20,
)


DROP_IN = 1.25
"""A quarter is what the drop-in may cost over our own client."""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of the report, and what it has to reach."""

    name: str
    unit: str
    what: str
    required: float | None = None
    """At least so many times better than `against`."""
    limit: float | None = None
    """At most this, in `unit`."""
    against: str = "transferqueue"
    higher_is_better: bool = False
    drop_in: float | None = None
    """At most so many times worse through the drop-in than through our own client."""


class Cast(Protocol):
    """The processes of one subject, as `play` directs them. Each call runs one step there."""

    name: str

    def writer(self, step: str, **arguments: object) -> Any: ...
    def reader(self, step: str, **arguments: object) -> Any: ...
    def writers(self, step: str, **arguments: object) -> list[Any]: ...


class Workload:
    """Base of all: `load` makes the data, the other methods are steps."""

    name: ClassVar[str]
    lines: ClassVar[tuple[Line, ...]]
    subjects: ClassVar[tuple[str, ...]] = (
        "ours",
        "embedded",
        "drop_in",
        "transferqueue",
        "redis",
        "ray_actor",
    )
    writers_needed: ClassVar[int] = 1
    once: ClassVar[bool] = False
    """Played one time, without a warm-up: it compares two states of one run itself."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.partition = f"bench-{self.name}"

    def load(self) -> None:
        """Make the data, once per process."""

    def play(self, cast: Cast, number: int) -> dict[str, float]:
        """Direct one round, and return its figures by line name."""
        raise NotImplementedError


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds that the call took, and its result."""
    gc.collect()
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def shuffled(count: int, seed: int) -> list[int]:
    """0..count-1 in an order fixed by the seed."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def times_of_each(call: Callable[..., object], arguments: Iterable[tuple[Any, ...]]) -> list[float]:
    """Seconds of one call per tuple of arguments."""
    seconds: list[float] = []
    gc.collect()
    for each in arguments:
        begin = time.perf_counter()
        call(*each)
        seconds.append(time.perf_counter() - begin)
    return seconds


def median_of_each(call: Callable[..., object], arguments: Iterable[tuple[Any, ...]]) -> float:
    """The median of `times_of_each`."""
    return statistics.median(times_of_each(call, arguments))
