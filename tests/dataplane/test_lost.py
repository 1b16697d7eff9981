"""Rows whose bytes are gone: what they lose, who is told, what they still are good for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.errors import ClaimLost, FieldNotFound, InvalidRequest, KeyNotFound, ValueLost
from dataplane.fields import LOST, LOST_AT, LOST_ROWS, LOST_STORES, PLANE_TAGS
from dataplane.tags.history import History
from dataplane.tags.keys import MAX_SAVED_TAG_BYTES, unpack_tags
from dataplane.tags.listing import piece_of_chunk
from dataplane.tags.lost import find_losses
from dataplane.tags.placement import Placement
from dataplane.tags.query import compile_where
from dataplane.tags.resolve import resolve
from dataplane.tags.store import TagStore
from dataplane.tags.views.views import View, condition_of
from dataplane.types import Quota
from tests.dataplane.audit import (
    COLUMNS,
    FREE,
    Blocks,
    audit,
    dead_blocks,
    live_cells,
    lose,
    put,
    rows_of,
)
from tests.dataplane.changes import begin_group, end_group
from tests.dataplane.claimers import Desk
from tests.dataplane.claimers import P as DESK
from tests.dataplane.test_explain import question, told
from tests.dataplane.test_restoring import restoring_of
from tests.dataplane.test_views import keys_of, opened, scanned

P = "p"


@pytest.fixture
def store() -> TagStore:
    return TagStore(1)


@pytest.fixture
def near() -> Blocks:
    """Blocks of a store that stays."""
    return Blocks("near")


@pytest.fixture
def far() -> Blocks:
    """Blocks of a store that is lost."""
    return Blocks("far")


def tags(store: TagStore, key: str, partition_id: str = P) -> dict[str, Any]:
    row = store.partition(partition_id).row(key)
    assert row is not None
    return dict(row.tags)


def view_of(store: TagStore, where: Any, *, grouped: bool = False) -> View:
    """A view that has seen all rows."""
    return scanned(store, opened(store, where, grouped=grouped))


def places(
    store: TagStore, keys: Sequence[str], fields: list[str] | None = None, **how: Any
) -> Any:
    how.setdefault("drop_missing", False)
    return resolve(store.partition(P), list(keys), fields, **how)


def x(blocks: Blocks, rows: int = 1, fields: str = "x") -> Placement:
    return blocks.block(rows, {name: [3] * rows if FREE[name] else [] for name in fields})


# -- what is lost ------------------------------------------------------------------------------


def test_rows_with_a_cell_in_the_store_are_lost_and_no_others(
    store: TagStore, near: Blocks, far: Blocks
) -> None:
    put(store, P, ["a", "b"], x(far, 2), [{"n": 1}, {"n": 2}])
    put(store, P, ["c"], x(near), [{"n": 3}])
    put(store, P, ["d"], None, [{"n": 4}])
    put(store, "q", ["a"], x(far))
    before = store.n
    assert lose(store, "far", now=7.5) == 3
    assert store.n == before + 1
    assert tags(store, "a") == {"n": 1, LOST: ["x"], LOST_STORES: ["far"], LOST_AT: 7.5}
    assert tags(store, "b")["n"] == 2
    assert tags(store, "a", "q")[LOST] == ["x"]
    assert (tags(store, "c"), tags(store, "d")) == ({"n": 3}, {"n": 4})
    assert dead_blocks(store) == []
    assert [store.partition(name).revision for name in (P, "q")] == [store.n, store.n]
    audit(store, [near], lost=[])
    audit(store, [far], lost=[1, 2])


def test_only_named_blocks_go_and_one_that_is_not_known_is_nothing(
    store: TagStore, far: Blocks
) -> None:
    for key in "abc":
        put(store, P, [key], x(far))
    assert lose(store, "far", [2, 99, 2]) == 1
    assert [LOST in tags(store, key) for key in "abc"] == [False, True, False]
    n = store.n
    assert lose(store, "far", [2, 99]) == lose(store, "other") == 0
    assert store.n == n
    audit(store, [far], lost=[2])


def test_fields_elsewhere_stay_and_those_that_go_later_are_added(
    store: TagStore, near: Blocks, far: Blocks
) -> None:
    put(store, P, ["a"], x(far))
    put(store, P, ["a"], x(near, fields="s"))
    assert lose(store, "far", now=1.0) == 1
    places(store, ["a"], ["s"])
    assert lose(store, "near", now=2.0) == 1
    assert tags(store, "a") == {
        LOST: ["s", "x"], LOST_STORES: ["far", "near"], LOST_AT: 1.0,
    }  # fmt: skip
    assert store.placements == {}
    audit(store)


def test_what_was_written_over_is_not_brought_back(
    store: TagStore, near: Blocks, far: Blocks
) -> None:
    put(store, P, ["a"], near.block(1, {"x": [5], "s": []}))
    put(store, P, ["a"], far.block(1, {"x": [2]}))
    assert lose(store, "far") == 1
    assert tags(store, "a")[LOST] == ["x"]
    audit(store, [near])
    with pytest.raises(ValueLost):
        places(store, ["a"], ["x"])
    places(store, ["a"], ["s"])
    store.apply_clear(P, ["a"], 0.0)
    assert dead_blocks(store) == [1]
    assert store.partition(P).payload_bytes == 0
    audit(store, [near], dead=[1])


def test_what_covers_a_lost_field_keeps_it_whole(
    store: TagStore, near: Blocks, far: Blocks
) -> None:
    put(store, P, ["a"], x(far))
    put(store, P, ["a"], x(near))  # nothing of the row is in the other store any more
    dead_blocks(store)
    assert lose(store, "far") == 0
    assert LOST not in tags(store, "a")


def test_a_block_that_is_dead_and_was_not_told_of_is_forgotten(
    store: TagStore, near: Blocks, far: Blocks
) -> None:
    put(store, P, ["a", "b"], x(far, 2))
    put(store, P, ["c"], x(far))
    put(store, P, ["d"], x(near))
    store.apply_clear(P, list("abcd"), 0.0)
    queue = store.dead
    lose(store, "far", [1])
    assert [(p.store, p.block) for p in store.dead] == [("far", 2), ("near", 1)]
    lose(store, "far")
    assert [(p.store, p.block) for p in queue] == [("near", 1)]


@pytest.mark.parametrize("loses", ["before", "between", "after"])
def test_a_clear_that_is_carried_out_lazily_lets_go_of_lost_blocks_once(
    store: TagStore, far: Blocks, loses: str
) -> None:
    put(store, P, ["a", "b"], far.block(2, {"x": [3, 4]}), [{"n": 1}, {"n": 2}])
    put(store, P, ["c"], x(far), [{"n": 1}])
    if loses == "before":
        lose(store, "far")
    partition = store.partition(P)
    doomed = store.scan_clear(partition, 0, compile_where({"n": 1}))
    assert doomed is not None
    removed = store.apply_scanned_clear(partition, [doomed], 0.0)
    if loses == "between":
        assert lose(store, "far") == 1
        assert store.placements == {}
    store.release_rows(partition, list(removed))
    if loses == "after":
        assert lose(store, "far") == 1
    assert list(rows_of(store, P)) == ["b"]
    assert partition.payload_bytes == 0
    audit(store)


def test_what_is_left_of_a_dropped_partition_is_not_taken_for_the_new_one(
    store: TagStore, near: Blocks, far: Blocks
) -> None:
    put(store, P, [f"k{i}" for i in range(40)], x(far, 40))
    dropped = store.partition(P)
    pieces = list(store.apply_drop(dropped, 0.0))
    put(store, P, ["k0"], x(near))
    assert lose(store, "far") == 0
    assert LOST not in tags(store, "k0")
    for piece in pieces:
        store.release_rows(dropped, piece)
    assert dropped.payload_bytes == 0
    assert dead_blocks(store) == []
    audit(store, [near])


# -- accounts ----------------------------------------------------------------------------------


def test_producers_and_quotas_get_back_what_lost_blocks_took(store: TagStore, far: Blocks) -> None:
    put(store, P, ["a"], x(far), [{}], client_id="c")
    partition = store.partition(P)
    partition.quota = Quota(bytes=4096 + 500)
    assert partition.account.extent_bytes == 4096
    lose(store, "far")
    assert partition.account.extent_bytes == partition.producer("c").extent_bytes == 0
    assert partition.account.rows == 1
    assert partition.account.tag_bytes == len(msgpack.packb(tags(store, "a")))
    store.apply_clear(P, ["a"], 0.0)
    assert partition.account.is_empty


@pytest.mark.parametrize("count", [0, 1, 12, 13, 15, 16, 40])
def test_the_size_of_tags_is_counted_whatever_their_number(
    store: TagStore, near: Blocks, far: Blocks, count: int
) -> None:
    put(store, P, ["a"], x(far), [{f"t{i}": i for i in range(count)}])
    put(store, P, ["a"], x(near, fields="s"))
    for name in ("far", "near"):
        lose(store, name)
        assert store.partition(P).tag_bytes == len(msgpack.packb(tags(store, "a")))
        audit(store)


def test_an_open_group_has_room_again_for_what_it_lost(store: TagStore, far: Blocks) -> None:
    group = begin_group(store, P, "u", 2, declared_bytes=10_000, kept_by="far")
    put(store, P, ["u_0"], x(far), group=group)
    store.settled.clear()
    used = group.held_bytes
    lose(store, "far")
    # Its tags have grown by what is said of the loss.
    assert group.held_bytes == used + 4096 - (group.tag_bytes - group.rows)
    assert group in store.settled
    audit(store)


# -- groups ------------------------------------------------------------------------------------


def test_a_prompt_says_how_many_trajectories_of_its_group_are_lost(
    store: TagStore, near: Blocks, far: Blocks
) -> None:
    group = begin_group(store, P, "u", 3)
    for i, blocks in enumerate([far, near, far]):
        put(store, P, [f"u_{i}"], x(blocks), group=group)
    begin_group(store, P, "other", 1)
    lose(store, "far", [1])
    assert tags(store, "u")[LOST_ROWS] == 1
    assert LOST not in tags(store, "u")
    lose(store, "far")
    assert tags(store, "u")[LOST_ROWS] == 2
    assert LOST_ROWS not in tags(store, "other")
    audit(store)


def test_a_group_that_begins_anew_has_lost_nothing(store: TagStore, far: Blocks) -> None:
    group = begin_group(store, P, "u", 1)
    put(store, P, ["u_0"], x(far), group=group)
    view = view_of(store, {LOST_ROWS: {"exists": True}})
    lose(store, "far")
    assert view.count == 1
    begin_group(store, P, "u", 1)
    assert view.count == 0
    assert LOST_ROWS not in tags(store, "u")
    assert store.partition(P).row("u_0") is None
    audit(store)


def test_a_prompt_may_be_cleared_and_may_itself_be_lost(store: TagStore, far: Blocks) -> None:
    group = begin_group(store, P, "u", 1)
    put(store, P, ["u_0"], x(far), group=group)
    put(store, P, ["u"], x(far), must_exist=True)
    assert lose(store, "far") == 2
    assert (tags(store, "u")[LOST], tags(store, "u")[LOST_ROWS]) == (["x"], 1)
    gone = begin_group(store, P, "v", 1)
    put(store, P, ["v_0"], x(far), group=gone)
    store.apply_clear(P, ["v"], 0.0)
    assert lose(store, "far") == 1
    assert store.partition(P).row("v") is None
    audit(store)


# -- who is told -------------------------------------------------------------------------------


def test_it_is_a_change_of_every_row_and_of_prompts(store: TagStore, far: Blocks) -> None:
    group = begin_group(store, P, "u", 1)
    put(store, P, ["u_0"], x(far), group=group)
    put(store, P, ["a"], x(far))
    n = store.n
    lose(store, "far", now=5.0)
    (change,) = store.history.since(P, n)
    assert (change.n, change.at, change.positions, change.by) == (n + 1, 5.0, None, "")
    assert sorted(change.keys) == ["a", "u", "u_0"]
    changed = {key: row.revision for key, row in rows_of(store, P).items()}
    assert changed == dict.fromkeys(["a", "u", "u_0"], n + 1)


def test_a_cut_that_was_made_before_shows_rows_as_they_were(store: TagStore, far: Blocks) -> None:
    put(store, P, ["a"], x(far), [{"n": 1}])
    (chunk,) = store.partition(P).slots.cut()
    lose(store, "far")
    assert [row.tags for row in chunk.live_rows()] == [{"n": 1}]


def test_a_listing_after_the_loss_has_the_tag_and_not_the_fields(
    store: TagStore, near: Blocks, far: Blocks
) -> None:
    put(store, P, ["a", "b"], x(far, 2), [{"n": 1}, {"n": 2}])
    put(store, P, ["a"], x(near, fields="s"))
    partition = store.partition(P)
    (chunk,) = partition.slots.cut()
    piece_of_chunk(chunk, None, partition.schema)
    lose(store, "far")
    (chunk,) = partition.slots.cut()
    piece = piece_of_chunk(chunk, None, partition.schema)
    assert {LOST, LOST_AT, LOST_STORES, "n"} <= set(piece.columns)
    sets = [piece.field_sets[i] for i in memoryview(piece.columns["\0fields"].buffers[1]).cast("i")]
    assert sets == [["s"], []]
    lose(store, "near")
    (chunk,) = partition.slots.cut()
    again = piece_of_chunk(chunk, None, partition.schema)
    assert again.field_sets == [[]]
    assert again.columns[LOST].buffers != piece.columns[LOST].buffers
    assert again.columns["n"] is piece.columns["n"]


VIEWS: list[tuple[Any, bool]] = [
    ({}, False),
    ({"n": 1}, False),
    ({LOST: {"exists": False}}, False),
    ({LOST: {"exists": True}}, True),
    ({"n": 1, LOST: {"exists": True}}, True),
    ({"or": [{"n": 1}, {LOST: {"exists": True}}]}, True),
    ({"not": {LOST: {"exists": False}}}, True),
    ({LOST: ["x"]}, True),
    ({LOST_AT: {"exists": True}}, False),
]


@pytest.mark.parametrize(("where", "matches"), VIEWS, ids=[str(where) for where, _ in VIEWS])
@pytest.mark.parametrize("when", ["before", "after"])
def test_lost_rows_match_only_what_names_their_tag(
    store: TagStore, far: Blocks, where: Any, matches: bool, when: str
) -> None:
    put(store, P, ["a"], x(far), [{"n": 1}])
    view = view_of(store, where) if when == "before" else None
    lose(store, "far")
    view = view or view_of(store, where)
    assert keys_of(store, view) == ["a"] * matches
    moment = store.partition(P).views.moment(view)
    assert [row.key for part in moment.portions() for row in part] == ["a"] * matches


def test_whoever_watches_is_told_whatever_it_watches_for(store: TagStore, far: Blocks) -> None:
    put(store, P, ["a"], x(far), [{"n": 1}])
    partition, asked = store.partition(P), compile_where({"n": 1})
    view = partition.views.open(condition_of(asked, frozenset(), grouped=False, lost=True), asked)
    before = view.touched
    lose(store, "far")
    assert before < view.touched == store.n
    row = partition.row("a")
    assert row is not None
    assert view.matches(row)


def test_a_group_with_a_lost_row_is_not_whole(store: TagStore, near: Blocks, far: Blocks) -> None:
    group = begin_group(store, P, "u", 2)
    put(store, P, ["u_0", "u_1"], x(near, 2), group=group)
    put(store, P, ["u_1"], x(far, fields="s"), group=group)
    end_group(store, group.attempt, "finished")
    view = view_of(store, {}, grouped=True)
    of_lost = view_of(store, {"or": [{LOST: ["s"]}, {}]}, grouped=True)
    named = {"or": [{LOST: {"exists": True}}, {LOST: {"exists": False}}]}
    both = view_of(store, named, grouped=True)
    assert (view.size, both.size) == (1, 1)
    lose(store, "far")
    assert (view.size, both.size, of_lost.size) == (0, 1, 0)
    store.apply_clear(P, ["u_1"], 0.0)
    assert (view.size, both.size) == (1, 1)


# -- reading -----------------------------------------------------------------------------------


@pytest.fixture
def mixed(store: TagStore, near: Blocks, far: Blocks) -> TagStore:
    """a and b have lost x, c has it; all three have s."""
    put(store, P, ["a", "b"], x(far, 2))
    put(store, P, ["c"], x(near))
    put(store, P, ["a", "b", "c"], near.block(3, {"s": []}))
    lose(store, "far")
    return store


@pytest.mark.parametrize(
    ("keys", "fields", "lost"),
    [
        (["a", "c", "b", "a"], ["x"], ["a", "b"]),
        (["a"], ["s", "x"], ["a"]),
        (["a", "c"], None, ["a"]),
        (["a", "b"], None, ["a", "b"]),
    ],
)
@pytest.mark.parametrize("common", [False, True])
def test_a_read_of_what_is_lost_names_all_of_it(
    mixed: TagStore, keys: list[str], fields: list[str] | None, lost: list[str], common: bool
) -> None:
    with pytest.raises(ValueLost) as error:
        places(mixed, keys, fields, common=common)
    assert (error.value.partition_id, error.value.keys) == (P, lost)
    assert (error.value.fields, error.value.stores) == (["x"], ["far"])
    for word in ("'x'", "'a'", "value store 'far'", "clear", "on_missing='drop'"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("keys", "fields", "kept"),
    [
        (["a", "c", "b"], ["x"], ["c"]),
        (["a", "c"], None, ["c"]),
        (["a", "b"], ["x"], []),
        (["a", "gone", "c"], ["s", "x"], ["c"]),
        (["a", "b"], ["s"], None),
    ],
)
def test_on_missing_drop_leaves_lost_rows_out(
    mixed: TagStore, keys: list[str], fields: list[str] | None, kept: list[str] | None
) -> None:
    assert places(mixed, keys, fields, drop_missing=True)[0] == kept


def test_what_is_not_there_is_said_before_what_is_lost_and_that_before_what_is_not_produced(
    mixed: TagStore,
) -> None:
    with pytest.raises(KeyNotFound):
        places(mixed, ["a", "nobody"], ["x"])
    with pytest.raises(ValueLost):
        places(mixed, ["a", "c"], ["x", "w"])
    with pytest.raises(FieldNotFound):
        places(mixed, ["a"], ["s", "w"])
    assert places(mixed, ["a", "b", "c"], ["s"])[0] is None


# -- writing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["x", "m", "w"])
@pytest.mark.parametrize("options", [{}, {"must_exist": True}])
def test_a_lost_row_takes_no_field(
    mixed: TagStore, near: Blocks, field: str, options: dict[str, bool]
) -> None:
    n = mixed.n
    block = near.block(2, {field: [1, 1] if FREE[field] == 1 else [[1, 1]] * 2})
    with pytest.raises(ValueLost, match="nothing was put; clear them") as error:
        put(mixed, P, ["c", "a"], block, [{"n": 1}, {"n": 1}], **options)
    assert (error.value.keys, error.value.fields) == (["a"], ["x"])
    assert mixed.n == n
    assert "n" not in tags(mixed, "c")


def test_a_lost_row_takes_tags_and_is_lost_still(mixed: TagStore) -> None:
    put(mixed, P, ["a"], None, [{"n": 1}], must_exist=True)
    assert (tags(mixed, "a")["n"], tags(mixed, "a")[LOST]) == (1, ["x"])
    audit(mixed)


def test_a_lost_row_that_was_cleared_may_be_put_anew(mixed: TagStore, near: Blocks) -> None:
    mixed.apply_clear(P, ["a"], 0.0)
    put(mixed, P, ["a"], x(near))
    assert tags(mixed, "a") == {}
    assert places(mixed, ["a"], ["x"])[0] is None
    audit(mixed)


@pytest.mark.parametrize("name", [*PLANE_TAGS, "dataplane.", "dataplane.anything"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_put_may_not_bring_tags_of_the_planes_own(name: str, count: int) -> None:
    keys = [f"k{i}" for i in range(count)]
    packed = msgpack.packb({}) * (count - 1) + msgpack.packb({"fine": 1, name: 1})
    for _ in range(2):  # a name that was refused is not taken for a good one later
        with pytest.raises(InvalidRequest, match=f"plane's own.*'k{count - 1}' brings"):
            unpack_tags(packed, keys)


@pytest.mark.parametrize("name", ["dataplane", "dataplanes.x", "my.dataplane.lost", "lost"])
def test_names_that_only_look_like_it_are_anybodys(name: str) -> None:
    assert unpack_tags(msgpack.packb({name: 1}), ["a"])[0] == [{name: 1}]


SAVED: dict[str, Any] = {LOST: ["x"], LOST_STORES: ["far"], LOST_AT: 1.5, LOST_ROWS: 2}


def test_rows_as_they_were_saved_may_have_them() -> None:
    saved = {**SAVED, LOST: ["f" * 200 + str(i) for i in range(1000)]}
    packed = msgpack.packb(saved)
    assert unpack_tags(packed, ["a"], saved=True) == ([saved], [len(packed)])
    with pytest.raises(InvalidRequest, match="at most"):
        too_much = {LOST: ["f" * MAX_SAVED_TAG_BYTES]}
        unpack_tags(msgpack.packb(too_much), ["a"], saved=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (LOST, "x"), (LOST, [1]), (LOST, [["x"]]), (LOST, None), (LOST_STORES, {"far": 1}),
        (LOST_AT, 1), (LOST_AT, "now"), (LOST_ROWS, True), ("dataplane.more", 1),
    ],
)  # fmt: skip
def test_but_only_as_the_plane_says_them(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest):
        unpack_tags(msgpack.packb({**SAVED, name: value}), ["a"], saved=True)


def test_a_row_is_lost_still_after_a_load(mixed: TagStore) -> None:
    loaded = TagStore(1)
    restoring_of(mixed, Blocks("v1")).finish(loaded, History())
    assert {key: row.tags for key, row in rows_of(loaded, P).items()} == {
        key: row.tags for key, row in rows_of(mixed, P).items()
    }
    audit(loaded)
    with pytest.raises(ValueLost):
        places(loaded, ["a"], ["x"])
    places(loaded, ["a", "b", "c"], ["s"])


# -- repacks -----------------------------------------------------------------------------------


def test_a_block_of_which_rows_lost_other_fields_can_be_repacked(
    store: TagStore, near: Blocks, far: Blocks
) -> None:
    put(store, P, ["a", "b", "c"], near.block(3, {"x": [1, 2, 3], "s": []}))
    put(store, P, ["a"], far.block(1, {"x": [9]}))
    store.apply_clear(P, ["c"], 0.0)
    lose(store, "far")
    partition = store.partition(P)
    old = store.placements["near", 1]
    live = partition.live_rows_of(old)
    new = near.block(2, {"x": [1, 2], "s": []})
    store.apply_repack(old, new, [(row, position) for row, position, _ in live])
    assert dead_blocks(store) == [1]
    audit(store, [near], dead=[1])
    with pytest.raises(ValueLost):
        places(store, ["a"], ["x"])
    places(store, ["a", "b"], ["s"])


# -- claims ------------------------------------------------------------------------------------


@pytest.fixture
def desk() -> Desk:
    return Desk()


def loses(desk: Desk, *blocks: int) -> None:
    assert lose(desk.store, "v0", blocks)
    desk.serve()
    desk.check()


def test_a_lost_row_is_not_offered(desk: Desk) -> None:
    desk.put("a b", None, {"x": [1, 1]})
    desk.put("c", None, {"x": [1]})
    waiting = desk.claim(4)
    loses(desk, 1)
    desk.put("d e f", None, {"x": [1, 1, 1]})
    assert waiting.keys == ["c", "d", "e", "f"]
    assert desk.claim(1).keys is None
    assert desk.claim(2, where={LOST: {"exists": True}}).keys == ["a", "b"]


def test_what_was_claimed_before_it_was_lost_can_be_committed_or_comes_back_to_nobody(
    desk: Desk,
) -> None:
    for key in "abc":
        desk.put(key, None, {"x": [1]})
    first, second, third = desk.claim(1), desk.claim(1), desk.claim(1, lease_s=5.0, client="dies")
    loses(desk, 1, 2, 3)
    desk.commit(first)
    desk.release(second)
    desk.leaves("dies")
    desk.passes(6.0)
    desk.check()
    assert desk.claim(1).keys is None
    with pytest.raises(ClaimLost):
        desk.commit(third)
    too_many = desk.claim(3, where={LOST: {"exists": True}})
    assert too_many.keys is None  # one is committed
    desk.leave(too_many)
    assert desk.claim(2, where={LOST: {"exists": True}}).keys == ["b", "c"]


def test_a_group_with_a_lost_row_is_not_offered_as_one(desk: Desk) -> None:
    group = desk.begin("u", 2)
    desk.put("u_0", None, {"x": [1]}, group=group)
    desk.put("u_1", None, {"x": [1]}, group=group)
    desk.end(group)
    desk.finished("v", {"session_id": 0})
    loses(desk, 2)
    assert desk.claim(1, groups=True).keys == ["v_0"]
    waiting = desk.claim(1, groups=True)
    assert waiting.keys is None
    desk.clear("u_1")
    assert waiting.keys == ["u_0"]
    assert desk.store.partition(DESK).row("u_0") is not None


# -- why something waits -----------------------------------------------------------------------


def test_it_says_how_many_rows_are_lost_which_with_what_and_since_when(desk: Desk) -> None:
    desk.put("a b c d e", {"n": 1}, {"x": [1] * 5})
    desk.put("f", {"n": 1}, {"x": [1]})
    lose(desk.store, "v0", [1], now=90.0)
    answer = told(desk.store, question(where={"n": 1}, fields=["x"], wanted=6), now=100.0)
    assert (answer.matching, answer.total) == (1, 6)
    assert answer.failing == {"'dataplane.lost' is absent": 5}
    assert (
        "  5 rows that match are lost with value store 'v0', since 10.0 s: 'a', 'b', 'c' and 2 "
        "more; clear them, and produce them anew" in answer.text
    )
    other = told(desk.store, question(where={"n": 2}, wanted=6))
    assert "lost" not in other.text
    about = told(desk.store, question(where={LOST: {"exists": True}}, wanted=9))
    assert (about.matching, "since" in about.text) == (5, False)


def test_a_group_that_is_not_whole_for_a_lost_row_is_told_with_it(desk: Desk) -> None:
    group = desk.begin("u", 2)
    desk.put("u_0 u_1", None, {"x": [1, 1]}, group=group)
    desk.end(group)
    lose(desk.store, "v0", now=3.0)
    answer = told(desk.store, question(grouped=True, wanted=1), now=5.0)
    assert (answer.matching, answer.total) == (0, 1)
    assert "but 2 of 2 rows fail: 'u_0' first (lost)" in answer.text
    assert "2 rows that match are lost with value store 'v0', since 2.0 s" in answer.text


# -- any puts ----------------------------------------------------------------------------------

KEYS = [f"k{i}" for i in range(6)]
PUTS = st.tuples(
    st.sampled_from(["near", "far"]),
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=3, unique=True),
)
CHANGES = st.lists(
    st.one_of(PUTS, st.tuples(st.just("clear"), st.lists(st.sampled_from(KEYS)))), max_size=14
)


@settings(max_examples=120)
@given(CHANGES, st.none() | st.sets(st.integers(1, 8)), CHANGES)
def test_every_row_is_as_it_was_or_lost_and_all_sums_are_those_of_a_recount(
    before: Any, blocks: set[int] | None, after: Any
) -> None:
    store, makers = TagStore(1), {name: Blocks(name) for name in ("near", "far")}
    dead: dict[str, set[int]] = {"near": set(), "far": set()}
    put(store, P, ["first"], tags=[{}])

    def hear() -> None:
        for placement in store.dead:
            dead[placement.store].add(placement.block)
        store.dead.clear()

    def change(what: str, keys: list[str], *fields: list[str]) -> None:
        if what == "clear":
            store.apply_clear(P, keys, 0.0)
        else:
            lengths = {
                name: ([2] * len(keys) if FREE[name] == 1 else [[2, 1]] * len(keys))
                if FREE[name]
                else []
                for name in fields[0]
            }
            block = makers[what].block(len(keys), lengths)
            rows = rows_of(store, P)
            refused = [key for key in keys if key in rows and LOST in rows[key].tags]
            if refused:
                with pytest.raises(ValueLost) as error:
                    put(store, P, keys, block, [{"n": 1} for _ in keys])
                assert error.value.keys == refused
                store.dead.append(block)  # its store takes it back
            else:
                put(store, P, keys, block, [{"n": 1} for _ in keys])
        hear()

    for one in before:
        change(*one)
    was = rows_of(store, P)
    lost_cells = {
        key: sorted(
            name
            for name, (placement, _) in live_cells(row).items()
            if placement.store == "far" and (blocks is None or placement.block in blocks)
        )
        for key, row in was.items()
    }
    gone = [p.block for p in find_losses(store, "far", blocks).placements]
    assert lose(store, "far", blocks) == sum(map(bool, lost_cells.values()))
    now = rows_of(store, P)
    assert now.keys() == was.keys()
    for key, row in now.items():
        assert row.tags.get(LOST, []) == lost_cells[key]
        assert (row is was[key]) == (not lost_cells[key])
        readable = [name for name in live_cells(was[key]) if name not in lost_cells[key]]
        if readable:
            assert places(store, [key], readable)[0] is None
    _check(store, makers, dead, gone)
    for one in after:
        change(*one)
        _check(store, makers, dead, gone)
    store.apply_clear(P, [*KEYS, "first"], 0.0)
    hear()
    _check(store, makers, dead, gone)
    partition = store.partition(P)
    assert store.placements == {}
    assert partition.payload_bytes == partition.tag_bytes == 0
    assert partition.account.is_empty


def _check(store: TagStore, makers: Any, dead: dict[str, set[int]], gone: list[int]) -> None:
    audit(store, [makers["near"]], dead["near"])
    audit(store, [makers["far"]], dead["far"], lost=gone)


def test_partitions_that_lose_nothing_are_left_alone(
    store: TagStore, near: Blocks, far: Blocks
) -> None:
    put(store, P, ["a"], x(near))
    put(store, "q", ["b"], x(far))
    told_of: list[str] = []
    store.changed = lambda partition: told_of.append(partition.partition_id)
    revision = store.partition(P).revision
    lose(store, "far")
    assert told_of == ["q"]
    assert store.partition(P).revision == revision
