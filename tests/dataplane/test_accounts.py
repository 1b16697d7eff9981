"""Accounts: who holds how much, all the way up, and nothing when everything is gone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.tags.accounts import Account, Producer
from dataplane.tags.groups import Group
from dataplane.tags.partition import MOST_PRODUCERS, Partition
from dataplane.tags.store import TagStore
from dataplane.values.extents import PAGE
from tests.dataplane.audit import Blocks, audit, put
from tests.dataplane.changes import begin_group, end_group


def sums(account: Account) -> tuple[int, ...]:
    return (
        account.rows, account.tag_bytes, account.extent_bytes, account.held_bytes,
        account.held_rows,
    )  # fmt: skip


def test_a_change_of_an_account_is_one_of_all_above_it() -> None:
    partition = Account()
    one, other = Producer("one", partition), Producer("other", partition)
    group = Account(one)
    group.add_rows(2, 30)
    group.add_extent(PAGE)
    group.hold(100, 4)
    other.add_rows(1, 5)
    assert sums(group) == sums(one) == (2, 30, PAGE, 100, 4)
    assert sums(other) == (1, 5, 0, 0, 0)
    assert sums(partition) == (3, 35, PAGE, 100, 4)
    assert (partition.total_bytes, partition.total_rows) == (32 + PAGE + 100, 7)
    group.hold(40, 1)  # less than before
    assert sums(one) == (2, 30, PAGE, 40, 1)
    assert sums(partition) == (3, 35, PAGE, 40, 1)
    group.hold(0, 0)
    group.add_rows(-2, -30)
    group.add_extent(-PAGE)
    other.add_rows(-1, -5)
    assert [sums(a) for a in (partition, one, other, group)] == [(0,) * 5] * 4


@pytest.mark.parametrize("change", ["add_rows", "add_tags", "add_extent", "hold", "hold_rows"])
def test_an_account_is_empty_when_nothing_at_all_is_left(change: str) -> None:
    account = Account()
    assert account.is_empty
    if change == "add_rows":
        account.add_rows(1, 0)
    elif change == "add_tags":
        account.add_rows(0, 1)
    elif change == "add_extent":
        account.add_extent(1)
    elif change == "hold":
        account.hold(1, 0)
    else:
        account.hold(0, 1)
    assert not account.is_empty


steps = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.integers(0, 3), st.integers(-5, 5), st.integers(-50, 50)),
        st.tuples(st.just("extent"), st.integers(0, 3), st.integers(-9, 9), st.just(0)),
        st.tuples(st.just("hold"), st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)),
    )
)


@given(steps)
def test_an_account_is_the_sum_of_what_lies_below_it(
    steps: list[tuple[str, int, int, int]],
) -> None:
    top = Account()
    middle = [Account(top), Account(top)]
    leaves = [Account(middle[0]), Account(middle[0]), Account(middle[1]), Account(middle[1])]
    for kind, which, one, two in steps:
        leaf = leaves[which]
        if kind == "rows":
            leaf.add_rows(one, two)
        elif kind == "extent":
            leaf.add_extent(one)
        else:
            leaf.hold(one, two)

    def added(*accounts: Account) -> list[int]:
        return [sum(parts) for parts in zip(*map(sums, accounts), strict=True)]

    assert list(sums(middle[0])) == added(*leaves[:2])
    assert list(sums(middle[1])) == added(*leaves[2:])
    assert list(sums(top)) == added(*middle)


# -- blocks


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(1, 5000))
def test_a_block_is_charged_to_the_last_byte_in_equal_shares(rows: list[int], size: int) -> None:
    accounts = [Account() for _ in rows]
    block = Blocks().block(1, {"x": [size]})
    block.charge(dict(zip(accounts, rows, strict=True)))
    total = block.extent_bytes
    assert total == -(-block.nbytes // PAGE) * PAGE
    assert sum(account.extent_bytes for account in accounts) == total
    for account, count in zip(accounts, rows, strict=True):
        assert abs(account.extent_bytes - total * count / sum(rows)) <= len(rows)
    assert set(block.uncharge()) == set(accounts)
    assert all(account.is_empty for account in accounts)
    assert block.uncharge() == []  # nobody answers twice
    assert all(account.is_empty for account in accounts)


def test_a_block_is_charged_whole_until_its_last_cell_is_dead() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, "p", ["a", "b"], blocks.block(2, {"x": [3, 3]}), client_id="c")
    producer = store.partition("p").producer("c")
    assert sums(producer) == (2, 2, PAGE, 0, 0)
    store.apply_clear("p", ["a"], 0.0)
    assert sums(producer) == (1, 1, PAGE, 0, 0)
    store.apply_clear("p", ["b"], 0.0)
    assert producer.is_empty


def test_a_write_back_is_charged_to_those_whose_rows_it_adds_to() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, "p", ["a1"], tags=[{}], client_id="a")
    put(store, "p", ["b1", "b2", "b3"], tags=[{}, {}, {}], client_id="b")
    back = blocks.block(4, {"x": [1, 1, 1, 1]})
    put(store, "p", ["a1", "b1", "b2", "b3"], back, must_exist=True, client_id="trainer")
    partition = store.partition("p")
    assert sums(partition.producer("a"))[2] == PAGE // 4
    assert sums(partition.producer("b"))[2] == PAGE * 3 // 4
    assert "trainer" not in partition.producers or partition.producer("trainer").is_empty
    audit(store, [blocks])


def test_what_overwrites_a_block_is_charged_to_its_own_writer() -> None:
    store, blocks = TagStore(1), Blocks()
    put(store, "p", ["k"], blocks.block(1, {"x": [1]}), client_id="a")
    group = begin_group(store, "p", "u", 1, 4 * PAGE, "a")
    put(store, "p", ["u_0"], tags=[{}], group=group)
    put(store, "p", ["k", "u_0"], blocks.block(2, {"x": [PAGE, 1]}), client_id="b")
    partition = store.partition("p")
    # The rows stay whose they were, and the group keeps its room for its own.
    assert sums(partition.producer("b")) == (0, 0, blocks.made[1].extent_bytes, 0, 0)
    assert sums(group) == (1, 1, 0, 4 * PAGE, 0)
    assert partition.producer("a").extent_bytes == 0
    audit(store, [blocks], [1])


# -- prompts


def test_the_row_of_a_prompt_that_begin_group_makes_is_outside_of_every_quota() -> None:
    store, blocks = TagStore(1), Blocks()
    begin_group(store, "p", "u", client_id="c")
    partition = store.partition("p")
    assert (partition.account.rows, partition.account.tag_bytes) == (0, 0)
    assert (partition.prompts.rows, partition.tag_bytes) == (1, partition.prompts.tag_bytes)
    # What is put under it counts, for whoever puts it.
    put(store, "p", ["u"], blocks.block(1, {"x": [1]}), client_id="controller")
    put(store, "p", ["u"], blocks.block(1, {"m": [1]}), client_id="controller", must_exist=True)
    assert sums(partition.producer("controller")) == (0, 0, 2 * PAGE, 0, 0)
    assert partition.prompts.extent_bytes == 0
    audit(store, [blocks])
    store.apply_clear("p", ["u"], 0.0, retire=True)
    assert partition.account.is_empty
    assert partition.prompts.is_empty


def test_the_row_of_a_prompt_that_was_put_before_stays_its_writers() -> None:
    store = TagStore(1)
    put(store, "p", ["u"], tags=[{"status": "pending"}], client_id="controller")
    begin_group(store, "p", "u", client_id="loop")
    partition = store.partition("p")
    assert partition.producer("controller").rows == 1
    assert partition.prompts.is_empty
    audit(store)


def test_a_repack_charges_what_lies_under_a_prompt_to_its_clients_producer() -> None:
    store, blocks = TagStore(1), Blocks()
    begin_group(store, "p", "u", client_id="c")
    put(store, "p", ["u", "k"], blocks.block(2, {"x": [1, 1]}), client_id="d")
    store.apply_clear("p", ["k"], 0.0)
    old, partition = blocks.made[0], store.partition("p")
    live = partition.live_rows_of(old)
    new = blocks.block(1, {"x": [1]})
    store.apply_repack(old, new, [(row, position) for row, position, _ in live])
    assert partition.prompts.extent_bytes == 0
    assert partition.producer("c").extent_bytes == PAGE
    audit(store, [blocks], [old.block])


# -- who is forgotten


def test_producers_that_hold_nothing_are_forgotten_when_there_are_many() -> None:
    store = TagStore(1)
    put(store, "p", ["kept"], tags=[{}], client_id="keeper")
    group = begin_group(store, "p", "u", n=2, client_id="beginner")
    partition = store.partition("p")
    for i in range(3 * MOST_PRODUCERS):
        put(store, "p", ["k"], tags=[{}], client_id=f"c{i}")
        store.apply_clear("p", ["k"], 0.0)
        uid = begin_group(store, "p", f"u{i}", client_id=f"c{i}").uid
        store.apply_clear("p", [uid], 0.0, retire=True)
    assert len(partition.producers) + len(partition.prompters) <= MOST_PRODUCERS
    assert partition.producer("keeper").rows == 1
    # An open group's producer is the same still, or its limit would be no limit.
    assert partition.producers["beginner"] is group.producer
    audit(store)


def test_many_producers_that_hold_something_are_looked_through_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = TagStore(1)
    looked: list[int] = []
    plain = Partition._drop_idle

    def counted(partition: Partition) -> None:
        before = partition.producers
        plain(partition)
        if partition.producers is not before:
            looked.append(len(before))

    monkeypatch.setattr(Partition, "_drop_idle", counted)
    for i in range(8 * MOST_PRODUCERS):
        put(store, "p", [f"k{i}"], tags=[{}], client_id=f"c{i}")
    assert len(store.partition("p").producers) == 8 * MOST_PRODUCERS
    assert len(looked) <= 4  # each time when they have doubled


def test_a_thousand_groups_come_and_go_and_leave_nothing() -> None:
    store, blocks = TagStore(1), Blocks()
    for i in range(1000):
        group = begin_group(store, "p", f"u{i}", 2, 3 * PAGE)
        options: Any = {"group": group}
        put(store, "p", [f"{i}_0", f"{i}_1"], blocks.block(2, {"x": [1, 1]}), **options)
        end_group(store, group.attempt, "finished")
        store.apply_clear("p", [f"u{i}", f"{i}_0", f"{i}_1"], 0.0)
    partition = store.partition("p")
    assert partition.account.is_empty
    assert partition.prompts.is_empty
    assert (partition.groups, store.attempts, partition.touched) == ({}, {}, {})
    assert len(partition.producers) <= 2  # the one who began them, and the puts' own
    assert Group.__slots__
    assert not hasattr(group, "__dict__")  # pyright: ignore[reportPossiblyUnboundVariable]
