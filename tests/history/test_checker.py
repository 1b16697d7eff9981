"""The checker itself: histories written by hand, each legal or broken in one place."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.errors import (
    AlreadyWritten,
    ClaimLost,
    DataplaneError,
    DeadlineExceeded,
    FieldNotFound,
    InternalError,
    KeyNotFound,
    PartitionNotFound,
    StaleWrite,
)
from tests.history import checker
from tests.history.checker import check
from tests.history.record import (
    Away,
    Begin,
    Claim,
    Clear,
    End,
    Get,
    History,
    List,
    Op,
    Put,
    Recorder,
    Seal,
    Settle,
    Tags,
)

Span = tuple[int, int] | int
"""When a call began and ended; the beginning alone of one whose outcome nobody knows."""


def at(span: Span) -> dict[str, Any]:
    begin, end = span if isinstance(span, tuple) else (span, None)
    return {"begin": begin, "end": end}


def put(
    keys: str, n: int | None, span: Span, x: str | None = None, c: int | None = None, **more: Any
) -> Put:
    """A put of keys of one letter each; `x` is its field and `c` its tag."""
    fields = None if x is None else [{"x": x} for _ in keys]
    tags: list[Tags] | None = None if c is None and x is not None else [{"c": c} for _ in keys]
    return Put(
        client="w", keys=list(keys), fields=fields, tags=tags, revision=n, **at(span), **more
    )


def clear(keys: str, n: int | None, span: Span, removed: int = 1, **more: Any) -> Clear:
    return Clear(client="k", keys=list(keys), revision=n, removed=removed, **at(span), **more)


def clear_where(c: int, n: int, span: Span, removed: int, **more: Any) -> Clear:
    return Clear(client="k", where={"c": c}, revision=n, removed=removed, **at(span), **more)


def get(keys: str, n: int | None, span: Span, *found: str | None, **more: Any) -> Get:
    """A get of field x; what was found for each key, None where it was left out."""
    rows = [(k, {"x": v}) for k, v in zip(keys, found, strict=False) if v is not None]
    return Get(client="r", keys=list(keys), fields=["x"], revision=n, rows=rows, **at(span), **more)


def listing(n: int, span: Span, **rows: Tags) -> List:
    """A listing of rows of which none has a field."""
    found = {key: (tags, frozenset[str]()) for key, tags in rows.items()}
    return List(client="r", revision=n, rows=found, **at(span))


def begin(uid: str, n: int, span: Span) -> Begin:
    return Begin(client="w", uid=uid, revision=n, **at(span))


def end(attempt: int, n: int | None, span: Span, **more: Any) -> End:
    return End(client="w", attempt=attempt, revision=n, **at(span), **more)


def prompt(uid: str, attempt: int, status: str = "running") -> Tags:
    return {"is_prompt": True, "status": status, "uid": uid, "n": 1, "attempt": attempt}


def claim(
    client: str, n: int | None, span: Span, *rows: tuple[str, int], c: int | None = 0, **more: Any
) -> Claim:
    """A claim that got these keys, each delivered so many times; their tag c is 0."""
    more = {"count": max(1, len(rows)), **more}
    got: list[tuple[str, Tags, int]] = [(key, {"c": c}, number) for key, number in rows]
    return Claim(client=client, revision=n, rows=got, **at(span), **more)


def commit(of: Claim, n: int | None, span: Span, keys: str | None = None, **more: Any) -> Settle:
    named = [key for key, _, _ in of.rows] if keys is None else list(keys)
    return Settle(client=of.client, claim=of, keys=named, revision=n, **at(span), **more)


def release(of: Claim, n: int | None, span: Span, **more: Any) -> Settle:
    return commit(of, n, span, commit=False, **more)


def stale(*keys: str, at: int | None = None, attempt: int | None = None) -> StaleWrite:
    return StaleWrite("", partition_id="p", keys=list(keys), cleared_at=at, attempt=attempt)


def missing(*keys: str) -> KeyNotFound:
    return KeyNotFound("", partition_id="p", keys=list(keys))


def lost(*keys: str) -> ClaimLost:
    return ClaimLost("", partition_id="p", keys=list(keys), task="t")


def told(
    *ops: Op, last: int | None = None, away: tuple[Away, ...] = (), kept: int | None = None
) -> History:
    return History(ops, 0, last, away, kept)


LATE: DataplaneError = DeadlineExceeded("", waited_s=1.0)


# -- legal -----------------------------------------------------------------------------------


def legal() -> dict[str, History]:
    first = claim("u", 1, (3, 4), ("a", 1))
    second = claim("v", 1, (7, 8), ("a", 2))
    both = claim("u", 1, (3, 4), ("a", 1), ("b", 1))
    return {
        "nothing": told(),
        "a read of a put": told(put("a", 1, (1, 2), "1"), get("a", 1, (3, 4), "1")),
        "a read of what is overwritten while it runs": told(
            put("a", 1, (1, 2), "1"), put("a", 2, (4, 5), "2"), get("a", 1, (3, 6), "1")
        ),
        "two puts that overlap, later one first": told(
            put("a", 2, (1, 4), "1"), put("a", 1, (2, 3), "2"), get("a", 2, (5, 6), "1")
        ),
        "tags merge and fields stay": told(
            put("a", 1, (1, 2), "1"),
            put("a", 2, (3, 4), c=7, merged=[{"c": 7}]),
            get("a", 2, (5, 6), "1"),
        ),
        "repeated keys give repeated rows": told(
            put("a", 1, (1, 2), "1"), get("aa", 1, (3, 4), "1", "1")
        ),
        "a put that nobody heard of shows": told(
            put("a", 1, (1, 2), "1"), put("a", None, 3, "2"), get("a", 2, (4, 5), "2"), last=2
        ),
        "a put that nobody heard of does not show": told(
            put("a", 1, (1, 2), "1"), put("a", None, 3, "2"), get("a", 1, (4, 5), "1"), last=1
        ),
        "it shows long after": told(
            put("a", None, 1, "2"), put("a", 1, (2, 3), "1"), get("a", 2, (6, 7), "2"),
            get("a", 1, (4, 5), "1"), last=2,
        ),
        "two calls that nobody heard of, in the one order that explains the reads": told(
            put("a", 1, (1, 2), "1"), clear("a", None, 3), put("a", None, 4, "2"),
            get("a", 2, (5, 6), "2"), get("a", 3, (7, 8), None, drop=True), last=3,
        ),
        "a clear and what it left": told(
            put("ab", 1, (1, 2), "1"), clear("ac", 2, (3, 4)),
            get("ab", 2, (5, 6), None, "1", drop=True),
        ),
        "a clear of nothing has no revision": told(
            put("a", 1, (1, 2), "1"), clear("b", 1, (3, 4), 0), get("a", 1, (5, 6), "1"), last=1
        ),
        "a clear by tags": told(
            put("a", 1, (1, 2), c=1), put("b", 2, (3, 4), c=2), clear_where(2, 3, (5, 6), 1),
            listing(3, (7, 8), a={"c": 1}),
        ),
        "a put after a clear that it began after": told(
            put("a", 1, (1, 2), "1"), clear("a", 2, (3, 4)), put("a", 3, (5, 7), "2", begun=6)
        ),
        "a put that was there before the clear it began before": told(
            put("a", 1, (1, 6), "1", begun=2), clear("a", 2, (3, 4))
        ),
        "a late put is refused": told(
            put("a", 1, (1, 2), "1"), put("a", None, (3, 7), "2", error=stale("a", at=2)),
            clear("a", 2, (4, 5)), get("a", None, (8, 9), error=missing("a")), last=2,
        ),
        "a put asked again is judged from what its client had seen": told(
            put("a", 1, (1, 2), "1"), clear("a", 2, (3, 4)),
            put("a", None, (5, 6), "2", seen=1, broken=1, error=stale("a", at=2)),
        ),
        "a put from before what the plane remembers": told(
            put("a", 1, (1, 2), "1"), put("a", None, (3, 8), "2", error=stale("a")),
            put("bc", 2, (4, 5), "1"), put("bc", 3, (6, 7), "2"), kept=4,
        ),
        "conditions": told(
            put("a", 1, (1, 2), "1", if_absent=True), put("a", 2, (3, 4), "2", must_exist=True),
            put("a", None, (5, 6), "3", if_absent=True,
                error=AlreadyWritten("", partition_id="p", keys=["a"])),
            put("ab", None, (7, 8), "3", must_exist=True, error=missing("b")), last=2,
        ),
        "a refusal for what was so at one moment": told(
            put("a", 1, (1, 2), "1"), clear("a", 2, (3, 6)),
            put("a", None, (4, 9), "3", must_exist=True, error=missing("a")),
            put("a", 3, (7, 8), "2"),
        ),
        "a partition that is not there yet": told(
            get("a", None, (1, 4), error=PartitionNotFound("", partition_id="p")),
            put("a", 1, (2, 3), "1"),
        ),
        "a get of a field that was not put": told(
            put("a", 1, (1, 2), c=1),
            get("a", None, (3, 4), error=FieldNotFound("", partition_id="p", keys=["a"],
                                                       fields=["x"])),
        ),
        "a get that was overtaken three times": told(
            put("a", 1, (1, 2), "1"), get("a", None, (3, 12), error=missing("a")),
            put("a", 2, (4, 5), "2"), put("a", 3, (6, 7), "3"), put("a", 4, (8, 9), "4"),
        ),
        "a group from begin to end": told(
            begin("g", 1, (1, 2)), put("a", 2, (3, 4), "1", attempt=1), end(1, 3, (5, 6)),
            put("a", None, (7, 8), "2", attempt=1, error=stale("a", attempt=1)),
            Get(client="r", keys=["a", "g"], drop=True, revision=3, rows=[("a", {"x": "1"})],
                begin=9, end=10),
        ),
        "a newer attempt drops the rows of the older one": told(
            begin("g", 1, (1, 2)), put("a", 2, (3, 4), c=1, attempt=1), put("b", 3, (5, 6), c=2),
            begin("g", 4, (7, 8)), listing(4, (9, 10), g=prompt("g", 4), b={"c": 2}),
            end(1, None, (11, 12), error=stale(attempt=1)),
        ),
        "a row that moved to another group stays with it": told(
            begin("g", 1, (1, 2)), begin("h", 2, (3, 4)), put("a", 3, (5, 6), c=1, attempt=1),
            put("a", 4, (7, 8), c=2, attempt=2), begin("g", 5, (9, 10)),
            listing(5, (11, 12), g=prompt("g", 5), h=prompt("h", 2), a={"c": 2}),
        ),
        "a clear that retires closes the attempt": told(
            begin("g", 1, (1, 2)), put("a", 2, (3, 4), c=1, attempt=1),
            clear("a", 3, (5, 6), retire=True),
            put("b", None, (7, 8), c=1, attempt=1, error=stale("b", attempt=1)),
        ),
        "one that removes nothing closes it too": told(
            begin("g", 1, (1, 2)), clear("g", 2, (3, 4)), clear("g", 3, (5, 6), 0, retire=True),
            end(1, None, (7, 8), error=stale(attempt=1)), last=3,
        ),
        "a claim and its commit": told(
            put("ab", 1, (1, 2), c=0), first, commit(first, 1, (5, 6)),
            claim("v", 1, (7, 8), ("b", 1)),
        ),
        "one task's claim is nothing to another": told(
            put("a", 1, (1, 2), c=0), first, claim("v", 1, (5, 6), ("a", 1), task="u")
        ),
        "released rows are offered again": told(
            put("a", 1, (1, 2), c=0), first, release(first, 1, (5, 6)), second,
            commit(second, 1, (9, 10)),
        ),
        "while the release is under way": told(
            put("a", 1, (1, 2), c=0), first, release(first, 1, (5, 9)), second
        ),
        "a lease that ended while its client was away": told(
            put("a", 1, (1, 2), c=0), first, second,
            commit(first, None, (10, 11), error=lost("a")),
            away=(Away(client="u", begin=5, end=9, seconds=31.0),),
        ),
        "a commit of what was cleared": told(
            put("ab", 1, (1, 2), c=0), both, clear("a", 2, (5, 6)),
            commit(both, None, (7, 8), error=lost("a")), commit(both, 2, (9, 10), "b"),
        ),
        "a commit just before the clear": told(
            put("a", 1, (1, 2), c=0), first, clear("a", 2, (5, 8)), commit(first, 1, (6, 7))
        ),
        "a row put anew is another one": told(
            put("a", 1, (1, 2), c=0), first, commit(first, 1, (5, 6)), clear("a", 2, (7, 8)),
            put("a", 3, (9, 10), c=0), claim("v", 3, (11, 12), ("a", 1)),
        ),
        "a claim that nobody heard of counts as a delivery": told(
            put("a", 1, (1, 2), c=0), Claim(client="u", begin=3), second,
            away=(Away(client="u", begin=4, seconds=31.0),),
        ),
        "a claim of what is sealed ends": told(
            put("a", 1, (1, 2), c=0), Seal(client="k", revision=2, begin=3, end=4),
            one := claim("u", 2, (5, 6), ("a", 1), count=5, alone=True), commit(one, 2, (7, 8)),
            claim("u", 2, (9, 10), last=True, alone=True),
        ),
        "a claim of a whole group": told(
            begin("g", 1, (1, 2)), put("ab", 2, (3, 4), c=0, attempt=1), end(1, 3, (5, 6)),
            claim("u", 3, (7, 8), ("b", 1), ("a", 1), grouped=True, count=1),
        ),
        "of what is left of one": told(
            begin("g", 1, (1, 2)), put("ab", 2, (3, 4), c=0, attempt=1), end(1, 3, (5, 6)),
            clear("a", 4, (7, 8)), claim("u", 4, (9, 10), ("b", 1), grouped=True),
        ),
        "a claim that waited in vain": told(
            put("a", 1, (1, 2), c=0), claim("u", None, (3, 4), count=2, error=LATE)
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", legal())
def test_what_one_plane_could_have_told_is_legal(name: str) -> None:
    assert check(legal()[name]) is None


# -- not legal -------------------------------------------------------------------------------


def illegal() -> dict[str, tuple[str, History]]:
    first = claim("u", 1, (3, 4), ("a", 1))
    second = claim("v", 1, (7, 8), ("a", 2))
    both = claim("u", 1, (3, 4), ("a", 1), ("b", 1))
    return {
        "two changes of one revision": ("order", told(
            put("a", 1, (1, 2), "1"), put("b", 1, (3, 4), "2"),
        )),
        "a revision of nobody": ("order", told(
            put("a", 1, (1, 2), "1"), put("a", 3, (3, 4), "2"),
        )),
        "a put that had its effect twice": ("order", told(
            put("a", 1, (1, 2), "1"), put("a", 3, (3, 4), "2", broken=1), last=3,
        )),
        "a refused put that shows": ("order", told(
            put("a", 1, (1, 2), "1"), clear("a", 2, (5, 6)),
            put("a", None, (3, 7), "2", error=stale("a", at=2)), last=3,
        )),
        "a put that nobody heard of, twice": ("order", told(
            put("a", 1, (1, 2), "1"), put("a", None, 3, "2"), last=3,
        )),
        "a put that nobody heard of, before it was asked for": ("order", told(
            put("a", 2, (1, 2), "1"), put("a", None, 3, "2"), last=2,
        )),
        "a change before one that was over": ("order", told(
            put("a", 2, (1, 2), "1"), put("a", 1, (3, 4), "2"),
        )),
        "a read of what is long past": ("order", told(
            put("a", 1, (1, 2), "1"), put("a", 2, (3, 4), "2"), get("a", 1, (5, 6), "1"),
        )),
        "a read of what an earlier read had left behind": ("order", told(
            put("a", 1, (1, 2), "1"), put("a", 2, (3, 8), "2"), get("a", 2, (4, 5), "2"),
            get("a", 1, (6, 7), "1"),
        )),
        "a read of what is to come": ("order", told(
            put("a", 1, (1, 2), "1"), get("a", 2, (3, 4), "2"), put("a", 2, (5, 6), "2"),
        )),
        "a read of a revision that another partition made": ("order", told(
            put("a", 1, (1, 2), "1"), put("a", 2, (3, 4), "2", partition="q"),
            get("a", 2, (5, 6), "1"),
        )),
        "a clear of nothing that made a revision": ("order", told(
            put("a", 1, (1, 2), "1"), clear("b", 2, (3, 4), 1),
        )),
        "another's value": ("read", told(
            put("a", 1, (1, 2), "1"), put("b", 2, (3, 4), "2"), get("a", 2, (5, 6), "2"),
        )),
        "an old value": ("read", told(
            put("a", 1, (1, 2), "1"), put("a", 2, (3, 4), "2"), get("a", 2, (5, 6), "1"),
        )),
        "rows of two moments": ("read", told(
            put("ab", 1, (1, 2), "1"), put("ab", 2, (4, 5), "2"), get("ab", 2, (3, 6), "1", "2"),
        )),
        "half a put": ("read", told(
            put("ab", 1, (1, 2), "1"), put("ab", 2, (3, 4), "2"), get("ab", 2, (5, 6), "1", "2"),
        )),
        "half a clear": ("read", told(
            put("ab", 1, (1, 2), c=1), clear("ab", 2, (3, 4), 2), listing(2, (5, 6), b={"c": 1}),
        )),
        "a cleared row": ("read", told(
            put("ab", 1, (1, 2), "1"), clear("a", 2, (3, 4)), get("ab", 2, (5, 6), "1", "1"),
        )),
        "a row that was left out": ("read", told(
            put("ab", 1, (1, 2), "1"), get("ab", 1, (3, 4), "1", drop=True),
        )),
        "a key that was not there, silently": ("read", told(
            put("a", 1, (1, 2), "1"), get("ab", 1, (3, 4), "1"),
        )),
        "rows in another order": ("read", told(
            put("ab", 1, (1, 2), "1"),
            Get(client="r", keys=["a", "b"], revision=1, begin=3, end=4,
                rows=[("b", {"x": "1"}), ("a", {"x": "1"})]),
        )),
        "tags that were replaced": ("effect", told(
            put("a", 1, (1, 2), c=1), put("a", 2, (3, 4), "1", merged=[{}]),
        )),
        "rows that were not counted": ("effect", told(
            put("ab", 1, (1, 2), "1"), clear("ab", 2, (3, 4), 1),
        )),
        "a clear of nothing that left a row": ("effect", told(
            put("a", 1, (1, 2), "1"), clear("a", 1, (3, 4), 0),
        )),
        "a clear that retires and left an attempt open": ("effect", told(
            begin("g", 1, (1, 2)), put("a", 2, (3, 4), "1"), clear("gb", 3, (5, 6)),
            put("a", 4, (7, 8), "2"), clear("g", 4, (9, 10), 0, retire=True),
        )),
        "a put brings back what was cleared after it began": ("late", told(
            put("a", 1, (1, 2), "1"), put("a", 3, (3, 8), "2", begun=4), clear("a", 2, (5, 6)),
        )),
        "over what was put since": ("late", told(
            put("a", 1, (1, 2), "1"), put("a", 4, (3, 10), "2", begun=4), clear("a", 2, (5, 6)),
            put("a", 3, (7, 8), "3"),
        )),
        "what a clear removed that nobody heard of": ("late", told(
            put("a", 1, (1, 2), "1"), put("a", 3, (3, 8), "2", begun=4), clear("a", None, 5),
            last=3,
        )),
        "what a newer attempt dropped": ("late", told(
            begin("g", 1, (1, 2)), put("a", 2, (3, 4), "1", attempt=1),
            put("a", 4, (5, 10), "2", begun=6), begin("g", 3, (7, 8)),
        )),
        "must_exist of what is not there": ("condition", told(
            put("a", 1, (1, 2), "1"), put("ab", 2, (3, 4), "2", must_exist=True),
        )),
        "if_absent of what is there": ("condition", told(
            put("a", 1, (1, 2), "1"), put("ab", 2, (3, 4), "2", if_absent=True),
        )),
        "stale without a clear": ("refusal", told(
            put("a", 1, (1, 2), "1"), put("a", None, (3, 4), "2", error=stale("a", at=1)), last=1,
        )),
        "stale for a clear before it began": ("refusal", told(
            put("a", 1, (1, 2), "1"), clear("a", 2, (3, 4)),
            put("a", None, (5, 6), "2", error=stale("a", at=2)),
        )),
        "stale for another key's clear": ("refusal", told(
            put("ab", 1, (1, 2), "1"), clear("b", 2, (4, 5)),
            put("a", None, (3, 6), "2", error=stale("a", at=2)),
        )),
        "from before what the plane remembers, and it remembers more": ("refusal", told(
            put("a", 1, (1, 2), "1"), put("a", None, (3, 8), "2", error=stale("a")),
            put("bc", 2, (4, 5), "1"), put("b", 3, (6, 7), "2"), kept=4,
        )),
        "an open attempt that is refused": ("refusal", told(
            begin("g", 1, (1, 2)), put("a", None, (3, 4), "1", attempt=1,
                                       error=stale("a", attempt=1)),
        )),
        "must_exist refused for a key that is there": ("refusal", told(
            put("ab", 1, (1, 2), "1"),
            put("abc", None, (3, 4), "2", must_exist=True, error=missing("b", "c")),
        )),
        "missing what is there": ("refusal", told(
            put("ab", 1, (1, 2), "1"), get("ab", None, (3, 4), error=missing("b")),
        )),
        "missing what never was at one moment": ("refusal", told(
            put("ab", 1, (1, 2), "1"), clear("a", 2, (4, 5)), get("ab", None, (3, 12),
                                                                  error=missing("a", "b")),
            put("a", 3, (6, 7), "2"),
        )),
        "missing some of what is not there": ("refusal", told(
            put("a", 1, (1, 2), "1"), get("abc", None, (3, 4), error=missing("b")),
        )),
        "overtaken by one change": ("refusal", told(
            put("a", 1, (1, 2), "1"), get("a", None, (3, 6), error=missing("a")),
            put("a", 2, (4, 5), "2"),
        )),
        "no partition where there is one": ("refusal", told(
            put("a", 1, (1, 2), "1"),
            get("a", None, (3, 4), error=PartitionNotFound("", partition_id="p")),
        )),
        "a fault of the plane": ("refusal", told(
            put("a", None, (1, 2), "1", error=InternalError("it broke")),
        )),
        "a put for an attempt that ended": ("attempt", told(
            begin("g", 1, (1, 2)), end(1, 2, (3, 4)), put("a", 3, (5, 6), "1", attempt=1),
        )),
        "for one that began anew": ("attempt", told(
            begin("g", 1, (1, 2)), begin("g", 2, (3, 4)), put("a", 3, (5, 6), "1", attempt=1),
        )),
        "for one that was retired": ("attempt", told(
            begin("g", 1, (1, 2)), clear("g", 2, (3, 4), retire=True),
            put("a", 3, (5, 6), "1", attempt=1),
        )),
        "an attempt that ended twice": ("attempt", told(
            begin("g", 1, (1, 2)), end(1, 2, (3, 4)), end(1, 3, (5, 6)),
        )),
        "rows of an older attempt": ("read", told(
            begin("g", 1, (1, 2)), put("a", 2, (3, 4), c=1, attempt=1), begin("g", 3, (5, 6)),
            listing(3, (7, 8), g=prompt("g", 3), a={"c": 1}),
        )),
        "a prompt that did not take its status": ("read", told(
            begin("g", 1, (1, 2)), end(1, 2, (3, 4)), listing(2, (5, 6), g=prompt("g", 1)),
        )),
        "a claimed row that was not there": ("offer", told(
            put("ab", 1, (1, 2), c=0), clear("a", 2, (3, 4)), claim("u", 2, (5, 6), ("a", 1)),
        )),
        "a claimed row without its field": ("offer", told(
            put("a", 1, (1, 2), c=0), claim("u", 1, (3, 4), ("a", 1), fields=["x"]),
        )),
        "a claimed row that does not match": ("offer", told(
            put("a", 1, (1, 2), c=0), claim("u", 1, (3, 4), ("a", 1), where={"c": 1}),
        )),
        "a claimed row with old tags": ("offer", told(
            put("a", 1, (1, 2), c=0), put("a", 2, (3, 4), c=1), claim("u", 2, (5, 6), ("a", 1)),
        )),
        "claimed rows out of order": ("offer", told(
            put("a", 1, (1, 2), c=0), put("b", 2, (3, 4), c=0),
            claim("u", 2, (5, 6), ("b", 1), ("a", 1)),
        )),
        "too few claimed rows": ("offer", told(
            put("a", 1, (1, 2), c=0), claim("u", 1, (3, 4), ("a", 1), count=2),
        )),
        "half a group": ("offer", told(
            begin("g", 1, (1, 2)), put("ab", 2, (3, 4), c=0, attempt=1), end(1, 3, (5, 6)),
            claim("u", 3, (7, 8), ("a", 1), grouped=True),
        )),
        "a group that runs": ("offer", told(
            begin("g", 1, (1, 2)), put("ab", 2, (3, 4), c=0, attempt=1),
            claim("u", 2, (5, 6), ("a", 1), ("b", 1), grouped=True, count=1),
        )),
        "a group that failed": ("offer", told(
            begin("g", 1, (1, 2)), put("a", 2, (3, 4), c=0, attempt=1),
            end(1, 3, (5, 6), status="failure"), claim("u", 3, (7, 8), ("a", 1), grouped=True),
        )),
        "rows of no group": ("offer", told(
            put("a", 1, (1, 2), c=0), claim("u", 1, (3, 4), ("a", 1), grouped=True),
        )),
        "too few groups": ("offer", told(
            begin("g", 1, (1, 2)), put("ab", 2, (3, 4), c=0, attempt=1), end(1, 3, (5, 6)),
            claim("u", 3, (7, 8), ("a", 1), ("b", 1), grouped=True, count=2),
        )),
        "a delivery that nobody got": ("offer", told(
            put("a", 1, (1, 2), c=0), claim("u", 1, (3, 4), ("a", 2)),
        )),
        "one row, two consumers": ("holding", told(
            put("a", 1, (1, 2), c=0), first, second, commit(second, 1, (9, 10)),
        )),
        "for the first time both": ("holding", told(
            put("a", 1, (1, 2), c=0), first, claim("v", 1, (7, 8), ("a", 1)),
        )),
        "released too late": ("holding", told(
            put("a", 1, (1, 2), c=0), first, second, release(first, 1, (9, 10)),
        )),
        "away for less than the lease": ("holding", told(
            put("a", 1, (1, 2), c=0), first, second,
            away=(Away(client="u", begin=5, end=6, seconds=29.0),),
        )),
        "away before it claimed": ("holding", told(
            put("a", 1, (1, 2), c=0), claim("u", 1, (6, 7), ("a", 1)),
            claim("v", 1, (8, 9), ("a", 2)),
            away=(Away(client="u", begin=3, end=5, seconds=31.0),),
        )),
        "another one was away": ("holding", told(
            put("a", 1, (1, 2), c=0), first, second,
            away=(Away(client="v", begin=5, end=6, seconds=31.0),),
        )),
        "offered after its commit": ("commit", told(
            put("a", 1, (1, 2), c=0), first, commit(first, 1, (5, 6)), second,
        )),
        "committed after its lease was lost": ("commit", told(
            put("a", 1, (1, 2), c=0), first, second, commit(first, 1, (10, 11)),
            away=(Away(client="u", begin=5, end=9, seconds=31.0),),
        )),
        "committed after it was cleared": ("commit", told(
            put("ab", 1, (1, 2), c=0), first, clear("a", 2, (5, 6)), commit(first, 2, (7, 8)),
        )),
        "committed as another row of that key": ("commit", told(
            put("a", 1, (1, 2), c=0), first, clear("a", 2, (5, 6)), put("a", 3, (7, 8), c=0),
            commit(first, 3, (9, 10)),
        )),
        "lost without a cause": ("loss", told(
            put("a", 1, (1, 2), c=0), first, commit(first, None, (5, 6), error=lost("a")),
        )),
        "lost while its client was there": ("loss", told(
            put("a", 1, (1, 2), c=0), first, commit(first, None, (8, 9), error=lost("a")),
            away=(Away(client="u", begin=5, end=6, seconds=29.0),),
        )),
        "more lost than was cleared": ("loss", told(
            put("ab", 1, (1, 2), c=0), both, clear("a", 2, (5, 6)),
            commit(both, None, (7, 8), error=lost("a", "b")),
        )),
        "less lost than was cleared": ("loss", told(
            put("ab", 1, (1, 2), c=0), both, clear("ab", 2, (5, 6), 2),
            commit(both, None, (7, 8), error=lost("a")),
        )),
        "a commit refused for no reason of its own": ("refusal", told(
            put("a", 1, (1, 2), c=0), first, commit(first, None, (5, 6), error=missing("a")),
        )),
        "alone, and nothing came": ("starving", told(
            put("a", 1, (1, 2), c=0), claim("u", None, (3, 4), alone=True, error=LATE),
        )),
        "the end, and a row was never given": ("starving", told(
            put("ab", 1, (1, 2), c=0), first, commit(first, 1, (5, 6)),
            Seal(client="k", revision=2, begin=7, end=8),
            claim("v", 2, (9, 10), last=True, count=1),
        )),
        "the end, and a row came back": ("starving", told(
            put("a", 1, (1, 2), c=0), first, release(first, 1, (5, 6)),
            Seal(client="k", revision=2, begin=7, end=8), claim("v", 2, (9, 10), last=True),
        )),
    }  # fmt: skip


@pytest.mark.parametrize("name", illegal())
def test_what_no_plane_could_have_told_is_found_by_its_rule(name: str) -> None:
    rule, history = illegal()[name]
    found = check(history)
    assert found is not None
    assert (found.rule, found.what != "") == (rule, True), found


def test_every_rule_is_broken_by_some_history() -> None:
    assert checker.__doc__ is not None
    indented = [line for line in checker.__doc__.splitlines() if line.startswith("    ")]
    assert {line.split()[0] for line in indented} == {rule for rule, _ in illegal().values()}


# -- the record ------------------------------------------------------------------------------


def test_calls_are_ordered_as_they_were_made_and_answered() -> None:
    now = 10.0
    notes = Recorder(lambda: now)
    one, two = put("a", 1, 0, "1"), put("a", 2, 0, "2")
    notes.begin(one, seen=0)
    notes.begin(two, seen=0)
    notes.end(two)
    notes.leaves("w")
    notes.end(one, DeadlineExceeded("", waited_s=1.0))
    now = 12.5
    notes.returns("w")
    notes.leaves("w")
    now = 13.5
    history = notes.history(0, 2)
    assert [(op.begin, op.end) for op in history.ops] == [(1, None), (2, 3)]
    assert [op.ok for op in history.ops] == [False, True]
    assert [(a.begin, a.end, a.seconds) for a in history.away] == [(4, 5, 2.5), (6, None, 1.0)]


@pytest.mark.parametrize(("broken", "known"), [(0, True), (1, False)])
def test_a_claim_that_was_told_that_it_waited_in_vain_holds_nothing_unless_it_was_asked_twice(
    broken: int, known: bool
) -> None:
    notes = Recorder(lambda: 0.0)
    op = Claim(client="u", broken=broken)
    notes.begin(op, seen=0)
    notes.end(op, LATE)
    assert (op.end is not None) == known
