"""Groups bare: attempts that open and close, the rows that come with them, the room they keep."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRequest, StaleWrite
from dataplane.tags.groups import MARGIN_BYTES, MAX_SESSIONS, Group, check_begin
from dataplane.tags.history import History
from dataplane.tags.store import TagStore
from dataplane.values.extents import PAGE
from tests.dataplane.audit import Blocks, audit, dead_blocks, put, rows_of
from tests.dataplane.changes import begin_group, drop_partition, end_group
from tests.dataplane.interleaving import clear_where

P = "p"


@pytest.fixture
def store() -> TagStore:
    return TagStore(1)


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


def rows(store: TagStore) -> dict[str, dict[str, Any]]:
    return {key: row.tags for key, row in rows_of(store, P).items()}


def put_for(store: TagStore, group: Group, *keys: str, block: Any = None) -> int:
    """A put that names a group's attempt."""
    tags = None if block is not None else [{} for _ in keys]
    return put(store, P, keys, block, tags, group=store.attempt(group.attempt, P, list(keys)))


# -- arguments


@pytest.mark.parametrize("n", [1, 4, MAX_SESSIONS])
@pytest.mark.parametrize("declared", [None, 0, 1, (1 << 63) - 1])
def test_a_group_has_sessions_and_may_declare_bytes(n: int, declared: int | None) -> None:
    check_begin(n, declared)


@pytest.mark.parametrize("n", [0, -1, MAX_SESSIONS + 1, 1 << 70, 1.0, True, "4", None, [4]])
def test_anything_else_is_no_number_of_sessions(n: object) -> None:
    with pytest.raises(InvalidRequest, match="number of sessions"):
        check_begin(n, None)


@pytest.mark.parametrize("declared", [-1, 1 << 63, 1.5, True, "4096", [1]])
def test_anything_else_declares_no_bytes(declared: object) -> None:
    with pytest.raises(InvalidRequest, match="declared_bytes"):
        check_begin(4, declared)


# -- attempts


def test_a_group_begins_with_the_row_of_its_prompt_at_the_revision_that_is_its_attempt(
    store: TagStore,
) -> None:
    put(store, P, ["other"], tags=[{}])
    group = begin_group(store, P, "u", 4, client_id="c", now=7.5)
    assert group.attempt == store.n == 2
    assert rows(store)["u"] == {
        "is_prompt": True, "status": "running", "uid": "u", "n": 4, "attempt": 2,
    }  # fmt: skip
    assert (group.status, group.since, group.at, group.open) == ("running", 2, 7.5, True)
    assert (group.producer.client_id, group.positions) == ("c", set())
    assert store.attempts == {2: group}
    assert store.attempt(2, P, ["u_0_0"]) is group
    audit(store)


def test_a_prompt_that_waits_keeps_its_tags_when_its_group_begins(store: TagStore) -> None:
    put(store, P, ["u"], tags=[{"status": "pending", "task_name": "sums"}])
    begin_group(store, P, "u")
    assert rows(store)["u"]["task_name"] == "sums"
    assert rows(store)["u"]["status"] == "running"


def test_an_empty_partition_is_a_partition_when_a_group_begins_in_it(store: TagStore) -> None:
    partition = store.apply_create(P, 0.0)
    partition.sealed = False
    begin_group(store, P, "u")
    assert store.partition(P) is partition


@pytest.mark.parametrize("attempt", [1, 2, 1 << 62])
def test_an_attempt_that_never_was_is_refused_by_number(store: TagStore, attempt: int) -> None:
    begin_group(store, P, "u")
    store.apply_clear(P, ["u"], 0.0, retire=True)
    with pytest.raises(StaleWrite, match=f"attempt {attempt} is not open") as error:
        store.attempt(attempt, P, ["u_0_0"])
    assert (error.value.attempt, error.value.keys) == (attempt, ["u_0_0"])
    assert error.value.partition_id == P


def test_an_attempt_names_its_partition(store: TagStore) -> None:
    group = begin_group(store, P, "u")
    with pytest.raises(InvalidRequest, match="belongs to partition 'p'"):
        store.attempt(group.attempt, "q", ["k"])


