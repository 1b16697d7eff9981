"""What a watch tells of history, bare: whoever applies it has every moment that it names."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.tags.history import Change, History
from dataplane.tags.store import TagStore
from dataplane.tags.views.changes import (
    STEP_KEYS,
    Latest,
    Lookup,
    Present,
    Span,
    first_spans,
    spans,
)
from tests.dataplane.audit import put
from tests.dataplane.interleaving import clear_where
from tests.dataplane.test_views import begin


def history(store: TagStore, after: int = 0) -> list[Change]:
    """Changes of p after a revision, oldest first."""
    return list(store.history.since("p", after))[::-1]


def present(store: TagStore) -> Lookup:
    return Present(store.partition("p")).look


def told(store: TagStore, after: int = 0) -> list[tuple[int, list[str], list[str]]]:
    """Revision, keys of rows, and cleared keys of each span."""
    found = spans(history(store, after), present(store))
    return [(s.revision, [row.key for row in s.rows], s.cleared) for s in found if s is not None]


def start() -> TagStore:
    store = TagStore(1)
    put(store, "p", ["start"], tags=[{}])
    return store


# -- by example ------------------------------------------------------------------------------


def test_revisions_of_different_keys_are_told_one_by_one() -> None:
    store = start()
    put(store, "p", ["a", "b"], tags=[{}, {}])
    put(store, "p", ["c"], tags=[{}])
    store.apply_clear("p", ["start"], 0.0)
    assert told(store, 1) == [(2, ["a", "b"], []), (3, ["c"], []), (4, [], ["start"])]
    assert told(store, 3) == [(4, [], ["start"])]
    assert told(store, 4) == []


def test_revisions_between_two_changes_of_a_key_are_told_together() -> None:
    store = start()
    put(store, "p", ["z"], tags=[{}])
    put(store, "p", ["a", "b"], tags=[{"v": 1}, {"v": 1}])
    put(store, "p", ["c"], tags=[{}])
    put(store, "p", ["b"], tags=[{"v": 2}])
    put(store, "p", ["d"], tags=[{}])
    assert told(store, 1) == [(2, ["z"], []), (5, ["a", "b", "c"], []), (6, ["d"], [])]
    # Whoever has revision 3 knows b as it was, so nothing binds 4 and 5 together any more.
    assert told(store, 3) == [(4, ["c"], []), (5, ["b"], []), (6, ["d"], [])]


def test_spans_that_overlap_are_one() -> None:
    store = start()
    for keys in (["a"], ["b"], ["a"], ["c"], ["b"], ["d"]):
        put(store, "p", keys, tags=[{}])
    assert told(store, 1) == [(6, ["a", "b", "c"], []), (7, ["d"], [])]


def test_a_key_that_came_and_went_is_told_as_gone() -> None:
    store = start()
    put(store, "p", ["a"], tags=[{}])
    put(store, "p", ["b"], tags=[{}])
    store.apply_clear("p", ["a"], 0.0)
    assert told(store, 1) == [(4, ["b"], ["a"])]


def test_a_key_that_went_and_came_is_told_as_there() -> None:
    store = start()
    store.apply_clear("p", ["start"], 0.0)
    put(store, "p", ["start"], tags=[{"v": 1}])
    assert told(store, 1) == [(3, ["start"], [])]


def test_what_one_revision_writes_and_clears_is_told_together() -> None:
    store = start()
    group = begin(store, "u")
    put(store, "p", ["u_0", "u_1"], tags=[{}, {}], group=group)
    begin(store, "u")  # drops the rows of the older attempt
    assert history(store, 3)[0].n == history(store, 3)[1].n == 4
    assert told(store, 3) == [(4, ["u"], ["u_0", "u_1"])]


def test_a_revision_without_keys_tells_nothing() -> None:
    store = start()
    store.apply_create("other", 0.0)
    store.apply_seal(store.partition("p"), 0.0)
    put(store, "p", ["start"], tags=[{}], must_exist=True)
    assert history(store, 1)[0].keys == ()
    assert told(store, 1) == [(4, ["start"], [])]


# -- a bounded look --------------------------------------------------------------------------


def looked(store: TagStore, after: int, limit: int) -> tuple[list[int], bool]:
    found, all_of_them = first_spans(history(store, after), present(store), limit)
    assert sum(len(span.rows) + len(span.cleared) for span in found) <= limit
    return [span.revision for span in found], all_of_them


def test_only_whole_spans_within_the_limit_come_back() -> None:
    store = start()
    put(store, "p", ["a", "b"], tags=[{}, {}])  # 2
    put(store, "p", ["c"], tags=[{}])  # 3
    put(store, "p", ["d"], tags=[{}])  # 4
    put(store, "p", ["c", "e"], tags=[{}, {}])  # 5
    assert looked(store, 1, 100) == ([2, 5], True)
    assert looked(store, 1, 6) == ([2, 5], True)
    assert looked(store, 1, 5) == ([2], False)
    assert looked(store, 1, 4) == ([2], False)
    assert looked(store, 1, 2) == ([2], False)
    assert looked(store, 1, 1) == ([], False)
    assert looked(store, 2, 3) == ([], False)
    assert looked(store, 5, 0) == ([], True)


def test_a_revision_in_two_parts_is_not_cut_by_the_limit() -> None:
    store = start()
    group = begin(store, "u")
    put(store, "p", ["u_0", "u_1"], tags=[{}, {}], group=group)
    put(store, "p", ["a"], tags=[{}])
    begin(store, "u")
    assert looked(store, 4, 2) == ([], False)
    assert looked(store, 4, 3) == ([5], True)


# -- in steps --------------------------------------------------------------------------------


def test_many_keys_are_looked_at_in_steps() -> None:
    store = start()
    keys = [f"k{i}" for i in range(10 * STEP_KEYS)]
    put(store, "p", keys, tags=[{}] * len(keys))
    store.apply_clear("p", keys[1:], 0.0)
    found = list(spans(history(store, 1), present(store)))
    assert found.count(None) == 20 - 1  # k0 is one key less
    (span,) = [part for part in found if part is not None]
    assert ([row.key for row in span.rows], span.cleared) == (["k0"], keys[1:])


def latest(store: TagStore, after: int) -> Latest:
    """The same moment, put together from all rows and the pages of history."""
    moment = Latest()
    for chunk in store.partition("p").slots.cut():
        moment.add_rows(row for row in chunk.live_rows() if row.revision > after)
    for _ in moment.add_gone(store.history.pages_since("p", after), after):
        pass
    return moment


# -- any history -----------------------------------------------------------------------------

KEYS = [f"k{i}" for i in range(6)]

one_key = st.sampled_from(KEYS)
some_keys = st.lists(one_key, min_size=1, max_size=3, unique=True)
acts = st.one_of(
    st.tuples(st.just("put"), some_keys),
    st.tuples(st.just("put"), some_keys),
    st.tuples(st.just("clear"), some_keys),
    st.tuples(st.just("where"), st.integers(0, 2)),
    st.tuples(st.just("elsewhere"), some_keys),
)


def applied(store: TagStore, act: tuple[str, Any]) -> None:
    kind, what = act
    if kind == "put":
        put(store, "p", what, tags=[{"n": store.n, "v": store.n % 3}] * len(what))
    elif kind == "clear":
        store.apply_clear("p", what, 0.0)
    elif kind == "where":
        clear_where(store, "p", {"v": what})
    else:
        put(store, "q", what, tags=[{}] * len(what))


def state_of(store: TagStore) -> dict[str, dict[str, Any]]:
    return {row.key: row.tags for row in store.partition("p").slots}


def cuts_between(changes: list[Change]) -> int:
    """Into how many spans the changes fall: one more than the places that no key spans."""
    revisions = sorted({change.n for change in changes if change.keys})
    cuts = 0
    for last in revisions[:-1]:
        before = {key for change in changes if change.n <= last for key in change.keys}
        behind = {key for change in changes if change.n > last for key in change.keys}
        cuts += before.isdisjoint(behind)
    return cuts + 1 if revisions else 0


def check(found: Iterator[Span | None], at: int, states: dict[int, Any], smallest: int) -> None:
    """Whoever is at a revision and applies the spans passes through these very states."""
    state = dict(states[at])
    seen: set[str] = set()
    count = 0
    for span in found:
        if span is None:
            continue
        count += 1
        assert span.revision > at
        at = span.revision
        keys = [row.key for row in span.rows] + span.cleared
        assert len(set(keys)) == len(keys)
        assert seen.isdisjoint(keys)
        seen.update(keys)
        for row in span.rows:
            state[row.key] = row.tags
        for key in span.cleared:
            state.pop(key, None)
        assert state == states[at]
    assert state == states[max(states)]
    assert count == smallest


@given(st.lists(acts, max_size=30), st.data())
def test_any_history_is_told_as_the_states_that_it_went_through(
    what: list[tuple[str, Any]], data: st.DataObject
) -> None:
    store = start()
    states = {0: {}, 1: state_of(store)}
    for act in what:
        before = store.n
        applied(store, act)
        if store.n != before:
            states[store.n] = state_of(store)
    after = data.draw(st.sampled_from(sorted(states)))
    smallest = cuts_between(history(store, after))
    check(spans(history(store, after), present(store)), after, states, smallest)
    check(spans(history(store, after), latest(store, after).look), after, states, smallest)
    limit = data.draw(st.integers(0, 12))
    found, all_of_them = first_spans(history(store, after), present(store), limit)
    whole = [span for span in spans(history(store, after), latest(store, after).look) if span]
    assert found == whole[: len(found)]
    assert all_of_them is (sum(len(c.keys) for c in history(store, after)) <= limit)
    assert not all_of_them or len(found) == len(whole)


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_that_lags_loses_nothing(seed: int) -> None:
    """Readers resume from wherever they got to, with bounded looks, while changes go on."""
    r = random.Random(seed)
    store = start()
    store.history = History(max_changes=10_000)
    states = {1: state_of(store)}
    readers = [(1, dict(states[1])) for _ in range(5)]
    for _ in range(600):
        keys = r.sample(KEYS, r.randint(1, 3))
        before = store.n
        applied(
            store, r.choice([("put", keys), ("put", keys), ("clear", keys), ("elsewhere", keys)])
        )
        if store.n != before:
            states[store.n] = state_of(store)
        who = r.randrange(8)
        if who < len(readers):
            at, state = readers[who]
            changes = history(store, at)
            found, _ = first_spans(changes, present(store), r.choice([5, 50]))
            if not found:
                found = [span for span in spans(changes, latest(store, at).look) if span]
            for span in found:
                state.update({row.key: row.tags for row in span.rows})
                for key in span.cleared:
                    state.pop(key, None)
                assert state == states[span.revision]
            readers[who] = (found[-1].revision if found else at, state)
