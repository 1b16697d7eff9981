"""What a gateway reports is what was asked of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from dataplane.errors import KeyNotFound, Unauthenticated
from dataplane.gateway.access.token_records import Records
from dataplane.gateway.server import GatewayServer
from dataplane.gateway.service import NAME
from dataplane.metrics.targets import list_targets
from dataplane.v1 import dataplane_pb2 as pb
from tests.dataplane.gateway.gateways import Callers, Serve
from tests.dataplane.metrics.scraping import Scrape, ask

PARTITION = "measured"


async def scrape(gateway: GatewayServer) -> Scrape:
    assert gateway.metrics is not None
    assert gateway.metrics.target is not None
    return await asyncio.to_thread(Scrape, gateway.metrics.target)


async def test_calls_by_method_and_status(serve: Serve, callers: Callers) -> None:
    gateway = await serve(metrics_port=0)
    caller = await callers(gateway)
    value = b"x" * 100_000
    for _ in range(3):
        await caller.put_rows(PARTITION, {"a": {"text": value}})
    await caller.get_rows(PARTITION, ["a"])
    with pytest.raises(KeyNotFound):
        await caller.get_rows(PARTITION, ["absent"])
    seen = await scrape(gateway)
    calls = "dataplane_gateway_calls_total"
    assert seen.value(calls, method="PutRows", code="OK") == 3
    assert seen.value(calls, method="GetRows", code="OK") == 1
    assert seen.value(calls, method="GetRows", code="NOT_FOUND") == 1
    assert seen.value("dataplane_gateway_refused_total", error="KeyNotFound") == 1
    received = seen.value("dataplane_gateway_received_bytes_total", method="PutRows")
    assert 300_000 < received < 310_000
    assert seen.value("dataplane_gateway_sent_bytes_total", method="GetRows") > 100_000
    assert seen.value("dataplane_gateway_call_duration_seconds_count", method="PutRows") == 3
    assert seen.value("dataplane_gateway_open_calls") == 0
    assert seen.value("dataplane_gateway_inflight_bytes") == 0
    assert seen.value("dataplane_gateway_clients") == 1
    assert seen.value("dataplane_gateway_serving") == 1
    assert seen.value("dataplane_build_info", role="gateway") == 1


async def test_calls_without_credentials_are_counted(
    serve: Serve, callers: Callers, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.json"
    path.write_bytes(Records().dump())
    gateway = await serve(metrics_port=0, token_file=path)
    stranger = await callers(gateway, token="wrong")
    for _ in range(4):
        with pytest.raises(Unauthenticated):
            await stranger.get_rows(PARTITION, ["a"])
    seen = await scrape(gateway)
    assert seen.value("dataplane_gateway_refused_total", error="Unauthenticated") == 4
    of = {"method": "GetRows", "code": "UNAUTHENTICATED"}
    assert seen.value("dataplane_gateway_calls_total", **of) == 4


async def test_methods_that_callers_make_up_are_one(serve: Serve) -> None:
    gateway = await serve(metrics_port=0)
    place = gateway.addresses[0].partition("://")[2]
    async with grpc.aio.insecure_channel(f"unix:{place}") as channel:
        for number in range(5):
            method: Any = channel.unary_unary(f"/{NAME}/Made{number}")
            with pytest.raises(grpc.aio.AioRpcError):
                await method(b"", timeout=10)
    seen = await scrape(gateway)
    assert seen.labels("dataplane_gateway_calls_total", "method") <= {"unknown"}


async def test_trajectories_in_quarantine(serve: Serve, callers: Callers) -> None:
    gateway = await serve(metrics_port=0)
    caller = await callers(gateway)
    bad = pb.Trajectory(uid="q1", input_ids=[1, 2], labels=[1])
    message = pb.PutTrajectoriesRequest(
        request=caller.request(), partition_id=PARTITION, trajectories=[bad, bad]
    )
    answer = await caller.call("PutTrajectories", message)
    assert [bool(result.reason) for result in answer.results] == [True, True]
    seen = await scrape(gateway)
    assert seen.value("dataplane_gateway_quarantined_rows_total") == 2
    assert seen.value("dataplane_gateway_unkept_rows_total") == 0


async def test_probes_follow_the_gateway(serve: Serve) -> None:
    gateway = await serve(metrics_port=0)
    assert gateway.metrics is not None
    target = gateway.metrics.target
    assert target is not None
    assert (await asyncio.to_thread(ask, target, "/readyz")).status == 200
    assert (await asyncio.to_thread(ask, target, "/targets")).status == 404
    assert gateway.joined.tags.unix is not None
    runtime = Path(gateway.joined.tags.unix).parent
    assert [target] in [group["targets"] for group in list_targets(runtime)]
    await gateway.health.say(serving=False)
    assert (await asyncio.to_thread(ask, target, "/readyz")).status == 503
    await gateway.stop()
    assert [target] not in [group["targets"] for group in list_targets(runtime)]
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(ask, target, "/healthz")


async def test_nothing_is_measured_unless_it_is_asked_for(serve: Serve) -> None:
    gateway = await serve()
    assert gateway.metrics is None
