"""Walks in slices, with changes between every two of them: each still sees a single moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgpack
import pytest

from dataplane.client.results import Listing, unpack_listing
from dataplane.server import slices
from dataplane.server.clearing import clear_where
from dataplane.server.listings import SMALL_SINCE, list_partition
from dataplane.server.slices import WorstSlice
from dataplane.tags.history import History
from dataplane.tags.query import compile_where
from dataplane.tags.store import Doomed
from tests.dataplane.audit import forget_everything, put, rows_of
from tests.dataplane.interleaving import Interleaving
from tests.dataplane.test_listing import expected, shown


@pytest.fixture(autouse=True)
def every_slice_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_S", -1.0)


def drive(walk: Coroutine[Any, Any, Any], between: Callable[[], object]) -> tuple[Any, int]:
    """The walk's result, and how often it let others run; each time something else happens."""
    pauses = 0
    while True:
        try:
            walk.send(None)
        except StopIteration as end:
            return end.value, pauses
        pauses += 1
        between()


def listed(answer: Any) -> Listing:
    body, buffers, nbytes = answer
    payload = b"".join(bytes(buffer) for buffer in buffers)
    assert len(payload) == nbytes
    return unpack_listing("p", msgpack.unpackb(msgpack.packb(body)), memoryview(payload))


def filled(seed: int, keys: int = 3000) -> Interleaving:
    run = Interleaving(seed, keys, History(max_changes=10**6, max_age_s=1e9))
    for _ in range(8):
        run.put(keys // 4)
    run.clear(keys // 10)
    return run


def changes(run: Interleaving) -> Callable[[], None]:
    def change() -> None:
        for _ in range(run.random.randint(0, 2)):
            run.step()

    return change


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("where", [None, {"a": {">=": 2}}], ids=["all", "matching"])
@pytest.mark.parametrize("limit", [None, 1500])
def test_a_listing_shows_the_rows_of_the_moment_it_began(
    seed: int, where: Any, limit: int | None
) -> None:
    run = filled(seed)
    partition = run.store.partition("p")
    holds = compile_where(where)
    rows = [row for row in rows_of(run.store, "p").values() if holds(row.tags)]
    then = expected(rows[:limit], partition)
    revision = (1, partition.revision)
    body = ["p", where, None, None, limit]
    answer, pauses = drive(list_partition(run.store, body, WorstSlice()), changes(run))
    listing = listed(answer)
    assert (listing.full, listing.cleared, listing.revision) == (True, [], revision)
    assert shown(listing) == then
    assert pauses > 3
    assert run.store.n > revision[1]  # it did change meanwhile
    run.check()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("size", ["few changes", "many changes"])
@pytest.mark.parametrize("where", [None, {"b": {"<": 2}}], ids=["all", "matching"])
def test_a_listing_since_a_revision_shows_the_changes_up_to_the_moment_it_began(
    seed: int, size: str, where: Any
) -> None:
    run = filled(seed)
    since = run.store.n
    before = set(rows_of(run.store, "p"))
    for _ in range(5 if size == "few changes" else 40):
        run.step()
        if size == "many changes":
            run.put(400)
            run.clear(100)
    partition = run.store.partition("p")
    touched = {key for change in run.store.history.since("p", since) for key in change.keys}
    count = sum(len(change.keys) for change in run.store.history.since("p", since))
    assert (count > SMALL_SINCE) == (size == "many changes")
    holds = compile_where(where)
    rows = [row for row in rows_of(run.store, "p").values() if row.revision > since]
    then = expected([row for row in rows if holds(row.tags)], partition)
    gone = touched - set(rows_of(run.store, "p"))
    assert before - set(rows_of(run.store, "p")) <= gone
    body = ["p", where, [1, since], None, None]
    answer, _ = drive(list_partition(run.store, body, WorstSlice()), changes(run))
    listing = listed(answer)
    assert not listing.full
    assert sorted(shown(listing)) == sorted(then)
    assert sorted(listing.cleared) == sorted(gone)
    run.check()


def test_history_may_forget_what_a_listing_since_a_revision_is_still_walking_over() -> None:
    run = filled(3)
    store = run.store
    since = store.n
    for _ in range(20):
        run.put(600)
        run.clear(300)
    gone = {key for change in store.history.since("p", since) for key in change.keys}
    gone -= set(rows_of(store, "p"))
    rows = [row for row in rows_of(store, "p").values() if row.revision > since]
    then = expected(rows, store.partition("p"))

    def forget() -> None:
        if store.history.max_age_s > 1.0:
            store.history.max_age_s = 1.0
            run.now += 100.0
            run.put(10)
            forget_everything(store, run.now)
            assert store.history.floor > since
        run.step()

    body = ["p", None, [1, since], None, None]
    listing = listed(drive(list_partition(store, body, WorstSlice()), forget)[0])
    assert sorted(shown(listing)) == sorted(then)
    assert sorted(listing.cleared) == sorted(gone)
    later = listed(drive(list_partition(store, body, WorstSlice()), lambda: None)[0])
    assert later.full


@pytest.mark.parametrize("seed", range(4))
def test_a_clear_by_predicate_takes_exactly_what_matches_at_its_revision(seed: int) -> None:
    run = filled(seed, keys=6000)
    store = run.store
    partition = store.partition("p")
    made: list[int] = []

    def commit(doomed: list[Doomed]) -> None:
        matching = {key for key, (tags, _) in run.rows["p"].items() if tags.get("a", -1) >= 2}
        assert {key for part in doomed for key in part.keys} == matching
        store.apply_scanned_clear(partition, doomed, run.now)
        for key in matching:
            del run.rows["p"][key]
        made.append(len(matching))
        run.releasing = True
        assert set(rows_of(store, "p")) == set(run.rows["p"])  # gone for everybody at once

    predicate = compile_where({"a": {">=": 2}})
    clear = clear_where(store, partition, predicate, commit, WorstSlice())
    removed, pauses = drive(clear, changes(run))
    assert made == [removed]
    assert removed > 100
    assert pauses > 3
    run.check()  # and every byte of them is given back when it is answered


def test_a_clear_of_a_partition_that_never_rests_comes_to_an_end() -> None:
    run = filled(1)
    store = run.store
    partition = store.partition("p")
    keys = list(run.rows["p"])
    r = random.Random(1)

    def commit(doomed: list[Doomed]) -> None:
        store.apply_scanned_clear(partition, doomed, run.now)

    def touch_everything() -> None:
        # A change in every chunk between any two slices: nothing that was scanned stays good.
        put(store, "p", r.sample(keys, 300), tags=[{"a": 5}] * 300, now=run.now)

    clear = clear_where(store, partition, compile_where({}), commit, WorstSlice())
    removed, pauses = drive(clear, touch_everything)
    assert removed == len(keys)
    assert pauses < 1000
    left = rows_of(store, "p")
    assert all(row.tags == {"a": 5} for row in left.values())  # put after the clear


def test_a_clear_that_matches_nothing_changes_nothing() -> None:
    run = filled(2)
    before = run.store.counts()

    def commit(doomed: list[Doomed]) -> None:
        raise AssertionError("there is nothing to commit")

    clear = clear_where(
        run.store, run.store.partition("p"), compile_where({"a": 99}), commit, WorstSlice()
    )
    assert drive(clear, lambda: None)[0] == 0
    assert run.store.counts() == before
