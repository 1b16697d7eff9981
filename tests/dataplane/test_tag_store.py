"""The tag store bare: what it refuses, what it counts, what it forgets, what it reports dead."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.codec.tags import MAX_TAG_BYTES, MAX_TAGS
from dataplane.errors import (
    AlreadyWritten,
    DataplaneError,
    InvalidRequest,
    KeyNotFound,
    PartitionNotFound,
    SchemaMismatch,
    StaleWrite,
)
from dataplane.tags.accounts import Account
from dataplane.tags.history import History
from dataplane.tags.listing import piece_of_chunk
from dataplane.tags.placement import Placement
from dataplane.tags.query import compile_where
from dataplane.tags.rows import CHUNK_ROWS, Row
from dataplane.tags.store import REAP_STEP, Doomed, TagStore
from dataplane.types import FieldSchema, Revision
from tests.dataplane.audit import (
    COLUMNS,
    FREE,
    Blocks,
    audit,
    cell_bytes,
    dead_blocks,
    forget_everything,
    live_cells,
    put,
    rows_of,
    tags_of,
)
from tests.dataplane.interleaving import Interleaving, clear_where

P = "train"


def state(store: TagStore) -> Any:
    """Everything a caller can tell a store by."""
    rows = {
        name: {
            key: (row.tags, row.revision, row.cleared_at, row.layers)
            for key, row in rows_of(store, name).items()
        }
        for name in store.partitions
    }
    return store.counts(), rows, [p.block for p in store.dead]


# -- partitions and revisions


def test_a_partition_is_there_from_its_first_put_on() -> None:
    store = TagStore(7)
    with pytest.raises(PartitionNotFound, match="'train'") as error:
        store.partition(P)
    assert error.value.partition_id == P
    assert store.revision() == Revision(7, 0)
    assert put(store, P, ["a"], tags=[{"n": 1}]) == 1
    assert store.revision() == Revision(7, 1)
    assert len(store.partition(P)) == 1
    with pytest.raises(PartitionNotFound):
        store.partition("val")


@pytest.mark.parametrize("name", ["", "a\nb", "../x", "x" * 1025])
def test_a_partition_name_that_will_not_do_is_refused_by_put_and_by_every_look(name: str) -> None:
    store = TagStore(1)
    with pytest.raises(InvalidRequest, match="partition name"):
        store.partition(name)
    with pytest.raises(InvalidRequest, match="partition name"):
        put(store, name, ["a"], tags=[{}])
    assert not store.partitions


def test_every_change_makes_the_next_revision_and_nothing_else_does() -> None:
    store, blocks = TagStore(1), Blocks()
    assert put(store, P, ["a", "b"], blocks.block(2, {"x": [1, 2]})) == 1
    assert put(store, "val", ["a"], tags=[{}]) == 2
    assert store.apply_clear(P, ["zzz"], 0.0) == 0
    assert store.n == 2
    assert store.apply_clear(P, ["a", "zzz", "a"], 0.0) == 1
    assert store.n == 3
    assert store.partition(P).revision == 3
    assert store.partition("val").revision == 2
    old = store.placements["v0", 1]
    store.apply_repack(old, blocks.block(1, {"x": [2]}), [(1, old.positions[1])])
    store.upkeep(1e9)
    assert store.n == 3


# -- bytes and dead blocks


def test_bytes_and_dead_blocks_follow_every_change_of_two_rows_step_by_step() -> None:
    store, blocks = TagStore(1), Blocks()
    partition_bytes = lambda: store.partition(P).payload_bytes  # noqa: E731

    put(store, P, ["a", "b"], blocks.block(2, {"x": [3, 1], "s": []}))  # block 1
    assert partition_bytes() == 3 * 8 + 1 * 8 + 2 * 8
    assert dead_blocks(store) == []

    put(store, P, ["a"], blocks.block(1, {"x": [5]}))  # 2 covers a.x of 1
    assert partition_bytes() == 5 * 8 + 1 * 8 + 2 * 8
    assert store.placements["v0", 1].live == 3
    assert dead_blocks(store) == []

    put(store, P, ["b"], blocks.block(1, {"s": [], "m": [4]}))  # 3 covers b.s of 1
    assert partition_bytes() == 5 * 8 + 1 * 8 + 2 * 8 + 4 * 8
    assert store.placements["v0", 1].live == 2

    put(store, P, ["a"], blocks.block(1, {"x": [0], "s": []}))  # 4 covers 2, and a.s of 1
    assert partition_bytes() == 0 + 8 + 1 * 8 + 8 + 4 * 8
    assert dead_blocks(store) == [2]

    assert store.apply_clear(P, ["b"], 0.0) == 1  # the end of 1 (b.x) and of 3
    assert partition_bytes() == 8
    assert dead_blocks(store) == [1, 3]

    assert store.apply_clear(P, ["a"], 0.0) == 1
    assert partition_bytes() == 0
    assert dead_blocks(store) == [4]
    assert not store.placements
    assert store.partition(P).tag_bytes == 0


def test_one_put_that_covers_a_whole_block_reports_it_once() -> None:
    store, blocks = TagStore(1), Blocks()
    keys = [f"k{i}" for i in range(50)]
    put(store, P, keys, blocks.block(50, {"x": [1] * 50}))
    put(store, P, keys[::-1], blocks.block(50, {"x": [2] * 50}))
    assert dead_blocks(store) == [1]
    assert store.apply_clear(P, keys, 0.0) == 50
    assert dead_blocks(store) == [2]
    audit(store, [blocks], [1, 2])


def test_a_field_of_no_bytes_keeps_its_block_alive_all_the_same() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["a"], blocks.block(1, {"x": [0]}))
    assert store.partition(P).payload_bytes == 0
    assert dead_blocks(store) == []
    store.apply_clear(P, ["a"], 0.0)
    assert dead_blocks(store) == [1]


def test_blocks_of_two_stores_with_one_number_are_told_apart() -> None:
    store, near, far = TagStore(1), Blocks("near"), Blocks("far")
    put(store, P, ["a"], near.block(1, {"x": [1]}))
    put(store, P, ["a"], far.block(1, {"m": [1]}))
    assert len(store.placements) == 2
    put(store, P, ["a"], near.block(1, {"m": [2]}))
    assert [(p.store, p.block) for p in store.dead] == [("far", 1)]
    audit(store, [far], [1])
    audit(store, [near])


@pytest.mark.parametrize("seed", range(12))
def test_sums_equal_a_recount_after_any_interleaving_and_are_zero_at_the_end(seed: int) -> None:
    history = History(max_changes=200, max_age_s=20.0)
    run = Interleaving(seed, keys=60, history=history)
    for _ in range(150):
        run.step()
        run.check()
    for name in run.rows:
        run.store.apply_clear(name, run.keys, run.now)
        run.rows[name].clear()
    run.check()
    assert not run.store.placements
    for name in run.rows:
        partition = run.store.partition(name)
        assert (len(partition), partition.payload_bytes, partition.tag_bytes) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_sums_hold_across_chunk_borders_while_history_forgets(seed: int) -> None:
    history = History(max_changes=3000, max_age_s=100.0)
    run = Interleaving(seed, keys=1500, history=history)
    for _ in range(40):
        run.put(200)
        run.step()
        run.clear(150)
    run.check()
    assert all(len(run.store.partition(name).slots.chunks) > 2 for name in run.rows)
    run.now += 1000.0
    forget_everything(run.store, run.now)
    run.check()


# -- a cut shows one moment


@pytest.mark.parametrize("seed", range(6))
def test_a_cut_taken_before_changes_shows_exactly_the_old_rows(seed: int) -> None:
    run = Interleaving(seed, keys=1400, history=History(max_changes=500, max_age_s=10.0))
    cuts: list[tuple[list[Any], list[Any]]] = []
    for _ in range(12):
        for name in ("p", "q"):
            cut = run.store.partition(name).slots.cut()
            seen = [
                (row, row.tags.copy(), row.layers) for chunk in cut for row in chunk.live_rows()
            ]
            assert [row.key for row, _, _ in seen] == list(rows_of(run.store, name))
            cuts.append((cut, seen))
        run.put(300)
        for _ in range(6):
            run.step()
    for cut, seen in cuts:
        rows = [row for chunk in cut for row in chunk.live_rows()]
        assert len(rows) == len(seen)
        for row, (old, tags, layers) in zip(rows, seen, strict=True):
            assert row is old
            assert row.tags == tags
            assert row.layers == layers
    run.check()


def test_iterating_over_the_rows_is_a_cut_too() -> None:
    store = TagStore(1)
    put(store, P, [f"k{i}" for i in range(1500)], tags=[{"n": i} for i in range(1500)])
    rows = iter(store.partition(P).slots)
    first = next(rows)
    store.apply_clear(P, [f"k{i}" for i in range(1400)], 0.0)
    put(store, P, ["k0", "new"], tags=[{"n": -1}] * 2)
    seen = [first, *rows]
    assert [row.key for row in seen] == [f"k{i}" for i in range(1500)]
    assert [row.tags["n"] for row in seen] == list(range(1500))


# -- refusals change nothing


def _stamped(store: TagStore, keys: list[str], stamp: int, **options: Any) -> int:
    return put(store, P, keys, tags=[{"by": "late"} for _ in keys], stamp=stamp, **options)


def _filled() -> tuple[TagStore, Blocks]:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["a", "b"], blocks.block(2, {"x": [1, 2]}), [{"n": 1}, {"n": 2}])  # 1
    put(store, P, ["c"], tags=[{"big": "y" * 40_000}])  # 2
    store.apply_clear(P, ["b"], 0.0)  # 3
    return store, blocks


REFUSED: list[
    tuple[str, Callable[[TagStore, Blocks], Any], type[DataplaneError], dict[str, Any]]
] = [
    (
        "another dtype",
        lambda s, b: put(s, P, ["z", "a"], b.of([COLUMNS["x"]._replace(dtype="int32")], 2,
                                                bytes(8))),
        SchemaMismatch,
        {"partition_id": P, "keys": ["z"], "fields": ["x"]},
    ),
    (
        "another rank",
        lambda s, b: put(s, P, ["a"], b.of([COLUMNS["x"]._replace(dims=(-1, 2))], 1, bytes(4))),
        SchemaMismatch,
        {"partition_id": P, "keys": ["a"], "fields": ["x"]},
    ),
    (
        "an object where a tensor was",
        lambda s, b: put(s, P, ["a"], b.of([COLUMNS["o"]._replace(name="x")], 1, bytes(4))),
        SchemaMismatch,
        {"partition_id": P, "keys": ["a"], "fields": ["x"]},
    ),
    (
        "absent keys that must exist",
        lambda s, b: put(s, P, ["a", "z", "b"], tags=[{}] * 3, must_exist=True),
        KeyNotFound,
        {"partition_id": P, "keys": ["z", "b"]},
    ),
    (
        "new keys only that must exist",
        lambda s, b: put(s, P, ["y", "z"], tags=[{}] * 2, must_exist=True),
        KeyNotFound,
        {"partition_id": P, "keys": ["y", "z"]},
    ),
    (
        "a partition that is not there and must exist",
        lambda s, b: put(s, "val", ["a"], tags=[{}], must_exist=True),
        KeyNotFound,
        {"partition_id": "val", "keys": ["a"]},
    ),
    (
        "present keys that must be absent",
        lambda s, b: put(s, P, ["z", "a", "b", "c"], tags=[{}] * 4, if_absent=True),
        AlreadyWritten,
        {"partition_id": P, "keys": ["a", "c"]},
    ),
    (
        "a key cleared after the put began",
        lambda s, b: _stamped(s, ["a", "b"], 2),
        StaleWrite,
        {"partition_id": P, "keys": ["b"], "cleared_at": 3},
    ),
    (
        "stale wins over a key that must exist",
        lambda s, b: _stamped(s, ["b", "zzz"], 2, must_exist=True),
        StaleWrite,
        {"partition_id": P, "keys": ["b"], "cleared_at": 3},
    ),
    (
        "too many bytes of tags after the merge",
        lambda s, b: put(s, P, ["a", "c"], tags=[{"n": 3}, {"more": "y" * 40_000}]),
        InvalidRequest,
        {},
    ),
    (
        "too many tags after the merge",
        lambda s, b: put(s, P, ["a"], tags=[{f"t{i}": 0 for i in range(MAX_TAGS)}]),
        InvalidRequest,
        {},
    ),
    (
        "too many tags of a new key",
        lambda s, b: put(s, P, ["z"], tags=[{f"t{i}": 0 for i in range(MAX_TAGS + 1)}]),
        InvalidRequest,
        {},
    ),
    (
        "too many tags of a cleared key",
        lambda s, b: put(s, P, ["a", "b"], tags=[{}, {f"t{i}": 0 for i in range(MAX_TAGS + 1)}]),
        InvalidRequest,
        {},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("attempt", "error", "attributes"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_a_refused_put_says_what_is_wrong_and_changes_nothing(
    attempt: Callable[[TagStore, Blocks], Any],
    error: type[DataplaneError],
    attributes: dict[str, Any],
) -> None:
    store, blocks = _filled()
    before = state(store)
    with pytest.raises(error) as caught:
        attempt(store, blocks)
    assert {name: getattr(caught.value, name) for name in attributes} == attributes
    assert state(store) == before
    audit(store)


def test_a_refused_put_fixes_no_schema() -> None:
    store, blocks = TagStore(1), Blocks()
    with pytest.raises(KeyNotFound):
        put(store, P, ["a"], blocks.block(1, {"x": [1]}), must_exist=True)
    assert not store.partitions
    put(store, P, ["a"], blocks.of([COLUMNS["x"]._replace(dtype="int16")], 1, bytes(4)))
    assert store.partition(P).schema == {"x": FieldSchema("int16", 1, 0)}


def test_a_schema_lasts_after_every_row_is_cleared_and_lets_other_sizes_in() -> None:
    store, blocks = TagStore(1), Blocks()
    fixed = COLUMNS["m"]._replace(dims=(7, -1))
    put(store, P, ["a"], blocks.block(1, {"m": [3]}))
    put(store, P, ["a"], blocks.of([fixed], 1, bytes(4)))
    store.apply_clear(P, ["a"], 0.0)
    with pytest.raises(SchemaMismatch, match="holds float32 of rank 2"):
        put(store, P, ["b"], blocks.of([fixed._replace(dtype="float64")], 1, bytes(4)))


def test_the_first_write_fixes_the_ragged_dimension_and_later_hints_do_not() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["a"], blocks.of([COLUMNS["w"]], 1, bytes(8)))
    put(store, P, ["b"], blocks.of([COLUMNS["w"]._replace(ragged_dim=0)], 1, bytes(8)))
    assert store.partition(P).schema["w"].ragged_dim == 1


# -- late writes


@pytest.mark.parametrize(
    ("stamp", "stale"),
    [(0, True), (1, True), (2, False), (3, False), (None, False)],
    ids=["before the row", "with the row", "with the clear", "after it", "begins now"],
)
@pytest.mark.parametrize("recreated", [False, True])
def test_a_put_is_late_if_its_key_was_cleared_after_it_began_re_created_or_not(
    stamp: int | None, stale: bool, recreated: bool
) -> None:
    store = TagStore(1)
    put(store, P, ["a", "b"], tags=[{"v": 1}] * 2)  # 1
    store.apply_clear(P, ["a"], 0.0)  # 2
    if recreated:
        put(store, P, ["a"], tags=[{"v": 3}])  # 3
    if stale:
        with pytest.raises(StaleWrite) as error:
            put(store, P, ["b", "a"], tags=[{"v": 9}] * 2, stamp=stamp)
        assert (error.value.keys, error.value.cleared_at) == (["a"], 2)
        present = {"b": {"v": 1}} | ({"a": {"v": 3}} if recreated else {})
    else:
        put(store, P, ["b", "a"], tags=[{"v": 9}] * 2, stamp=stamp)
        present = {"b": {"v": 9}, "a": {"v": 9}}
    assert {key: row.tags for key, row in rows_of(store, P).items()} == present


def test_the_last_of_several_clears_judges_a_late_put() -> None:
    store = TagStore(1)
    for _ in range(3):  # revisions 1 to 6: put, clear, put, clear, ...
        put(store, P, ["a", "b"], tags=[{}] * 2)
        store.apply_clear(P, ["a", "b"], 0.0)
    put(store, P, ["a"], tags=[{}])  # 7
    for stamp in range(6):
        with pytest.raises(StaleWrite) as error:
            put(store, P, ["a", "b"], tags=[{}] * 2, stamp=stamp)
        assert (error.value.keys, error.value.cleared_at) == (["a", "b"], 6)
    put(store, P, ["a", "b"], tags=[{}] * 2, stamp=6)


def test_a_clear_by_predicate_makes_late_puts_stale_as_well() -> None:
    store = TagStore(1)
    put(store, P, ["a", "b"], tags=[{"v": 1}, {"v": 2}])
    assert clear_where(store, P, {"v": 2}) == 1
    with pytest.raises(StaleWrite) as error:
        put(store, P, ["a", "b"], tags=[{}] * 2, stamp=1)
    assert (error.value.keys, error.value.cleared_at) == (["b"], 2)
    put(store, P, ["a", "b"], tags=[{}] * 2, stamp=2)


def test_the_same_key_of_another_partition_makes_no_put_stale() -> None:
    store = TagStore(1)
    put(store, P, ["a"], tags=[{}])
    put(store, "val", ["a"], tags=[{}])
    store.apply_clear("val", ["a"], 0.0)
    put(store, P, ["a"], tags=[{"v": 1}], stamp=1)


def test_a_put_that_began_below_the_floor_is_refused_whatever_its_keys() -> None:
    store = TagStore(1, History(max_changes=2))
    for i in range(5):
        put(store, P, [f"k{i}"], tags=[{}])
    assert store.history.floor == 3
    for stamp in (0, 2):
        with pytest.raises(StaleWrite, match=rf"began at revision {stamp}.*from 3") as error:
            put(store, P, ["never", "seen"], tags=[{}] * 2, stamp=stamp)
        assert (error.value.keys, error.value.cleared_at) == (["never", "seen"], None)
    put(store, P, ["never", "seen"], tags=[{}] * 2, stamp=3)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=25), st.data())
def test_a_late_put_is_judged_as_a_full_log_of_clears_would(
    changes: list[tuple[str, bool]], data: st.DataObject
) -> None:
    store = TagStore(1, History(max_changes=data.draw(st.integers(1, 30), "history")))
    put(store, P, ["other"], tags=[{}])
    cleared: dict[str, int] = {}
    for key, clear in changes:
        if not clear:
            put(store, P, [key], tags=[{}])
        elif store.apply_clear(P, [key], 0.0):
            cleared[key] = store.n
    stamp = data.draw(st.integers(0, store.n), "stamp")
    late = [key for key in "abc" if cleared.get(key, 0) > stamp]
    if stamp < store.history.floor or late:
        with pytest.raises(StaleWrite) as error:
            put(store, P, ["a", "b", "c"], tags=[{}] * 3, stamp=stamp)
        if stamp >= store.history.floor:
            assert error.value.keys == late
            assert error.value.cleared_at == max(cleared[key] for key in late)
    else:
        put(store, P, ["a", "b", "c"], tags=[{}] * 3, stamp=stamp)


# -- tags


def test_tags_merge_and_fields_of_a_put_without_tags_keep_them() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["a"], tags=[{"status": "pending", "n": 1}])
    put(store, P, ["a"], blocks.block(1, {"x": [2]}))
    put(store, P, ["a"], tags=[{"status": "done"}])
    row = rows_of(store, P)["a"]
    assert row.tags == {"status": "done", "n": 1}
    assert set(live_cells(row)) == {"x"}
    assert row.revision == 3
    assert tags_of(store, P, ["a", "zzz"]) == [{"status": "done", "n": 1}, {}]


def test_the_tags_of_a_put_are_not_changed_by_a_later_merge() -> None:
    store = TagStore(1)
    put(store, P, ["a", "b"])
    first = rows_of(store, P)["a"].tags
    put(store, P, ["a"], tags=[{"v": 1}])
    assert first == {}
    assert rows_of(store, P)["b"].tags == {}


def test_a_large_tag_can_be_overwritten_for_ever_and_is_counted_at_least_once() -> None:
    store = TagStore(1)
    for i in range(10):
        put(store, P, ["a"], tags=[{"big": f"{i}" * 40_000, "i": i}])
        row = rows_of(store, P)["a"]
        size = len(msgpack.packb(row.tags))
        assert size <= row.tag_bytes <= MAX_TAG_BYTES
        audit(store)


def test_tags_up_to_the_limit_fit_by_merging_and_one_byte_more_does_not() -> None:
    first = {"a": "x" * 1000}
    overhead = len(msgpack.packb({**first, "b": "y" * 60_000})) - 60_000
    room = MAX_TAG_BYTES - overhead
    store = TagStore(1)
    put(store, P, ["k"], tags=[first])
    put(store, P, ["k"], tags=[{"b": "y" * room}])
    assert rows_of(store, P)["k"].tag_bytes == MAX_TAG_BYTES
    with pytest.raises(InvalidRequest, match=rf"2 tags of {MAX_TAG_BYTES + 1} bytes"):
        put(store, P, ["k"], tags=[{"b": "y" * (room + 1)}])
    put(store, P, ["k"], tags=[{"b": "y" * room}])
    audit(store)


# -- clear by predicate


@pytest.mark.parametrize("seed", range(8))
def test_a_clear_by_predicate_leaves_what_a_clear_of_those_keys_leaves(seed: int) -> None:
    first, second = (
        Interleaving(seed, keys=1300, history=History(max_changes=10_000)) for _ in range(2)
    )
    for run in (first, second):
        for _ in range(8):
            run.put(300)
        for _ in range(10):
            run.step()
        run.check()
    since = first.store.n
    keys = [key for key, row in rows_of(first.store, "p").items() if row.tags.get("a", -1) >= 2]
    assert clear_where(first.store, "p", {"a": {">=": 2}}) == len(keys) > 0
    assert second.store.apply_clear("p", keys, second.now) == len(keys)
    for run in (first, second):
        run.rows["p"] = {k: v for k, v in run.rows["p"].items() if k not in keys}
    dead = dead_blocks(second.store)
    assert dead_blocks(first.store) == dead
    first.dead += dead
    second.dead += dead
    first.check()
    second.check()
    assert first.store.counts() == second.store.counts()
    (one,) = first.store.history.since("p", since)
    (two,) = second.store.history.since("p", since)
    assert one.n == two.n == since + 1
    assert one.positions is not None
    assert two.positions is not None
    assert dict(zip(one.keys, one.positions, strict=True)) == dict(
        zip(two.keys, two.positions, strict=True)
    )
    for run in (first, second):  # and history forgets both alike
        run.now += 10_000.0
        run.put(1)
        forget_everything(run.store, run.now)
        run.check()
    assert first.store.counts() == second.store.counts()


def test_a_scan_changes_nothing_until_it_is_applied_and_is_void_after_a_change() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["a", "b"], blocks.block(2, {"x": [1, 2]}), [{"v": 1}, {"v": 2}])
    partition = store.partition(P)
    before = state(store)
    scan = store.scan_clear(partition, 0, compile_where({"v": 1}))
    assert isinstance(scan, Doomed)
    assert (scan.keys, [row.key for row in scan.rows], scan.positions) == (["a"], ["a"], [0])
    assert state(store) == before
    put(store, P, ["c"], tags=[{"v": 1}])
    assert partition.slots.chunks[0] is not scan.before  # which tells that it must be done again
    rescan = store.scan_clear(partition, 0, compile_where({"v": 1}))
    assert rescan is not None
    assert rescan.keys == ["a", "c"]
    rows = store.apply_scanned_clear(partition, [rescan], 0.0)
    assert sorted(rows_of(store, P)) == ["b"]
    assert partition.payload_bytes == 24  # the rows are gone for all; their bytes go in slices
    store.release_rows(partition, list(rows))
    assert partition.payload_bytes == 16
    audit(store, [blocks])


def test_a_scan_that_matches_no_row_says_so() -> None:
    store = TagStore(1)
    put(store, P, ["a"], tags=[{"v": 1}])
    partition = store.partition(P)
    assert store.scan_clear(partition, 0, compile_where({"v": 2})) is None
    store.apply_clear(P, ["a"], 0.0)
    assert store.scan_clear(partition, 0, compile_where({})) is None


# -- repack


def test_a_repack_moves_live_cells_and_leaves_revisions_and_listings_alone() -> None:
    store, blocks = TagStore(1), Blocks()
    keys = [f"k{i}" for i in range(8)]
    put(store, P, keys, blocks.block(8, {"x": list(range(8)), "m": [1] * 8}))
    put(store, P, ["k5"], blocks.block(1, {"m": [9]}))
    store.apply_clear(P, [k for k in keys if k not in ("k2", "k5")], 0.0)
    old = store.placements["v0", 1]
    partition = store.partition(P)
    assert partition.live_rows_of(old) == [
        (2, 2, frozenset({"x", "m"})),
        (5, 5, frozenset({"x"})),
    ]
    payload, revision = partition.payload_bytes, store.n
    new = blocks.block(2, {"x": [2, 5], "m": [1, 1]})
    store.apply_repack(old, new, [(2, 2), (5, 5)])
    assert dead_blocks(store) == [1]
    assert (new.live, partition.payload_bytes, store.n) == (3, payload, revision)
    assert list(store.history.since(P, revision)) == []
    assert live_cells(rows_of(store, P)["k2"]) == {"x": (new, 0), "m": (new, 0)}
    cells = live_cells(rows_of(store, P)["k5"])
    assert cells["x"] == (new, 1)
    assert cells["m"] == (store.placements["v0", 2], 0)
    audit(store, [blocks], [1])
    store.apply_clear(P, ["k2", "k5"], 0.0)
    assert dead_blocks(store) == [2, 3]


def test_a_cell_that_was_cleared_or_overwritten_meanwhile_stays_so_after_a_repack() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, list("abcd"), blocks.block(4, {"x": [1, 2, 3, 4]}))
    old = store.placements["v0", 1]
    moves = [(row, position) for row, position, _ in store.partition(P).live_rows_of(old)]
    copy = blocks.block(4, {"x": [1, 2, 3, 4]})
    store.apply_clear(P, ["a"], 0.0)
    put(store, P, ["b"], blocks.block(1, {"x": [7]}))
    store.apply_clear(P, ["c"], 0.0)
    put(store, P, ["c"], blocks.block(1, {"x": [8]}))  # the same key, another row
    store.apply_repack(old, copy, moves)
    assert copy.live == 1
    cells = {key: live_cells(row)["x"][0] for key, row in rows_of(store, P).items()}
    assert [cells[key].block for key in "bcd"] == [3, 4, 2]
    assert dead_blocks(store) == [1]
    audit(store, [blocks], [1])


def test_a_repack_of_rows_that_are_all_gone_ends_its_copy() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["a", "b"], blocks.block(2, {"x": [1, 2]}))
    old = store.placements["v0", 1]
    put(store, P, ["a"], blocks.block(1, {"x": [1]}))
    copy = blocks.block(1, {"x": [1]})
    store.apply_repack(old, copy, [(0, old.positions[0])])
    assert dead_blocks(store) == [copy.block]
    audit(store, [blocks], [copy.block])


def test_a_repack_that_lacks_a_live_field_of_a_row_leaves_that_row_where_it_is() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, P, ["a", "b"], blocks.block(2, {"x": [1, 2], "m": [1, 1]}))
    put(store, P, ["b"], blocks.block(1, {"m": [3]}))
    old = store.placements["v0", 1]
    store.apply_repack(old, blocks.block(2, {"x": [1, 2]}), [(0, 0), (1, 1)])
    cells = {key: live_cells(row) for key, row in rows_of(store, P).items()}
    assert cells["a"] == {"x": (old, 0), "m": (old, 0)}
    assert {name: place[0].block for name, place in cells["b"].items()} == {"x": 3, "m": 2}
    audit(store, [blocks])


# -- forgetting


def test_tombstones_go_with_history_and_chunks_of_nothing_else_are_dropped() -> None:
    store = TagStore(1, History(max_changes=10**6, max_age_s=60.0))
    keys = [f"k{i}" for i in range(2 * CHUNK_ROWS + 100)]
    put(store, P, keys, now=0.0)
    partition = store.partition(P)
    store.apply_clear(P, keys, 1.0)
    put(store, P, ["k0"], now=2.0)  # the same key again, in a slot of its own
    assert [type(chunk) for chunk in partition.slots.chunks].count(type(None)) == 0
    forget_everything(store, 61.0)  # not a moment too early
    assert sum(map(len, partition.index.shards)) == len(keys)
    forget_everything(store, 61.1)
    assert partition.slots.chunks[:2] == [None, None]
    assert {key for shard in partition.index.shards for key in shard} == {"k0"}
    assert rows_of(store, P).keys() == {"k0"}
    audit(store)
    put(store, P, ["k1"], now=61.2)  # and the last chunk is still written to
    audit(store)


def test_a_chunk_stays_for_the_sake_of_a_single_row() -> None:
    store = TagStore(1, History(max_changes=1))
    keys = [f"k{i}" for i in range(CHUNK_ROWS)]
    put(store, P, keys, tags=[{"n": i} for i in range(CHUNK_ROWS)])
    store.apply_clear(P, [key for key in keys if key != "k500"], 0.0)
    put(store, P, ["other"])
    forget_everything(store, 0.0)
    assert rows_of(store, P)["k500"].tags == {"n": 500}
    store.apply_clear(P, ["k500"], 0.0)
    put(store, P, ["other"])
    forget_everything(store, 0.0)
    assert store.partition(P).slots.chunks[0] is None
    audit(store)


def test_history_is_trimmed_in_steps_so_that_no_change_pays_for_a_large_clear() -> None:
    store = TagStore(1, History(max_age_s=60.0))
    keys = [f"k{i}" for i in range(5 * REAP_STEP)]
    put(store, P, keys, now=0.0)
    store.apply_clear(P, keys, 0.0)
    partition = store.partition(P)
    entries = [len(keys)]
    while entries[-1] > 1:
        put(store, P, ["other"], tags=[{}], now=100.0)
        entries.append(sum(map(len, partition.index.shards)))
    forgotten = [a - b for a, b in pairwise(entries)]
    assert max(forgotten) <= REAP_STEP
    assert len(forgotten) <= 7


def test_a_key_that_was_forgotten_can_be_put_again() -> None:
    store = TagStore(1, History(max_changes=1))
    put(store, P, ["a"], tags=[{"v": 1}])
    store.apply_clear(P, ["a"], 0.0)
    put(store, P, ["b"], tags=[{}])
    forget_everything(store, 0.0)
    assert store.partition(P).index.get("a") is None
    put(store, P, ["a"], tags=[{"w": 2}])
    assert rows_of(store, P)["a"].tags == {"w": 2}


# -- caches


def test_a_thawed_chunk_keeps_the_columns_that_did_not_change() -> None:
    store, blocks = TagStore(1), Blocks()
    keys = [f"k{i}" for i in range(10)]
    put(store, P, keys, blocks.block(10, {"x": [1] * 10}), [{"a": 1, "b": 2}] * 10)
    (chunk,) = store.partition(P).slots.cut()
    piece_of_chunk(chunk, None, store.partition(P).schema)
    before = dict(chunk.columns)
    put(store, P, ["k3"], tags=[{"a": 5}])
    (after,) = store.partition(P).slots.cut()
    assert after is not chunk
    assert {n for n in before if after.columns.get(n) is before[n]} == set(before) - {"a"}


def test_counts_say_what_status_shows() -> None:
    store, blocks = TagStore(4), Blocks()
    put(store, P, ["a", "b"], blocks.block(2, {"x": [1, 2], "s": []}), [{"v": 1}, {}])
    put(store, "val", ["a"], tags=[{}])
    store.apply_clear(P, ["a"], 0.0)
    assert store.counts() == {
        "revision": [4, 3],
        "history_floor": 0,
        "history_changes": 4,
        "blocks": 1,
        "dead_blocks": 0,
        "partitions": {
            "train": {
                "keys": 1, "payload_bytes": 24, "tag_bytes": 1, "revision": 3,
                "fields": ["s", "x"],
            },
            "val": {"keys": 1, "payload_bytes": 0, "tag_bytes": 1, "revision": 2, "fields": []},
        },
    }  # fmt: skip


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(sorted(COLUMNS)), unique=True, max_size=6),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_a_placement_adds_up_the_bytes_of_its_cells(
    fields: list[str], rows: int, r: random.Random
) -> None:
    sizes = {f: [[r.randint(0, 9) for _ in range(FREE[f])] for _ in range(rows)] for f in fields}
    block = Blocks().block(
        rows,
        {f: [] if not FREE[f] else [s[0] if FREE[f] == 1 else s for s in of]
         for f, of in sizes.items()},
    )  # fmt: skip
    expected: dict[str, Sequence[int]] = {
        f: [cell_bytes(f, of[row]) for row in range(rows)] for f, of in sizes.items()
    }
    assert block.live == rows * len(fields)
    assert block.payload_bytes == sum(map(sum, expected.values()))
    for row in range(rows):
        assert block.row_bytes(row) == sum(of[row] for of in expected.values())
        for f in fields:
            assert block.field_bytes(f, row) == expected[f][row]


def test_a_row_and_a_placement_take_no_dict_each() -> None:
    assert not hasattr(Row("k", {}, 1, (), 1, 0, Account()), "__dict__")
    assert not hasattr(Blocks().block(1, {"x": [1]}), "__dict__")
    assert Placement.__slots__
