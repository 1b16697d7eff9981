"""What an operator is told of a plane: keys, partitions, claims, who waits, what stores hold.

Plain values, the same for every way to a plane; `dataclasses.asdict` makes JSON of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dataplane.types import Revision, Tags


@dataclass(frozen=True, slots=True)
class ClientReport:
    """A client as the plane knows it."""

    client_id: str
    label: str
    """Where it runs, as it said itself; empty if that is not known."""
    alive: bool
    """Whether it has a connection: one that stopped, or is cut off, has none soon after."""


@dataclass(frozen=True, slots=True)
class FieldReport:
    """One cell: a field of one key."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int
    store: str
    """The value store that has it."""
    block: int
    segment: int
    offset: int
    """Where its block begins in the segment."""


@dataclass(frozen=True, slots=True)
class KeyReport:
    """One key, without its values."""

    key: str
    revision: Revision
    """Its last change."""
    age_s: float | None
    """Since that change; None where it is longer ago than is remembered."""
    tags: Tags
    tag_bytes: int
    fields: list[FieldReport]
    producer: ClientReport
    """Whose row it is: for a row of a group, who began the group."""
    group: dict[str, Any] | None
    """Of a prompt or a trajectory of a group: uid, attempt, status, open, n, sessions."""
    tasks: dict[str, str]
    """Each task of the partition: `committed`, `claimed` or `not claimed`."""
    lost: bool


@dataclass(frozen=True, slots=True)
class Tally:
    """How much of a partition matches: what a clear would remove."""

    partition_id: str
    revision: Revision
    """`kv_clear(…, until=revision)` removes these rows and none that changed since."""
    rows: int
    payload_bytes: int
    tag_bytes: int
    statuses: dict[str, list[int]]
    """Rows and bytes by the tag `status`, most bytes first; rows without one are under ''."""
    groups_open: int
    """Groups that are open and have rows or their prompt among them."""
    sample: list[str]
    """The first keys."""


@dataclass(frozen=True, slots=True)
class LengthReport:
    """Lengths of a ragged field; percentiles and bins are exact up to 255, then to within 1 %."""

    rows: int
    min: int
    max: int
    mean: float
    p50: int
    p90: int
    p99: int
    histogram: list[tuple[int, int, int]]
    """(from, to, rows) of about 20 bins, ends included; those without rows are left out."""


@dataclass(frozen=True, slots=True)
class PartitionStats:
    """What a partition is made of."""

    partition_id: str
    revision: Revision
    keys: int
    payload_bytes: int
    extent_bytes: int
    """Of blocks, in whole pages: what the value stores have in use for it."""
    tag_bytes: int
    held_bytes: int
    """Reserved for groups, and not used by them yet."""
    fields: dict[str, dict[str, int]]
    """`rows` and `bytes` of each field, most bytes first."""
    statuses: dict[str, int]
    """Rows by the tag `status`; rows without one are under ''."""
    producers: list[dict[str, Any]]
    """client_id, label, alive, rows, bytes (extents and tags) of each, most bytes first."""
    ages: list[dict[str, Any]]
    """rows and bytes of those last changed `from_s` to `to_s` seconds ago (None: and longer)."""
    lengths: dict[str, LengthReport]
    """By ragged field."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits."""

    kind: str
    """`rows` (kv_wait), `changes` (kv_watch), `claim`, or `room` (a put or a group)."""
    client: ClientReport
    partition_id: str
    waited_s: float
    left_s: float | None
    """Until its deadline."""
    count: int | None = None
    """Rows or groups that are wanted."""
    where: str = ""
    """What they have to match, as JSON."""
    task: str = ""
    """Of a claim."""
    fields: list[str] = field(default_factory=list[str])
    grouped: bool = False


@dataclass(frozen=True, slots=True)
class ClaimReport:
    """Rows that a task has handed out."""

    partition_id: str
    task: str
    claim_id: int
    keys: list[str]
    """Those that are still held."""
    holders: list[ClientReport]
    age_s: float
    lease_s: float
    left_s: float | None
    """Until its term is over; None while one of its holders is there."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """How far a task has come in a partition."""

    partition_id: str
    task: str
    committed: int
    """Rows that are there, and that it has committed."""
    held: int
    lag: int
    """Rows that it has not committed."""
    waiting: int
    """Claims of it that wait."""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What one value store has in use, and who holds it."""

    store_id: str
    reachable: bool
    error: str = ""
    """Why it could not be asked."""
    pid: int = 0
    capacity_bytes: int = 0
    segment_bytes: int = 0
    """What it takes of shared memory."""
    used_bytes: int = 0
    held_bytes: int = 0
    """Reserved for groups."""
    live_blocks: int = 0
    dead_blocks: int = 0
    """Without a live cell, and kept by readers."""
    orphans: list[dict[str, int]] = field(default_factory=list[Any])
    """Published blocks that the tag store knows nothing of: block, bytes."""
    pins: list[dict[str, Any]] = field(default_factory=list[Any])
    """Who reads: client, blocks, bytes, dead_bytes, age_s (of its oldest pin)."""
    reservations: list[dict[str, Any]] = field(default_factory=list[Any])
    """Who writes: client, blocks, bytes, age_s (of its oldest reservation)."""


def client_report(wire: Mapping[str, Any]) -> ClientReport:
    """The client that an answer names."""
    return ClientReport(**wire)