def test_a_group_that_begins_anew_drops_the_rows_of_its_older_attempt_at_once(
    store: TagStore, blocks: Blocks
) -> None:
    old = begin_group(store, P, "u", 4, 3 * PAGE)
    put_for(store, old, "u_0", "u_1", block=blocks.block(2, {"x": [1, 1]}))
    put(store, P, ["another"], tags=[{}])
    before = store.n
    new = begin_group(store, P, "u", 2, PAGE)
    assert new.attempt == store.n == before + 1
    assert set(rows(store)) == {"u", "another"}
    assert rows(store)["u"]["attempt"] == new.attempt
    assert rows(store)["u"]["n"] == 2
    assert (old.open, old.positions, old.held_bytes, old.held_rows) == (False, set(), 0, 0)
    assert store.partition(P).groups == {"u": new}
    assert dead_blocks(store) == [1]
    with pytest.raises(StaleWrite):
        store.attempt(old.attempt, P, ["u_2"])
    changes = list(store.history.since(P, before))
    assert {change.n for change in changes} == {new.attempt}
    cleared = [change for change in changes if change.positions is not None]
    assert [list(change.keys) for change in cleared] == [["u_0", "u_1"]]
    audit(store, [blocks], [1])


def test_an_ended_group_that_begins_anew_drops_its_rows_too(store: TagStore) -> None:
    old = begin_group(store, P, "u")
    put_for(store, old, "u_0")
    end_group(store, old.attempt, "failure")
    begin_group(store, P, "u")
    assert set(rows(store)) == {"u"}


def test_what_was_cleared_with_an_attempt_stays_cleared_for_writes_that_began_before(
    store: TagStore,
) -> None:
    old = begin_group(store, P, "u")
    put_for(store, old, "u_0")
    stamp = store.n
    begin_group(store, P, "u")
    with pytest.raises(StaleWrite):
        put(store, P, ["u_0"], tags=[{}], stamp=stamp)


def test_attempts_are_numbers_of_the_plane_and_never_come_twice(store: TagStore) -> None:
    numbers = [begin_group(store, p, uid).attempt for p in ("p", "q") for uid in ("u", "v", "u")]
    assert len(set(numbers)) == len(numbers)
    assert numbers == sorted(numbers)


# -- ends


@pytest.mark.parametrize("status", ["finished", "failure", "aborted"])
def test_a_group_ends_once_with_a_status_that_its_prompt_takes_on(
    store: TagStore, status: str
) -> None:
    group = begin_group(store, P, "u")
    put_for(store, group, "u_0")
    n = end_group(store, group.attempt, status, now=9.0)
    assert n == store.n == store.partition(P).revision
    assert rows(store)["u"]["status"] == status
    assert (group.status, group.since, group.at, group.open) == (status, n, 9.0, False)
    with pytest.raises(StaleWrite):
        store.attempt(group.attempt, P, ["u_0"])
    assert group.attempt not in store.attempts
    audit(store)


def test_a_group_whose_prompt_is_gone_ends_without_bringing_it_back(store: TagStore) -> None:
    group = begin_group(store, P, "u")
    put_for(store, group, "u_0")
    store.apply_clear(P, ["u"], 0.0)
    before = store.n
    assert end_group(store, group.attempt, "finished") == before + 1
    assert set(rows(store)) == {"u_0"}
    assert store.partition(P).revision == before + 1
    audit(store)


def test_a_group_is_forgotten_when_it_has_ended_and_its_rows_are_cleared(store: TagStore) -> None:
    group = begin_group(store, P, "u")
    put_for(store, group, "u_0", "u_1")
    store.apply_clear(P, ["u_0", "u_1"], 0.0)
    assert store.partition(P).groups == {"u": group}  # it is open
    put_for(store, group, "u_2")
    end_group(store, group.attempt, "finished")
    assert store.partition(P).groups == {"u": group}  # it has a row
    store.apply_clear(P, ["u_2"], 0.0)
    assert store.partition(P).groups == {}
    audit(store)


