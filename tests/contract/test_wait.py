"""kv_wait: woken by whatever makes enough rows match, and answered with one moment."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from dataplane.errors import DeadlineExceeded, InvalidRequest, PartitionNotFound
from dataplane.types import KVBatchMeta
from tests.contract.planes import Plane
from tests.contract.waits import in_vain, under_way

DONE = {"status": "done"}


def group(
    client: Any,
    partition: str,
    uid: str,
    tags: list[dict[str, Any]],
    status: str | None = "finished",
) -> list[str]:
    """A group with a trajectory of each of these tags; their keys. Without a status it goes on."""
    attempt = client.begin_group(uid, partition, n=len(tags))
    keys = [f"{uid}_{i}" for i in range(len(tags))]
    client.kv_batch_put(keys, partition, None, tags, attempt=attempt)
    if status is not None:
        client.end_group(attempt, status)
    return keys


# -- answers ---------------------------------------------------------------------------------


def test_what_is_there_already_comes_at_once_oldest_revision_first(
    client: Any, partition: str
) -> None:
    client.kv_batch_put(["a", "b", "c", "d"], partition, {"x": torch.arange(4)}, [DONE] * 4)
    client.kv_put("b", partition, {"y": torch.tensor(1)})
    put = client.kv_put("a", partition, tags={"score": 0.5, "status": "used"})
    rows = client.kv_wait(partition, DONE, count=2, timeout=5)
    assert type(rows) is KVBatchMeta
    assert rows.keys == ["c", "d", "b"]
    assert rows.tags == [DONE] * 3
    assert rows.fields == ["x"]
    assert (rows.partition_id, rows.revision) == (partition, put.revision)


def test_every_row_matches_a_where_that_asks_nothing(client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b"], partition, None, [{}, {"v": 1}])
    for where in (None, {}):
        assert client.kv_wait(partition, where, count=2, timeout=5).keys == ["a", "b"]
    assert client.kv_wait(partition, timeout=5).keys == ["a", "b"]


def test_many_rows_come_whole(client: Any, partition: str) -> None:
    keys = [f"k{i}" for i in range(3000)]
    tags = [{"n": i, "s": f"s{i}", "l": [i]} for i in range(3000)]
    client.kv_batch_put(keys, partition, None, tags)
    client.kv_batch_put(keys[1000:1100], partition, None, [{"late": True}] * 100)
    rows = client.kv_wait(partition, {"n": {">=": 500}}, count=2500, timeout=10)
    assert rows.keys == keys[500:1000] + keys[1100:] + keys[1000:1100]
    assert rows.tags[:500] == tags[500:1000]
    assert rows.tags[-100:] == [{**tag, "late": True} for tag in tags[1000:1100]]


# -- what wakes ------------------------------------------------------------------------------


def test_a_put_wakes(plane: Plane, client: Any, partition: str) -> None:
    client.kv_put("a", partition, tags={"status": "running"})
    with under_way(plane, client.kv_wait, partition, DONE, timeout=20) as rows:
        assert not rows.done()
        put = plane.witness.kv_put("b", partition, {"x": torch.arange(3)}, DONE)
        woken = rows.result(20)
    assert (woken.keys, woken.fields, woken.revision) == (["b"], ["x"], put.revision)


def test_a_tag_update_wakes(plane: Plane, client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b"], partition, None, [{"v": 1}, {"v": 2}])
    with under_way(plane, client.kv_wait, partition, DONE, count=2, timeout=20) as rows:
        plane.witness.kv_put("b", partition, tags=DONE)
        plane.witness.status()
        assert not rows.done()
        plane.witness.kv_put("a", partition, tags=DONE)
        assert rows.result(20).keys == ["b", "a"]
    assert rows.result().tags == [{"v": 2, **DONE}, {"v": 1, **DONE}]


def test_a_clear_wakes_who_waits_for_what_is_left(
    plane: Plane, client: Any, partition: str
) -> None:
    keys = group(client, partition, "u", [{"ok": True}, {"ok": False}, {"ok": True}])
    where = {"ok": True}
    named = {"group_by": "uid", "timeout": 20}
    with under_way(plane, client.kv_wait, partition, where, **named) as rows:
        assert not rows.done()
        plane.witness.kv_clear(keys[1:2], partition)
        assert rows.result(20).keys == [keys[0], keys[2]]


def test_rows_of_one_put_come_together(plane: Plane, client: Any, partition: str) -> None:
    with under_way(plane, client.kv_wait, partition, DONE, count=4, timeout=20) as rows:
        for name in "ab":
            keys = [f"{name}{i}" for i in range(3)]
            plane.witness.kv_batch_put(keys, partition, None, [DONE] * 3)
        assert rows.result(20).keys == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_what_does_not_match_any_more_does_not_count(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_batch_put(["a", "b"], partition, None, [DONE, DONE])
    with under_way(plane, client.kv_wait, partition, DONE, count=3, timeout=20) as rows:
        plane.witness.kv_put("a", partition, tags={"status": "used"})
        plane.witness.kv_clear(["b"], partition)
        plane.witness.kv_batch_put(["c", "d"], partition, None, [DONE, DONE])
        plane.witness.status()
        assert not rows.done()
        plane.witness.kv_put("e", partition, tags=DONE)
        assert rows.result(20).keys == ["c", "d", "e"]


def test_those_who_wait_for_less_are_woken_first(plane: Plane, client: Any, partition: str) -> None:
    with (
        under_way(plane, client.kv_wait, partition, DONE, count=1, timeout=20) as one,
        under_way(plane, client.kv_wait, partition, DONE, count=3, timeout=20) as three,
        under_way(plane, client.kv_wait, partition, DONE, count=2, timeout=20) as two,
    ):
        plane.witness.kv_put("a", partition, tags=DONE)
        assert one.result(20).keys == ["a"]
        plane.witness.kv_put("b", partition, tags=DONE)
        assert two.result(20).keys == ["a", "b"]
        assert not three.done()
        plane.witness.kv_put("c", partition, tags=DONE)
        assert three.result(20).keys == ["a", "b", "c"]


# -- one moment ------------------------------------------------------------------------------


def test_an_answer_is_of_one_revision(plane: Plane, client: Any, partition: str) -> None:
    """A writer moves pairs of rows from round to round; no answer has half a round."""
    keys = [f"k{i}" for i in range(1200)]  # two chunks of the store
    client.kv_batch_put(keys, partition, None, [{"round": 0, "side": i % 2} for i in range(1200)])
    over = threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            pair = [keys[number % 100], keys[1100 + number % 100]]
            plane.witness.kv_batch_put(pair, partition, None, [{"round": number}] * 2)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        last = client.kv_list(partition, limit=1).revision
        for _ in range(15):
            rows = client.kv_wait(partition, {"round": {">=": 0}}, count=1200, timeout=20)
            assert len(rows) == 1200
            rounds: dict[int, int] = {}
            for tags in rows.tags:
                rounds[tags["round"]] = rounds.get(tags["round"], 0) + 1
            assert set(rounds.values()) - {rounds.get(0)} <= {2}
            assert [tags["round"] for tags in rows.tags] == sorted(t["round"] for t in rows.tags)
            assert rows.revision >= last
            last = rows.revision
    finally:
        over.set()
        writer.join(20)
    assert not writer.is_alive()


# -- groups ----------------------------------------------------------------------------------


def test_a_group_counts_only_when_it_has_ended_as_finished(
    plane: Plane, client: Any, partition: str
) -> None:
    group(client, partition, "failed", [{}, {}], "failure")
    group(client, partition, "half", [{}], None)
    attempt = client.begin_group("u", partition, n=2)
    client.kv_batch_put(["u_0", "u_1"], partition, None, [{"i": 0}, {"i": 1}], attempt=attempt)
    client.kv_put("loose", partition, tags={"i": 2})
    with under_way(plane, client.kv_wait, partition, None, group_by="uid", timeout=20) as rows:
        assert not rows.done()
        ended = plane.witness.end_group(attempt, "finished")
        woken = rows.result(20)
    assert (woken.keys, woken.revision) == (["u_0", "u_1"], ended)


def test_all_whole_groups_come_and_all_of_each(client: Any, partition: str) -> None:
    first = group(client, partition, "a", [{"ok": True}] * 3)
    mixed = group(client, partition, "b", [{"ok": True}, {"ok": False}])
    last = group(client, partition, "c", [{"ok": True}])
    rows = client.kv_wait(partition, {"ok": True}, count=2, group_by="uid", timeout=10)
    assert rows.keys == [*first, *last]
    with pytest.raises(DeadlineExceeded):
        client.kv_wait(partition, {"ok": True}, count=3, group_by="uid", timeout=0.1)
    client.kv_put(mixed[1], partition, tags={"ok": True}, must_exist=True)
    rows = client.kv_wait(partition, {"ok": True}, count=3, group_by="uid", timeout=10)
    assert rows.keys == [*first, mixed[0], *last, mixed[1]]


def test_a_group_that_begins_anew_is_not_whole(client: Any, partition: str) -> None:
    group(client, partition, "u", [{"n": 1}])
    client.begin_group("u", partition, n=1)
    with pytest.raises(DeadlineExceeded):
        client.kv_wait(partition, None, group_by="uid", timeout=0.1)


# -- partitions ------------------------------------------------------------------------------


def test_the_partition_need_not_exist_yet(plane: Plane, client: Any, partition: str) -> None:
    with under_way(plane, client.kv_wait, partition, DONE, timeout=20) as rows:
        assert not rows.done()
        assert partition not in plane.witness.status()["partitions"]
        plane.witness.kv_put("a", partition, tags={"status": "running"})
        plane.witness.kv_put("b", partition, tags=DONE)
        assert rows.result(20).keys == ["b"]


def test_a_partition_that_is_created_empty_is_waited_in(
    plane: Plane, client: Any, partition: str
) -> None:
    plane.witness.kv_create_partition(partition)
    with under_way(plane, client.kv_wait, partition, timeout=20) as rows:
        plane.witness.kv_put("a", partition, tags=DONE)
        assert rows.result(20).keys == ["a"]


def test_a_wait_ends_with_its_partition(plane: Plane, client: Any, partition: str) -> None:
    client.kv_put("a", partition, tags={"v": 1})
    with under_way(plane, client.kv_wait, partition, DONE, timeout=20) as rows:
        plane.witness.kv_drop_partition(partition)
        with pytest.raises(PartitionNotFound, match="was dropped while") as caught:
            rows.result(20)
    assert caught.value.partition_id == partition
    client.kv_put("b", partition, tags=DONE)
    assert client.kv_wait(partition, DONE, timeout=5).keys == ["b"]


# -- deadlines and bad input -----------------------------------------------------------------


def test_a_deadline_says_how_long_it_waited_and_what_is_missing(
    client: Any, partition: str
) -> None:
    client.kv_batch_put(["a", "b"], partition, None, [DONE, {"status": "running"}])
    error = in_vain(lambda: client.kv_wait(partition, DONE, count=2, timeout=0.3))
    assert 0.3 <= error.waited_s < 20
    assert f"partition {partition!r}" in str(error)
    assert "2 matching rows" in str(error)
    assert "1 of 2 rows match" in (error.explanation or "")
    assert error.explanation is not None
    assert error.explanation in str(error)
    error = in_vain(lambda: client.kv_wait(partition, DONE, group_by="uid", timeout=0.05))
    assert "1 whole group " in str(error)


def test_a_deadline_for_a_partition_that_never_came_says_so(client: Any, partition: str) -> None:
    error = in_vain(lambda: client.kv_wait(partition, DONE, timeout=0.1))
    assert f"there is no partition '{partition}'" in str(error)
    assert 0.1 <= error.waited_s < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count is a number of rows or groups, 1 or more, not 0"),
        ({"count": -1}, "count is a number"),
        ({"count": 1.0}, "count is a number"),
        ({"count": True}, "count is a number"),
        ({"count": None}, "count is a number"),
        ({"count": "2"}, "count is a number"),
        ({"group_by": "session_id"}, "group_by is None or 'uid', not 'session_id'"),
        ({"group_by": True}, "group_by is None or 'uid'"),
        ({"where": 5}, "where: a mapping"),
        ({"where": {"a": {"~": 1}}}, "where: at 'a': unknown operator"),
        ({"partition_id": 7}, "a partition_id is a string, not int"),
        ({"partition_id": None}, "a partition_id is a string, not NoneType"),
        ({"partition_id": ""}, "the empty string is no partition_id"),
        ({"partition_id": "../x"}, "partition_id '../x' has a '..' path component"),
        ({"timeout": -1}, "timeout is a positive number"),
        ({"timeout": float("inf")}, "timeout is a positive number"),
    ],
)
def test_a_wrong_argument_is_named(
    client: Any, partition: str, arguments: dict[str, Any], message: str
) -> None:
    named = {"partition_id": partition, "where": DONE, "count": 1, "timeout": 5, **arguments}
    with pytest.raises(InvalidRequest) as caught:
        client.kv_wait(named.pop("partition_id"), named.pop("where"), **named)
    assert message in str(caught.value)
