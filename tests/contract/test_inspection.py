"""What an operator asks is answered alike by every kind of client, and as the plane knows it."""

from __future__ import annotations

import threading
from dataclasses import asdict, replace
from typing import Any, cast

import pytest
import torch

from dataplane.errors import InvalidRequest, PartitionNotFound
from dataplane.inspection import KeyReport
from dataplane.types import Revision
from tests.contract.planes import Plane
from tests.deadline import eventually

WHO = ("client_id", "label", "producer", "consumer", "client")
"""Of whom a client of a gateway is told by another name than one inside."""
WHEN = ("age_s", "waited_s", "left_s", "ms")


@pytest.fixture
def rows(client: Any, partition: str) -> str:
    """A group with its prompt and two rows, and a row of no group, in one partition."""
    attempt = client.begin_group("u", partition, n=2)
    for session, length in ((0, 3), (1, 5)):
        client.kv_put(
            f"u_{session}_0", partition, {"ids": torch.arange(length), "r": torch.tensor(1.5)},
            {"uid": "u", "session_id": session, "status": "done", "length": length},
            attempt=attempt,
        )  # fmt: skip
    client.kv_put("alone", partition, None, {"status": "new", "ok": True, "score": 0.5})
    return partition


def bare(value: Any) -> Any:
    """What is told, without who and when."""
    if hasattr(value, "__dataclass_fields__"):
        return bare(asdict(value))
    if isinstance(value, dict):
        told = cast("dict[str, Any]", value)
        return {name: bare(each) for name, each in told.items() if name not in WHO + WHEN}
    if isinstance(value, list | tuple):
        return [bare(each) for each in cast("list[Any]", value)]
    return value


# -- keys ----------------------------------------------------------------------------------------


def test_a_key_is_told_of_with_all_that_is_known(plane: Plane, client: Any, rows: str) -> None:
    found: list[Any] = client.inspect(["u_1_0", "nobody", "alone", "u", "alone"], rows)
    one, absent, alone, prompt, again = found
    assert {type(each) for each in (one, alone, prompt)} == {KeyReport}
    assert absent is None
    assert bare(alone) == bare(again)
    assert (one.key, one.tags["length"], one.lost) == ("u_1_0", 5, False)
    assert type(one.revision) is Revision
    assert 0 <= one.age_s < 600
    assert [(field.name, field.dtype, field.shape, field.nbytes) for field in one.fields] == [
        ("ids", "int64", [5], 40), ("r", "float32", [], 4),
    ]  # fmt: skip
    assert (one.group["uid"], one.group["n"], one.group["open"]) == ("u", 2, True)
    assert prompt.group["sessions"] == 2
    assert alone.group is None
    assert alone.tags == {"status": "new", "ok": True, "score": 0.5}
    assert one.producer.client_id == client.client_id
    assert one.producer.alive
    assert bare(found) == bare(plane.witness.inspect([r.key if r else "x" for r in found], rows))


def test_keys_of_nothing(client: Any, rows: str) -> None:
    assert client.inspect([], rows) == []
    with pytest.raises(PartitionNotFound):
        client.inspect(["a"], f"{rows}-absent")
    for keys in ("alone", [""], [1]):
        with pytest.raises(InvalidRequest):
            client.inspect(keys, rows)


def test_more_keys_than_are_told_of_at_once(client: Any, partition: str) -> None:
    keys = [f"k{i}" for i in range(2100)]
    client.kv_batch_put(keys, partition, None, [{"i": i} for i in range(len(keys))])
    found = client.inspect(keys, partition)
    assert [report.tags["i"] for report in found] == list(range(len(keys)))


def test_tasks_of_a_key(client: Any, rows: str) -> None:
    claim = client.kv_claim(rows, "train", count=1, where={"length": 3})
    assert client.inspect(["u_0_0", "u_1_0"], rows)[0].tasks == {"train": "claimed"}
    client.kv_commit(claim)
    one, other = client.inspect(["u_0_0", "u_1_0"], rows)
    assert (one.tasks, other.tasks) == ({"train": "committed"}, {"train": "not claimed"})


# -- partitions ----------------------------------------------------------------------------------