# -- retired


def test_clearing_alone_closes_no_attempt(store: TagStore) -> None:
    group = begin_group(store, P, "u")
    put_for(store, group, "u_0")
    store.apply_clear(P, ["u", "u_0"], 0.0)
    clear_where(store, P, {})
    assert store.attempt(group.attempt, P, []) is group


@pytest.mark.parametrize(
    "keys", [["u"], ["u_0"], ["u_0", "u_1"], ["u", "u_0"]], ids=lambda keys: "+".join(keys)
)
def test_retiring_closes_the_attempts_of_the_groups_that_are_cleared(
    store: TagStore, keys: list[str]
) -> None:
    group, other = begin_group(store, P, "u"), begin_group(store, P, "v")
    put_for(store, group, "u_0", "u_1")
    assert store.apply_clear(P, keys, 0.0, retire=True) == len(keys)
    assert store.attempts == {other.attempt: other}
    assert set(rows(store)) == {"u", "u_0", "u_1", "v"} - set(keys)
    audit(store)


def test_a_group_can_be_retired_when_nothing_of_it_is_left(store: TagStore) -> None:
    group = begin_group(store, P, "u", 4, PAGE)
    store.apply_clear(P, ["u"], 0.0)
    partition = store.partition(P)
    assert store.would_clear(partition, ["u"], retire=True)
    assert not store.would_clear(partition, ["u"], retire=False)
    before = store.n
    assert store.apply_clear(P, ["u"], 0.0, retire=True) == 0
    assert store.n == partition.revision == before + 1
    assert not group.open
    assert partition.account.is_empty
    assert not store.would_clear(partition, ["u"], retire=True)
    assert store.apply_clear(P, ["u"], 0.0, retire=True) == 0
    assert store.n == before + 1  # nothing was left to close
    audit(store)


@pytest.mark.parametrize(
    ("where", "closed"),
    [
        ({"step": 1}, {"u"}),
        ({"uid": "v"}, {"v"}),
        ({}, {"u", "v", "w"}),
        ({"step": 3}, set[str]()),
    ],
)
def test_retiring_by_predicate_closes_the_groups_of_the_rows_that_match(
    store: TagStore, where: dict[str, Any], closed: set[str]
) -> None:
    groups = {uid: begin_group(store, P, uid) for uid in ("u", "v", "w")}
    for step, uid in enumerate(["u", "v"], 1):
        group = groups[uid]
        put(store, P, [f"{uid}_0"], tags=[{"step": step}], group=group)
    clear_where(store, P, where, retire=True)
    assert {uid for uid, group in groups.items() if not group.open} == closed
    audit(store)


# -- whose rows


def test_the_prompt_is_no_trajectory_whoever_puts_to_it(store: TagStore) -> None:
    group = begin_group(store, P, "u", 2)
    put_for(store, group, "u", "u_0")
    position = store.partition(P).index.get("u_0")
    assert group.positions == {position}
    store.apply_clear(P, ["u"], 0.0)
    put_for(store, group, "u", "u_1")  # it comes anew
    assert {store.partition(P).index.get(k) for k in ("u_0", "u_1")} == group.positions
    assert rows_of(store, P)["u"].account is group.producer
    audit(store)


def test_a_put_for_a_group_makes_an_older_row_the_groups(store: TagStore, blocks: Blocks) -> None:
    put(store, P, ["a", "b"], blocks.block(2, {"x": [1, 1]}), client_id="c")
    one, two = begin_group(store, P, "u", 2, PAGE), begin_group(store, P, "v", 2, PAGE)
    put_for(store, one, "a")
    put_for(store, one, "b")
    put_for(store, two, "b")
    at = store.partition(P).index.get
    assert (one.positions, two.positions) == ({at("a")}, {at("b")})
    assert (one.held_rows, two.held_rows) == (1, 1)
    # What was in them before is still answered for by whoever brought it.
    assert store.partition(P).producer("c").extent_bytes == PAGE
    audit(store, [blocks])


