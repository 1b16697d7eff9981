"""The first rows by a tag, against sorting all of them, while others change the partition."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.errors import InvalidRequest
from dataplane.server import slices
from dataplane.server.listings import list_partition
from dataplane.server.ordering import MAX_ORDERED, first_rows
from dataplane.server.slices import WorstSlice
from dataplane.tags.claims.queues import Order
from dataplane.tags.history import History
from dataplane.tags.query import compile_where
from dataplane.tags.store import TagStore
from tests.dataplane.audit import put, rows_of
from tests.dataplane.interleaving import Interleaving
from tests.dataplane.test_walks import changes, drive


@pytest.fixture(autouse=True)
def every_slice_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_S", -1.0)


@pytest.mark.parametrize("order_by", ["a", "-a", "b"])
@pytest.mark.parametrize("limit", [0, 1, 20, 1000])
@pytest.mark.parametrize("where", [None, {"c": {">=": 1}}], ids=["all", "matching"])
def test_the_first_rows_are_those_of_a_sorted_listing(
    order_by: str, limit: int, where: Any
) -> None:
    run = Interleaving(3, 3000, History(max_changes=10**6, max_age_s=1e9))
    for _ in range(8):
        run.put(700)
    order, holds = Order.parse(order_by), compile_where(where)
    rows = [row for row in rows_of(run.store, "p").values() if holds(row.tags)]
    expected = sorted(rows, key=order.key)[:limit]
    partition = run.store.partition("p")
    walk = first_rows(partition, holds, order, limit, WorstSlice())
    found, pauses = drive(walk, changes(run))
    assert [row.key for row in found] == [row.key for row in expected]
    assert pauses > 3 or not limit


def test_numbers_come_before_texts_before_what_has_none() -> None:
    store = TagStore(1)
    values: list[Any] = [None, "b", 3, "a", 1.5, True, [1], float("nan"), -2]
    put(store, "p", [f"k{i}" for i in range(9)], tags=[{"v": v} for v in values])
    put(store, "p", ["none"], tags=[{}])

    def keys(order_by: str) -> list[str]:
        order = Order.parse(order_by)
        walk = first_rows(store.partition("p"), compile_where(None), order, 5, WorstSlice())
        return [row.key for row in drive(walk, lambda: None)[0]]

    assert keys("v") == ["k8", "k4", "k2", "k3", "k1"]
    assert keys("-v") == ["k2", "k4", "k8", "k1", "k3"]


@pytest.mark.parametrize(
    ("since", "limit", "order_by"),
    [([1, 0], 5, "a"), (None, None, "a"), (None, MAX_ORDERED + 1, "a"), (None, 5, 7),
     (None, 5, ""), (None, 5, "-"), (None, True, "a")],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(since: Any, limit: Any, order_by: Any) -> None:
    store = TagStore(1)
    put(store, "p", ["k"], tags=[{}])
    with pytest.raises(InvalidRequest):
        drive(
            list_partition(store, ["p", None, since, None, limit, order_by], WorstSlice()),
            lambda: None,
        )
