"""Listings that are kept between pages, bare: how many, how long, and whose have to go."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dataplane.errors import InvalidRequest, TooOld
from dataplane.gateway.calls.pages import Kept, Pages
from dataplane.types import Revision

AT = Revision(1, 7)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pages(clock: Clock, **bounds: Any) -> Pages:
    names = itertools.count(1)
    given = {"max_bytes": 1000, "max_per_principal": 3, "ttl_s": 60.0, **bounds}
    return Pages(**given, clock=clock, new_name=lambda: f"n{next(names)}")


def keep(of: Pages, principal: str, nbytes: int, question: bytes = b"q") -> Kept:
    rows: Any = range(10)
    return of.keep(principal, question, rows, nbytes, AT, full=True)


def has(of: Pages, kept: Kept) -> bool:
    try:
        found, _ = of.find(kept.token(3), kept.principal, b"q")
    except TooOld:
        return False
    assert found is kept
    return True


def test_a_listing_is_kept_so_long_after_it_was_read() -> None:
    clock = Clock()
    kept = pages(clock)
    first, second = keep(kept, "a", 10), keep(kept, "b", 20)
    clock.now += 50
    assert kept.find(first.token(4), "a", b"q") == (first, 4)
    clock.now += 50
    assert has(kept, first)
    assert not has(kept, second)
    assert (len(kept), kept.nbytes) == (1, 10)
    clock.now += 60
    kept.sweep()
    assert (len(kept), kept.nbytes) == (0, 0)


def test_one_principal_keeps_so_many_and_lets_go_of_its_oldest() -> None:
    kept = pages(Clock())
    other = keep(kept, "b", 1)
    mine = [keep(kept, "a", 1) for _ in range(4)]
    assert [has(kept, one) for one in mine] == [False, True, True, True]
    assert has(kept, other)


def test_who_keeps_most_makes_room() -> None:
    kept = pages(Clock())
    small = keep(kept, "small", 100)
    large = [keep(kept, "large", 400), keep(kept, "large", 400)]
    newest = keep(kept, "new", 300)
    assert [has(kept, one) for one in (small, *large, newest)] == [True, False, True, True]
    assert kept.nbytes == 800


def test_what_never_fits_is_refused_and_nobody_goes_for_it() -> None:
    kept = pages(Clock())
    before = keep(kept, "a", 900)
    with pytest.raises(InvalidRequest, match="list fewer"):
        keep(kept, "b", 1001)
    assert has(kept, before)


def test_tokens_cannot_be_guessed_or_used_by_others_or_for_another_question() -> None:
    real = Pages(max_bytes=10, max_per_principal=1, ttl_s=1.0)
    assert len(keep(real, "a", 1).name) >= 22
    kept = pages(Clock())
    one = keep(kept, "a", 1)
    with pytest.raises(TooOld):
        kept.find(one.token(1), "b", b"q")
    with pytest.raises(InvalidRequest, match="another question"):
        kept.find(one.token(1), "a", b"other")
    for wrong in ("", "n1", "n1.", "n1.x", "n1.-1", "n1.11", "n1.1\u0661", "n1." + "1" * 80):
        with pytest.raises(InvalidRequest, match="page_token"):
            kept.find(wrong, "a", b"q")


def test_closing_lets_go_of_all() -> None:
    kept = pages(Clock())
    keep(kept, "a", 1)
    kept.close()
    assert (len(kept), kept.nbytes) == (0, 0)