def test_a_row_stays_its_groups_when_others_write_to_it(store: TagStore, blocks: Blocks) -> None:
    group = begin_group(store, P, "u", 1, 4 * PAGE, client_id="loop")
    put_for(store, group, "u_0", block=blocks.block(1, {"x": [1]}))
    put(store, P, ["u_0"], blocks.block(1, {"m": [1]}), client_id="trainer", must_exist=True)
    put(store, P, ["u_0"], tags=[{"seen": True}], client_id="controller")
    assert group.positions == {store.partition(P).index.get("u_0")}
    assert group.extent_bytes == 2 * PAGE
    assert group.held_bytes == 2 * PAGE - group.tag_bytes + 1  # an empty mapping is nothing
    audit(store, [blocks])


# -- the room that is kept


def test_room_is_reserved_when_a_group_begins_and_used_by_its_puts(
    store: TagStore, blocks: Blocks
) -> None:
    group = begin_group(store, P, "u", 2, 5 * PAGE, client_id="c")
    account = store.partition(P).account
    assert (account.total_bytes, account.total_rows) == (5 * PAGE, 2)
    put_for(store, group, "u_0", block=blocks.block(1, {"x": [1]}))
    assert (account.total_bytes, account.total_rows) == (5 * PAGE, 2)
    assert (account.extent_bytes, account.held_rows) == (PAGE, 1)
    put(store, P, ["u_0"], tags=[{"score": 1.0}], must_exist=True)  # tags draw on it too
    assert account.total_bytes == 5 * PAGE
    put_for(store, group, "u_1", block=blocks.block(1, {"x": [PAGE]}))  # nine pages of int64
    assert account.held_bytes == 0
    assert account.total_bytes == account.used_bytes > 5 * PAGE
    audit(store, [blocks])


def test_room_is_kept_until_the_last_row_of_the_group_is_cleared(
    store: TagStore, blocks: Blocks
) -> None:
    group = begin_group(store, P, "u", 2, 5 * PAGE)
    put_for(store, group, "u_0", block=blocks.block(1, {"x": [1]}))
    put_for(store, group, "u_1", block=blocks.block(1, {"x": [1]}))
    end_group(store, group.attempt, "finished")
    account = store.partition(P).account
    assert (account.total_bytes, account.total_rows) == (5 * PAGE, 2)
    store.apply_clear(P, ["u_0"], 0.0)
    assert (account.total_bytes, account.total_rows) == (5 * PAGE, 1)
    store.apply_clear(P, ["u_1"], 0.0)
    assert account.is_empty
    audit(store, [blocks], dead_blocks(store))


@pytest.mark.parametrize("how", ["keys", "predicate"])
@pytest.mark.parametrize("with_values", [True, False])
def test_an_open_group_has_its_room_back_when_its_rows_are_cleared(
    store: TagStore, blocks: Blocks, how: str, with_values: bool
) -> None:
    group = begin_group(store, P, "u", 2, 5 * PAGE)
    block = blocks.block(1, {"x": [1]}) if with_values else None
    put_for(store, group, "u_0", block=block)
    if how == "keys":
        store.apply_clear(P, ["u_0"], 0.0)
    else:
        assert clear_where(store, P, {"uid": {"exists": False}}) == 1
    account = store.partition(P).account
    assert (account.held_bytes, account.held_rows, account.extent_bytes) == (5 * PAGE, 2, 0)
    audit(store, [blocks], dead_blocks(store))


def test_a_group_that_begins_anew_gives_back_what_its_older_attempt_kept(
    store: TagStore, blocks: Blocks
) -> None:
    old = begin_group(store, P, "u", 8, 9 * PAGE)
    put_for(store, old, "u_0", block=blocks.block(1, {"x": [1]}))
    begin_group(store, P, "u", 1, PAGE)
    account = store.partition(P).account
    assert (account.total_bytes, account.total_rows) == (PAGE, 1)
    audit(store, [blocks], dead_blocks(store))


