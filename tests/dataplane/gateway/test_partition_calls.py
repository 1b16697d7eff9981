"""Partitions through a gateway: their settings, their end, who sees them, and Clear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from dataplane.errors import InvalidRequest, PartitionNotFound, PermissionDenied, SchemaMismatch
from dataplane.protocol.values import from_value, to_value
from dataplane.types import FieldSchema
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.gateways import Caller, Callers, Serve
from tests.dataplane.gateway.guarded import add_token
from tests.faults.planes import Plane


def create(caller: Caller, partition: str, **parts: Any) -> pb.CreatePartitionRequest:
    return pb.CreatePartitionRequest(request=caller.request(), partition_id=partition, **parts)


async def partitions(caller: Caller) -> dict[str, Any]:
    answer = await caller.call("ListPartitions", pb.ListPartitionsRequest())
    return {
        name: from_value(pb.Value(map_value=about)) for name, about in answer.partitions.items()
    }


# -- settings --------------------------------------------------------------------------------


async def test_a_partition_is_made_with_its_schema_and_its_limits(
    caller: Caller, plane: Plane, partition: str
) -> None:
    schema = {
        "ids": pb.FieldSchema(dtype="int64", rank=1),
        "experts": pb.FieldSchema(dtype="uint16", rank=2, ragged_dim=0),
        "note": pb.FieldSchema(dtype="object", rank=1),
    }
    quota = pb.Quota(bytes=1 << 20, rows=100)
    asked = create(caller, partition, schema=schema, quota=quota, retention_versions=3)
    made = await caller.call("CreatePartition", asked)
    about = plane.client.kv_list_partitions()[partition]
    assert made.revision.n == about["revision"]
    assert about["schema"] == {
        "ids": FieldSchema("int64", 1, 0),
        "experts": FieldSchema("uint16", 2, 0),
        "note": FieldSchema("object", 1, 0),
    }
    assert about["quota"] == {"bytes": 1 << 20, "rows": 100}
    assert about["retention"] == {"versions": 3}
    told = (await partitions(caller))[partition]
    assert {name: FieldSchema(*parts) for name, parts in told.pop("schema").items()} == about.pop(
        "schema"
    )
    assert told == about
    # What is not named stays; a quota without a limit goes.
    await caller.call("CreatePartition", create(caller, partition))
    assert plane.client.kv_list_partitions()[partition]["quota"] == {"bytes": 1 << 20, "rows": 100}
    await caller.call("CreatePartition", create(caller, partition, quota=pb.Quota()))
    assert plane.client.kv_list_partitions()[partition]["quota"] is None
    with pytest.raises(SchemaMismatch):
        plane.client.kv_put("a", partition, {"ids": np.zeros((2, 2))})


async def test_an_open_schema_lets_fields_change(
    caller: Caller, plane: Plane, partition: str
) -> None:
    await caller.call("CreatePartition", create(caller, partition, open_schema=True))
    plane.client.kv_put("a", partition, {"x": np.arange(2)})
    plane.client.kv_put("b", partition, {"x": np.zeros((2, 2))})
    assert plane.client.kv_list_partitions()[partition]["open_schema"]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"open_schema": True, "schema": {"x": pb.FieldSchema(dtype="int64")}}, "not both"),
        ({"schema": {"x": pb.FieldSchema(dtype="int63")}}, "dtype"),
        ({"schema": {"x": pb.FieldSchema(dtype="int64", rank=-1)}}, "rank"),
        ({"quota": pb.Quota(bytes=-1)}, "quota.bytes"),
        ({"quota": pb.Quota(bytes=1, group_bytes=2)}, "less than one group"),
        ({"retention_versions": -1}, "retention.versions"),
    ],
)
async def test_settings_that_make_no_sense_are_refused(
    caller: Caller, plane: Plane, partition: str, parts: dict[str, Any], says: str
) -> None:
    name = f"{partition}"[:60].replace("[", "-")
    with pytest.raises(InvalidRequest, match=says):
        await caller.call("CreatePartition", create(caller, name, **parts))
    assert name not in plane.client.kv_list_partitions()


# -- the end ---------------------------------------------------------------------------------


async def test_a_sealed_partition_takes_no_row_and_older_versions_go(
    caller: Caller, plane: Plane, partition: str
) -> None:
    await caller.call("CreatePartition", create(caller, partition, retention_versions=2))
    dropped = []
    asked = pb.SealPartitionRequest()
    for version in range(4):
        name = f"{partition}@{version}"
        plane.client.kv_put("a", name, None, {})
        asked = pb.SealPartitionRequest(request=caller.request(), partition_id=name)
        dropped.append(list((await caller.call("SealPartition", asked)).dropped))
    assert dropped == [[], [], [f"{partition}@0"], [f"{partition}@1"]]
    asked.request.retry = True
    assert list((await caller.call("SealPartition", asked)).dropped) == [f"{partition}@1"]
    with pytest.raises(InvalidRequest, match="sealed"):
        plane.client.kv_put("b", f"{partition}@3", None, {})


async def test_a_partition_or_its_older_versions_are_dropped_once(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    one = await serve()
    caller = await callers(one, client_id="dropper")
    for version in (1, 2, 3):
        plane.client.kv_put("a", f"{partition}@{version}", None, {})
    asked = pb.DropPartitionRequest(request=caller.request(), partition_id=partition, older_than=3)
    assert list((await caller.call("DropPartition", asked)).dropped) == [
        f"{partition}@1", f"{partition}@2",
    ]  # fmt: skip
    plane.client.kv_put("a", f"{partition}@1", None, {})
    await one.stop()
    caller = await callers(await serve(), client_id="dropper")
    asked.request.retry = True
    assert len((await caller.call("DropPartition", asked)).dropped) == 2
    assert f"{partition}@1" in plane.client.kv_list_partitions()
    whole = pb.DropPartitionRequest(request=caller.request(9), partition_id=f"{partition}@3")
    assert list((await caller.call("DropPartition", whole)).dropped) == [f"{partition}@3"]
    whole.request.CopyFrom(caller.request(10))
    with pytest.raises(PartitionNotFound) as missing:
        await caller.call("DropPartition", whole)
    assert missing.value.code is grpc.StatusCode.NOT_FOUND


# -- who sees what ---------------------------------------------------------------------------


async def test_only_what_the_caller_sees_is_listed_and_dropped(
    serve: Serve, callers: Callers, plane: Plane, partition: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.json"
    token = add_token(path, "some", "admin", partition=f"{partition}.w*0")
    family = add_token(path, "family", "admin", partition=f"{partition}.w")
    gateway = await serve(token_file=path)
    caller = await callers(gateway, token=token.text)
    for name in ("w", "w@10", "w@11", "w@20", "other"):
        plane.client.kv_put("a", f"{partition}.{name}", None, {})
    seen = await partitions(caller)
    assert set(seen) == {f"{partition}.w@10", f"{partition}.w@20"}
    of_family = await callers(gateway, token=family.text)
    asked = pb.DropPartitionRequest(
        request=of_family.request(), partition_id=f"{partition}.w", older_than=50
    )
    with pytest.raises(PermissionDenied) as denied:
        await of_family.call("DropPartition", asked)
    assert "@1" not in str(denied.value)
    assert f"{partition}.w@10" in plane.client.kv_list_partitions()


# -- Clear -----------------------------------------------------------------------------------


async def test_rows_are_cleared_by_key_or_by_predicate_once(
    serve: Serve, callers: Callers, plane: Plane, partition: str
) -> None:
    one = await serve()
    caller = await callers(one, client_id="clearer")
    keys = [f"k{i}" for i in range(10)]
    plane.client.kv_batch_put(keys, partition, None, [{"n": i} for i in range(10)])
    by_key = pb.ClearRequest(
        request=caller.request(), partition_id=partition, keys=["k0", "k1", "k0", "gone"]
    )
    assert (await caller.call("Clear", by_key)).removed == 2
    by_tags = pb.ClearRequest(
        request=caller.request(), partition_id=partition, where=to_value({"n": {">=": 6}})
    )
    assert (await caller.call("Clear", by_tags)).removed == 4
    assert plane.client.kv_list(partition).keys == ["k2", "k3", "k4", "k5"]
    plane.client.kv_put("k0", partition, None, {"n": 7})
    await one.stop()
    caller = await callers(await serve(), client_id="clearer")
    by_tags.request.retry = True
    assert (await caller.call("Clear", by_tags)).removed == 4
    assert "k0" in plane.client.kv_list(partition).keys


async def test_a_clear_says_what_it_means(caller: Caller, plane: Plane, partition: str) -> None:
    plane.client.kv_put("a", partition, None, {})
    empty = pb.ClearRequest(request=caller.request(), partition_id=partition)
    with pytest.raises(InvalidRequest, match="keys"):
        await caller.call("Clear", empty)
    both = pb.ClearRequest(
        request=caller.request(), partition_id=partition, keys=["a"], where=to_value({})
    )
    with pytest.raises(InvalidRequest, match="not both"):
        await caller.call("Clear", both)
    assert plane.client.kv_list(partition).keys == ["a"]
    everything = pb.ClearRequest(
        request=caller.request(), partition_id=partition, where=to_value({})
    )
    assert (await caller.call("Clear", everything)).removed == 1


async def test_a_clear_that_retires_closes_attempts(
    caller: Caller, plane: Plane, partition: str
) -> None:
    plane.client.begin_group("u", partition, n=1)
    asked = pb.ClearRequest(
        request=caller.request(), partition_id=partition, keys=["u"], retire=True
    )
    assert (await caller.call("Clear", asked)).removed == 1
    assert plane.client.kv_list_partitions()[partition]["groups"] == 0
