"""A gateway as a Ray actor: it is where its plane is, comes back, and goes with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from dataplane import session
from dataplane.errors import PlaneLost
from dataplane.v1 import dataplane_pb2 as pb
from dataplane.v1 import dataplane_pb2_grpc
from tests.dataplane.gateway.test_server import free_port
from tests.deadline import eventually

pytestmark = pytest.mark.ray


def described(target: str) -> pb.DescribeResponse:
    """What a gateway says of itself, once it is there."""
    with grpc.insecure_channel(target) as channel:
        stub = dataplane_pb2_grpc.DataPlaneServiceStub(channel)
        return stub.Describe(pb.DescribeRequest(), timeout=30, wait_for_ready=True)


def test_it_serves_comes_back_and_ends_with_its_plane(
    ray_cluster: list[str], roots: dict[str, Path]
) -> None:
    import ray

    from dataplane.gateway.actor import start_gateway

    target = f"127.0.0.1:{free_port()}"
    settings: dict[str, Any] = {**roots, "linger_s": 5.0, "gateway": {"listen": target}}
    client = session.init(settings, name="outside")
    try:
        config = session.settings_of(settings)
        assert start_gateway("outside", config.gateway, plane_config=config) == [f"grpc://{target}"]
        assert described(target).plane_id == client.plane_id
        actors = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
        (name,) = (each for each in actors if each.startswith("outside/gateway/"))
        actor = ray.get_actor(name, namespace="dataplane")
        os.kill(ray.get(actor.describe.remote(10.0))["pid"], signal.SIGKILL)
        assert described(target).plane_id == client.plane_id
    finally:
        client.close(destroy=True)

    def is_gone() -> bool:
        names = {each["name"] for each in ray.util.list_named_actors(all_namespaces=True)}
        return name not in names

    eventually(is_gone, "the gateway ends with its plane", within_s=30)
    with pytest.raises(PlaneLost):
        start_gateway("outside", {"listen": target}, plane_config=config)
