"""Quotas: who has room, who waits and for how long, who is never held up, who is told what."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dataplane.client.connection import Connection
from dataplane.client.put import put_batch
from dataplane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KeyNotFound,
    PartitionNotFound,
    QuotaExceeded,
    StaleWrite,
)
from dataplane.types import Quota
from dataplane.wire.channel import Broken
from dataplane.wire.messages import PutMeta
from tests.contract.planes import Plane, ThreadPlane, hosted, thread_plane
from tests.contract.test_promises import listed
from tests.contract.test_scenarios import asks
from tests.contract.waits import under_way
from tests.deadline import eventually

PAGE = 4096
SHORT_S = 0.3

LOCAL = pytest.mark.kinds("embedded-sync", "embedded-async", "memory", "ray")
"""For tests of what one producer has: elsewhere two processes put by turns."""


def waiting(client: Any, partition: str) -> int:
    """How many requests wait for room."""
    return client.kv_list_partitions()[partition]["waiting"]


def short(call: Any, *args: Any, **named: Any) -> Any:
    """A call with little patience; with more, where a busy machine had no time to refuse it."""
    for timeout in (SHORT_S, 2.0):
        try:
            return call(*args, **named, timeout=timeout)
        except DeadlineExceeded:
            pass
    return call(*args, **named, timeout=10.0)


class Waiter:
    """A call that waits for room, in a thread of its own."""

    def __init__(self, plane: Plane, partition: str, call: Any, *args: Any, **named: Any) -> None:
        self._result: Future[Any] = Future()
        before = waiting(plane.witness, partition)

        def work() -> None:
            try:
                self._result.set_result(call(*args, **named))
            except BaseException as error:
                self._result.set_exception(error)

        self._thread = threading.Thread(target=work)
        self._thread.start()
        eventually(
            lambda: self._result.done() or waiting(plane.witness, partition) > before,
            "the call waits for room",
        )

    @property
    def waits(self) -> bool:
        return not self._result.done()

    def result(self) -> Any:
        try:
            return self._result.result(30.0)
        finally:
            self._thread.join(30.0)


def page(value: int = 0) -> dict[str, torch.Tensor]:
    """The fields of a row whose block takes one page."""
    return {"x": torch.full((400,), value)}


def fill(client: Any, partition: str, rows: int) -> list[str]:
    """Rows that are in a partition already."""
    keys = [f"full-{i}" for i in range(rows)]
    client.kv_batch_put(keys, partition, None, [{} for _ in keys])
    return keys


# -- at the limit ----------------------------------------------------------------------------


def test_a_put_without_room_waits_to_its_deadline_and_says_who_fills_it(
    client: Any, partition: str
) -> None:
    client.kv_create_partition(partition, quota={"rows": 100})
    keys = fill(client, partition, 99)
    before = client.kv_list(partition).revision
    started = time.monotonic()
    with pytest.raises(QuotaExceeded) as full:
        client.kv_batch_put(["a", "b"], partition, {"x": torch.arange(2)}, [{}, {}], timeout=2.0)
    assert 1.0 < time.monotonic() - started < 2.5
    for part in (repr(partition), "2 more rows", "99 of 100 rows", "clear rows"):
        assert part in str(full.value)
    assert full.value.oldest_keys == keys[:5]
    assert full.value.lagging_task is None
    assert (full.value.used_bytes, full.value.limit_bytes) == (0, None)
    assert client.kv_list(partition).revision == before
    assert set(listed(client, partition)) == set(keys)
    assert client.status()["bytes_in_use"] == 0
    client.kv_put("a", partition, tags={})  # one more fits


@pytest.mark.parametrize("size", [400, 100_000], ids=["small", "large"])
def test_bytes_at_the_limit(plane: Plane, client: Any, partition: str, size: int) -> None:
    row = {"x": torch.arange(size)}
    client.kv_put("first", partition, row)
    taken = client.kv_list_partitions()[partition]["used_bytes"]
    client.kv_create_partition(partition, quota={"bytes": 3 * taken})
    for i in range(2):
        client.kv_put(f"k{i}", partition, row)
    with pytest.raises(QuotaExceeded) as full:
        short(client.kv_put, "one-too-many", partition, row)
    assert full.value.limit_bytes == 3 * taken
    assert 3 * (taken - 1) <= full.value.used_bytes <= 3 * taken
    assert full.value.oldest_keys == ["first", "k0", "k1"]
    assert set(listed(client, partition)) == {"first", "k0", "k1"}
    plane.settle()
    assert plane.used_bytes() == 3 * (taken - 1)
    client.kv_clear(["k0"], partition)
    client.kv_put("fits-now", partition, row)


def test_rows_that_are_there_need_no_room(client: Any, partition: str) -> None:
    client.kv_create_partition(partition, quota={"rows": 2})
    client.kv_batch_put(["a", "b"], partition, None, [{"v": 1}, {"v": 1}])
    client.kv_batch_put(["a", "b"], partition, {"x": torch.arange(2)}, [{"v": 2}, {"v": 2}])
    assert {tags["v"] for tags, _ in listed(client, partition).values()} == {2}


def test_the_tasks_that_lag_are_named(client: Any, partition: str) -> None:
    client.kv_create_partition(partition, quota={"rows": 4})
    keys = fill(client, partition, 4)
    for task, rows in (("train", 3), ("reference", 1)):
        claim = client.kv_claim(partition, task, count=rows)
        client.kv_commit(claim)
    with pytest.raises(QuotaExceeded, match="task 'reference' lags most") as full:
        short(client.kv_put, "new", partition, tags={})
    assert full.value.lagging_task == "reference"
    assert full.value.oldest_keys == keys[1:]  # the first was committed by both


# -- woken -----------------------------------------------------------------------------------


def test_a_put_that_waits_is_made_as_soon_as_rows_are_cleared(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_create_partition(partition, quota={"rows": 10})
    fill(client, partition, 10)
    waiter = Waiter(plane, partition, client.kv_put, "new", partition, page(), timeout=20)
    assert waiter.waits
    # What takes no room stands in no line, and gives none either.
    plane.witness.kv_put("full-3", partition, tags={"seen": True}, timeout=5)
    plane.witness.kv_put("full-4", partition, page(), timeout=5)
    assert waiter.waits
    started = time.monotonic()
    plane.witness.kv_clear(["full-3"], partition)
    assert waiter.result().keys == ["new"]
    assert time.monotonic() - started < 2.0
    assert "new" in listed(client, partition)
    assert waiting(client, partition) == 0


@pytest.mark.parametrize("by", ["keys", "predicate"])
def test_who_waits_is_served_in_order(plane: Plane, client: Any, partition: str, by: str) -> None:
    plane.witness.kv_create_partition(partition, quota={"rows": 4})
    fill(plane.witness, partition, 4)
    sizes = [2, 1, 1, 2]
    waiters: list[Waiter] = []
    for number, rows in enumerate(sizes):
        keys = [f"w{number}-{i}" for i in range(rows)]
        one = plane.another()
        waiters.append(
            Waiter(plane, partition, one.kv_batch_put, keys, partition, None, [{}] * rows,
                   timeout=20)
        )  # fmt: skip
    assert waiting(client, partition) == 4

    def clear(key: str) -> None:
        if by == "keys":
            assert client.kv_clear([key], partition) == 1
        else:
            client.kv_put(key, partition, tags={"done": True}, must_exist=True)
            assert client.kv_clear(None, partition, where={"done": True}) == 1

    clear("full-0")
    # One row is free. The second in line would fit, and waits for the first all the same.
    assert waiting(client, partition) == 4
    clear("full-1")
    revisions = [waiters[0].result().revision]
    assert waiting(client, partition) == 3
    clear("full-2")
    revisions.append(waiters[1].result().revision)
    clear("full-3")
    revisions.append(waiters[2].result().revision)
    assert waiters[3].waits
    client.kv_clear(["w0-0", "w0-1"], partition)
    revisions.append(waiters[3].result().revision)
    assert revisions == sorted(revisions)


def test_whoever_comes_later_does_not_overtake(plane: Plane, client: Any, partition: str) -> None:
    client.kv_create_partition(partition, quota={"rows": 4})
    fill(client, partition, 3)
    first = Waiter(
        plane, partition, plane.another().kv_batch_put, ["a", "b"], partition, None, [{}, {}],
        timeout=20,
    )  # fmt: skip
    with pytest.raises(QuotaExceeded, match="others who came before still wait in line"):
        short(client.kv_put, "c", partition, tags={})
    # Something wrong is said at once, whoever waits.
    with pytest.raises(QuotaExceeded, match="larger than the whole quota"):
        client.kv_batch_put([f"k{i}" for i in range(5)], partition, None, [{}] * 5, timeout=20)
    with pytest.raises(KeyNotFound):
        client.kv_put("c", partition, tags={}, must_exist=True, timeout=20)
    client.kv_clear(["full-0"], partition)
    first.result()


def test_when_the_first_gives_up_the_next_is_served(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_create_partition(partition, quota={"rows": 4})
    fill(client, partition, 3)
    large = Waiter(
        plane, partition, plane.another().kv_batch_put, ["a", "b"], partition, None, [{}, {}],
        timeout=1.0,
    )  # fmt: skip
    small = Waiter(plane, partition, client.kv_put, "c", partition, tags={}, timeout=20)
    assert small.waits
    with pytest.raises(QuotaExceeded):
        large.result()
    small.result()
    assert set(listed(client, partition)) == {"full-0", "full-1", "full-2", "c"}


def test_raising_a_quota_wakes_who_waits(plane: Plane, client: Any, partition: str) -> None:
    client.kv_create_partition(partition, quota=Quota(rows=1))
    fill(client, partition, 1)
    waiters = [
        Waiter(plane, partition, plane.another().kv_put, f"w{i}", partition, tags={}, timeout=20)
        for i in range(3)
    ]
    plane.witness.kv_create_partition(partition, quota={"rows": 3})
    for waiter in waiters[:2]:
        waiter.result()
    assert waiting(client, partition) == 1
    assert waiters[2].waits
    plane.witness.kv_create_partition(partition, quota={})  # no limit at all
    waiters[2].result()
    assert client.kv_list_partitions()[partition]["quota"] is None


def test_lowering_a_quota_tells_who_never_will_have_room(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_create_partition(partition, quota={"rows": 4})
    fill(client, partition, 4)
    keys = ["a", "b", "c"]
    waiter = Waiter(
        plane, partition, client.kv_batch_put, keys, partition, None, [{}] * 3, timeout=60
    )
    plane.witness.kv_create_partition(partition, quota={"rows": 2})
    with pytest.raises(QuotaExceeded, match="larger than the whole quota"):
        waiter.result()


# -- producers -------------------------------------------------------------------------------


@LOCAL
def test_a_producer_at_its_own_limit_holds_up_nobody_else(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_create_partition(partition, quota={"rows": 100, "producer_rows": 2})
    other = plane.another()
    client.kv_batch_put(["a", "b"], partition, None, [{}, {}])
    waiter = Waiter(plane, partition, client.kv_put, "c", partition, tags={}, timeout=20)
    assert waiter.waits
    other.kv_put("d", partition, tags={}, timeout=5)
    other.begin_group("u", partition, n=1, timeout=5)
    with pytest.raises(QuotaExceeded, match="producer") as full:
        short(other.kv_put, "e", partition, tags={})
    assert other._core.client_id in str(full.value) if hasattr(other, "_core") else True
    # Its own later puts do not overtake, even where they would fit.
    behind = Waiter(plane, partition, client.kv_put, "f", partition, tags={}, timeout=20)
    plane.witness.kv_clear(["a"], partition)
    waiter.result()
    assert behind.waits
    plane.witness.kv_clear(["b"], partition)
    behind.result()


@LOCAL
def test_bytes_of_one_producer(plane: Plane, client: Any, partition: str) -> None:
    client.kv_create_partition(partition, quota={"producer_bytes": 2 * PAGE})
    client.kv_put("a", partition, page())
    client.kv_put("b", partition, page())
    plane.another().kv_put("c", partition, page())
    with pytest.raises(QuotaExceeded) as full:
        short(client.kv_put, "d", partition, page())
    assert (full.value.used_bytes, full.value.limit_bytes) == (2 * PAGE, 2 * PAGE)


# -- groups ----------------------------------------------------------------------------------


def test_groups_reserve_their_room_and_wait_for_it(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_create_partition(partition, quota={"bytes": 8 * PAGE})
    first = client.begin_group("u", partition, n=2, declared_bytes=4 * PAGE)
    second = client.begin_group("v", partition, n=2, declared_bytes=4 * PAGE)
    with pytest.raises(QuotaExceeded) as full:
        short(client.begin_group, "w", partition, n=1, declared_bytes=PAGE)
    assert (full.value.used_bytes, full.value.limit_bytes) == (8 * PAGE, 8 * PAGE)
    assert "w" not in listed(client, partition)
    third = Waiter(
        plane, partition, plane.another().begin_group, "w", partition, n=1,
        declared_bytes=4 * PAGE, timeout=20,
    )  # fmt: skip
    # What is reserved is used without waiting, by puts and by what is written back to them.
    keys = ["u_0", "u_1"]
    client.kv_batch_put(
        keys, partition, {"x": torch.zeros(2, 400).long()}, attempt=first, timeout=5
    )
    client.kv_put("u_0", partition, {"score": torch.tensor(1.0)}, must_exist=True, timeout=5)
    client.kv_put("v_0", partition, page(), attempt=second, timeout=5)
    client.end_group(first, "finished")
    client.end_group(second, "failure")
    client.kv_clear(["u_0"], partition)
    assert third.waits  # the room of a group is kept until the last of its rows is gone
    client.kv_clear(["u_1"], partition)
    assert third.result() > second
    about = client.kv_list_partitions()[partition]
    assert about["held_bytes"] == 4 * PAGE + 3 * PAGE  # of the new one, and of v's beside v_0


def test_a_full_partition_cannot_lock_its_own_groups_out(
    plane: Plane, client: Any, partition: str
) -> None:
    """Group-less puts wait in line; what is needed to empty the partition goes past them."""
    client.kv_create_partition(partition, quota={"rows": 4, "bytes": 16 * PAGE})
    attempt = client.begin_group("u", partition, n=3, declared_bytes=8 * PAGE)
    client.kv_put("plain", partition, tags={})
    waiter = Waiter(plane, partition, plane.another().kv_put, "more", partition, page(), timeout=20)
    for i in range(3):
        client.kv_put(f"u_{i}", partition, page(i), {"uid": "u"}, attempt=attempt, timeout=5)
    client.end_group(attempt, "finished", timeout=5)
    keys = client.kv_wait(partition, {"uid": "u"}, count=1, group_by="uid", timeout=5).keys
    assert len(keys) == 3
    client.kv_batch_put(keys, partition, {"adv": torch.ones(3)}, must_exist=True, timeout=5)
    client.kv_put("u", partition, tags={"status": "trained"}, must_exist=True, timeout=5)
    assert waiter.waits
    client.kv_clear([*keys, "u"], partition)
    waiter.result()


def test_groups_count_the_rows_of_their_sessions(client: Any, partition: str) -> None:
    client.kv_create_partition(partition, quota={"rows": 8})
    attempts = [client.begin_group(f"u{i}", partition, n=4) for i in range(2)]
    with pytest.raises(QuotaExceeded, match="4 more rows: 8 of 8 rows"):
        short(client.begin_group, "u2", partition, n=4)
    for i, attempt in enumerate(attempts):
        client.kv_batch_put(
            [f"u{i}_{j}" for j in range(4)], partition, None, [{}] * 4, attempt=attempt, timeout=5
        )
        # More than it said: a session may have several trajectories.
        client.kv_put(f"u{i}_more", partition, tags={}, attempt=attempt, timeout=5)
        client.end_group(attempt, "finished")
    client.kv_clear(None, partition, where={"is_prompt": {"exists": False}})
    client.begin_group("u3", partition, n=8, timeout=5)


def test_a_group_is_refused_at_once_where_it_never_will_have_room(
    client: Any, partition: str
) -> None:
    client.kv_create_partition(partition, quota={"bytes": 8 * PAGE, "rows": 4})
    for n, declared in ((1, 8 * PAGE + 1), (5, PAGE)):
        with pytest.raises(QuotaExceeded, match="larger than the whole quota"):
            client.begin_group("u", partition, n=n, declared_bytes=declared, timeout=20)
    for declared in (None, 0):
        with pytest.raises(InvalidRequest, match="declare what the group will take"):
            client.begin_group("u", partition, n=1, declared_bytes=declared)
    client.kv_create_partition(partition, quota={"bytes": 8 * PAGE, "group_bytes": 3 * PAGE})
    client.begin_group("u", partition, n=1)
    assert client.status()["held_bytes"] == {partition: 3 * PAGE}


def test_beyond_what_it_declared_a_group_has_a_margin(client: Any, partition: str) -> None:
    attempt = client.begin_group("u", partition, n=2, declared_bytes=16 * PAGE)
    margin = 4 * PAGE + (64 << 10)
    size = (16 * PAGE + margin) // PAGE - 1  # all but one of the pages
    large = {"x": torch.zeros((size * PAGE - 256) // 8, dtype=torch.int64)}
    client.kv_put("u_0", partition, large, attempt=attempt)
    for key in ("u_0", "u_1"):
        with pytest.raises(QuotaExceeded, match=r"group 'u' .* declared 65536 bytes") as full:
            client.kv_put(key, partition, {"y": torch.zeros(2000)}, attempt=attempt, timeout=20)
        assert full.value.limit_bytes == 16 * PAGE + margin
        assert full.value.used_bytes == size * PAGE
    client.kv_put("u_1", partition, {"y": torch.zeros(900)}, attempt=attempt)  # one page
    # What is written back is not refused for it.
    client.kv_put("u_0", partition, {"y": torch.zeros(9000)}, must_exist=True, timeout=5)
    assert set(listed(client, partition)) == {"u", "u_0", "u_1"}


def test_a_group_begins_anew_in_a_full_partition(client: Any, partition: str) -> None:
    client.kv_create_partition(partition, quota={"bytes": 4 * PAGE, "rows": 2})
    first = client.begin_group("u", partition, n=2, declared_bytes=4 * PAGE)
    client.kv_put("u_0", partition, page(1), attempt=first)
    second = client.begin_group("u", partition, n=2, declared_bytes=4 * PAGE, timeout=5)
    client.kv_put("u_0", partition, page(2), attempt=second, timeout=5)
    assert client.kv_list_partitions()[partition]["held_bytes"] == 3 * PAGE


# -- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "text"),
    [
        ({"bytes": PAGE, "group_bytes": 2 * PAGE}, "no group could ever begin"),
        ({"producer_bytes": PAGE, "group_bytes": 2 * PAGE}, "no group could ever begin"),
        ({"bytes": 2 * PAGE}, "is less than one group"),
        ({"rows": 3}, "is less than one group"),
        ({"producer_rows": 3}, "is less than one group"),
        ({"rows": 0}, "positive number"),
        ({"rows": -1}, "positive number"),
        ({"rows": True}, "positive number"),
        ({"bytes": 1.5}, "positive number"),
        ({"keys": 5}, "quota"),
        (5, "quota"),
        ([["rows", 5]], "quota"),
    ],
)
def test_settings_that_could_block_for_ever_are_refused(
    client: Any, partition: str, quota: Any, text: str
) -> None:
    client.kv_create_partition(partition, quota={"rows": 10, "bytes": 8 * PAGE})
    client.begin_group("u", partition, n=4, declared_bytes=4 * PAGE)
    with pytest.raises(InvalidRequest, match=text):
        client.kv_create_partition(partition, quota=quota)
    about = client.kv_list_partitions()[partition]
    assert about["quota"] == {"rows": 10, "bytes": 8 * PAGE}


def test_a_quota_and_a_claim_that_could_never_be_served_do_not_go_together(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_create_partition(partition, quota={"rows": 4})
    with pytest.raises(InvalidRequest, match="there can never be as many"):
        client.kv_claim(partition, "train", count=5, timeout=20)
    with under_way(plane, client.kv_claim, partition, "train", count=3, timeout=20) as claim:
        with pytest.raises(InvalidRequest, match="less than the 3 that a claim waits for"):
            plane.witness.kv_create_partition(partition, quota={"rows": 2})
        plane.witness.kv_create_partition(partition, quota={"rows": 3})
        fill(plane.witness, partition, 3)
        assert len(claim.result(20)) == 3


def test_a_quota_that_is_not_named_stays(client: Any, partition: str) -> None:
    client.kv_create_partition(partition, quota={"rows": 10})
    client.kv_create_partition(partition, retention={"versions": 2})
    about = client.kv_list_partitions()[partition]
    assert (about["quota"], about["retention"]) == ({"rows": 10}, {"versions": 2})


# -- while somebody waits --------------------------------------------------------------------


def test_a_put_that_waited_does_not_bring_back_what_was_cleared_meanwhile(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_create_partition(partition, quota={"rows": 3})
    fill(client, partition, 3)
    waiter = Waiter(
        plane, partition, client.kv_batch_put, ["full-0", "new"], partition, None, [{}, {}],
        timeout=20,
    )  # fmt: skip
    plane.witness.kv_clear(["full-0"], partition)
    with pytest.raises(StaleWrite) as stale:
        waiter.result()
    assert stale.value.keys == ["full-0"]
    assert set(listed(client, partition)) == {"full-1", "full-2"}


def test_who_waits_is_told_when_a_partition_is_sealed_or_dropped(
    plane: Plane, client: Any, partition: str
) -> None:
    for name, end in (("sealed", "kv_seal_partition"), ("dropped", "kv_drop_partition")):
        of = f"{partition}-{name}"
        client.kv_create_partition(of, quota={"rows": 1})
        fill(client, of, 1)
        put = Waiter(plane, of, plane.another().kv_put, "new", of, tags={}, timeout=60)
        large = Waiter(plane, of, plane.another().kv_put, "large", of, page(), timeout=60)
        group = Waiter(plane, of, plane.another().begin_group, "u", of, n=1, timeout=60)
        getattr(plane.witness, end)(of)
        of_put, of_group = {
            "sealed": (InvalidRequest, InvalidRequest),
            "dropped": (StaleWrite, PartitionNotFound),
        }[name]
        for waiter, error in ((put, of_put), (large, of_put), (group, of_group)):
            with pytest.raises(error, match=name):
                waiter.result()
        if name == "sealed":
            assert set(listed(client, of)) == {"full-0"}
        else:
            assert of not in client.kv_list_partitions()
    assert client.status()["held_bytes"] == {}


# -- connections that break ------------------------------------------------------------------


@contextmanager
def cut_plane(settings: dict[str, Any]) -> Iterator[tuple[ThreadPlane, Any]]:
    with thread_plane(settings) as plane, plane.connect() as client:
        yield plane, client


def test_who_waits_is_served_once_however_often_connections_break(
    plane_settings: dict[str, Any],
) -> None:
    with cut_plane(plane_settings) as (plane, client):
        client.kv_create_partition("p", quota={"rows": 2})
        client.kv_batch_put(["a", "b"], "p", None, [{}, {}])
        done: list[str] = []
        others = [plane.connect() for _ in range(3)]

        def put(number: int) -> None:
            key = f"w{number}"
            fields = None if number == 1 else {"x": torch.arange(100)}
            tags = {} if number == 1 else None
            others[number].kv_put(key, "p", fields, tags, timeout=30)
            done.append(key)

        threads: list[threading.Thread] = []
        for number in range(3):
            threads.append(threading.Thread(target=put, args=(number,)))
            threads[-1].start()
            eventually(lambda: waiting(client, "p") == len(threads), "it waits")
        for _ in range(3):
            cut_and_come_again(plane, "p")
        revision = client.kv_list("p").revision.n
        client.kv_clear(["a", "b"], "p")
        eventually(lambda: len(done) == 2, "two have room")
        client.kv_clear(done[:1], "p")
        for thread in threads:
            thread.join(30.0)
        assert sorted(done) == ["w0", "w1", "w2"]
        listing = client.kv_list("p")
        assert set(listing.keys) == set(done[1:])
        assert listing.revision.n == revision + 5  # three puts and two clears
        client.kv_clear(None, "p", where={})
        eventually(lambda: used(client) == 0, "no block of a broken try is left")
        for other in others:
            other.close()


def test_who_goes_away_while_waiting_leaves_the_line(
    plane_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Connection.call

    def call_for_a_day(connection: Any, verb: str, body: Any, *rest: Any) -> Any:
        # The server believes that there is a day, and hears of the end by the connection alone.
        if verb == "begin_group":
            body = [*body[:5], 86_400.0, *body[6:]]
        elif verb in ("put_tags", "put_block"):
            body = (PutMeta.unpack(body[0])._replace(wait_s=86_400.0).pack(), *body[1:])
        return call(connection, verb, body, *rest)

    with cut_plane(plane_settings) as (plane, client):
        client.kv_create_partition("p", quota={"rows": 1})
        client.kv_put("a", "p", tags={})
        monkeypatch.setattr(Connection, "call", call_for_a_day)
        calls: list[tuple[str, dict[str, Any]]] = [
            ("kv_put", {"tags": {}}), ("kv_put", {"fields": page()}), ("begin_group", {"n": 1}),
        ]  # fmt: skip
        for verb, named in calls:
            with plane.connect() as impatient:
                with pytest.raises(DeadlineExceeded):
                    getattr(impatient, verb)("b", "p", **named, timeout=0.3)
                eventually(lambda: waiting(client, "p") == 0, "nobody waits any more")
        client.kv_clear(["a"], "p")
        assert client.kv_list("p").keys == []
        eventually(lambda: used(client) == 0, "no block is left")


def cut_and_come_again(plane: ThreadPlane, partition: str) -> None:
    """Cut every connection; returns when all who waited are in line again."""

    def line() -> dict[int, Any]:
        line = plane.server.tags.admission._lines.get(partition)
        return {} if line is None else dict(line.by_place)

    before = plane.call(line)
    plane.cut_connections()

    def again() -> bool:
        now = plane.call(line)
        return len(now) == len(before) and not set(before.values()) & set(now.values())

    eventually(again, "all who waited are in line again")


def test_a_begin_that_waits_is_made_once_when_its_connection_breaks(
    plane_settings: dict[str, Any],
) -> None:
    with cut_plane(plane_settings) as (plane, client):
        client.kv_create_partition("p", quota={"bytes": 4 * PAGE})
        client.begin_group("u", "p", n=1, declared_bytes=4 * PAGE)
        other = plane.connect()
        begun: list[int] = []

        def begin() -> None:
            begun.append(other.begin_group("v", "p", n=1, declared_bytes=4 * PAGE, timeout=30))

        thread = threading.Thread(target=begin)
        thread.start()
        eventually(lambda: waiting(client, "p") == 1, "it waits")
        for _ in range(3):
            cut_and_come_again(plane, "p")
        revision = client.kv_list("p").revision.n
        client.kv_clear(["u"], "p", retire=True)
        thread.join(30.0)
        assert begun == [revision + 2]
        assert client.status()["held_bytes"] == {"p": 4 * PAGE}
        assert client.kv_list_partitions()["p"]["groups"] == 1
        other.close()


def test_a_put_told_that_there_is_no_room_is_not_made_after_all(
    plane_settings: dict[str, Any],
) -> None:
    """Its first try, on a connection that broke, waits no longer than the one that is answered."""
    with cut_plane(plane_settings) as (plane, client):
        client.kv_create_partition("p", quota={"rows": 1})
        client.kv_put("a", "p", tags={})
        cuts: list[int] = []

        def put() -> Any:
            deadline = time.monotonic() + 1.0
            return put_batch(client._core, ["b"], "p", {"x": torch.zeros(1, 9)}, None, 0, deadline)

        other = plane.connect()

        def cut() -> None:
            eventually(lambda: waiting(other, "p") == 1, "it waits")
            cuts.append(1)
            plane.cut_connections()

        thread = threading.Thread(target=cut)
        thread.start()
        with pytest.raises(QuotaExceeded):
            client._drive(put(), time.monotonic() + 5.0)
        thread.join(30.0)
        assert cuts
        other.kv_clear(["a"], "p")
        assert waiting(other, "p") == 0
        assert other.kv_list("p").keys == []
        eventually(lambda: used(other) == 0, "its blocks are gone")
        other.close()


def used(client: Any) -> int:
    return sum(store["used_bytes"] for store in client.status()["values"].values())


# -- a value store that is full --------------------------------------------------------------


@pytest.fixture(scope="module")
def full_plane(
    plane: Plane, plane_settings: dict[str, Any], request: pytest.FixtureRequest
) -> Iterator[Plane]:
    """A plane of the same kind, every store of which is full of rows of the partition `most`."""
    small = {**plane_settings, "capacity_bytes": 4 << 20, "segment_bytes": 4 << 20}
    with hosted(plane.kind, f"full-{plane.kind}-{os.getpid()}", small, request) as full:
        client = full.client
        client.kv_put("x", "little", page())
        for i in range(2 * len(client.status()["values"])):
            client.kv_put(f"k{i}", "most", {"x": torch.zeros(500_000)})
        claim = client.kv_claim("most", "fast", count=1, timeout=20)
        client.kv_commit(claim)
        client.kv_commit(client.kv_claim("most", "slow", count=1, timeout=20))
        client.kv_commit(client.kv_claim("most", "fast", count=1, timeout=20))
        yield full


@pytest.mark.parametrize("size", [300_000, 60_000], ids=["large", "small"])
def test_a_full_value_store_says_whose_rows_fill_it(full_plane: Plane, size: int) -> None:
    """Whatever partition the put is for: rows of the one that holds the most are in its way."""
    client = full_plane.client
    if full_plane.kind == "ray-remote":
        client = client.here
    with pytest.raises(QuotaExceeded) as full:
        short(client.kv_put, "new", "little", {"y": torch.zeros(size)})
    error = full.value
    assert error.oldest_keys is not None
    assert error.oldest_keys[0] == "k1"  # both tasks have committed the first
    assert error.lagging_task == "slow"
    assert error.limit_bytes == 4 << 20
    assert 4_000_000 <= error.used_bytes <= 4 << 20
    assert str(error).endswith("; partition 'most' holds the most (task 'slow' lags most)")
    with pytest.raises(QuotaExceeded) as full:
        short(client.begin_group, "u", "little", n=1, declared_bytes=4 * size)
    assert (full.value.oldest_keys, full.value.lagging_task) == (error.oldest_keys, "slow")
    # What would not fit into an empty store is in nobody's way.
    with pytest.raises(QuotaExceeded, match="larger than the whole value store") as full:
        client.kv_put("new", "little", {"y": torch.zeros(2_000_000)}, timeout=20)
    assert full.value.oldest_keys is None


@LOCAL
def test_who_fills_a_store_is_left_out_where_it_cannot_be_asked(full_plane: Plane) -> None:
    """The error says why there is no room, whatever becomes of the second question."""
    put = put_batch(
        full_plane.core, ["new"], "little", {"y": torch.zeros(1, 300_000)}, None, 0,
        time.monotonic() + 5.0,
    )  # fmt: skip

    def before(effect: Any) -> None:
        if asks(effect, "fullest"):
            raise Broken("lost by the test")

    with pytest.raises(QuotaExceeded, match="clear rows that were consumed") as full:
        full_plane.step(put, before=before)
    assert (full.value.oldest_keys, full.value.lagging_task) == (None, None)


# -- faults seen elsewhere -------------------------------------------------------------------


def test_a_producer_ten_times_as_fast_as_its_consumer_loses_nothing(
    plane: Plane, client: Any, partition: str
) -> None:
    """ray#24329: producers outran the consumer, the store filled, actors hung without a word."""
    capacity, total = 100, 400
    client.kv_create_partition(partition, quota={"rows": capacity})
    producer = plane.another()
    refused: list[QuotaExceeded] = []

    def produce() -> None:
        for i in range(total):
            while True:
                try:
                    producer.kv_put(f"k{i}", partition, {"x": torch.tensor([i])}, {"i": i},
                                    timeout=1.0)  # fmt: skip
                    break
                except QuotaExceeded as full:
                    refused.append(full)

    thread = threading.Thread(target=produce)
    thread.start()
    eventually(lambda: len(client.kv_list(partition)) == capacity, "the partition is full")
    eventually(lambda: refused, "the producer is told")
    consumed: list[int] = []
    while len(consumed) < total:
        assert len(client.kv_list(partition, columns=[])) <= capacity
        claim = client.kv_claim(
            partition, "train", count=min(10, total - len(consumed)), timeout=20
        )
        rows = client.kv_batch_get(claim.keys, partition, layout="list")["x"]
        consumed += [int(row[0]) for row in rows]
        client.kv_commit(claim)
        client.kv_clear(claim.keys, partition)
    thread.join(30.0)
    assert consumed == list(range(total)), "in order, each once, none dropped"
    assert f"{capacity} of {capacity} rows" in str(refused[0])
    assert refused[0].oldest_keys == [f"k{i}" for i in range(5)]


