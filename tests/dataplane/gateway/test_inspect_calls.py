"""What an operator asks through a gateway: who is named before whom, and long answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from dataplane.errors import InvalidRequest
from dataplane.gateway.access.limits import Limits
from dataplane.gateway.access.roles import ROLES, Grant, Principal
from dataplane.gateway.access.sight import Sight
from dataplane.gateway.access.unseen import text_without_unseen
from dataplane.gateway.calls.tracing import hide
from dataplane.inspection import ClaimReport, ClientReport, StoreReport
from dataplane.protocol import reports
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.gateways import Caller, Callers, Serve
from tests.dataplane.gateway.guarded import add_token
from tests.faults.planes import Plane


async def answers(caller: Caller, rpc: str, message: Any) -> list[Any]:
    call = getattr(caller.stub, rpc)(message, timeout=20, metadata=caller.metadata)
    return [answer async for answer in call]


@pytest.fixture
async def faces(
    serve: Serve, callers: Callers, partition: str, tmp_path: Path
) -> tuple[Caller, Caller, Caller]:
    """A reader and an admin of one partition, and an admin of all."""
    path = tmp_path / "tokens.json"
    tokens = [
        add_token(path, "reads", "reader", partition=partition),
        add_token(path, "runs", "admin", partition=partition),
        add_token(path, "owns", "admin"),
    ]
    gateway = await serve(token_file=path)
    reader, admin, owner = [await callers(gateway, token=token.text) for token in tokens]
    return reader, admin, owner


async def test_clients_are_named_to_those_who_may_operate(
    faces: tuple[Caller, Caller, Caller], plane: Plane, partition: str
) -> None:
    reader, admin, owner = faces
    plane.client.kv_put("a", partition, {"x": np.arange(3)}, {"n": 1})
    claim = plane.client.kv_claim(partition, "t", count=1)
    inside = plane.client.client_id
    for caller, named, placed in (
        (reader, "", False),
        (admin, inside, False),
        (owner, inside, True),
    ):
        answer = await caller.call(
            "Inspect", pb.InspectRequest(partition_id=partition, keys=["a", "b"])
        )
        (row,) = answer.rows
        assert answer.looked_at == 2
        assert (row.producer.client_id, row.producer.alive) == (named, True)
        assert bool(row.producer.label) is bool(named)
        assert bool(row.fields[0].store) is placed
        assert list(row.fields[0].shape) == [3]
        stats = await caller.call("GetStats", pb.GetStatsRequest(partition_id=partition))
        assert [of.client.client_id for of in stats.producers] == [named]
        (_, claims) = await answers(
            caller, "ListClaims", pb.ListClaimsRequest(partition_id=partition)
        )
        assert [holder.client_id for holder in claims.claims[0].holders] == [named]
        said = str(await answers(caller, "Trace", pb.TraceRequest(partition_id=partition)))
        assert (inside in said) is bool(named)
        assert bool(named) or "#1" in said
    plane.client.kv_release(claim)


async def test_what_concerns_the_plane_is_for_who_may_operate_all_of_it(
    faces: tuple[Caller, Caller, Caller], plane: Plane, partition: str
) -> None:
    plane.client.kv_put("a", partition, {"x": np.arange(3)}, {"n": 1})
    reader, admin, owner = faces
    for caller in (reader, admin):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answers(caller, "ListHoldings", pb.ListHoldingsRequest())
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        told = await caller.call("GetStatus", pb.GetStatusRequest())
        assert {"stores", "values", "clients", "waiting"}.isdisjoint(told.status.entries)
        assert "revision" in told.status.entries
    told = await owner.call("GetStatus", pb.GetStatusRequest())
    assert {"stores", "values", "clients", "waiting"} <= set(told.status.entries)
    (held,) = await answers(owner, "ListHoldings", pb.ListHoldingsRequest())
    assert held.store.reachable


async def test_its_own_client_is_called_as_it_calls_itself(
    faces: tuple[Caller, Caller, Caller], partition: str
) -> None:
    _, admin, _ = faces
    await admin.put_rows(partition, {"mine": {"x": np.arange(2)}})
    asked = pb.InspectRequest(partition_id=partition, keys=["mine"])
    (row,) = (await admin.call("Inspect", asked)).rows
    assert row.producer.client_id not in ("", admin.client_id)
    asked.client_id = admin.client_id
    (row,) = (await admin.call("Inspect", asked)).rows
    assert row.producer.client_id == admin.client_id


async def test_only_so_many_keys_at_once_and_as_many_as_have_room(
    caller: Caller, plane: Plane, partition: str
) -> None:
    keys = [f"k{i}" for i in range(60)]
    plane.client.kv_batch_put(keys, partition, None, [{"t": "x" * 60_000} for _ in keys])
    answer = await caller.call("Inspect", pb.InspectRequest(partition_id=partition, keys=keys))
    assert 0 < answer.looked_at == len(answer.rows) < 60
    assert answer.ByteSize() < 4 << 20
    with pytest.raises(InvalidRequest, match="at most 1000"):
        await caller.call("Inspect", pb.InspectRequest(partition_id=partition, keys=["k"] * 1001))
    with pytest.raises(InvalidRequest):
        await caller.call("Inspect", pb.InspectRequest(partition_id=partition))


def test_what_has_no_room_in_one_message_comes_in_parts() -> None:
    me = ClientReport("c", "here", alive=True)
    keys = [f"{i:0200}" for i in range(20_000)]
    claims = [ClaimReport("p", "t", claim_id, keys, [me], 1.0, 30.0, None) for claim_id in (1, 2)]
    parts = [part for claim in claims for part in reports.claim_to(claim)]
    assert len(parts) > 2
    assert max(part.ByteSize() for part in parts) < 2 << 20
    assert reports.claims_from(parts) == claims
    pins = [{"client": me, "blocks": 1, "bytes": 2, "dead_bytes": 0}]
    stores = [
        StoreReport("s", True, orphans=[{"block": i} for i in range(120_000)], pins=pins),
        StoreReport("r", False, "is away"),
    ]
    parts = [part for store in stores for part in reports.store_to(store)]
    assert len(parts) == 4
    assert reports.stores_from(parts) == stores


def test_who_is_not_named_has_a_number_in_a_trace() -> None:
    some = Principal("some", (Grant("mine", ROLES["reader"]),), Limits())
    answer: dict[str, Any] = {
        "entries": [
            {"client": "aa", "partition": "mine", "store": "s"},
            {"client": "bb", "partition": "mine", "message": "attempt 3 belongs to partition 'x'"},
            {"client": "aa", "partition": "mine"},
            {"client": "own-inside", "partition": "mine"},
        ],
        "clients": {"aa": ["pid 1 on h", True], "own-inside": ["pid 2 on h", True]},
    }
    hide(answer, Sight(some, "own", "own-inside"), all_seen=False)
    assert [entry["client"] for entry in answer["entries"]] == ["#1", "#2", "#1", "own"]
    assert answer["entries"][0]["store"] == "#1"
    assert answer["entries"][1]["message"] == "attempt 3 is not open"
    assert answer["clients"] == {"#1": ["", True], "#2": ["", False], "own": ["", True]}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("full; partition 'secret' holds the most (x)", "full"),
        ("late: there is no partition 'a'; there are 'secret'", "late: there is no partition 'a'"),
        ("key 'a' is not there", "key 'a' is not there"),
    ],
)
def test_texts_of_refusals_name_no_other_partition(text: str, left: str) -> None:
    assert text_without_unseen(text) == left
