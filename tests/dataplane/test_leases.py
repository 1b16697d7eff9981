"""The clock of leases, when a lease ends, and the positions that a task has committed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.tags.claims.leases import MAX_STEP_S, Closed, Granted, Holders, Lease, LeaseClock
from dataplane.tags.claims.marks import Marks, positions_in


def test_the_clock_counts_small_steps_and_no_leaps() -> None:
    clock = LeaseClock()
    clock.tick(1000.0)
    assert clock.now == 0.0
    clock.tick(1000.125)
    clock.tick(1000.25)
    assert clock.now == 0.25
    clock.tick(1060.0)  # the process was stopped for a minute
    assert clock.now == 0.25 + MAX_STEP_S
    clock.tick(1059.0)  # and a clock that goes back takes nothing away
    assert clock.now == 0.25 + MAX_STEP_S


def test_time_in_which_nobody_looked_does_not_count() -> None:
    clock = LeaseClock()
    clock.tick(5.0)
    clock.pause()
    clock.tick(5.1)
    assert clock.now == 0.0
    clock.tick(5.2)
    assert clock.now == pytest.approx(0.1)


def lease(claim_id: int = 1, lease_s: float = 10.0) -> Lease:
    return Lease(Granted(claim_id, [], [], [], 0), lease_s, grouped=False, at=0.0)


def test_a_term_begins_when_the_last_holder_has_gone() -> None:
    holders, held = Holders(), lease()
    holders.join(held, "a", 1, None)
    holders.join(held, "b", 1, None)
    assert holders.detached("a", 5.0)
    assert held.expires_at(holders.away) is None
    assert holders.detached("b", 7.0)
    assert held.expires_at(holders.away) == 17.0
    assert list(holders.expired(16.9)) == []
    assert list(holders.expired(17.0)) == [held, held]  # once for each, if nobody ends it
    holders.attached("a")
    assert held.expires_at(holders.away) is None
    assert holders.detached("a", 30.0)
    assert held.expires_at(holders.away) == 40.0


def test_who_holds_nothing_is_not_waited_for() -> None:
    holders, held = Holders(), lease()
    assert not holders.detached("a", 5.0)
    assert holders.away == {}
    holders.join(held, "a", 1, 6.0)
    assert holders.away == {"a": 6.0}
    holders.join(held, "a", 2, 8.0)
    assert holders.away == {"a": 6.0}
    holders.leave(held, "a", 1)
    assert "a" in holders
    holders.leave(held, "a", 2)
    assert "a" not in holders
    assert holders.away == {}


def test_a_lease_that_ended_is_nobodys() -> None:
    holders, one, two = Holders(), lease(1), lease(2)
    for held in (one, two):
        holders.join(held, "a", held.claim_id, 0.0)
    holders.end(one)
    assert holders.of("a") == [two]
    holders.end(two)
    assert holders.of("a") == []
    assert holders.away == {}


def test_ending_a_claim_once_more_is_right_for_the_keys_that_ended_so() -> None:
    closed = Closed(7, {"c": "cleared", "r": "released"}, committed=True)
    assert closed.check(["a"], commit=True) == {}
    assert closed.check(["a", "c", "r"], commit=True) == {"c": "cleared", "r": "released"}
    assert closed.check(["r"], commit=False) == {}
    assert closed.check(["r", "c", "a"], commit=False) == {"c": "cleared", "a": "committed"}


# -- marks -----------------------------------------------------------------------------------

positions = st.integers(0, 5000)


@given(st.lists(st.tuples(st.booleans(), positions), max_size=200))
def test_marks_are_a_set_of_positions(steps: list[tuple[bool, int]]) -> None:
    marks, model = Marks(), set[int]()
    for add, position in steps:
        if add:
            marks.add(position)
            model.add(position)
        else:
            marks.discard(position)
            model.discard(position)
        assert len(marks) == len(model)
        assert (position in marks) == (position in model)
    assert list(marks) == sorted(model)
    by_chunk = marks.by_chunk()
    assert set(by_chunk) == {position >> 10 for position in model}
    assert [p for c in sorted(by_chunk) for p in positions_in(c, by_chunk[c])] == sorted(model)
