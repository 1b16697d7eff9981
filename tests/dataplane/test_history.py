"""History: what it keeps, from which revision on, and that it says so."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.tags.history import PAGE_CHANGES, Chain, Change, History


def change(n: int, keys: int = 1, at: float = 0.0, partition_id: str = "p") -> Change:
    return Change(n, at, partition_id, [f"k{n}.{i}" for i in range(keys)], None)


def fill(history: History, changes: list[Change]) -> None:
    """Append changes, forgetting after each what is beyond the bounds then."""
    for each in changes:
        history.append(each)
        while history.expired(each.at):
            pass


def test_changes_since_a_revision_come_newest_first_and_without_it() -> None:
    history = History()
    fill(history, [change(n, partition_id="pq"[n % 2]) for n in range(1, 8)])
    assert [c.n for c in history.since("p", 0)] == [6, 4, 2]
    assert [c.n for c in history.since("q", 0)] == [7, 5, 3, 1]
    assert [c.n for c in history.since("p", 4)] == [6]
    assert [c.n for c in history.since("p", 3)] == [6, 4]
    assert list(history.since("p", 6)) == []
    assert list(history.since("p", 99)) == []
    assert list(history.since("no such partition", 0)) == []


@pytest.mark.parametrize(
    ("keys_of_changes", "kept", "floor", "size"),
    [
        ([], [], 0, 0),
        ([10], [1], 0, 10),
        ([4, 6], [1, 2], 0, 10),
        ([4, 7], [2], 1, 7),
        ([1] * 12, list(range(3, 13)), 2, 10),
        ([3, 25], [2], 1, 25),  # the newest stays, however large
        ([25, 1], [2], 1, 1),
        ([3, 3, 3, 3, 9], [5], 4, 9),
    ],
)
def test_history_is_bounded_by_the_number_of_changed_keys(
    keys_of_changes: list[int], kept: list[int], floor: int, size: int
) -> None:
    history = History(max_changes=10)
    fill(history, [change(n, keys) for n, keys in enumerate(keys_of_changes, 1)])
    assert [c.n for c in reversed(list(history.since("p", 0)))] == kept
    assert (history.floor, history.size) == (floor, size)


@pytest.mark.parametrize(
    ("now", "kept", "floor"),
    [(20.0, [1, 2, 3, 4], 0), (60.0, [1, 2, 3, 4], 0), (60.5, [2, 3, 4], 1), (70.5, [4], 3),
     (1e9, [4], 3)],
)  # fmt: skip
def test_history_is_bounded_by_age_and_the_newest_change_stays(
    now: float, kept: list[int], floor: int
) -> None:
    history = History(max_age_s=60.0)
    fill(history, [change(n, at=at) for n, at in enumerate([0.0, 10.0, 10.0, 20.0], 1)])
    while history.expired(now):
        pass
    assert [c.n for c in reversed(list(history.since("p", 0)))] == kept
    assert history.floor == floor
    assert not history.covers("p", floor - 1)
    assert history.covers("p", floor)


def test_one_bound_holds_for_all_partitions_together() -> None:
    history = History(max_changes=3)
    fill(history, [change(1, partition_id="p"), *(change(n, partition_id="q") for n in (2, 3, 4))])
    assert list(history.since("p", 0)) == []
    assert [c.n for c in history.since("q", 0)] == [4, 3, 2]
    assert history.floor == 1  # a listing of p since 0 cannot be told from changes any more


def test_a_partition_that_was_quiet_for_longer_than_history_reaches_is_covered() -> None:
    history = History(max_changes=3)
    fill(history, [change(1, partition_id="p"), change(2, partition_id="p")])
    fill(history, [change(n, partition_id="q") for n in range(3, 30)])
    assert history.floor == 26
    assert [history.covers("p", n) for n in (0, 1, 2, 26)] == [False, False, True, True]
    assert [history.covers("q", n) for n in (2, 25, 26)] == [False, False, True]
    assert history.covers("never", 0)


def test_a_partition_that_is_made_when_history_has_forgotten_is_covered_from_there() -> None:
    """One of its name may have been there before, of which nothing is known any more."""
    history = History(max_changes=3)
    fill(history, [change(n, partition_id="q") for n in range(1, 10)])
    history.begin("p")
    assert [history.covers("p", n) for n in (0, 5, 6, 9)] == [False, False, True, True]
    history.begin("q")
    assert not history.covers("q", 5)  # what was known stays


def test_what_expired_is_handed_over_oldest_first() -> None:
    history = History(max_changes=1)
    changes = [change(n) for n in (1, 2, 3)]
    for each in changes:
        history.append(each)
    assert [history.expired(0.0), history.expired(0.0), history.expired(0.0)] == [
        changes[0], changes[1], None,
    ]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from("pq"), st.integers(1, 9), st.floats(0, 5)), max_size=40))
def test_what_is_kept_is_a_suffix_within_the_bounds_and_the_floor_is_right_below_it(
    steps: list[tuple[str, int, float]],
) -> None:
    history = History(max_changes=20, max_age_s=12.0)
    now = 0.0
    every: list[Change] = []
    for n, (name, keys, gap) in enumerate(steps, 1):
        now += gap
        every.append(change(n, keys, now, name))
        history.append(every[-1])
        while history.expired(now):
            pass
        kept = sorted(
            (c for name in "pq" for c in history.since(name, history.floor)), key=lambda c: c.n
        )
        assert kept == every[history.floor :]
        assert history.size == sum(len(c.keys) for c in kept)
        if len(kept) > 1:
            assert history.size <= 20
            assert now - kept[0].at <= 12.0
        if history.floor:  # it forgets no more than it must
            last = every[history.floor - 1]
            assert history.size + len(last.keys) > 20 or now - last.at > 12.0


@pytest.mark.parametrize("first", [0, 1, PAGE_CHANGES - 1, PAGE_CHANGES, 3 * PAGE_CHANGES])
def test_pages_hold_what_was_there_whatever_happens_later(first: int) -> None:
    history = History(max_changes=10 * PAGE_CHANGES)
    count = 6 * PAGE_CHANGES + 5
    fill(history, [change(n) for n in range(1, count + 1)])
    pages = history.pages_since("p", first)
    then = [c.n for page in pages for c in page if c.n > first]
    assert sorted(then) == list(range(first + 1, count + 1))
    assert [page[0].n for page in pages] == sorted((page[0].n for page in pages), reverse=True)
    fill(history, [change(n) for n in range(count + 1, 20 * PAGE_CHANGES)])
    assert history.floor > first  # what was seen has expired, and more has come
    assert [c.n for page in pages for c in page if c.n > first] == then


def test_pages_of_a_long_history_are_handed_out_without_a_walk_over_it() -> None:
    history = History()
    fill(history, [change(n) for n in range(1, 50_001)])
    started = time.process_time()
    pages = history.pages_since("p", 0)
    assert time.process_time() - started < 0.01
    assert sum(map(len, pages)) == 50_000
    assert history.pages_since("p", 50_000) == []
    assert history.pages_since("q", 0) == []


def test_a_chain_is_its_parts_in_order_without_a_copy() -> None:
    parts = [["a", "b"], [], ["c"]]
    chain = Chain(parts)
    assert list(chain) == ["a", "b", "c"]
    assert len(chain) == 3
    assert "c" in chain
    assert "d" not in chain
    assert chain.parts is parts
    assert list(Chain([])) == []


@given(
    st.lists(st.sampled_from("ppq"), max_size=3 * PAGE_CHANGES),
    st.integers(1, 2 * PAGE_CHANGES),
    st.data(),
)
def test_the_change_of_a_revision_is_found_as_long_as_it_is_kept(
    partitions: list[str], max_changes: int, data: st.DataObject
) -> None:
    history = History(max_changes=max_changes)
    changes = [change(n, at=float(n), partition_id=name) for n, name in enumerate(partitions, 1)]
    fill(history, changes)
    kept = {(c.partition_id, c.n): c for name in "pq" for c in history.since(name, history.floor)}
    n = data.draw(st.integers(0, len(partitions) + 1))
    for name in "pqr":
        assert history.made(name, n) is kept.get((name, n))
    assert history.floor_at == (float(history.floor) if history.floor else None)