def test_a_group_may_take_a_quarter_more_and_64_kib() -> None:
    assert begin_group(TagStore(1), P, "u", 1, 1 << 20).limit_bytes == (5 << 18) + MARGIN_BYTES
    assert MARGIN_BYTES == 64 << 10


def test_value_stores_are_to_be_told_of_groups_whose_room_changed(
    store: TagStore, blocks: Blocks
) -> None:
    kept = begin_group(store, P, "u", 1, 5 * PAGE, kept_by="v0")
    begin_group(store, P, "v", 1, 5 * PAGE)  # no store keeps anything for it
    assert list(store.settled) == [kept]
    store.settled.clear()
    put_for(store, kept, "u_0", block=blocks.block(1, {"x": [1]}))
    assert list(store.settled) == [kept]
    assert (kept.held_bytes, kept.kept_bytes) == (4 * PAGE, 5 * PAGE)
    store.settled.clear()
    put(store, P, ["another"], tags=[{}])
    assert not store.settled


def test_a_repack_leaves_a_group_with_what_it_uses(store: TagStore, blocks: Blocks) -> None:
    group = begin_group(store, P, "u", 2, 40 * PAGE)
    put_for(store, group, "u_0", "u_1", block=blocks.block(2, {"x": [4 * PAGE, 1]}))
    store.apply_clear(P, ["u_0"], 0.0)
    old = blocks.made[0]
    live = store.partition(P).live_rows_of(old)
    new = blocks.block(1, {"x": [1]})
    store.apply_repack(old, new, [(row, position) for row, position, _ in live])
    assert group.extent_bytes == PAGE
    assert store.partition(P).account.total_bytes == 40 * PAGE
    audit(store, [blocks], dead_blocks(store))


def test_a_repack_charges_rows_to_the_group_whose_they_have_become(
    store: TagStore, blocks: Blocks
) -> None:
    put(store, P, ["a", "b"], blocks.block(2, {"x": [PAGE, 1]}), client_id="c")
    group = begin_group(store, P, "u", 2, 40 * PAGE)
    put_for(store, group, "b")
    store.apply_clear(P, ["a"], 0.0)
    old = blocks.made[0]
    live = store.partition(P).live_rows_of(old)
    new = blocks.block(1, {"x": [1]})
    store.apply_repack(old, new, [(row, position) for row, position, _ in live])
    assert (group.extent_bytes, group.held_bytes) == (PAGE, 39 * PAGE)
    audit(store, [blocks], dead_blocks(store))


# -- partitions that are dropped


def test_a_dropped_partition_takes_its_groups_along(store: TagStore, blocks: Blocks) -> None:
    group = begin_group(store, P, "u", 2, 5 * PAGE, kept_by="v0")
    put_for(store, group, "u_0", block=blocks.block(1, {"x": [1]}))
    account = store.partition(P).account
    store.settled.clear()
    drop_partition(store, P)
    assert not store.attempts
    assert list(store.settled) == [group]
    assert (group.open, group.held_bytes) == (False, 0)
    assert account.is_empty
    assert dead_blocks(store) == [1]
    with pytest.raises(StaleWrite):
        store.attempt(group.attempt, P, ["u_1"])
    audit(store, [blocks], [1])


def test_a_put_that_began_before_a_partition_was_dropped_is_stale(store: TagStore) -> None:
    put(store, P, ["k"], tags=[{}])
    stamp = store.n
    dropped = drop_partition(store, P)
    with pytest.raises(StaleWrite, match=f"dropped at revision {dropped}") as error:
        put(store, P, ["k", "l"], tags=[{}, {}], stamp=stamp)
    assert (error.value.cleared_at, error.value.keys) == (dropped, ["k", "l"])
    put(store, P, ["m"], tags=[{}], stamp=dropped)  # begun when it was gone
    with pytest.raises(StaleWrite, match="made anew"):
        put(store, P, ["k"], tags=[{}], stamp=stamp)
    assert set(rows(store)) == {"m"}


