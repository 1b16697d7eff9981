"""Quotas bare: what has room, what has to wait, what never will, and what an error says of it."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import InvalidRequest
from dataplane.tags.groups import MARGIN_BYTES, Group
from dataplane.tags.placement import Placement
from dataplane.tags.puts import PutRows
from dataplane.tags.quota import (
    MAX_ROWS_SEEN,
    Shortage,
    check_fits,
    oldest_unconsumed,
    shortage,
    shortage_of_group,
    shortage_of_put,
)
from dataplane.tags.store import TagStore
from dataplane.types import Quota
from dataplane.values.extents import PAGE
from tests.dataplane.audit import Blocks, audit, dead_blocks, put
from tests.dataplane.changes import begin_group, end_group

P = "p"
PAYLOAD = (PAGE - 128) // 8
"""Entries of an int64 row whose block takes one page; so many more for each page more."""


def store_with(**limits: int) -> TagStore:
    store = TagStore(1)
    store.apply_create(P, 0.0).quota = Quota(**limits)
    return store


def lacking(
    store: TagStore,
    keys: list[str],
    *,
    block: Placement | None = None,
    tags: list[dict[str, Any]] | None = None,
    client_id: str = "c",
    must_exist: bool = False,
    group: Group | None = None,
) -> Shortage | None:
    """What a put would lack."""
    if block is None and tags is None:
        tags = [{} for _ in keys]
    sizes = None if tags is None else [len(msgpack.packb(tag)) for tag in tags]
    rows = PutRows(P, keys, tags, sizes, block, must_exist, False, None, client_id, group)
    return shortage_of_put(rows, store.check_put(rows), store.partitions.get(P))


def summary(short: Shortage | None) -> tuple[Any, ...] | None:
    """Of a shortage what is short, how much is needed, used and allowed, and whose limit it is."""
    return None if short is None else (*short[:4], short.producer)


# -- puts that belong to no group


def test_without_a_quota_there_is_room_for_everything() -> None:
    store, blocks = TagStore(1), Blocks()
    assert lacking(store, ["k"], block=blocks.block(1, {"x": [1 << 30]})) is None  # no partition
    store.apply_create(P, 0.0)
    assert lacking(store, ["k"], block=blocks.block(1, {"x": [1 << 30]})) is None
    assert shortage(store.partition(P), "c", 1 << 60, 1 << 60) is None


@pytest.mark.parametrize(
    ("limits", "rows", "lacks"),
    [
        ({"rows": 5}, 2, None),
        ({"rows": 5}, 3, ("rows", 3, 3, 5, "")),
        ({"rows": 5}, 6, ("rows", 6, 3, 5, "")),
        ({"producer_rows": 3}, 1, None),
        ({"producer_rows": 3}, 2, ("rows", 2, 2, 3, "c")),
        ({"rows": 4, "producer_rows": 3}, 2, ("rows", 2, 3, 4, "")),
        ({"bytes": 1 << 20}, 1000, None),
    ],
)
def test_rows_are_counted_for_all_and_for_each_producer(
    limits: dict[str, int], rows: int, lacks: tuple[Any, ...] | None
) -> None:
    store = store_with(**limits)
    put(store, P, ["a", "b"], tags=[{}, {}], client_id="c")
    put(store, P, ["d"], tags=[{}], client_id="d")
    assert summary(lacking(store, [f"k{i}" for i in range(rows)])) == lacks


def test_rows_that_are_there_already_take_no_more_room() -> None:
    store = store_with(rows=3)
    put(store, P, ["a", "b", "c"], tags=[{}, {}, {}])
    assert lacking(store, ["a", "b"]) is None
    assert summary(lacking(store, ["a", "new"])) == ("rows", 1, 3, 3, "")
    store.apply_clear(P, ["b"], 0.0)
    assert lacking(store, ["a", "b"]) is None  # a cleared key is a new row again


@pytest.mark.parametrize(
    ("limits", "pages", "lacks"),
    [
        ({"bytes": 4 * PAGE}, 1, None),
        ({"bytes": 4 * PAGE}, 2, ("bytes", 2 * PAGE, 3 * PAGE, 4 * PAGE, "")),
        ({"bytes": 4 * PAGE}, 5, ("bytes", 5 * PAGE, 3 * PAGE, 4 * PAGE, "")),
        ({"producer_bytes": 3 * PAGE}, 1, None),
        ({"producer_bytes": 3 * PAGE}, 2, ("bytes", 2 * PAGE, 2 * PAGE, 3 * PAGE, "c")),
        ({"rows": 9}, 1 << 20, None),
    ],
)
def test_bytes_are_those_of_extents_and_tags(
    limits: dict[str, int], pages: int, lacks: tuple[Any, ...] | None
) -> None:
    store, blocks = store_with(**limits), Blocks()
    put(store, P, ["a"], blocks.block(1, {"x": [PAGE // 8 + 1]}), client_id="c")
    put(store, P, ["b"], blocks.block(1, {"x": [1]}), client_id="d")
    wanted = blocks.block(1, {"x": [PAYLOAD + (pages - 1) * PAGE // 8]})
    assert wanted.extent_bytes == pages * PAGE
    short = lacking(store, ["k"], block=wanted)
    assert summary(short) == lacks


def test_tags_alone_count_as_well() -> None:
    store = store_with(bytes=100)
    assert lacking(store, ["k"], tags=[{"t": "x" * 90}]) is None
    assert summary(lacking(store, ["k"], tags=[{"t": "x" * 100}])) == ("bytes", 104, 0, 100, "")
    assert lacking(store, ["a", "b"], tags=[{"t": "x" * 46}] * 2) is None  # two times 50 bytes


def test_what_is_reserved_is_taken() -> None:
    store = store_with(bytes=4 * PAGE, rows=10)
    begin_group(store, P, "u", 7, 3 * PAGE)
    blocks = Blocks()
    assert lacking(store, ["k"], block=blocks.block(1, {"x": [1]})) is None
    two = lacking(store, ["k"], block=blocks.block(1, {"x": [PAGE // 8 + 1]}))
    assert summary(two) == ("bytes", 2 * PAGE, 3 * PAGE, 4 * PAGE, "")
    rows = lacking(store, ["k1", "k2", "k3", "k4"])
    assert summary(rows) == ("rows", 4, 7, 10, "")


@pytest.mark.parametrize("how", ["must_exist", "group"])
def test_write_backs_and_puts_of_open_groups_ask_for_no_room(how: str) -> None:
    store, blocks = store_with(bytes=PAGE, rows=1), Blocks()
    group = begin_group(store, P, "u", 1, PAGE)
    put(store, P, ["u_0"], tags=[{}], group=group)
    large = blocks.block(1, {"x": [2 * PAGE // 8]})
    if how == "group":
        assert lacking(store, ["u_0", "u_1"], group=group) is None
        assert lacking(store, ["u_0"], block=large, group=group) is None
    else:
        assert lacking(store, ["u_0"], block=large, must_exist=True) is None


def test_a_group_that_began_before_there_was_a_quota_is_not_held_up_by_it() -> None:
    store, blocks = TagStore(1), Blocks()
    group = begin_group(store, P, "u", 2)
    store.partition(P).quota = Quota(bytes=PAGE, rows=1)
    assert lacking(store, ["a", "b"], group=group) is None
    assert lacking(store, ["a"], block=blocks.block(1, {"x": [1 << 20]}), group=group) is None


# -- groups


@pytest.mark.parametrize(
    ("declared", "n", "lacks"),
    [
        (2 * PAGE, 2, None),
        (2 * PAGE + 1, 2, ("bytes", 2 * PAGE + 1, 2 * PAGE, 4 * PAGE, "")),
        (0, 2, None),
        (0, 3, ("rows", 3, 4, 6, "")),
        (5 * PAGE, 1, ("bytes", 5 * PAGE, 2 * PAGE, 4 * PAGE, "")),
    ],
)
def test_groups_fill_a_quota_exactly(declared: int, n: int, lacks: tuple[Any, ...] | None) -> None:
    store = store_with(bytes=4 * PAGE, rows=6)
    begin_group(store, P, "u", 4, 2 * PAGE)
    partition = store.partition(P)
    assert summary(shortage_of_group(partition, "c", "v", declared, n)) == lacks
    # Rows of prompts, of which every group leaves one behind, do not count.
    for i in range(20):
        store.apply_clear(P, ["u"], 0.0, retire=True)
        begin_group(store, P, f"u{i}", 4, 2 * PAGE)
        end_group(store, store.n, "failure")
    assert shortage_of_group(partition, "c", "v", 4 * PAGE, 6) is None
    audit(store)


def test_a_group_that_begins_anew_needs_no_room_for_what_it_gives_back() -> None:
    store, blocks = store_with(bytes=4 * PAGE, rows=4), Blocks()
    group = begin_group(store, P, "u", 4, 4 * PAGE, "c")
    put(store, P, ["u_0"], blocks.block(1, {"x": [1]}), group=group)
    partition = store.partition(P)
    assert shortage_of_group(partition, "c", "u", 4 * PAGE, 4) is None
    assert summary(shortage_of_group(partition, "c", "v", PAGE, 1)) == (
        "bytes", PAGE, 4 * PAGE, 4 * PAGE, "",
    )  # fmt: skip
    partition.quota = Quota(bytes=2 * PAGE, rows=4)  # less than there is
    assert shortage_of_group(partition, "c", "u", 4 * PAGE, 4) is None
    short = shortage_of_group(partition, "c", "u", 4 * PAGE + 1, 4)
    assert short is not None
    assert short.is_lasting


def test_a_group_that_another_producer_begins_anew_counts_against_its_own_limit() -> None:
    store = store_with(bytes=4 * PAGE, producer_bytes=2 * PAGE)
    begin_group(store, P, "u", 1, 2 * PAGE, "c")
    begin_group(store, P, "v", 1, 2 * PAGE, "d")
    partition = store.partition(P)
    assert shortage_of_group(partition, "c", "u", 2 * PAGE, 1) is None
    short = shortage_of_group(partition, "d", "u", 2 * PAGE, 1)
    assert summary(short) == ("bytes", 2 * PAGE, 2 * PAGE, 2 * PAGE, "d")


# -- margins


def test_a_group_may_exceed_what_it_declared_by_its_margin_and_no_more() -> None:
    store, blocks = store_with(bytes=1 << 20), Blocks()
    group = begin_group(store, P, "u", 1, 8 * PAGE)
    limit = 10 * PAGE + MARGIN_BYTES
    assert group.limit_bytes == limit
    room = limit // PAGE
    fits = blocks.block(1, {"x": [PAYLOAD + (room - 1) * PAGE // 8]})
    over = blocks.block(1, {"x": [PAYLOAD + room * PAGE // 8]})
    assert (fits.extent_bytes, over.extent_bytes) == (room * PAGE, (room + 1) * PAGE)
    assert lacking(store, ["u_0"], block=fits, group=group) is None
    short = lacking(store, ["u_0"], block=over, group=group)
    assert short is not None
    error = short.error(P)
    assert "group 'u'" in str(error)
    assert f"declared {8 * PAGE} bytes and may take {limit} in all" in str(error)
    assert (error.used_bytes, error.limit_bytes, error.oldest_keys) == (0, limit, [])
    put(store, P, ["u_0"], fits, group=group)
    short = lacking(store, ["u_1"], block=blocks.block(1, {"x": [1]}), group=group)
    assert summary(short) == ("bytes", PAGE, limit, limit, "c")
    assert short is not None
    assert short.is_lasting  # whatever others clear, it is more than the group may take


def test_what_is_written_back_is_not_refused_by_what_was_declared() -> None:
    store, blocks = TagStore(1), Blocks()
    group = begin_group(store, P, "u", 1, PAGE)
    put(store, P, ["u_0"], tags=[{}], group=group)
    large = blocks.block(1, {"x": [1 << 17]})
    assert lacking(store, ["u_0"], block=large, must_exist=True) is None
    assert lacking(store, ["u_0"], block=large, must_exist=True, group=group) is None
    short = lacking(store, ["u_0"], block=large, group=group)  # no quota: it holds all the same
    assert short is not None
    assert short.group is group


# -- what errors say


def test_an_error_says_what_is_short_how_much_is_used_and_what_to_do() -> None:
    short = Shortage("rows", 2, 99, 100, 5000, 10_000)
    error = short.error(P, 1.5, ["old"], "train")
    for part in ("'p'", "2 more rows", "99 of 100 rows", "all producers", "1.5 s", "clear rows"):
        assert part in str(error)
    assert "'train' lags most" in str(error)
    assert (error.used_bytes, error.limit_bytes) == (5000, 10_000)
    assert (error.oldest_keys, error.lagging_task) == (["old"], "train")


def test_an_error_says_when_waiting_is_in_vain() -> None:
    short = Shortage("bytes", 101, 0, 100, 0, 100, producer="c0ffee")
    assert short.is_lasting
    text = str(short.error(P))
    assert "producer c0ffee" in text
    assert "larger than the whole quota" in text
    assert not Shortage("bytes", 100, 50, 100, 50, 100).is_lasting


# -- settings


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"bytes": 2 * PAGE - 1}, "bytes"),
        ({"producer_bytes": 2 * PAGE - 1}, "producer_bytes"),
        ({"rows": 3}, "rows"),
        ({"producer_rows": 3}, "producer_rows"),
    ],
)
def test_a_quota_under_one_group_that_is_open_is_refused(limits: dict[str, int], name: str) -> None:
    store = TagStore(1)
    group = begin_group(store, P, "u", 4, 2 * PAGE)
    partition = store.partition(P)
    with pytest.raises(InvalidRequest, match=f"quota.{name} "):
        check_fits(Quota(**limits), partition)
    check_fits(Quota(**{name: limits[name] + 1}), partition)
    put(store, P, ["u_0"], tags=[{}], group=group)
    end_group(store, group.attempt, "finished")
    check_fits(Quota(**limits), partition)


def test_a_quota_under_what_a_claim_waits_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = TagStore(1).make(P)
    monkeypatch.setattr(partition.claims, "wanted", lambda: 64)
    with pytest.raises(InvalidRequest, match=r"quota.rows \(63\) is less than the 64"):
        check_fits(Quota(rows=63), partition)
    check_fits(Quota(rows=64), partition)
    check_fits(Quota(bytes=1), partition)


@pytest.mark.parametrize("limit", ["bytes", "producer_bytes"])
def test_a_quota_under_what_it_gives_a_group_is_refused(limit: str) -> None:
    with pytest.raises(InvalidRequest, match="no group could ever begin"):
        Quota(**{limit: PAGE, "group_bytes": PAGE + 1})
    Quota(**{limit: PAGE, "group_bytes": PAGE})


@pytest.mark.parametrize("value", [0, -1, 1.5, "1", True, 1 << 63])
def test_a_limit_is_a_positive_number(value: Any) -> None:
    for name in ("bytes", "rows", "producer_bytes", "producer_rows", "group_bytes"):
        with pytest.raises(InvalidRequest, match=f"quota.{name} "):
            Quota(**{name: value})


# -- the oldest keys


def test_the_oldest_keys_are_named_and_prompts_are_not() -> None:
    store = TagStore(1)
    begin_group(store, P, "u")
    keys = [f"k{i}" for i in range(9)]
    put(store, P, keys, tags=[{} for _ in keys])
    put(store, P, ["k1"], tags=[{"changed": True}])  # it has been there as long as before
    store.apply_clear(P, ["k0"], 0.0)
    partition = store.partition(P)
    assert oldest_unconsumed(partition) == ["k1", "k2", "k3", "k4", "k5"]
    assert oldest_unconsumed(partition, 2) == ["k1", "k2"]


def test_keys_that_every_task_has_committed_are_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = TagStore(1)
    put(store, P, [f"k{i}" for i in range(5000)], tags=[{}] * 5000)
    partition = store.partition(P)
    seen: list[int] = []

    def committed(position: int) -> bool:
        seen.append(position)
        return position < 1500 or position > 1502

    monkeypatch.setattr(partition.claims, "is_committed_by_all", committed)
    assert oldest_unconsumed(partition) == ["k1500", "k1501", "k1502"]
    assert len(seen) <= MAX_ROWS_SEEN + 1024  # an error must not hold the store


def test_long_cleared_rows_do_not_hide_the_oldest() -> None:
    store = TagStore(1)
    store.history.max_age_s = 1.0
    for i in range(80):
        keys = [f"{i}_{j}" for j in range(1024)]
        put(store, P, keys, tags=[{}] * 1024, now=float(i))
        store.apply_clear(P, keys, float(i))
    put(store, P, ["left"], tags=[{}], now=80.0)
    assert oldest_unconsumed(store.partition(P)) == ["left"]


# -- whatever happens

ops = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "begin", "put for", "put for", "end", "clear", "retire"]),
        st.integers(0, 5),
        st.integers(1, 3),
        st.sampled_from("cd"),
    ),
    max_size=50,
)


@given(
    ops,
    st.integers(3, 12),
    st.integers(3, 12),
    st.integers(2, 8),
    st.integers(2, 8),
)
def test_nothing_that_has_room_exceeds_a_quota(
    ops: list[tuple[str, int, int, str]], pages: int, rows: int, own_pages: int, own_rows: int
) -> None:
    """Groups put what they declared: then no limit is ever exceeded, and all of it comes back."""
    quota = Quota(
        bytes=pages * PAGE, rows=rows, producer_bytes=own_pages * PAGE, producer_rows=own_rows
    )
    store, blocks = TagStore(1), Blocks()
    partition = store.apply_create(P, 0.0)
    partition.quota = quota
    left: dict[int, int] = {}
    """Pages that each open group has left."""
    dead: list[int] = []
    for op, which, size, client in ops:
        open_groups = sorted(store.attempts)
        if op == "put":
            block = blocks.block(1, {"x": [PAYLOAD + (size - 1) * PAGE // 8]})
            if lacking(store, [f"k{which}"], block=block, client_id=client) is None:
                put(store, P, [f"k{which}"], block, client_id=client)
            else:
                dead.append(block.block)
        elif op == "begin":
            declared = size * PAGE
            if shortage_of_group(partition, client, f"u{which}", declared, size) is None:
                group = begin_group(store, P, f"u{which}", size, declared, client)
                left[group.attempt] = size
        elif op == "put for" and open_groups:
            attempt = open_groups[which % len(open_groups)]
            group = store.attempts[attempt]
            if left[attempt]:
                key = f"{attempt}_{left[attempt]}"
                block = blocks.block(1, {"x": [PAYLOAD]})
                assert lacking(store, [key], block=block, group=group) is None
                put(store, P, [key], block, group=group)
                left[attempt] -= 1
        elif op == "end" and open_groups:
            end_group(store, open_groups[which % len(open_groups)], "finished")
        elif op == "clear":
            store.apply_clear(P, [f"k{which}"], 0.0)
        elif op == "retire":
            uid = f"u{which}"
            group = partition.groups.get(uid)
            keys = [] if group is None else [
                row.key for row in partition.slots if row.account is group
            ]  # fmt: skip
            store.apply_clear(P, [uid, *keys], 0.0, retire=True)
        dead += dead_blocks(store)
        audit(store, [blocks], dead)
        assert partition.account.total_bytes <= quota.bytes
        assert partition.account.total_rows <= quota.rows
        for producer in partition.producers.values():
            assert producer.total_bytes <= quota.producer_bytes
            assert producer.total_rows <= quota.producer_rows
    keys = [row.key for row in partition.slots]
    store.apply_clear(P, [*keys, *(f"u{i}" for i in range(6))], 0.0, retire=True)
    assert partition.account.is_empty
    assert partition.prompts.is_empty
    for limit in ("bytes", "producer_bytes"):
        whole = getattr(quota, limit)
        assert shortage(partition, "c", min(whole, quota.bytes, quota.producer_bytes), 1) is None