def test_what_was_counted_is_what_is_cleared(plane: Plane, client: Any, rows: str) -> None:
    tally = client.tally(rows, where={"status": {"in": ["done", "new"]}})
    assert (tally.partition_id, tally.rows, tally.groups_open) == (rows, 3, 1)
    assert tally.payload_bytes == 3 * 8 + 5 * 8 + 2 * 4
    assert {status: of[0] for status, of in tally.statuses.items()} == {"done": 2, "new": 1}
    assert set(tally.sample) == {"u_0_0", "u_1_0", "alone"}
    assert tally == plane.witness.tally(rows, where={"status": {"in": ["done", "new"]}})
    client.kv_put("u_1_0", rows, None, {"length": 6})
    left = client.tally(rows, where={"status": "done"}, until=tally.revision)
    assert left.sample == ["u_0_0"]
    assert client.kv_clear(None, rows, where={"status": "done"}, until=tally.revision) == 1
    assert client.inspect(["u_0_0"], rows) == [None]
    assert client.inspect(["u_1_0"], rows) != [None]
    for wrong in ((1,), "now", (-1, 2)):
        with pytest.raises(InvalidRequest):
            client.tally(rows, until=wrong)
        with pytest.raises(InvalidRequest):
            client.kv_clear(None, rows, where={}, until=wrong)


def test_what_a_partition_is_made_of(plane: Plane, client: Any, rows: str) -> None:
    stats = client.stats(rows)
    assert stats.fields["ids"] == {"rows": 2, "bytes": 64}
    assert sum(age["rows"] for age in stats.ages) == stats.keys == 4
    lengths = stats.lengths["ids"]
    assert (lengths.rows, lengths.min, lengths.max, lengths.mean) == (2, 3, 5, 4.0)
    assert sum(rows for _, _, rows in lengths.histogram) == 2
    assert stats.producers[0]["client_id"] == client.client_id
    assert stats.producers[0]["alive"]
    assert bare(stats) == bare(plane.witness.stats(rows))
    with pytest.raises(PartitionNotFound):
        client.stats(f"{rows}-absent")


def test_the_first_rows_by_a_tag(client: Any, rows: str) -> None:
    first = client.kv_list(rows, where={"status": "done"}, order_by="-length", limit=1)
    assert first.keys == ["u_1_0"]
    assert client.kv_list(rows, order_by="length", limit=3).keys[:2] == ["u_0_0", "u_1_0"]
    assert client.kv_list(rows, order_by="length", limit=0).keys == []
    for named in (
        {"order_by": "length"},
        {"order_by": "length", "limit": 100_000},
        {"order_by": "", "limit": 3},
        {"order_by": 5, "limit": 3},
        {"order_by": "length", "limit": 3, "since": first.revision},
    ):
        with pytest.raises(InvalidRequest):
            client.kv_list(rows, **named)


def test_revisions_of_an_age(client: Any, rows: str) -> None:
    assert client.revision_before(1e9) is None
    client.kv_put("late", rows, None, {})
    known = eventually(lambda: client.revision_before(0), "some moment is known")
    assert type(known) is Revision
    for wrong in (-1.0, float("nan"), "1", True):
        with pytest.raises(InvalidRequest):
            client.revision_before(wrong)


# -- who holds and who waits ---------------------------------------------------------------------


def test_claims_and_tasks(plane: Plane, client: Any, rows: str) -> None:
    claim = client.kv_claim(rows, "train", count=2, where={"status": "done"}, lease_s=77.0)
    (told,) = client.claims(rows)
    assert (told.task, told.claim_id, sorted(told.keys)) == (
        "train", claim.claim_id, sorted(claim.keys),
    )  # fmt: skip
    assert told.lease_s == 77.0
    assert [holder.client_id for holder in told.holders] == [client.client_id]
    (task,) = client.tasks(rows)
    assert (task.partition_id, task.task, task.held, task.committed) == (rows, "train", 2, 0)
    assert task.lag == 4
    assert bare(client.claims(rows)) == bare(plane.witness.claims(rows))
    assert client.tasks(rows) == plane.witness.tasks(rows)
    assert bare(told) in bare(client.claims())
    assert task in client.tasks()
    client.kv_release(claim)
    assert client.claims(rows) == []
    with pytest.raises(PartitionNotFound):
        client.claims(f"{rows}-absent")


