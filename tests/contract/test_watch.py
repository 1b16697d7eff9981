"""kv_watch: whole revisions in order, each key once, none lost, from wherever one stands."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from dataplane.errors import DeadlineExceeded, InvalidRequest, PartitionNotFound
from dataplane.types import Change, Revision
from tests.contract.planes import Plane, embedded_sync
from tests.contract.waits import Watch, in_vain, is_of_client, told, under_way

Rows = dict[str, dict[str, Any]]


def rows_of(listing: Any) -> Rows:
    return dict(zip(listing.keys, listing.tags, strict=True))


def apply(state: Rows, change: Change) -> None:
    """Bring what a reader has up to a Change."""
    if change.full:
        state.clear()
    state.update(zip(change.rows.keys, change.rows.tags, strict=True))
    for key in change.cleared:
        state.pop(key, None)


# -- what is told ----------------------------------------------------------------------------


def test_each_revision_is_told_in_order(client: Any, partition: str) -> None:
    start = client.kv_put("old", partition, tags={"v": 0}).revision
    first = client.kv_batch_put(["a", "b"], partition, {"x": torch.arange(2)}, [{"v": 1}, {"v": 2}])
    client.kv_clear(["old"], partition)
    last = client.kv_put("c", partition, tags={"v": 3})
    with Watch(client, partition, since=start, timeout=20) as change:
        one, two, three = change(), change(), change()
    assert (one.revision, told(one), one.full) == (first.revision, (["a", "b"], []), False)
    assert one.rows.tags == [{"v": 1}, {"v": 2}]
    assert (one.rows.fields, one.rows.partition_id) == (["x"], partition)
    assert one.rows.revision == one.revision
    assert told(two) == ([], ["old"])
    assert (three.revision, told(three)) == (last.revision, (["c"], []))
    assert one.revision < two.revision < three.revision
    assert three.rows.fields == []


def test_a_key_that_changed_again_is_told_once_with_all_between(
    client: Any, partition: str
) -> None:
    start = client.kv_put("z", partition, tags={"v": 0}).revision
    client.kv_batch_put(["a", "b"], partition, None, [{"v": 1}, {"v": 1}])
    client.kv_put("c", partition, tags={"v": 1})
    last = client.kv_put("b", partition, tags={"v": 2}).revision
    client.kv_put("d", partition, tags={"v": 1})
    with Watch(client, partition, since=start, timeout=20) as change:
        one, two = change(), change()
    assert (one.revision, told(one)) == (last, (["a", "b", "c"], []))
    assert one.rows.tags == [{"v": 1}, {"v": 2}, {"v": 1}]
    assert told(two) == (["d"], [])


def test_with_where_rows_that_match_now_are_told_and_clears(client: Any, partition: str) -> None:
    start = client.kv_put("other", partition, tags={"v": 2}).revision
    client.kv_batch_put(["a", "b"], partition, None, [{"v": 1}, {"v": 2}])
    client.kv_put("b", partition, tags={"w": 1})
    client.kv_put("other", partition, tags={"v": 1})
    client.kv_put("c", partition, tags={"v": 2})
    client.kv_clear(["c"], partition)
    client.kv_put("d", partition, tags={"v": 1})
    with Watch(client, partition, since=start, where={"v": 1}, timeout=20) as change:
        changes = [told(change()) for _ in range(4)]
    # What was cleared may have matched once, so it is always told.
    assert changes == [(["a"], []), (["other"], []), ([], ["c"]), (["d"], [])]


def test_rows_of_whole_revisions_come_together(plane: Plane, client: Any, partition: str) -> None:
    start = client.kv_put("z", partition, tags={}).revision
    keys = [f"k{i}" for i in range(5000)]
    client.kv_batch_put(keys, partition, None, [{"n": i} for i in range(5000)])
    client.kv_put("late", partition, tags={"n": 5000})
    with Watch(client, partition, since=start, timeout=20) as change:
        one, two = change(), change()
    assert told(one) == (keys, [])
    assert one.rows.tags == [{"n": i} for i in range(5000)]
    assert told(two) == (["late"], [])
    client.kv_clear(None, partition, where={"n": {">=": 100}})
    with Watch(client, partition, since=two.revision, timeout=20) as change:
        assert told(change()) == ([], [*keys[100:], "late"])
    with Watch(client, partition, since=start, where={"n": {"<": 50}}, timeout=20) as change:
        assert told(change()) == (keys[:50], [*keys[100:], "late"])


def test_what_a_new_attempt_drops_is_told_with_its_prompt(client: Any, partition: str) -> None:
    attempt = client.begin_group("u", partition, n=2)
    keys = ["u_0", "u_1"]
    start = client.kv_batch_put(keys, partition, None, [{}, {}], attempt=attempt).revision
    again = client.begin_group("u", partition, n=2)
    with Watch(client, partition, since=start, timeout=20) as change:
        one = change()
    assert (one.revision.n, told(one)) == (again, (["u"], keys))
    assert one.rows.tags[0]["attempt"] == again


# -- waking ----------------------------------------------------------------------------------


@pytest.mark.inside("a watch there waits at the plane whether or not anybody asks for its next")
def test_each_change_is_told_as_it_happens(plane: Plane, client: Any, partition: str) -> None:
    start = client.kv_put("a", partition, tags={"v": 1}).revision
    with Watch(client, partition, since=start, where={"v": 1}, timeout=20) as change:
        with under_way(plane, change) as next_one:
            assert not next_one.done()
            plane.witness.kv_put("b", partition, tags={"v": 2})
            plane.witness.status()
            assert not next_one.done()
            put = plane.witness.kv_put("c", partition, tags={"v": 1})
            assert next_one.result(20).revision == put.revision
            assert told(next_one.result()) == (["c"], [])
        with under_way(plane, change) as next_one:
            put = plane.witness.kv_put("b", partition, tags={"v": 1})
            assert told(next_one.result(20)) == (["b"], [])
        with under_way(plane, change) as next_one:
            plane.witness.kv_clear(["c"], partition)
            assert told(next_one.result(20)) == ([], ["c"])


def test_a_row_that_matches_no_more_is_not_told_and_stops_nobody(
    plane: Plane, client: Any, partition: str
) -> None:
    start = client.kv_put("a", partition, tags={"v": 1}).revision
    watch = Watch(client, partition, since=start, where={"v": 1}, timeout=20)
    with watch as change, under_way(plane, change) as next_one:
        plane.witness.kv_put("a", partition, tags={"v": 2})
        for _ in range(5):
            plane.witness.status()
        assert not next_one.done()
        plane.witness.kv_put("b", partition, tags={"v": 1})
        assert told(next_one.result(20)) == (["b"], [])


@pytest.mark.kinds("embedded-sync", "ray", "ray-remote")
def test_a_watch_begins_when_it_is_asked_for(client: Any, partition: str) -> None:
    client.kv_put("before", partition, tags={})
    with Watch(client, partition, timeout=20) as change:
        client.kv_put("after", partition, tags={})
        assert told(change()) == (["after"], [])


@pytest.mark.kinds("embedded-async")
def test_a_watch_of_coroutines_begins_with_its_first_step(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_put("before", partition, tags={})
    with Watch(client, partition, timeout=20) as change, under_way(plane, change) as next_one:
        assert not next_one.done()
        plane.witness.kv_put("after", partition, tags={})
        assert told(next_one.result(20)) == (["after"], [])


# -- nothing lost, nothing twice -------------------------------------------------------------


@pytest.mark.parametrize("where", [None, {"v": {"<": 2}}], ids=["all", "where"])
def test_a_reader_passes_through_states_that_have_been(
    plane: Plane, client: Any, partition: str, where: Any
) -> None:
    """One writer, whose every state is known by its revision; a reader that may lag."""
    r = random.Random(7)
    keys = [f"k{i}" for i in range(30)]
    start = client.kv_put("k0", partition, tags={"v": 0}).revision
    state: Rows = {"k0": {"v": 0}}
    states = {start: dict(state)}
    last = start

    def write() -> None:
        nonlocal last
        for i in range(300):
            some = r.sample(keys, r.randint(1, 4))
            if r.random() < 0.3 and any(key in state for key in some):
                plane.witness.kv_clear(some, partition)
                last = plane.witness.kv_list(partition, limit=0).revision
                for key in some:
                    state.pop(key, None)
            else:
                tags = [{"v": r.randint(0, 3), "i": i} for _ in some]
                last = plane.witness.kv_batch_put(some, partition, None, tags).revision
                for key, tag in zip(some, tags, strict=True):
                    state[key] = {**state.get(key, {}), **tag}
            states[last] = dict(state)
        last = plane.witness.kv_put("end", partition, tags={"v": 0}).revision
        state["end"] = {"v": 0}
        states[last] = dict(state)

    writer = threading.Thread(target=write)
    writer.start()
    changes: list[Change] = []
    got: Rows = {"k0": {"v": 0}}
    with Watch(client, partition, since=start, where=where, timeout=20) as change:
        while not changes or "end" not in changes[-1].rows.keys:
            changes.append(change())
    writer.join(20)
    at = start
    for one in changes:
        assert one.revision > at
        assert not one.full
        seen = [*one.rows.keys, *one.cleared]
        assert len(set(seen)) == len(seen) > 0
        at = one.revision
        if where is None:
            apply(got, one)
            assert got == states[at]
        else:
            there = states[at]
            assert all(there[k] == t for k, t in zip(one.rows.keys, one.rows.tags, strict=True))
            assert all(tags["v"] < 2 for tags in one.rows.tags)
            assert not set(one.cleared) & set(there)
    if where is None:
        assert got == state == rows_of(client.kv_list(partition))


def test_a_watch_goes_on_from_any_revision(client: Any, partition: str) -> None:
    revisions = [client.kv_put(f"k{i}", partition, tags={"i": i}).revision for i in range(6)]
    for i in (0, 3, 4):
        with Watch(client, partition, since=revisions[i], timeout=20) as change:
            assert [told(change())[0] for _ in range(5 - i)] == [[f"k{j}"] for j in range(i + 1, 6)]
    listing = client.kv_list(partition)
    client.kv_put("k9", partition, tags={})
    with Watch(client, partition, since=listing.revision, timeout=20) as change:
        assert told(change()) == (["k9"], [])


# -- beyond history --------------------------------------------------------------------------


def test_from_another_epoch_everything_is_told_first(client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b", "c"], partition, None, [{"v": 1}, {"v": 2}, {"v": 1}])
    put = client.kv_put("a", partition, tags={"w": 1})
    with Watch(client, partition, since=Revision(0, 999), where={"v": 1}, timeout=20) as change:
        one = change()
        assert (one.revision, told(one), one.full) == (put.revision, (["c", "a"], []), True)
        client.kv_put("d", partition, tags={"v": 1})
        two = change()
        assert (told(two), two.full) == ((["d"], []), False)


def test_everything_may_be_nothing(client: Any, partition: str) -> None:
    client.kv_put("a", partition, tags={"v": 2})
    with Watch(client, partition, since=Revision(0, 1), where={"v": 1}, timeout=20) as change:
        one = change()
    assert (told(one), one.full, one.rows.tags) == (([], []), True, [])


@pytest.fixture(scope="module")
def forgetful(plane_settings: dict[str, Any]) -> Any:
    """A plane whose history has room for ten changes."""
    with embedded_sync("forgetful", {**plane_settings, "history_changes": 10}) as plane:
        yield plane


def test_below_the_floor_of_history_everything_is_told_first(forgetful: Plane) -> None:
    client = forgetful.client
    start = client.kv_put("k0", "p", tags={"i": 0}).revision
    for i in range(1, 30):
        client.kv_put(f"k{i}", "p", tags={"i": i})
    with Watch(client, "p", since=start, timeout=20) as change:
        one = change()
        assert one.full
        assert told(one) == ([f"k{i}" for i in range(30)], [])
        client.kv_clear(["k3"], "p")
        two = change()
        assert (told(two), two.full) == (([], ["k3"]), False)
    client.kv_clear(None, "p", where={})


def test_who_was_there_all_along_is_not_told_everything(forgetful: Plane) -> None:
    """History forgets what no watch waited for: whoever waited knows that it missed nothing."""
    client, witness = forgetful.client, forgetful.witness
    start = client.kv_put("quiet", "q", tags={"v": 1}).revision
    for where in (None, {"v": 1}):
        watch = Watch(client, "q", since=start, where=where, timeout=20)
        with watch as change, under_way(forgetful, change) as next_one:
            for i in range(30):
                witness.kv_put(f"k{i}", "elsewhere", tags={})
                if where is not None:
                    witness.kv_put(f"k{i}", "q", tags={"v": 2})
            assert not next_one.done()
            put = witness.kv_put("loud", "q", tags={"v": 1})
            one = next_one.result(20)
            assert (one.revision, told(one), one.full) == (put.revision, (["loud"], []), False)
        start = one.revision
    for partition in ("q", "elsewhere"):
        client.kv_clear(None, partition, where={})


def test_a_partition_that_was_quiet_for_longer_than_history_reaches_has_lost_nothing(
    forgetful: Plane,
) -> None:
    client = forgetful.client
    start = client.kv_put("quiet", "calm", tags={"v": 1}).revision
    for i in range(30):
        client.kv_put(f"k{i}", "elsewhere", tags={})
    assert client.status()["history_floor"] > start.n
    listing = client.kv_list("calm", since=start)
    assert (listing.full, listing.keys) == (False, [])
    put = client.kv_put("loud", "calm", tags={"v": 1})
    for where in (None, {"v": 1}):
        with Watch(client, "calm", since=start, where=where, timeout=20) as change:
            one = change()
        assert (one.revision, told(one), one.full) == (put.revision, (["loud"], []), False)
    # Of one that was dropped and made anew nobody knows what was lost, however long ago it was.
    client.kv_drop_partition("calm")
    for i in range(30):
        client.kv_put(f"k{i}", "elsewhere", tags={})
    put = client.kv_put("new", "calm", tags={"v": 1})
    assert client.kv_list("calm", since=start).full
    with Watch(client, "calm", since=start, timeout=20) as change:
        one = change()
    assert (one.revision, told(one), one.full) == (put.revision, (["new"], []), True)
    for partition in ("calm", "elsewhere"):
        client.kv_clear(None, partition, where={})


def test_a_clear_of_more_keys_than_an_answer_names_is_told_as_what_is_left(
    client: Any, partition: str
) -> None:
    """With keys of the greatest length, so that few are enough."""
    keys = [f"{i:05}" + "x" * 1019 for i in range(17_000)]
    start = client.kv_put("kept", partition, tags={"v": 1}).revision
    for at in range(0, len(keys), 8500):
        client.kv_batch_put(keys[at : at + 8500], partition, None, [{}] * 8500)
    put = client.kv_list(partition, limit=0).revision
    client.kv_clear(None, partition, where={"v": {"exists": False}})
    client.kv_put("new", partition, tags={"v": 2})
    for since in (start, put):
        with Watch(client, partition, since=since, timeout=60) as change:
            one = change()
        assert (told(one), one.full) == ((["kept", "new"], []), True)


# -- partitions ------------------------------------------------------------------------------


def test_the_partition_need_not_exist_yet(plane: Plane, client: Any, partition: str) -> None:
    now = plane.witness.kv_put("x", f"{partition}-other", tags={}).revision
    watch = Watch(client, partition, since=now, where={"v": 1}, timeout=20)
    with watch as change, under_way(plane, change) as next_one:
        assert partition not in plane.witness.status()["partitions"]
        plane.witness.kv_put("a", partition, tags={"v": 2})
        put = plane.witness.kv_put("b", partition, tags={"v": 1})
        one = next_one.result(20)
    assert (one.revision, told(one), one.full) == (put.revision, (["b"], []), False)


def test_a_watch_ends_with_its_partition_and_the_next_one_is_another(
    plane: Plane, client: Any, partition: str
) -> None:
    start = client.kv_put("a", partition, tags={"v": 1}).revision
    for where in (None, {"v": 1}):
        watch = Watch(client, partition, since=start, where=where, timeout=20)
        with watch as change, under_way(plane, change) as next_one:
            plane.witness.kv_drop_partition(partition)
            with pytest.raises(PartitionNotFound, match="was dropped while"):
                next_one.result(20)
        client.kv_put("b", partition, tags={"v": 1})
        # Whoever knew the older one has to let go of what it had.
        with Watch(client, partition, since=start, where=where, timeout=20) as change:
            one = change()
            assert (told(one), one.full) == ((["b"], []), True)
        start = one.revision


# -- deadlines and bad input -----------------------------------------------------------------


@pytest.mark.parametrize("where", [None, {"v": 1}])
def test_quiet_for_too_long_is_a_deadline(client: Any, partition: str, where: Any) -> None:
    start = client.kv_put("a", partition, tags={"v": 1}).revision
    last = client.kv_put("b", partition, tags={"v": 1}).revision

    def quiet(since: Revision) -> None:
        with Watch(client, partition, since=since, where=where, timeout=0.3) as change:
            if since == start:
                assert told(change()) == (["b"], [])
            change()

    # After what it was told a watch has all of its time once more.
    in_vain(lambda: quiet(start))
    error = in_vain(lambda: quiet(last))
    assert 0.3 <= error.waited_s < 20
    assert f"nothing that this watch tells of has changed in partition {partition!r}" in str(error)
    assert "2 of 2 rows match" in (error.explanation or "")


def test_a_short_deadline_does_not_hide_what_is_there(client: Any, partition: str) -> None:
    start = client.kv_put("z", partition, tags={}).revision
    keys = [f"k{i}" for i in range(6000)]
    client.kv_batch_put(keys, partition, None, [{"n": i} for i in range(6000)])
    for _ in range(20):
        try:
            with Watch(client, partition, since=start, timeout=0.004) as change:
                assert told(change()) == (keys, [])
                return
        except DeadlineExceeded as late:
            if not is_of_client(late):
                raise
    raise AssertionError("the store never had the time to tell it")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"since": 5}, "since is the revision of an earlier answer, not 5"),
        ({"since": [1, 2]}, "since is the revision of an earlier answer"),
        ({"since": (1,)}, "since is the revision of an earlier answer"),
        ({"since": (1, -2)}, "since is the revision of an earlier answer"),
        ({"since": (1, "2")}, "since is the revision of an earlier answer"),
        ({"since": Revision(1, 1 << 40)}, "ahead of the plane"),
        ({"since": Revision(9, 1)}, "9:1 is ahead of the plane"),
        ({"where": 5}, "where: a mapping"),
        ({"where": {"a": {"in": 5}}}, "where: at 'a': 'in' takes a list"),
        ({"partition_id": 7}, "a partition_id is a string, not int"),
        ({"partition_id": "a/../b"}, "partition_id 'a/../b' has a '..' path component"),
        ({"timeout": 0}, "timeout is a positive number"),
    ],
)
def test_a_wrong_argument_is_named(
    client: Any, partition: str, arguments: dict[str, Any], message: str
) -> None:
    revision = client.kv_put("a", partition, tags={}).revision
    named = {"partition_id": partition, "since": revision, "timeout": 5, **arguments}
    name = named.pop("partition_id")
    with pytest.raises(InvalidRequest) as caught, Watch(client, name, **named) as change:
        change()
    assert message in str(caught.value)
