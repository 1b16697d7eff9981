"""Epochs of a tag store: what somebody had seen before a start is comparable after it."""

from __future__ import annotations

import pytest

from dataplane.tags.history import History
from dataplane.tags.restoring import Restoring
from dataplane.tags.store import TagStore
from dataplane.types import Revision
from tests.dataplane.audit import put


def test_a_stamp_of_the_present_epoch_is_its_own_revision() -> None:
    store = TagStore(4)
    put(store, "p", ["a"])
    assert store.starts == {4: 0}
    assert [store.stamp_of((4, n)) for n in (0, 1, 7)] == [0, 1, 7]


@pytest.mark.parametrize("epoch", [0, 3, 5, 6, 1 << 60])
def test_an_epoch_that_is_not_known_is_before_everything(epoch: int) -> None:
    store = TagStore(4)
    put(store, "p", ["a"])
    store.begin_epoch(7)
    assert store.stamp_of((epoch, 1)) == 0


def test_a_stamp_of_an_earlier_epoch_ends_where_the_next_one_began() -> None:
    """What was promised beyond it was lost with a crash of the machine: it never happened here."""
    store = TagStore(1)
    for n in range(3):
        put(store, "p", [f"a{n}"])
    store.begin_epoch(2)
    put(store, "p", ["b"])
    store.begin_epoch(5)
    put(store, "p", ["c"])
    assert store.starts == {1: 0, 2: 3, 5: 4}
    assert store.revision() == Revision(5, 5)
    assert [store.stamp_of((1, n)) for n in (0, 2, 3, 4, 99)] == [0, 2, 3, 3, 3]
    assert [store.stamp_of([2, n]) for n in (3, 4, 5, 99)] == [3, 4, 4, 4]
    assert [store.stamp_of((5, n)) for n in (4, 5, 6)] == [4, 5, 6]


@pytest.mark.parametrize(("saved", "epoch", "starts"), [
    (1, 3, {3: 0}), (2, 3, {3: 0}), (3, 4, {3: 0, 4: 2}), (9, 10, {3: 0, 10: 2}),
])  # fmt: skip
def test_a_load_of_a_later_epoch_begins_one(saved: int, epoch: int, starts: dict[int, int]) -> None:
    store = TagStore(3)
    put(store, "p", ["a"])
    put(store, "p", ["b"])
    assert Restoring(saved, 40).finish(store, History()) == 41
    assert (store.epoch, store.starts) == (epoch, starts)
    # Before the load or unknown: below the floor of the history in any case.
    assert all(store.stamp_of((e, n)) < store.history.floor for e in range(1, 12) for n in (0, 2))
    assert store.stamp_of((epoch, 41)) == 41