def test_who_waits(plane: Plane, client: Any, rows: str) -> None:
    other = plane.another()
    where = {"status": "never"}
    wait = threading.Thread(
        target=lambda: other.kv_wait(rows, {"n": {">=": 1}}, count=7, timeout=60.0)
    )
    wait.start()
    claim = threading.Thread(target=lambda: other.kv_claim(rows, "t", count=1, where=where))
    claim.start()

    def mine() -> list[Any]:
        return [each for each in client.waiters() if each.partition_id == rows]

    eventually(lambda: len(mine()) == 2, "both are told of")
    told = {each.kind: each for each in mine()}
    assert set(told) == {"rows", "claim"}
    assert told["rows"].count == 7
    assert told["rows"].where == '{"n": {">=": 1}}'
    assert 0 < told["rows"].left_s <= 70.0
    assert (told["claim"].task, told["claim"].grouped) == ("t", False)
    assert told["claim"].client.client_id
    assert bare(mine()) == bare([w for w in plane.witness.waiters() if w.partition_id == rows])
    client.kv_batch_put(
        [f"w{i}" for i in range(7)], rows, None, [{"n": i, "status": "never"} for i in range(1, 8)]
    )
    wait.join(30.0)
    claim.join(30.0)
    assert mine() == []


def test_what_stores_hold(plane: Plane, client: Any, rows: str) -> None:
    stores = client.holdings()
    assert stores
    assert all(store.reachable and store.pid and store.capacity_bytes for store in stores)
    assert sum(store.live_blocks for store in stores) >= 2
    assert [store.orphans for store in stores] == [[] for _ in stores]
    inside = plane.witness.holdings()
    assert [(s.store_id, s.used_bytes, s.pid) for s in stores] == [
        (s.store_id, s.used_bytes, s.pid) for s in inside
    ]
    used = {report.store for key in client.inspect(["u_0_0"], rows) for report in key.fields}
    assert used <= {store.store_id for store in stores}


def test_a_status_of_the_plane(plane: Plane, client: Any, rows: str) -> None:
    bare_client = client.client if plane.kind == "outside" else client
    told, inside = bare_client.status(), plane.witness.status()
    assert told["plane_id"] == client.plane_id
    assert told["partitions"][rows] == inside["partitions"][rows]
    # What only a gateway says comes on top.
    assert set(inside) <= set(told)
    assert told["version"] == inside["version"]


# -- lineage -------------------------------------------------------------------------------------


def test_what_a_report_tells_of_the_plane(plane: Plane, client: Any, rows: str) -> None:
    eventually(lambda: max(client.samples().columns["keys"], default=0) >= 3, "a look")
    samples = client.samples()
    assert {len(values) for values in samples.columns.values()} == {len(samples.times_s)}
    client.kv_put("long", rows, None, {"seq_len": 7})
    record = client.record()
    assert (record.plane_id, record.name) == (client.plane_id, plane.name)
    assert record.capacity_bytes > 0
    assert record.status["keys"] >= len(client.kv_list(rows).keys)
    assert len(record.samples.times_s) >= len(samples.times_s)
    (life,) = [group for group in record.groups if group.partition_id == rows]
    assert (life.uid, life.rows, life.is_open) == ("u", 2, True)
    assert record.lengths[rows] == {"seq_len": [7]}


def test_a_trace_of_a_group(plane: Plane, client: Any, rows: str) -> None:
    client.kv_batch_get(["u_0_0"], rows, ["ids"])
    found = client.trace(rows, uid="u")
    assert {row.op for row in found.rows} >= {"begin", "put", "get"}
    assert set(found.present) == {"u", "u_0_0", "u_1_0"}
    inside = plane.witness.trace(rows, uid="u")
    assert [bare(row) for row in found.rows] == [bare(row) for row in inside.rows]
    assert replace(found, rows=[], findings=[], next=0) == replace(
        inside, rows=[], findings=[], next=0
    )
    assert [each.status for each in found.findings] == [each.status for each in inside.findings]
    later = client.trace(rows, since=found.next)
    assert [row.op for row in later.rows] in ([], ["get"])
    assert len(client.trace(rows, key="u_0_0", limit=1).rows) >= 1
    for wrong in ({"uid": "u", "key": "k"}, {"limit": 0}, {"since": -1}):
        with pytest.raises(InvalidRequest):
            client.trace(rows, **wrong)


def test_a_stage_is_named_by_traces(plane: Plane, client: Any, partition: str) -> None:
    if plane.kind == "embedded-async":
        pytest.skip("contexts of an AsyncClient are its own")
    with client.stage("advantage"):
        client.kv_put("a", partition, None, {"x": 1})
    client.kv_put("a", partition, None, {"x": 2})
    put = [row for row in client.trace(partition, key="a").rows if row.op == "tag"]
    assert put[0].stage == "advantage"
    assert put[-1].stage != "advantage"
