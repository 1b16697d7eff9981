"""Histories: what clients asked of a plane and what they were told, in the order of it happening.

Owns the calls as data and the count that orders them. Whether a history is legal is for checker.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    OutcomeUnknown,
    PlaneLost,
    Unreachable,
)

Tag: TypeAlias = "bool | int | float | str | None"
Tags: TypeAlias = "dict[str, Tag]"
Value: TypeAlias = str
"""What a field holds, in a spelling that is equal exactly if the values are."""
Fields: TypeAlias = "dict[str, Value]"

OPEN = (DeadlineExceeded, OutcomeUnknown, PlaneLost, Unreachable)
"""Errors after which a call may have had its effect or may still have it."""


@dataclass(kw_only=True, slots=True, eq=False)
class Op:
    """One call of one client."""

    client: str
    partition: str = "p"
    begin: int = 0
    """When it was called, in the order of everything that happened."""
    end: int | None = None
    """When its outcome was known; None if it never was: it may have had its effect once."""
    seen: int = 0
    """The last revision that its client had seen when it was called."""
    broken: int = 0
    """How often a connection broke under it, after which it was asked again."""
    error: DataplaneError | None = None
    revision: int | None = None
    """The revision that it made or read, as it was told."""

    @property
    def ok(self) -> bool:
        """Whether it was answered with what it asked for."""
        return self.end is not None and self.error is None

    @property
    def refused(self) -> bool:
        """Whether it was told that it had no effect."""
        return self.end is not None and self.error is not None


@dataclass(kw_only=True, slots=True, eq=False)
class Put(Op):
    keys: list[str]
    fields: list[Fields] | None = None
    tags: list[Tags] | None = None
    attempt: int | None = None
    must_exist: bool = False
    if_absent: bool = False
    begun: int | None = None
    """When its stores knew at the latest that it had begun, in the order of everything; None if
    they may have learned of it with its rows only."""
    merged: list[Tags] | None = None
    """Whole tags of the keys, where it asked for them."""


@dataclass(kw_only=True, slots=True, eq=False)
class Clear(Op):
    keys: list[str] | None = None
    where: Tags | None = None
    """Tags that a row has to have, each of them."""
    retire: bool = False
    removed: int = 0


@dataclass(kw_only=True, slots=True, eq=False)
class Get(Op):
    keys: list[str]
    fields: list[str] | None = None
    drop: bool = False
    """Whether keys that lack something are left out."""
    rows: list[tuple[str, Fields]] = field(default_factory=list[tuple[str, Fields]])
    """What came back, in the order in which it was asked for."""


@dataclass(kw_only=True, slots=True, eq=False)
class List(Op):
    where: Tags | None = None
    rows: dict[str, tuple[Tags, frozenset[str]]] = field(
        default_factory=dict[str, tuple[Tags, frozenset[str]]]
    )
    """Tags and names of the fields of each key."""


@dataclass(kw_only=True, slots=True, eq=False)
class Begin(Op):
    """`begin_group`; its revision is the attempt."""

    uid: str
    n: int = 1


@dataclass(kw_only=True, slots=True, eq=False)
class End(Op):
    """`end_group`."""

    attempt: int
    status: str = "finished"


@dataclass(kw_only=True, slots=True, eq=False)
class Seal(Op):
    """`kv_seal_partition`."""


@dataclass(kw_only=True, slots=True, eq=False)
class Claim(Op):
    task: str = "t"
    count: int = 1
    fields: list[str] = field(default_factory=list[str])
    where: Tags | None = None
    grouped: bool = False
    """Whether whole groups are counted, and come."""
    lease_s: float = 30.0
    wait_s: float = 1.0
    """How long it is to wait for rows."""
    alone: bool = False
    """Whether nobody else could hold anything by its deadline, and no row could come: it is to be
    answered, with what there is."""
    claim_id: int = 0
    rows: list[tuple[str, Tags, int]] = field(default_factory=list[tuple[str, Tags, int]])
    """Key, tags and deliveries of each row."""
    last: bool = False
    """Whether it was told that nothing is left to claim."""


@dataclass(kw_only=True, slots=True, eq=False)
class Settle(Op):
    """`kv_commit`, or `kv_release`."""

    claim: Claim
    keys: list[str]
    commit: bool = True


@dataclass(kw_only=True, slots=True, eq=False)
class Away:
    """A time in which a client had no connection."""

    client: str
    begin: int = 0
    """When the first of its connections was closed."""
    end: int | None = None
    """When it surely had one again; None if it died."""
    seconds: float = 0.0
    """How long that was at most."""


@dataclass(slots=True, eq=False)
class History:
    """All calls on some partitions that did not exist before."""

    ops: Sequence[Op]
    first: int = 0
    """The plane's revision before the first of them."""
    last: int | None = None
    """Its revision when all was over; None where that is not known."""
    away: Sequence[Away] = ()
    kept: int | None = None
    """Changed keys that the plane remembers, where it may have forgotten some."""


class Recorder:
    """Notes calls as they are made. For any number of threads, as long as each call is its own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.ops: list[Op] = []
        self.away: list[Away] = []
        self._clock = clock
        self._count = itertools.count(1)
        self._left: dict[str, tuple[Away, float]] = {}

    def now(self) -> int:
        """The next place in the order of everything."""
        return next(self._count)

    def begin(self, op: Op, seen: int) -> None:
        """A call is about to be made by a client that has seen so much."""
        op.seen = seen
        self.ops.append(op)
        op.begin = self.now()

    def end(self, op: Op, error: DataplaneError | None = None) -> None:
        """A call was answered. Its results are noted in it already."""
        op.error = error
        if _is_known(op, error):
            op.end = self.now()

    def leaves(self, client: str) -> None:
        """A client is about to close its connections."""
        away = Away(client=client, begin=self.now())
        self.away.append(away)
        self._left[client] = away, self._clock()

    def returns(self, client: str) -> None:
        """A client that left has a connection again."""
        away, since = self._left.pop(client)
        away.seconds = self._clock() - since
        away.end = self.now()

    def history(self, first: int, last: int, kept: int | None = None) -> History:
        """What was noted, of clients of which none will call again."""
        for away, since in self._left.values():
            away.seconds = self._clock() - since
        return History(list(self.ops), first, last, list(self.away), kept)


def _is_known(op: Op, error: DataplaneError | None) -> bool:
    """Whether a call's outcome is known with its answer."""
    if isinstance(op, Claim) and isinstance(error, DeadlineExceeded):
        # The store's own deadline says that nothing is held.
        return not op.broken
    return not isinstance(error, OPEN)


def has(tags: Mapping[str, Tag], where: Mapping[str, Tag] | None) -> bool:
    """Whether a row with these tags matches."""
    return where is None or all(name in tags and tags[name] == where[name] for name in where)
