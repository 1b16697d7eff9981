"""Faults of clearing, late writes, capacity and ownership, as reported on systems of this kind.

Each test is named after what is right; the source of the report stands beside it.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import dataplane
from dataplane.client.put import put_batch
from dataplane.errors import (
    AlreadyWritten,
    FieldNotFound,
    InternalError,
    InvalidRequest,
    KeyNotFound,
    PartitionNotFound,
    PlaneLost,
    QuotaExceeded,
    SchemaMismatch,
    StaleWrite,
)
from dataplane.server.value_service import ValueService
from tests.contract.planes import MAPPED, SHM, Plane, ThreadPlane, embedded_sync, thread_plane
from tests.contract.test_scenarios import asks
from tests.deadline import eventually

SLOT = 1000
"""int64 entries of a value that takes two pages in the store, with what the block adds."""
FILLER = 521_216
"""int64 entries of a value that leaves two such slots free in a segment of 4 MiB."""


# -- A. clear, late writes, races ------------------------------------------------------------


@pytest.mark.timeout(120)
def test_a_new_write_into_a_slot_being_freed_is_right_1000_times(
    plane_settings: dict[str, Any],
) -> None:  # TQ#137
    small = {**plane_settings, "capacity_bytes": 4 << 20, "segment_bytes": 4 << 20}
    with embedded_sync("one-slot", small) as plane:
        client, other = plane.client, plane.another()
        client.kv_put("filler", "p", {"x": torch.zeros(FILLER, dtype=torch.int64)})
        value = torch.zeros(SLOT, dtype=torch.int64)
        client.kv_put("B", "p", {"x": value})
        client.kv_put("A", "p", {"x": value})
        with pytest.raises(QuotaExceeded):
            client.kv_put("C", "p", {"x": value}, timeout=1.0)
        client.kv_clear(["A"], "p")
        for turn in range(1000):
            client.kv_put("A", "p", {"x": value.fill_(-turn)})
            fresh = torch.full((SLOT,), turn)
            writer = threading.Thread(target=other.kv_put, args=("B", "p", {"x": fresh}))
            writer.start()
            assert client.kv_clear(["A"], "p") == 1
            writer.join(30.0)
            got = client.kv_batch_get(["B"], "p", layout="list")["x"][0]
            assert torch.equal(got, fresh)
        client.kv_clear(["B", "filler"], "p")
        plane.settle()
        assert plane.used_bytes() == 0


@MAPPED
def test_a_late_write_of_a_second_field_does_not_bring_a_cleared_key_back(
    plane: Plane, client: Any, partition: str
) -> None:  # TQ#141
    client.kv_put("A", partition, {"x": torch.arange(3)})
    cleared: list[int] = []

    def before(effect: Any) -> None:
        if asks(effect, "commit"):
            cleared.append(plane.witness.kv_clear(["A"], partition))

    late = put_batch(
        plane.core, ["A"], partition, {"y": torch.zeros(1, 100_000)}, None, 0, plane.deadline()
    )
    with pytest.raises(StaleWrite) as stale:
        plane.step(late, before=before)
    assert cleared == [1]
    assert stale.value.keys == ["A"]
    assert stale.value.cleared_at == client.kv_list(partition).revision.n
    assert client.kv_list(partition).keys == []
    assert client.status()["bytes_in_use"] == 0
    plane.settle()
    assert plane.used_bytes() == 0


class FailsOnce(ValueService):
    """A value service whose first free fails, after which it works."""

    failures: list[Exception]

    async def free(self, blocks: Sequence[int]) -> None:
        if self.failures:
            raise self.failures.pop()
        await super().free(blocks)


@pytest.mark.parametrize(
    "failure", [InternalError("no"), OSError(5, "I/O"), RuntimeError("a bug")], ids=repr
)
def test_a_free_that_failed_is_repeated_until_it_is_done(
    plane_settings: dict[str, Any], failure: Exception
) -> None:  # TQ-old#159
    with thread_plane({**plane_settings, "host": "embedded"}) as plane:
        service = plane.server.values
        assert service is not None
        service.__class__ = FailsOnce
        service.failures = [failure]  # type: ignore[attr-defined]
        with plane.connect() as client:
            client.kv_put("A", "p", {"x": torch.arange(1000)})
            client.kv_put("B", "p", {"x": torch.arange(5)})
            assert client.kv_clear(["A"], "p") == 1
            assert client.kv_list("p").keys == ["B"]
            assert client.status()["bytes_in_use"] == 40
            store = service.store
            eventually(lambda: store.blocks.used_bytes == 4096, "the bytes of A are freed")
            assert service.failures == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("fields", [None, {"x": torch.arange(4)}], ids=["tags only", "fields too"])
def test_a_key_with_or_without_fields_is_cleared_whole(
    client: Any, partition: str, fields: Any
) -> None:  # TQ#129
    client.kv_put("k", partition, fields, tags={"status": "new"})
    assert client.kv_clear(["k"], partition) == 1
    assert client.kv_list(partition).keys == []
    status = client.status()["partitions"][partition]
    assert (status["keys"], status["payload_bytes"], status["tag_bytes"]) == (0, 0, 0)


def test_partitions_know_nothing_of_each_other(client: Any, partition: str) -> None:
    # TQ-old#146
    train, val = partition, f"{partition}-val"
    client.kv_put("k", train, {"x": torch.arange(2)})
    with pytest.raises(PartitionNotFound) as absent:
        client.kv_list(val)
    assert absent.value.partition_id == val
    client.kv_put("other", val, tags={})
    client.kv_clear(["other"], val)
    assert client.kv_list(val).keys == []
    assert client.kv_list(train).fields == [("x",)]


@pytest.mark.parametrize("verb", ["kv_batch_get", "kv_list", "kv_clear", "kv_view"])
def test_an_absent_partition_is_named(client: Any, partition: str, verb: str) -> None:
    keys = () if verb == "kv_list" else (["k"],)
    with pytest.raises(PartitionNotFound, match=partition) as absent:
        if verb == "kv_view":
            with client.kv_view(["k"], partition):
                pass
        else:
            getattr(client, verb)(*keys, partition)
    assert absent.value.partition_id == partition


def test_no_keys_are_no_work_and_one_key_is_like_many(client: Any, partition: str) -> None:
    # TQ-old#100
    empty = client.kv_batch_put([], partition, {"x": torch.zeros(0, 3)}, [])
    assert (empty.keys, empty.tags) == ([], [])
    assert partition not in client.status()["partitions"]
    assert client.kv_clear([], partition) == 0

    meta = client.kv_batch_put(["k"], partition, {"x": torch.arange(3)[None]}, [{"n": 1}])
    assert (meta.keys, meta.tags, meta.fields) == (["k"], [{"n": 1}], ["x"])
    rows = client.kv_batch_get(["k"], partition)
    assert rows["x"].is_nested
    assert rows["x"].offsets().tolist() == [0, 3]
    assert rows.lengths["x"].tolist() == [3]
    none = client.kv_batch_get([], partition, ["x"])
    assert (none.keys, none["x"].dtype, none["x"].offsets().tolist()) == ([], torch.int64, [0])
    assert none.lengths["x"].tolist() == []
    assert client.kv_batch_get([], partition).keys == []
    assert client.kv_clear(["k"], partition) == 1


REFUSED: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "other dtype": (SchemaMismatch, {"fields": {"x": torch.tensor([[1.0], [2.0]])}}),
    "if_absent": (AlreadyWritten, {"fields": {"x": torch.zeros(2, 1).long()}, "if_absent": True}),
    "must_exist": (KeyNotFound, {"fields": {"x": torch.zeros(2, 1).long()}, "must_exist": True}),
    "wrong tags": (InvalidRequest, {"fields": {"x": torch.zeros(2, 1).long()},
                                    "tags": [{"n": 1}, {"n": {1, 2}}]}),
    "wrong rows": (InvalidRequest, {"fields": [{"x": torch.tensor([1])}, {"y": "text"}]}),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_a_refused_put_leaves_the_callers_objects_alone(
    plane: Plane, partition: str, case: str
) -> None:  # xtuner#1922
    client = plane.witness
    error, arguments = REFUSED[case]
    arguments = copy.deepcopy(arguments)
    arguments.setdefault("tags", [{"status": "done"}, {"status": "done", "deep": {"a": [1]}}])
    client.kv_put("there", partition, {"x": torch.tensor([5])}, {"status": "old"})
    keys = ["there", "new"]
    before = copy.deepcopy((keys, arguments))
    with pytest.raises(error):
        client.kv_batch_put(keys, partition, **arguments)
    assert repr((keys, arguments)) == repr(before)
    listing = client.kv_list(partition)
    assert (listing.keys, listing.tags) == (["there"], [{"status": "old"}])


def test_what_a_put_returns_is_not_the_callers_own_tags(client: Any, partition: str) -> None:
    tags = {"status": "new"}
    client.kv_put("k", partition, tags=tags, return_tags=True).tags[0]["status"] = "changed"
    assert tags == {"status": "new"}
    assert client.kv_list(partition).tags == [{"status": "new"}]


# -- C. memory growth, ownership, capacity ---------------------------------------------------


def test_a_slice_of_a_large_tensor_stores_40_bytes(client: Any, partition: str) -> None:
    # TQ-old#163
    whole = torch.randn(1_000_000)
    client.kv_put("one", partition, {"x": whole[123:133]})
    assert client.status()["bytes_in_use"] == 40
    halves = [whole[:10], whole[999_990:]]
    client.kv_batch_put(["a", "b"], partition, {"x": halves})
    assert client.status()["bytes_in_use"] == 120
    assert torch.equal(
        client.kv_batch_get(["b"], partition, layout="list")["x"][0], whole[999_990:]
    )


def test_eight_clients_with_defaults_take_no_memory_of_their_own(
    plane_settings: dict[str, Any],
) -> None:  # NeMo#2935
    with thread_plane({**plane_settings, "host": "embedded"}) as plane:
        clients = [plane.connect() for _ in range(8)]
        for i, client in enumerate(clients):
            client.kv_put(f"k{i}", "p", {"x": torch.arange(4)})
        assert plane.server.values is not None
        counts = plane.server.values.store.counts()
        assert counts["segments"] == 1
        assert counts["segment_bytes"] <= counts["capacity_bytes"] == 256 << 20
        assert counts["used_bytes"] == 8 * 4096
        for client in clients:
            client.close()


@pytest.mark.parametrize("text", ["ports", "", "-1", "1e9"])
def test_a_limit_that_is_no_number_of_bytes_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:  # NeMo#2935
    monkeypatch.setenv("DATAPLANE_CAPACITY_BYTES", text)
    with pytest.raises(InvalidRequest, match="capacity_bytes"):
        dataplane.init({"host": "embedded"}, name="never-started")


def test_an_unknown_setting_is_refused_naming_it() -> None:
    with pytest.raises(InvalidRequest, match=r"no setting 'capacity_byte'$"):
        dataplane.init({"capacity_byte": 1 << 30}, name="never-started")


# -- E. a reader that is slow, and absent keys -----------------------------------------------


@MAPPED
def test_a_view_held_open_past_clear_and_overwrite_shows_the_old_value(
    plane: Plane, client: Any, partition: str
) -> None:  # Mooncake#850
    old = torch.arange(50_000)
    client.kv_put("k", partition, {"x": old})
    with client.kv_view(["k"], partition, layout="list") as rows:
        seen = rows["x"][0]
        client.kv_clear(["k"], partition)
        for i in range(10):
            client.kv_put("k", partition, {"x": torch.full((50_000,), i)})
        assert torch.equal(seen, old)
        del rows
    assert torch.equal(seen, old), "the tensor outlives its context"
    client.kv_put("k", partition, {"x": torch.full((50_000,), -1)})
    assert torch.equal(seen, old)
    del seen
    gc.collect()
    client.kv_clear(["k"], partition)
    plane.settle()
    eventually(lambda: plane.used_bytes() == 0, "the view's pin ended with its last tensor")


def test_a_get_under_way_past_clear_and_overwrite_brings_the_old_value(
    plane: Plane, client: Any, partition: str
) -> None:  # Mooncake#850
    from dataplane.client.effects import Run
    from dataplane.client.get import GetOptions, get_batch

    old = torch.arange(50_000)
    client.kv_put("k", partition, {"x": old})
    changed: list[int] = []

    def before(effect: Any) -> None:
        if type(effect) is Run and not changed:
            changed.append(plane.witness.kv_clear(["k"], partition))
            for i in range(4):
                plane.witness.kv_put("k", partition, {"x": torch.full((50_000,), i)})

    read = get_batch(
        plane.core, ["k"], partition, None, GetOptions("list"), "raise", plane.deadline()
    )
    assert torch.equal(plane.step(read, before=before)["x"][0], old)
    assert changed == [1]


def test_absent_keys_are_a_typed_error_to_get_and_nothing_to_clear(
    client: Any, partition: str
) -> None:  # LMCache#497
    client.kv_put("k", partition, {"x": torch.arange(2)})
    with pytest.raises(KeyNotFound) as missing:
        client.kv_batch_get(["no", "k", "neither"], partition)
    assert missing.value.keys == ["no", "neither"]
    assert isinstance(missing.value, KeyError)
    revision = client.kv_list(partition).revision
    assert client.kv_clear(["no", "neither"], partition) == 0
    assert client.kv_list(partition).revision == revision


def test_a_result_may_be_written_to(client: Any, partition: str) -> None:
    # radixark/miles#703
    client.kv_batch_put(["a", "b"], partition, {"x": torch.ones(2, 40_000), "o": [[1], [2]]})
    for layout in ("nested", "padded", "list", "packed"):
        got = client.kv_batch_get(["a", "b"], partition, layout=layout)
        data = got["x"]
        for part in data if layout == "list" else [data.values() if data.is_nested else data]:
            part.add_(1)
            assert torch.equal(part, torch.full_like(part, 2.0))
        got["o"][0].append(9)
    again = client.kv_batch_get(["a", "b"], partition, layout="packed")
    assert torch.equal(again["x"], torch.ones(80_000))
    assert again["o"] == [[1], [2]]


# -- G. which plane ---------------------------------------------------------------------------


def test_a_client_never_attaches_to_another_plane_of_its_name(
    plane_settings: dict[str, Any],
) -> None:  # TQ#115
    with embedded_sync("same-name", plane_settings) as first:
        first.client.kv_put("k", "p", tags={})
        attached = dataplane.init({**plane_settings, "host": "embedded"}, name="same-name")
        assert attached.plane_id == first.client.plane_id
        assert attached.client_id != first.client.client_id
        assert attached.kv_list("p").keys == ["k"]
    with pytest.raises(PlaneLost):
        attached.kv_list("p")
    with embedded_sync("same-name", plane_settings) as second:
        assert second.client.plane_id != attached.plane_id
        with pytest.raises(PlaneLost):
            attached.kv_list("p")
        with pytest.raises(PartitionNotFound):
            second.client.kv_list("p")
    attached.close()


def test_planes_of_different_names_stand_side_by_side(
    plane: Plane, client: Any, partition: str
) -> None:  # TQ#115
    client.kv_put("k", partition, {"x": torch.arange(2)})
    host = "ray" if plane.kind.startswith("ray") else "embedded"
    settings = {**plane.settings, "host": host}
    second = dataplane.init(settings, name=f"{plane.name}-second")
    try:
        assert second.plane_id != client.plane_id
        with pytest.raises(PartitionNotFound):
            second.kv_list(partition)
        second.kv_put("other", partition, tags={})
        assert client.kv_list(partition).keys == ["k"]
        assert second.kv_list(partition).keys == ["other"]
    finally:
        plane_id = second.plane_id
        second.close(destroy=True)
    eventually(lambda: not [*SHM.glob(f"dataplane-*-{plane_id}")], "the second plane is gone")
    assert client.kv_list(partition).keys == ["k"]


def test_nothing_is_started_by_connecting(plane: Plane) -> None:
    with pytest.raises(PlaneLost, match="no-such-plane"):
        dataplane.connect("no-such-plane", config=plane.settings)


# -- H. hops ----------------------------------------------------------------------------------


class Requests:
    """Counts the requests that a server hears, by verb."""

    def __init__(self, plane: ThreadPlane) -> None:
        self.heard: list[str] = []
        for verb, work in list(plane.server.verbs.items()):
            plane.server.verbs[verb] = self._counted(verb, work)

    def _counted(self, verb: str, work: Any) -> Any:
        def heard(connection: Any, number: int, body: Any) -> Any:
            self.heard.append(verb)
            return work(connection, number, body)

        return heard


def test_512_keys_in_one_call_are_one_hop_on_the_tag_store(
    plane_settings: dict[str, Any],
) -> None:  # NeMo#3837
    with thread_plane({**plane_settings, "host": "embedded"}) as plane, plane.connect() as client:
        keys = [f"k{i}" for i in range(512)]
        for key in keys:
            client.kv_put(key, "p", {"x": torch.arange(3)})
        client.kv_batch_get(keys[:1], "p")  # connections are made and stores known
        assert plane.server.values is not None
        blocks = plane.server.values.store.blocks
        eventually(lambda: not blocks.counts()["pins"], "the reader has let go")
        requests = Requests(plane)
        client.kv_batch_get(keys, "p")
        eventually(lambda: "unpin" in requests.heard, "the reader has let go")
        assert requests.heard == ["resolve", "pin", "unpin"]
        requests.heard.clear()
        client.kv_batch_get(keys[:1], "p", ["x"])
        eventually(lambda: "unpin" in requests.heard, "the reader has let go")
        assert len(requests.heard) == 3, "as many as for all of them"
        requests.heard.clear()
        client.kv_batch_put(keys, "p", None, [{"n": 1}] * 512)
        client.kv_list("p")
        client.kv_clear(keys, "p")
        assert requests.heard == ["put_tags", "list", "clear"]
        requests.heard.clear()
        client.kv_batch_put(keys, "p", {"x": torch.zeros(512, 100_000 // 512).long()})
        assert requests.heard == ["reserve", "commit"]
        requests.heard.clear()
        client.kv_put("k", "p", {"x": torch.arange(3)})
        assert requests.heard == [], "its block is the only request, and comes with it"


def test_a_key_without_the_field_is_named_among_its_siblings(client: Any, partition: str) -> None:
    client.kv_put("a", partition, {"x": torch.arange(1), "y": torch.arange(1)})
    client.kv_put("b", partition, {"x": torch.arange(1)})
    client.kv_put("c", partition, tags={})
    with pytest.raises(FieldNotFound) as missing:
        client.kv_batch_get(["a", "b", "c"], partition, ["x", "y"])
    assert missing.value.keys == ["b", "c"]
    assert missing.value.fields == ["x", "y"]
    assert client.kv_batch_get(["a", "b", "c"], partition, ["y"], on_missing="drop").keys == ["a"]
