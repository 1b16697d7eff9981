"""Partitions: made with settings, listed, sealed, dropped; versions of a family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataplane.client.get import GetOptions, get_batch
from dataplane.client.partitions import create_partition, drop_partition, seal_partition
from dataplane.client.put import put_batch
from dataplane.errors import (
    FieldNotFound,
    InvalidRequest,
    KeyNotFound,
    PartitionNotFound,
    SchemaMismatch,
    StaleWrite,
)
from dataplane.server.clearing import clear_where
from dataplane.types import FieldSchema, Quota, Retention
from dataplane.wire.channel import Broken
from dataplane.wire.messages import PutMeta
from tests.contract.planes import MAPPED, Plane, thread_plane
from tests.contract.test_promises import LARGE, listed
from tests.contract.test_scenarios import asks
from tests.contract.waits import under_way
from tests.deadline import eventually

PAGE = 4096


def about(client: Any, partition: str) -> dict[str, Any]:
    return client.kv_list_partitions()[partition]


# -- made ------------------------------------------------------------------------------------


def test_a_partition_is_there_before_its_first_row(client: Any, partition: str) -> None:
    revision = client.kv_create_partition(partition)
    assert about(client, partition) == {
        "keys": 0, "revision": revision.n, "sealed": False, "schema": {}, "open_schema": False,
        "used_bytes": 0, "held_bytes": 0, "quota": None, "retention": None, "groups": 0,
        "waiting": 0,
    }  # fmt: skip
    assert client.kv_list(partition).keys == []
    assert client.kv_list(partition).revision == revision
    assert client.kv_clear(["absent"], partition) == 0


def test_a_partition_says_what_is_in_it(client: Any, partition: str) -> None:
    client.kv_create_partition(
        partition,
        schema={"x": ("int64", 1, 0), "y": FieldSchema("float32", 2, 0)},
        quota=Quota(bytes=1 << 20, rows=100, group_bytes=2 * PAGE),
        retention=Retention(versions=3),
    )
    attempt = client.begin_group("u", partition, n=2)
    client.kv_put("u_0", partition, {"x": torch.arange(3)}, attempt=attempt)
    last = client.kv_put("k", partition, {"z": torch.tensor(1)}).revision
    found = about(client, partition)
    assert found["schema"] == {
        "x": FieldSchema("int64", 1, 0),
        "y": FieldSchema("float32", 2, 0),
        "z": FieldSchema("int64", 0, None),
    }
    assert (found["keys"], found["groups"], found["revision"]) == (3, 1, last.n)
    assert found["held_bytes"] == PAGE
    assert 2 * PAGE < found["used_bytes"] < 2 * PAGE + 200  # two extents, and tags
    assert found["quota"] == {"bytes": 1 << 20, "rows": 100, "group_bytes": 2 * PAGE}
    assert found["retention"] == {"versions": 3}


def test_making_a_partition_again_changes_what_is_named_only(client: Any, partition: str) -> None:
    client.kv_create_partition(partition, quota={"rows": 5})
    put = client.kv_put("k", partition, {"x": torch.arange(2)})
    assert client.kv_create_partition(partition, schema={"y": ("int8", 0, None)}) == put.revision
    found = about(client, partition)
    assert found["quota"] == {"rows": 5}
    assert set(found["schema"]) == {"x", "y"}
    assert found["keys"] == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"schema": "shut"}, {"schema": 5}, {"schema": [("x", "int64", 1, 0)]},
        {"schema": {"x": "int64"}}, {"schema": {"x": 5}}, {"schema": {"x": ("int64", 1)}},
        {"schema": {"x": ("int65", 1, 0)}}, {"schema": {"x": (torch.int64, 1, 0)}},
        {"schema": {"x": ("int64", -1, None)}}, {"schema": {"x": ("int64", 9, 0)}},
        {"schema": {"x": ("int64", True, None)}}, {"schema": {"x": ("int64", 1, 1)}},
        {"schema": {"x": ("int64", 1, -1)}}, {"schema": {"x": ("int64", 0, 0)}},
        {"schema": {"x": ("object", 0, None)}}, {"schema": {"x": ("object", 2, 0)}},
        {"schema": {7: ("int64", 1, 0)}},
        {"retention": {"versions": 0}}, {"retention": {"versions": True}}, {"retention": 3},
        {"retention": {"days": 3}}, {"quota": {"rows": 0}}, {"quota": "much"},
    ],
    ids=repr,
)  # fmt: skip
def test_settings_that_make_no_sense_change_nothing(
    client: Any, partition: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest):
        client.kv_create_partition(partition, **settings)
    assert partition not in client.kv_list_partitions()


@pytest.mark.parametrize("name", ["", "a\nb", "../x", "k" * 2000, 7, None, b"x", ["x"]])
def test_what_is_no_name_is_refused_by_every_verb(client: Any, name: Any) -> None:
    for verb in ("kv_create_partition", "kv_seal_partition", "kv_drop_partition"):
        with pytest.raises(InvalidRequest):
            getattr(client, verb)(name)


# -- schemas ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [torch.arange(3).float(), torch.arange(3).int(), torch.zeros(2, 3).long(), torch.tensor(1),
     [1, 2, 3], "text"],
    ids=["float32", "int32", "rank 2", "rank 0", "list", "text"],
)  # fmt: skip
def test_a_put_that_does_not_agree_with_a_declared_schema_is_refused(
    client: Any, partition: str, value: Any
) -> None:
    client.kv_create_partition(partition, schema={"x": ("int64", 1, 0), "o": ("object", 1, 0)})
    with pytest.raises(SchemaMismatch) as mismatch:
        client.kv_put("k", partition, {"x": value, "o": {"a": 1}}, {"v": 1})
    assert (mismatch.value.keys, mismatch.value.fields) == (["k"], ["x"])
    with pytest.raises(SchemaMismatch):
        client.kv_put("k", partition, {"o": torch.arange(2)})
    assert listed(client, partition) == {}
    assert client.status()["bytes_in_use"] == 0
    client.kv_put("k", partition, {"x": torch.arange(3), "o": {"a": 1}})


def test_a_declared_ragged_dimension_stands_above_the_usual_one(
    client: Any, partition: str
) -> None:
    client.kv_create_partition(
        partition,
        schema={"first": ("int64", 2, 0), "last": ("int64", 2, 1), "usual": ("int64", 2, None)},
    )
    rows = [torch.arange(6).view(2, 3), torch.arange(9).view(3, 3)]
    client.kv_batch_put(["a", "b"], partition, {"first": rows})
    listing = client.kv_list(partition)
    assert listing.lengths("first").tolist() == [2, 3]
    got = client.kv_batch_get(["a", "b"], partition, ["first"], layout="packed")
    assert torch.equal(got["first"], torch.cat(rows))
    wide = [torch.arange(6).view(2, 3), torch.arange(8).view(2, 4)]
    client.kv_batch_put(["a", "b"], partition, {"last": wide, "usual": wide})
    got = client.kv_batch_get(["a", "b"], partition, ["last", "usual"], layout="packed")
    assert torch.equal(got["last"], torch.cat(wide, 1))
    assert torch.equal(got["usual"], torch.cat(wide, 1))


def test_a_field_that_was_written_keeps_its_schema(client: Any, partition: str) -> None:
    client.kv_put("k", partition, {"x": torch.arange(3)})
    client.kv_create_partition(partition, schema={"x": ("int64", 1, 0)})  # as it is
    with pytest.raises(InvalidRequest, match=r"'x' .* have another schema"):
        client.kv_create_partition(partition, schema={"x": ("int32", 1, 0), "y": ("int8", 0, None)})
    assert set(about(client, partition)["schema"]) == {"x"}
    # A template that agreed before something was declared is looked at anew.
    client.kv_create_partition(partition, schema={"y": ("float32", 1, 0)})
    with pytest.raises(SchemaMismatch):
        client.kv_put("k", partition, {"y": torch.arange(3)})


def test_fields_of_an_open_schema_may_change(client: Any, partition: str) -> None:
    client.kv_create_partition(partition, schema="open")
    client.kv_batch_put(["a", "b"], partition, {"x": [torch.arange(3), torch.arange(2)]})
    client.kv_batch_put(["c", "d"], partition, {"x": torch.ones(2, 2, 3)})
    client.kv_put("e", partition, {"x": torch.tensor(7, dtype=torch.int8)})
    client.kv_put("f", partition, {"x": {"some": "value"}})
    assert about(client, partition)["open_schema"]
    assert client.kv_list(partition).lengths("x").tolist()[:4] == [3, 2, 3, 3]

    def get(*keys: str, layout: str = "list") -> Any:
        return client.kv_batch_get(list(keys), partition, ["x"], layout=layout)["x"]

    # Rows that agree come back as they were put, in every layout.
    assert [row.tolist() for row in get("a", "b")] == [[0, 1, 2], [0, 1]]
    assert get("b", "a", layout="packed").tolist() == [0, 1, 0, 1, 2]
    assert torch.equal(get("c", "d", layout="padded"), torch.ones(2, 2, 3))
    assert torch.equal(get("d", layout="nested").values(), torch.ones(2, 3))
    assert torch.equal(get("e", layout="packed"), torch.tensor([7], dtype=torch.int8))
    assert get("f") == [{"some": "value"}]
    # Rows that do not are refused, by name: no container holds both.
    for keys in (["a", "c"], ["c", "a"], ["a", "b", "e"], ["f", "a"], ["a", "b", "c", "d", "e"]):
        with pytest.raises(SchemaMismatch, match=r"'x' .* get them apart") as mixed:
            client.kv_batch_get(keys, partition)
        assert mixed.value.fields == ["x"]
        assert mixed.value.partition_id == partition
        assert mixed.value.keys[0] in keys[1:]
    # What is overwritten is what it was overwritten with.
    client.kv_batch_put(["a", "b"], partition, {"x": torch.full((2, 2, 3), 2.0)})
    assert torch.equal(get("a", "c", layout="padded")[0], torch.full((2, 3), 2.0))
    assert client.kv_list(partition).lengths("x").tolist()[:2] == [3, 3]


@MAPPED
def test_a_view_of_rows_that_differ_is_refused_too(client: Any, partition: str) -> None:
    client.kv_create_partition(partition, schema="open")
    client.kv_put("a", partition, {"x": torch.arange(3)})
    client.kv_put("b", partition, {"x": torch.arange(3).float()})
    with pytest.raises(SchemaMismatch), client.kv_view(["a", "b"], partition, layout="list"):
        pass
    with client.kv_view(["b"], partition, layout="list") as rows:
        assert rows["x"][0].tolist() == [0.0, 1.0, 2.0]


def test_what_is_missing_is_said_before_what_differs(client: Any, partition: str) -> None:
    client.kv_create_partition(partition, schema="open")
    client.kv_put("a", partition, {"x": torch.arange(3)})
    client.kv_put("b", partition, {"y": torch.arange(3)})
    with pytest.raises(FieldNotFound):
        client.kv_batch_get(["a", "b"], partition, ["x"])
    with pytest.raises(KeyNotFound):
        client.kv_batch_get(["a", "absent"], partition, ["x"])
    got = client.kv_batch_get(["a", "b"], partition, ["x"], on_missing="drop", layout="list")
    assert got.keys == ["a"]


def test_a_partition_can_be_opened_and_not_be_closed_again(client: Any, partition: str) -> None:
    client.kv_put("a", partition, {"x": torch.arange(3)})
    with pytest.raises(SchemaMismatch):
        client.kv_put("b", partition, {"x": torch.arange(3).float()})
    client.kv_create_partition(partition, schema="open")
    client.kv_put("b", partition, {"x": torch.arange(3).float()})
    with pytest.raises(InvalidRequest, match="open"):
        client.kv_create_partition(partition, schema={"x": ("int64", 1, 0)})
    assert client.kv_batch_get(["b"], partition, layout="list")["x"][0].dtype == torch.float32
    client.kv_create_partition(f"{partition}-empty", schema="open")
    client.kv_create_partition(f"{partition}-empty", schema={"x": ("int64", 1, 0)})
    with pytest.raises(SchemaMismatch):
        client.kv_put("a", f"{partition}-empty", {"x": torch.arange(3).float()})


# -- sealed ----------------------------------------------------------------------------------


def test_a_sealed_partition_takes_no_new_row(client: Any, partition: str) -> None:
    client.kv_batch_put(["a", "b"], partition, {"x": torch.arange(2)}, [{}, {}])
    attempt = client.begin_group("u", partition, n=1)
    assert client.kv_seal_partition(partition) == []
    assert about(client, partition)["sealed"]
    before = listed(client, partition)
    for keys, options in ((["c"], {}), (["a", "c"], {}), (["u_0"], {"attempt": attempt})):
        for fields, tags in ((None, [{}] * len(keys)), ({"x": torch.arange(len(keys))}, None)):
            with pytest.raises(InvalidRequest, match=f"sealed .* {keys[-1]!r}"):
                client.kv_batch_put(keys, partition, fields, tags, **options)
    with pytest.raises(InvalidRequest, match="sealed"):
        client.begin_group("v", partition, n=1)
    with pytest.raises(InvalidRequest, match="sealed"):
        client.begin_group("u", partition, n=1)  # though its prompt is there
    assert listed(client, partition) == before
    # Rows that are there are written to, ended, read and cleared as before.
    client.kv_put("a", partition, {"y": torch.tensor(1.0)}, {"v": 1}, must_exist=True)
    client.kv_batch_put(["a", "b"], partition, None, [{"w": 1}] * 2)
    client.end_group(attempt, "failure")
    assert listed(client, partition)["a"] == ({"v": 1, "w": 1}, ("x", "y"))
    assert client.kv_clear(["a"], partition) == 1
    with pytest.raises(InvalidRequest, match="sealed"):
        client.kv_put("a", partition, tags={})  # it would be a new row


def test_sealing_twice_is_one_change(client: Any, partition: str) -> None:
    client.kv_put("a", partition, tags={})
    before = client.kv_list(partition).revision
    client.kv_seal_partition(partition)
    sealed = client.kv_list(partition).revision
    assert sealed.n == before.n + 1
    client.kv_seal_partition(partition)
    assert client.kv_list(partition).revision == sealed


def test_only_a_partition_can_be_sealed_or_dropped(client: Any, partition: str) -> None:
    for verb in ("kv_seal_partition", "kv_drop_partition"):
        with pytest.raises(PartitionNotFound) as absent:
            getattr(client, verb)(partition)
        assert absent.value.partition_id == partition
    with pytest.raises(PartitionNotFound):
        client.kv_drop_partition(partition, older_than=5)


# -- dropped ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, LARGE], ids=["small", "large"])
def test_a_dropped_partition_is_gone_at_once_with_all_its_bytes(
    plane: Plane, client: Any, partition: str, size: int
) -> None:
    keys = [f"k{i}" for i in range(20)]
    client.kv_batch_put(keys, partition, {"x": torch.zeros(20, size)}, [{"t": "x" * 50}] * 20)
    client.kv_put("k1", partition, {"y": torch.zeros(size)})
    assert client.kv_drop_partition(partition) == [partition]
    assert partition not in client.kv_list_partitions()
    for verb, args in (
        ("kv_list", (partition,)), ("kv_batch_get", (["k0"], partition)),
        ("kv_clear", (["k0"], partition)),
    ):  # fmt: skip
        with pytest.raises(PartitionNotFound):
            getattr(client, verb)(*args)
    assert client.status()["bytes_in_use"] == 0
    eventually(lambda: plane.used_bytes() == 0, "all its bytes are free")


def test_the_name_of_a_dropped_partition_can_be_used_again(client: Any, partition: str) -> None:
    client.kv_create_partition(partition, schema={"x": ("int64", 1, 0)}, quota={"rows": 2})
    client.kv_batch_put(["a", "b"], partition, {"x": torch.zeros(2, 3).long()}, [{"old": 1}] * 2)
    old = client.kv_list(partition).revision
    client.kv_seal_partition(partition)
    client.kv_drop_partition(partition)
    new = client.kv_put("b", partition, {"x": torch.ones(2, 2)}, {"new": 1})
    found = about(client, partition)
    assert (found["sealed"], found["quota"], found["keys"]) == (False, None, 1)
    assert found["schema"] == {"x": FieldSchema("float32", 2, 1)}
    assert client.kv_list(partition).tags == [{"new": 1}]
    # What was listed of the one before says nothing of this one.
    listing = client.kv_list(partition, since=old)
    assert listing.full
    assert (listing.keys, listing.cleared, listing.revision) == (["b"], [], new.revision)
    more = client.kv_put("c", partition, tags={})
    since = client.kv_list(partition, since=new.revision)
    assert (since.full, since.keys, since.revision) == (False, ["c"], more.revision)


@MAPPED
@pytest.mark.parametrize("anew", [True, False])
def test_a_put_that_began_before_the_drop_makes_no_partition(
    plane: Plane, client: Any, partition: str, anew: bool
) -> None:
    client.kv_put("k", partition, {"x": torch.zeros(3)})

    def before(effect: Any) -> None:
        if asks(effect, "commit"):
            plane.witness.kv_drop_partition(partition)
            if anew:
                plane.witness.kv_put("other", partition, tags={})

    put = put_batch(
        plane.core, ["k", "l"], partition, {"x": torch.zeros(2, LARGE)}, None, 0, plane.deadline()
    )
    with pytest.raises(StaleWrite, match="dropped") as stale:
        plane.step(put, before=before)
    assert stale.value.keys == ["k", "l"]
    if anew:
        assert set(listed(client, partition)) == {"other"}
    else:
        assert partition not in client.kv_list_partitions()
    plane.settle()
    eventually(lambda: plane.used_bytes() == 0, "nothing of it is left")


def test_a_read_of_a_partition_that_is_dropped_meanwhile_says_so(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_put("k", partition, {"x": torch.zeros(3)})

    def before(effect: Any) -> None:
        if asks(effect, "pin", "read") and partition in plane.witness.kv_list_partitions():
            plane.witness.kv_drop_partition(partition)
            eventually(lambda: plane.witness.status()["blocks"] == 0, "its blocks are dead")
            plane.settle()

    read = get_batch(
        plane.core, ["k"], partition, None, GetOptions("list"), "raise", plane.deadline()
    )
    with pytest.raises(PartitionNotFound):
        plane.step(read, before=before)


def test_who_waits_for_a_dropped_partition_is_told(
    plane: Plane, client: Any, partition: str
) -> None:
    client.kv_put("k", partition, tags={"v": 1})
    for call, named in (
        (client.kv_wait, {"where": {"v": 2}, "count": 1}),
        (plane.another().kv_claim, {"task": "train", "count": 2}),
    ):
        client.kv_create_partition(partition)
        with under_way(plane, call, partition, timeout=20, **named) as result:
            plane.witness.kv_drop_partition(partition)
            with pytest.raises(PartitionNotFound, match="dropped"):
                result.result(20)


def test_a_clear_that_is_under_way_never_touches_the_partition_that_comes_after(
    plane_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with thread_plane(plane_settings) as plane, plane.connect() as client:
        tags = plane.server.tags

        async def clear_too_late(
            store: Any, partition: Any, predicate: Any, commit: Any, *rest: Any
        ) -> int:
            def dropped_first(found: Any) -> None:
                tags.partitioning.drop("p")
                meta = PutMeta("p", ["k0", "k1"], 0, 1, 0, None, None)
                tags.putting.put("another", meta.pack(), b"\x80" * 2, None, "")
                commit(found)

            return await clear_where(store, partition, predicate, dropped_first, *rest)

        monkeypatch.setattr("dataplane.server.tag_service.clear_where", clear_too_late)
        client.kv_batch_put(["k0", "k1", "k2"], "p", {"x": torch.zeros(3)}, [{"v": 1}] * 3)
        with pytest.raises(PartitionNotFound, match="dropped, with all rows"):
            client.kv_clear(None, "p", where={"v": 1})
        assert client.kv_list("p").keys == ["k0", "k1"]
        monkeypatch.undo()
        assert client.kv_clear(None, "p", where={}) == 2
        eventually(lambda: client.status()["blocks"] == 0, "each cell was let go of, once")
        assert client.status()["bytes_in_use"] == 0


# -- versions --------------------------------------------------------------------------------


def versions(client: Any, family: str) -> list[str]:
    names = client.kv_list_partitions()
    return sorted((n for n in names if n.startswith(f"{family}@")), key=lambda n: (len(n), n))


def test_sealing_a_version_drops_those_that_are_too_many(client: Any, partition: str) -> None:
    client.kv_create_partition(partition, retention={"versions": 2})
    dropped: list[list[str]] = []
    for number in range(8, 12):
        name = f"{partition}@{number}"
        client.kv_batch_put(["w", "b"], name, {"x": torch.full((2, 5), float(number))})
        dropped.append(client.kv_seal_partition(name))
    assert dropped == [[], [], [f"{partition}@8"], [f"{partition}@9"]]
    assert versions(client, partition) == [f"{partition}@10", f"{partition}@11"]
    got = client.kv_batch_get(["b"], f"{partition}@10", layout="list")["x"][0]
    assert got.tolist() == [10.0] * 5
    # One that is still written to is no version that could be too many.
    client.kv_put("w", f"{partition}@9", {"x": torch.zeros(1)})
    client.kv_put("w", f"{partition}@12", {"x": torch.zeros(1)})
    assert client.kv_seal_partition(f"{partition}@12") == [f"{partition}@10"]
    assert versions(client, partition) == [f"{partition}@{n}" for n in (9, 11, 12)]


def test_without_retention_versions_are_kept(client: Any, partition: str) -> None:
    for number in (1, 2, 3):
        client.kv_put("w", f"{partition}@{number}", tags={})
        assert client.kv_seal_partition(f"{partition}@{number}") == []
    assert len(versions(client, partition)) == 3


def test_older_versions_are_dropped_by_number(client: Any, partition: str) -> None:
    family = partition
    others = [f"{family}-other@3", f"x{family}@3", f"{family}@latest", f"{family}@03"]
    for name in (*(f"{family}@{n}" for n in (9, 10, 16, 17, 100)), *others):
        client.kv_put("w", name, {"x": torch.arange(2)})
    with pytest.raises(InvalidRequest, match="family"):
        client.kv_drop_partition(f"{family}@9", older_than=17)
    for wrong in ("17", 1.5, True):
        with pytest.raises(InvalidRequest, match="version number"):
            client.kv_drop_partition(family, older_than=wrong)
    dropped = client.kv_drop_partition(family, older_than=17)
    assert sorted(dropped) == sorted(f"{family}@{n}" for n in (9, 10, 16))
    assert client.kv_drop_partition(family, older_than=17) == []
    left = set(client.kv_list_partitions())
    assert {*others, f"{family}@17", f"{family}@100"} <= left
    client.kv_drop_partition(f"x{family}@3")


def test_a_version_whose_weights_are_viewed_goes_when_it_is_let_go_of(
    plane: Plane, client: Any, partition: str
) -> None:
    if not plane.maps_segments:
        pytest.skip("nothing is viewed from another node")
    client.kv_create_partition(partition, retention={"versions": 1})
    client.kv_put("w", f"{partition}@1", {"x": torch.arange(2000)})
    client.kv_seal_partition(f"{partition}@1")
    with client.kv_view(["w"], f"{partition}@1", layout="list") as rows:
        client.kv_put("w", f"{partition}@2", {"x": torch.arange(5)})
        assert client.kv_seal_partition(f"{partition}@2") == [f"{partition}@1"]
        plane.settle()
        assert torch.equal(rows["x"][0], torch.arange(2000))
        del rows
    client.kv_drop_partition(f"{partition}@2")
    eventually(lambda: plane.used_bytes() == 0, "its bytes are free")


# -- one effect, whatever breaks -------------------------------------------------------------


@pytest.mark.parametrize("verb", ["create_partition", "seal_partition", "drop_partition"])
def test_a_change_of_a_partition_whose_answer_was_lost_has_one_effect(
    plane: Plane, client: Any, partition: str, verb: str
) -> None:
    client.kv_create_partition(partition, retention={"versions": 1})
    for number in (1, 2):
        client.kv_put("w", f"{partition}@{number}", tags={})
    client.kv_seal_partition(f"{partition}@1")
    of = f"{partition}@2"
    core, deadline = plane.core, plane.deadline()
    verbs = {
        "create_partition": create_partition(
            core, of, {"x": ("int64", 1, 0)}, {"rows": 5}, None, deadline
        ),
        "seal_partition": seal_partition(core, of, deadline),
        "drop_partition": drop_partition(core, of, None, deadline),
    }
    answers: list[Any] = []

    def after(effect: Any, value: Any) -> None:
        if asks(effect, verb):
            answers.append(value.body)
            if len(answers) == 1:
                # What the effect must not undo when it comes again.
                if verb == "create_partition":
                    plane.witness.kv_create_partition(of, quota={"rows": 7})
                elif verb == "seal_partition":
                    plane.witness.kv_put("back", f"{partition}@1", tags={})
                else:
                    plane.witness.kv_put("back", of, tags={})
                raise Broken("the answer was lost")

    result = plane.step(verbs[verb], after=after)
    assert len(answers) == 2
    assert answers[0] == answers[1]
    if verb == "create_partition":
        assert about(client, of)["quota"] == {"rows": 7}
    elif verb == "seal_partition":
        assert result == [f"{partition}@1"]
        assert set(listed(client, f"{partition}@1")) == {"back"}
    else:
        assert result == [of]
        assert set(listed(client, of)) == {"back"}
    for other in verbs.values():
        other.close()
