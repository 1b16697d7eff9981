"""A partition as the controller sees it: indexes, production, consumption, and what is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transfer_queue.control.registry import PartitionRows, Place, keyless, reserved
from transfer_queue.control.snapshot import PartitionSnapshot, PartitionView
from transfer_queue.names import RESERVED_TAG

from dataplane.types import Revision


@dataclass
class Told:
    """A listing as a test writes it."""

    n: int
    rows: list[tuple[str, tuple[str, ...], dict[str, Any]]] = field(default_factory=list[Any])
    cleared: list[str] = field(default_factory=list[str])
    full: bool = False

    @property
    def revision(self) -> Revision:
        return Revision(1, self.n)

    @property
    def keys(self) -> list[str]:
        return [row[0] for row in self.rows]

    @property
    def fields(self) -> list[tuple[str, ...]]:
        return [row[1] for row in self.rows]

    @property
    def tags(self) -> list[dict[str, Any]]:
        return [dict(row[2]) for row in self.rows]


def of(*rows: tuple[str, tuple[str, ...], dict[str, Any]]) -> PartitionRows:
    told = PartitionRows("p")
    told.take(Told(1, list(rows), full=True))
    told.number({key: at for at, key in enumerate(told.unnumbered())})
    return told


def test_rows_are_numbered_in_the_order_in_which_they_came() -> None:
    rows = PartitionRows("p")
    rows.take(Told(1, [("b", (), {}), ("a", (), {})], full=True))
    rows.take(Told(2, [("c", (), {})]))
    assert rows.unnumbered() == ["b", "a", "c"]
    assert rows.rows == []
    rows.number({"b": 7, "a": 8, "c": 9})
    assert [row.key for row in rows.rows] == ["b", "a", "c"]
    assert rows.unnumbered() == []


def test_what_the_controller_wrote_is_read_back_and_shown_to_nobody() -> None:
    place = Place("r1", 0, 1, "0/0")
    tags = {"status": "done", **reserved(5, ["train"], {"train": place})}
    rows = of(("k", ("x",), tags))
    row = rows.row(5)
    assert row is not None
    assert (row.consumed, row.claims, row.tags) == (
        ("train",),
        {"train": place},
        {"status": "done"},
    )
    assert rows.unnumbered() == []


def test_a_key_that_was_cleared_and_put_again_is_a_new_row() -> None:
    rows = of(("k", ("x",), reserved(3, ["train"])))
    rows.take(Told(2, [("k", ("x",), {})]))
    assert rows.unnumbered() == ["k"]
    assert not rows.has(3)
    rows.number({"k": 4})
    assert rows.ready(["x"], "train") == [4]


def test_an_index_that_two_rows_claim_stays_the_first_ones() -> None:
    rows = of(("a", (), reserved(3)), ("b", (), reserved(3)))
    assert [row.key for row in rows.rows] == ["b", "a"]  # `of` gave b the index 0
    assert rows.keyed("a") is rows.row(3)


def test_an_older_listing_changes_nothing() -> None:
    rows = of(("k", ("x",), {}))
    rows.take(Told(3, cleared=["k"]))
    rows.take(Told(2, [("k", ("x",), reserved(0))]))
    assert len(rows) == 0


def test_a_full_listing_takes_the_place_of_what_was_known() -> None:
    rows = of(("a", ("x",), {}), ("b", ("x",), {}))
    rows.take(Told(9, [("b", ("x",), reserved(1))], full=True))
    assert rows.indexes == [1]
    assert rows.keyed("a") is None


def test_rows_are_ready_that_have_all_fields_and_were_not_consumed() -> None:
    rows = of(("a", ("x", "y"), {}), ("b", ("x",), {}), ("c", ("x", "y"), {}), ("d", (), {}))
    assert rows.ready(["x"], "t") == [0, 1, 2]
    assert rows.ready(["x", "y"], "t") == [0, 2]
    rows.consume("t", {0: Place("r", 0, 1)})
    assert rows.ready(["x", "y"], "t") == [2]
    assert rows.ready(["x", "y"], "other") == [0, 2]
    assert rows.ready([], "t") == [1, 2, 3]
    assert rows.ready(["z"], "t") == []


def test_indexes_given_ahead_of_rows_count_as_neither_produced_nor_consumed() -> None:
    rows = of(("a", ("x",), {}))
    rows.ahead = range(4, 6)
    rows.consume("t", {0: Place("r", 0, 1)})
    assert rows.consumption("t") == ([0, 4, 5], [1, 0, 0])
    assert rows.production(["x"]) == ([0, 4, 5], [[1], [0], [0]])


def test_production_of_a_field_that_no_row_has_had_is_not_known() -> None:
    rows = of(("a", ("x",), {}), ("b", ("y",), {}))
    assert rows.production(["x", "y"]) == ([0, 1], [[1, 0], [0, 1]])
    assert rows.production(["x", "z"]) is None
    assert rows.production([]) is None


def test_the_batch_of_a_request_is_found_again_in_its_order_and_only_whole() -> None:
    rows = of(*[(key, ("x",), {}) for key in "abcd"])
    rows.consume("t", {2: Place("r", 0, 2, "0/1"), 0: Place("r", 1, 2, "0/1")})
    rows.consume("t", {3: Place("other", 0, 1), 1: Place("r", -1, 2)})
    assert rows.claimed("t", request="r") == [2, 0]
    assert rows.claimed("t", draw="0/1") == [2, 0]
    assert rows.claimed("u", request="r") == []
    assert rows.claimed("t", request="none") == []
    rows.take(Told(2, cleared=["c"]))
    assert rows.claimed("t", request="r") == []


def test_fields_in_common_keep_the_order_in_which_they_came() -> None:
    rows = of(("a", ("x", "b"), {}), ("b", ("a", "b", "x"), {}))
    assert rows.common(rows.rows) == ["x", "b"]
    assert rows.common([]) == []


def test_why_there_are_not_enough_rows_is_said_in_numbers() -> None:
    rows = of(("a", ("x", "y"), {}), ("b", ("x",), {}), ("c", (), {}))
    rows.consume("t", {0: Place("r", 0, 1)})
    assert rows.why_not(["x", "y"], "t", 4) == (
        "0 of 4 rows are ready, of 3 in the partition; task 't' has consumed 1; 1 lack field 'x'; "
        "2 lack field 'y'"
    )


def test_a_row_without_a_key_is_shown_without_one() -> None:
    rows = of((keyless(12), ("x",), reserved(12)), ("k", ("x",), {"n": 1}))
    view = PartitionView(rows)
    assert view.kv_retrieve_keys([12, 0, 99]) == [None, "k", None]
    assert view.keys_mapping == {"k": 0}
    assert view.kv_retrieve_indexes(["k", "none"]) == [0, None]
    assert view.get_custom_meta([0, 12, 99]) == {0: {"n": 1}, 12: {}}
    assert view.global_indexes == {0, 12}


def test_a_snapshot_reads_like_the_status_of_a_partition() -> None:
    rows = of(("a", ("x",), {"n": 1}), ("b", ("y",), {}))
    rows.ahead = range(3, 4)
    rows.consume("t", {1: Place("r", 0, 1)})
    snapshot = PartitionSnapshot.of(rows)
    assert snapshot.keys_mapping == {"a": 0, "b": 1}
    assert snapshot.custom_meta == {0: {"n": 1}, 1: {}}
    assert snapshot.field_name_mapping == {"x": 0, "y": 1}
    assert snapshot.production_status.tolist() == [[1, 0], [0, 1], [0, 0], [0, 0]]
    assert snapshot.consumption_status["t"].tolist() == [0, 1, 0, 0]
    assert snapshot.pre_allocated_global_indexes == {3}


def test_what_is_to_be_written_is_one_tag_of_plain_values() -> None:
    assert reserved(4, ("t",), {"t": Place("r", 1, 2)}) == {
        RESERVED_TAG: {"index": 4, "consumed": ["t"], "claims": {"t": ["r", 1, 2, None]}}
    }
    assert reserved(4) == {RESERVED_TAG: {"index": 4, "consumed": []}}
