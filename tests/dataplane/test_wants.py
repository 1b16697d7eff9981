"""What a claim may ask for: every argument is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.errors import InvalidRequest
from dataplane.tags.claims.queues import Order
from dataplane.tags.claims.shares import Rank
from dataplane.tags.claims.wants import MAX_NUMBERS, Want, check_number, check_numbers
from dataplane.tags.keys import MAX_KEYS

GOOD: dict[str, Any] = {
    "partition_id": "train", "task": "step", "count": 4, "fields": ["x", "y", "x"],
    "where": {"status": "done"}, "order_by": "-seq_len", "groups": False, "lease_s": 30,
    "replica": [0, 2, 5],
}  # fmt: skip


def test_a_want_holds_what_was_asked_for() -> None:
    want = Want.parse(**GOOD)
    assert (want.partition_id, want.task, want.count) == ("train", "step", 4)
    assert want.fields == ["x", "y"]
    assert want.condition.fields == frozenset("xy")
    assert want.predicate({"status": "done"})
    assert not want.condition.grouped
    assert want.order == Order("seq_len", descending=True)
    assert want.lease_s == 30.0
    assert want.rank == Rank(0, 2, 5)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("partition_id", 5, "partition name"),
        ("partition_id", "", "partition name"),
        ("partition_id", "a\nb", "partition name"),
        ("task", None, "task name"),
        ("task", "", "task name"),
        ("task", "../x", "task name"),
        ("task", "x" * 1025, "task name"),
        ("count", 0, "count"),
        ("count", -1, "count"),
        ("count", MAX_KEYS + 1, "count"),
        ("count", True, "count"),
        ("count", 2.0, "count"),
        ("count", None, "count"),
        ("fields", "x", "fields"),
        ("fields", None, "fields"),
        ("fields", [1], "fields"),
        ("fields", [""], "fields"),
        ("fields", [f"f{i}" for i in range(1025)], "fields"),
        ("where", "status", "where"),
        ("where", {"a": {"~": 1}}, "where"),
        ("order_by", 3, "order_by"),
        ("order_by", "", "order_by"),
        ("order_by", "-", "order_by"),
        ("order_by", "a\tb", "order_by"),
        ("order_by", "x" * 1025, "order_by"),
        ("groups", 1, "groups"),
        ("groups", None, "groups"),
        ("lease_s", 0.09, "lease_s"),
        ("lease_s", 86_401, "lease_s"),
        ("lease_s", float("nan"), "lease_s"),
        ("lease_s", True, "lease_s"),
        ("lease_s", "30", "lease_s"),
        ("replica", [0, 2], "replica"),
        ("replica", [2, 2, 0], "dp_rank"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_will_not_do_is_named(name: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Want.parse(**{**GOOD, name: value})


@pytest.mark.parametrize("value", [0, -1, 1 << 63, 1.0, True, None, "1"])
def test_a_request_number_is_a_positive_integer(value: Any) -> None:
    assert check_number(1, "claim") == 1
    with pytest.raises(InvalidRequest, match="claim: a request number"):
        check_number(value, "claim")
    with pytest.raises(InvalidRequest, match="claim: a request number"):
        check_numbers([1, value], "claim")


@pytest.mark.parametrize("value", [None, 5, "12", {1: 2}, [1] * (MAX_NUMBERS + 1)], ids=type)
def test_request_numbers_are_a_list_of_bounded_length(value: Any) -> None:
    assert check_numbers([3, 1], "claim") == [3, 1]
    with pytest.raises(InvalidRequest, match="claim: a list"):
        check_numbers(value, "claim")