def test_room_of_consumed_rows_is_there_at_once_and_nothing_unread_goes(
    client: Any, partition: str
) -> None:
    """TorchSpec#72: consumed rows were held until a lease of 300 s ended, then unread ones went."""
    client.kv_create_partition(partition, quota={"bytes": 10 * PAGE, "rows": 10})
    for i in range(10):
        client.kv_put(f"a{i}", partition, page(i))
    claim = client.kv_claim(partition, "train", count=5, lease_s=300.0, timeout=5)
    assert claim.keys == [f"a{i}" for i in range(5)]
    with pytest.raises(QuotaExceeded):  # claimed is not consumed: nothing is taken away for it
        short(client.kv_put, "b0", partition, page())
    client.kv_commit(claim)
    client.kv_clear(claim.keys, partition)
    started = time.monotonic()
    for i in range(5):
        client.kv_put(f"b{i}", partition, page(i), timeout=5)
    assert time.monotonic() - started < 2.0
    with pytest.raises(QuotaExceeded):
        short(client.kv_put, "c", partition, page())
    keys = [f"a{i}" for i in range(5, 10)] + [f"b{i}" for i in range(5)]
    assert client.kv_list(partition).keys == keys
    values = client.kv_batch_get(keys, partition, layout="list")["x"]
    assert [int(value[0]) for value in values] == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]