def test_a_drop_is_known_as_long_as_history_covers_it() -> None:
    store = TagStore(1, History(max_changes=3))
    for key in "abc":
        put(store, P, [key], tags=[{}])
    dropped = drop_partition(store, P)
    put(store, "q", ["k", "l"], tags=[{}, {}])  # makes history forget what was before
    assert store.history.floor == 2
    for stamp in (2, 3):
        with pytest.raises(StaleWrite, match=f"dropped at revision {dropped}"):
            put(store, P, ["a"], tags=[{}], stamp=stamp)
    put(store, "q", [f"k{i}" for i in range(4)], tags=[{} for _ in range(4)])
    assert not store.dropped
    with pytest.raises(StaleWrite, match="before what history still covers"):
        put(store, P, ["a"], tags=[{}], stamp=3)


def test_a_put_older_than_history_is_not_told_of_a_drop_that_never_was() -> None:
    store = TagStore(1, History(max_changes=3))
    for i in range(9):
        put(store, "q", [f"k{i}"], tags=[{}])
    put(store, P, ["a"], tags=[{}])  # the first of this name
    with pytest.raises(StaleWrite, match="before what history still covers") as error:
        put(store, P, ["b"], tags=[{}], stamp=2)
    assert error.value.cleared_at is None
    put(store, P, ["b"], tags=[{}], stamp=8)  # begun before there was the partition


def test_a_partition_made_again_after_its_drop_was_forgotten_is_another_one() -> None:
    store = TagStore(1, History(max_changes=3))
    known = [put(store, P, [key], tags=[{}]) for key in "ab"][-1]
    drop_partition(store, P)
    for i in range(9):
        put(store, "q", [f"k{i}"], tags=[{}])
    assert not store.dropped
    again = put(store, P, ["b"], tags=[{}])
    assert not store.history.covers(P, known)
    assert store.history.covers(P, again)


def test_what_history_knows_of_partitions_that_are_gone_is_bounded() -> None:
    store = TagStore(1, History(max_changes=20))
    for i in range(500):
        put(store, f"p{i}", ["a"], tags=[{}])
        drop_partition(store, f"p{i}")
        put(store, "kept", ["k"], tags=[{}])
    history = store.history
    assert len(store.dropped) <= 20
    assert len(history._forgotten) <= 20 + len(store.partitions)


def test_a_partition_of_the_same_name_has_a_life_of_its_own(
    store: TagStore, blocks: Blocks
) -> None:
    put(store, P, ["k"], blocks.block(1, {"x": [1]}))
    dropped = drop_partition(store, P)
    put(store, P, ["k"], blocks.block(1, {"m": [2]}))
    partition = store.partition(P)
    assert partition.born == dropped
    assert set(partition.schema) == {"m"}
    assert [change.n for change in store.history.since(P, dropped)] == [store.n]
    audit(store, [blocks], dead_blocks(store))


@given(
    st.lists(
        st.sampled_from(["put", "put", "clear", "drop", "wait", "upkeep", "begin"]), max_size=40
    )
)
def test_what_history_forgets_of_a_dropped_partition_never_touches_the_one_of_its_name(
    steps: list[str],
) -> None:
    store = TagStore(1, History(max_changes=6, max_age_s=10.0))
    now, expected = 0.0, set[str]()
    put(store, P, ["first"], tags=[{}])
    expected.add("first")
    for number, step in enumerate(steps):
        key = f"k{number % 3}"
        if step == "put":
            put(store, P, [key], tags=[{}], now=now)
            expected.add(key)
        elif step == "begin":
            begin_group(store, P, key, now=now)
            expected.add(key)
        elif step == "clear" and P in store.partitions:
            store.apply_clear(P, [key, "first"], now)
            expected -= {key, "first"}
        elif step == "drop" and P in store.partitions:
            drop_partition(store, P, now=now)
            expected.clear()
        elif step == "wait":
            now += 8.0
        elif step == "upkeep":
            store.upkeep(now, step=1)  # so that forgetting lags behind
        if P in store.partitions:
            assert set(rows(store)) == expected
            assert all(store.partition(P).row(key) is not None for key in expected)
        audit(store)
