"""Listings, clears and status: what is there, what changed, what is removed."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from dataplane.errors import FieldNotFound, InvalidRequest
from dataplane.types import Revision
from tests.contract.planes import Plane, embedded_sync
from tests.contract.waits import Watch, under_way
from tests.deadline import eventually

TAGS: list[dict[str, Any]] = [
    {"uid": "u0", "step": 1, "score": 0.5, "done": True, "status": "finished"},
    {"uid": "u0", "step": 2, "score": 1.5, "done": False, "status": "running"},
    {"uid": "u1", "step": 3, "score": -1.0, "done": True, "status": "finished"},
    {"uid": "u1", "step": 4, "status": None},
    {},
]
KEYS = [f"k{i}" for i in range(5)]


@pytest.fixture
def filled(client: Any, partition: str) -> str:
    """A partition with five keys of various tags; the first three have fields."""
    client.kv_batch_put(KEYS, partition, None, TAGS)
    client.kv_batch_put(KEYS[:3], partition, {"x": [torch.arange(n) for n in (3, 0, 2)]})
    client.kv_put("k1", partition, {"y": torch.tensor(1.0), "m": torch.zeros(2, 5)})
    return partition


# -- a whole partition -----------------------------------------------------------------------


def test_a_listing_says_all_about_every_key(client: Any, filled: str) -> None:
    listing = client.kv_list(filled)
    assert listing.keys == KEYS
    assert len(listing) == 5
    assert listing.tags == TAGS
    assert listing.fields == [("x",), ("m", "x", "y"), ("x",), (), ()]
    assert listing.lengths("x").tolist() == [3, 0, 2, -1, -1]
    assert listing.lengths("x").dtype == np.int32
    assert listing.lengths("m").tolist() == [-1, 5, -1, -1, -1]
    assert listing.lengths("no").tolist() == [-1] * 5
    assert listing.full
    assert listing.cleared == []
    assert listing.tag_names == ["done", "score", "status", "step", "uid"]


def test_columns_are_ready_for_numpy(client: Any, partition: str) -> None:
    tags = [{"i": i, "f": i / 2, "b": i % 2 == 0, "s": f"s{i}", "n": None} for i in range(4)]
    client.kv_batch_put([f"k{i}" for i in range(4)], partition, None, tags)
    listing = client.kv_list(partition)
    assert listing.column("i").dtype == np.int64
    assert listing.column("i").tolist() == [0, 1, 2, 3]
    assert listing.column("f").dtype == np.float64
    assert listing.column("b").dtype == np.bool_
    assert listing.column("s").tolist() == ["s0", "s1", "s2", "s3"]
    assert listing.column("n").tolist() == [None] * 4
    with pytest.raises(FieldNotFound, match="'q'"):
        listing.column("q")


def test_columns_of_mixed_or_missing_tags_stand_beside_their_keys(client: Any, filled: str) -> None:
    client.kv_put("k3", filled, tags={"score": "none"})
    listing = client.kv_list(filled)
    assert listing.column("score").tolist() == [0.5, 1.5, -1.0, "none", None]
    assert listing.column("status").tolist() == ["finished", "running", "finished", None, None]
    step = listing.column("step")
    assert step[:4].tolist() == [1, 2, 3, 4]


def test_columns_limit_the_tags(client: Any, filled: str) -> None:
    listing = client.kv_list(filled, columns=["step", "no"])
    assert listing.tags == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4}, {}]
    assert listing.keys == KEYS
    assert listing.fields[1] == ("m", "x", "y")
    assert client.kv_list(filled, columns=[]).tags == [{}] * 5


@pytest.mark.parametrize("limit", [0, 1, 3, 5, 100])
def test_limit_takes_the_first_rows(client: Any, filled: str, limit: int) -> None:
    listing = client.kv_list(filled, limit=limit)
    assert listing.keys == KEYS[:limit]
    assert listing.tags == TAGS[:limit]


WHERES: list[tuple[Any, list[int]]] = [
    (None, [0, 1, 2, 3, 4]),
    ({}, [0, 1, 2, 3, 4]),
    ({"status": "finished"}, [0, 2]),
    ({"status": None}, [3]),
    ({"status": {"exists": False}}, [4]),
    ({"step": {">=": 2, "<": 4}}, [1, 2]),
    ({"uid": {"in": ["u1", "u9"]}}, [2, 3]),
    ({"done": True, "uid": "u0"}, [0]),
    ({"or": [{"step": 1}, {"step": 4}]}, [0, 3]),
    ({"not": {"uid": "u0"}}, [2, 3, 4]),
    ({"score": {"!=": 0.5}}, [1, 2, 3, 4]),
    ({"uid": "nobody"}, []),
]


@pytest.mark.parametrize(("where", "matching"), WHERES, ids=lambda v: str(v)[:40])
def test_where_says_which_rows(client: Any, filled: str, where: Any, matching: list[int]) -> None:
    listing = client.kv_list(filled, where=where)
    assert listing.keys == [KEYS[i] for i in matching]
    assert listing.tags == [TAGS[i] for i in matching]
    assert client.kv_list(filled, where=where, limit=1).keys == listing.keys[:1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"where": 5},
        {"where": {"a": {"~": 1}}},
        {"where": {"a": {1}}},
        {"where": {"and": []}},
        {"where": {"a": "\ud800"}},
        {"columns": "step"},
        {"columns": [5]},
        {"columns": 5},
        {"columns": ["\ud800"]},
        {"limit": -1},
        {"limit": 1.5},
        {"limit": "all"},
        {"since": 5},
        {"since": (1, "x")},
        {"since": (1, 2, 3)},
        {"since": (1, -1)},
    ],
    ids=str,
)
def test_wrong_arguments_of_a_listing_are_refused(
    client: Any, filled: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest):
        client.kv_list(filled, **arguments)
    assert client.kv_list(filled).keys == KEYS


def test_a_listing_is_a_batch(client: Any, filled: str) -> None:
    listing = client.kv_list(filled, where={"uid": "u0"})
    meta = listing.to_meta()
    assert (meta.partition_id, meta.keys, meta.fields) == (filled, ["k0", "k1"], ["x"])
    assert meta.tags == TAGS[:2]
    assert meta.revision == listing.revision


# -- since a revision ------------------------------------------------------------------------


def test_since_brings_what_changed_and_no_more(client: Any, filled: str) -> None:
    start = client.kv_list(filled)
    nothing = client.kv_list(filled, since=start.revision)
    assert (nothing.keys, nothing.cleared, nothing.full) == ([], [], False)
    assert nothing.revision == start.revision

    client.kv_put("k2", filled, tags={"step": 30})
    client.kv_put("new", filled, {"x": torch.arange(1)}, {"step": 6})
    client.kv_clear(["k0"], filled)
    changed = client.kv_list(filled, since=start.revision)
    assert not changed.full
    by_key = dict(zip(changed.keys, changed.tags, strict=True))
    assert by_key == {"k2": {**TAGS[2], "step": 30}, "new": {"step": 6}}
    assert changed.cleared == ["k0"]
    assert dict(zip(changed.keys, changed.fields, strict=True)) == {"k2": ("x",), "new": ("x",)}

    client.kv_put("k0", filled, tags={"step": 100})
    again = client.kv_list(filled, since=start.revision)
    assert "k0" in again.keys
    assert again.cleared == []
    after = client.kv_list(filled, since=changed.revision)
    assert (after.keys, after.tags, after.cleared) == (["k0"], [{"step": 100}], [])


def test_since_and_where_see_the_changed_rows_that_match(client: Any, filled: str) -> None:
    start = client.kv_list(filled).revision
    client.kv_batch_put(["k0", "k1"], filled, None, [{"status": "failed"}, {"status": "finished"}])
    client.kv_clear(["k4"], filled)
    changed = client.kv_list(filled, since=start, where={"status": "finished"})
    assert changed.keys == ["k1"]
    assert changed.cleared == ["k4"]
    assert client.kv_list(filled, since=start, columns=["step"], limit=1).tags in (
        [{"step": 1}], [{"step": 2}],
    )  # fmt: skip


def test_following_revisions_is_the_same_as_listing_all(client: Any, partition: str) -> None:
    mirror: dict[str, Any] = {}
    client.kv_put("first", partition, tags={})
    revision = None
    for turn in range(12):
        client.kv_batch_put([f"k{turn}", f"k{turn // 2}x"], partition, None, [{"t": turn}] * 2)
        if turn % 3 == 0:
            client.kv_clear([f"k{turn - 1}", "first"], partition)
        if turn % 4 == 3:
            client.kv_clear(None, partition, where={"t": {"<": turn - 4}})
        if turn % 2:
            continue
        listing = client.kv_list(partition, since=revision)
        assert listing.full == (revision is None)
        for key in listing.cleared:
            mirror.pop(key, None)  # it may have come and gone since
        mirror.update(zip(listing.keys, listing.tags, strict=True))
        revision = listing.revision
    listing = client.kv_list(partition, since=revision)
    for key in listing.cleared:
        mirror.pop(key, None)
    mirror.update(zip(listing.keys, listing.tags, strict=True))
    whole = client.kv_list(partition)
    assert mirror == dict(zip(whole.keys, whole.tags, strict=True))


@pytest.mark.parametrize("limit", [None, 3])
def test_a_listing_since_many_changes_is_like_one_since_few(
    client: Any, partition: str, limit: int | None
) -> None:
    keys = [f"k{i}" for i in range(6000)]
    client.kv_batch_put(keys[:10], partition, None, [{"n": 0}] * 10)
    start = client.kv_list(partition).revision
    client.kv_batch_put(keys[5:], partition, None, [{"n": 1}] * 5995)
    client.kv_clear(keys[:3000], partition)
    client.kv_batch_put(keys[2500:3500], partition, None, [{"n": 2}] * 1000)
    client.kv_clear(keys[5990:], partition)
    listing = client.kv_list(partition, since=start, where={"n": 2}, limit=limit)
    assert not listing.full
    expected = set(keys[2500:3500])
    assert set(listing.keys) == expected if limit is None else set(listing.keys) < expected
    assert len(listing) == limit or limit is None
    assert sorted(listing.cleared) == sorted(keys[:2500] + keys[5990:])


def test_a_revision_that_history_does_not_reach_gives_the_whole_partition(
    plane_settings: dict[str, Any],
) -> None:
    with embedded_sync("short-history", {**plane_settings, "history_changes": 10}) as plane:
        client = plane.client
        old = client.kv_put("k0", "p", tags={"n": 0}).revision
        for i in range(1, 30):
            client.kv_put(f"k{i}", "p", tags={"n": i})
        client.kv_clear(["k0"], "p")
        listing = client.kv_list("p", since=old)
        assert listing.full
        assert listing.keys == [f"k{i}" for i in range(1, 30)]
        assert listing.cleared == []
        recent = client.kv_list("p", since=Revision(old.epoch, listing.revision.n - 1))
        assert (recent.full, recent.keys, recent.cleared) == (False, [], ["k0"])


def test_a_revision_of_another_epoch_gives_the_whole_partition(client: Any, filled: str) -> None:
    listing = client.kv_list(filled, since=Revision(0, 10**9))
    assert listing.full
    assert listing.keys == KEYS


def test_every_change_is_a_later_revision_and_reads_are_none(client: Any, filled: str) -> None:
    revision = client.kv_list(filled).revision
    client.kv_batch_get(["k0"], filled)
    client.kv_clear(["no"], filled)
    client.status()
    assert client.kv_list(filled).revision == revision
    client.kv_put("k0", filled, tags={})
    assert client.kv_list(filled).revision > revision


# -- clear -----------------------------------------------------------------------------------


def test_clear_removes_keys_once_and_counts_them(client: Any, filled: str) -> None:
    assert client.kv_clear(["k1", "no", "k3", "k1"], filled) == 2
    assert client.kv_list(filled).keys == ["k0", "k2", "k4"]
    assert client.kv_clear(["k1", "k3"], filled) == 0
    client.kv_put("k1", filled, tags={"new": 1})
    assert client.kv_list(filled, where={"new": 1}).tags == [{"new": 1}]
    assert client.kv_list(filled, where={"new": 1}).fields == [()]


@pytest.mark.parametrize(("where", "matching"), WHERES[1:], ids=lambda v: str(v)[:40])
def test_clear_where_removes_what_a_listing_would_show(
    client: Any, filled: str, where: Any, matching: list[int]
) -> None:
    assert client.kv_clear(None, filled, where=where) == len(matching)
    left = [KEYS[i] for i in range(5) if i not in matching]
    assert client.kv_list(filled).keys == left
    payload = client.status()["partitions"][filled]["payload_bytes"]
    x = {0: 24, 1: 0 + 4 + 40, 2: 16}
    assert payload == sum(x.get(i, 0) for i in range(5) if i not in matching)


@pytest.mark.parametrize(
    ("keys", "where"),
    [(None, None), (["k0"], {}), ("k0", None), (5, None), (None, {"a": {"~": 1}})],
)
def test_clear_says_what_is_wrong_with_its_arguments(
    client: Any, filled: str, keys: Any, where: Any
) -> None:
    with pytest.raises(InvalidRequest):
        client.kv_clear(keys, filled, where=where)
    assert client.kv_list(filled).keys == KEYS


def test_a_clear_is_seen_at_one_revision(plane: Plane, client: Any, partition: str) -> None:
    count = 5000
    keys = [f"k{i}" for i in range(count)]
    tags = [{"g": i % 2} for i in range(count)]
    client.kv_batch_put(keys, partition, {"x": torch.arange(count)}, tags)
    before = client.kv_list(partition, limit=0).revision
    assert client.kv_clear(None, partition, where={"g": 1}) == count // 2
    changed = client.kv_list(partition, since=before)
    assert sorted(changed.cleared) == sorted(keys[1::2])
    assert changed.revision.n == before.n + 1
    assert client.status()["bytes_in_use"] == 8 * (count // 2)
    rows = client.kv_batch_get(keys[::2], partition)
    assert torch.equal(rows["x"], torch.arange(0, count, 2))


# -- status ----------------------------------------------------------------------------------


def test_status_counts_keys_bytes_and_fields(plane: Plane, client: Any, filled: str) -> None:
    status = client.status()
    counts = status["partitions"][filled]
    assert counts["keys"] == 5
    assert counts["payload_bytes"] == 3 * 8 + 2 * 8 + 4 + 2 * 5 * 4
    assert counts["fields"] == ["m", "x", "y"]
    assert tuple(status["revision"]) >= (1, counts["revision"])
    assert counts["tag_bytes"] > 0
    assert status["bytes_in_use"] == counts["payload_bytes"]
    assert status["clients"] >= 1
    assert status["blocks"] == 2
    stores = 2 if plane.kind == "ray-remote" else 1
    assert len(status["stores"]) == len(status["values"]) == stores
    for store in status["values"].values():
        assert store["capacity_bytes"] == 256 << 20
        assert store["used_bytes"] <= store["segment_bytes"] <= store["capacity_bytes"]
    assert plane.used_bytes() == 2 * 4096


def test_status_says_how_many_wait_and_for_what(plane: Plane, client: Any, partition: str) -> None:
    def waiting() -> dict[str, int]:
        return plane.witness.status()["waiting"]

    nobody = {"rows": 0, "claims": 0, "room": 0, "partitions": 0}
    eventually(lambda: waiting() == nobody, "nobody waits")
    client.kv_create_partition(partition, quota={"rows": 1})
    start = client.kv_put("a", partition, tags={}).revision
    unborn = f"{partition}-unborn"

    def watch(watcher: Any) -> None:
        with Watch(watcher, partition, since=start, timeout=20) as change:
            change()

    calls: list[tuple[str, Any]] = [
        ("rows", lambda c: c.kv_wait(partition, count=2, timeout=20)),
        ("rows", watch),
        ("claims", lambda c: c.kv_claim(partition, "t", count=1, where={"n": 1}, timeout=20)),
        ("room", lambda c: c.kv_put("b", partition, tags={"n": 1}, timeout=20)),
        ("partitions", lambda c: c.kv_wait(unborn, timeout=20)),
        ("partitions", lambda c: c.kv_claim(unborn, "t", count=1, timeout=20)),
    ]
    want = dict(nobody)
    with ExitStack() as stack:
        results: list[Future[Any]] = []
        for what, call in calls:
            results.append(stack.enter_context(under_way(plane, call, plane.another())))
            want[what] += 1
            assert waiting() == want
        client.kv_create_partition(partition, quota={"rows": 2})
        client.kv_put("x", unborn, tags={})
        for result in results:
            result.result(20)
    assert waiting() == nobody


def test_segments_are_used_again_round_after_round(client: Any, partition: str) -> None:
    """Memory stays flat over many rounds of put and clear."""
    sizes = []
    for i in range(60):
        keys = [f"k{i}-{j}" for j in range(4)]
        client.kv_batch_put(keys, partition, {"x": torch.zeros(4, 200_000)})
        assert client.kv_clear(keys, partition) == 4
        sizes.append(sum(s["segment_bytes"] for s in client.status()["values"].values()))
    assert len(set(sizes[10:])) == 1
