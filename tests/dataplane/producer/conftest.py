"""A plane and gateways of it, for producers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dataplane.gateway.server import GatewayServer
from dataplane.producer import AsyncProducer
from tests.dataplane.gateway.gateways import serving
from tests.dataplane.producer.scripted import ScriptedGateway
from tests.faults import planes
from tests.faults.planes import Plane


@pytest.fixture(scope="module")
def plane(roots: dict[str, Path]) -> Iterator[Plane]:
    """One plane for all tests of a module."""
    with ExitStack() as stack:
        yield planes.start(stack, "producer", timeout_s=20, **roots)


@pytest_asyncio.fixture
async def gateway(plane: Plane, roots: dict[str, Path]) -> AsyncIterator[GatewayServer]:
    """A gateway of the plane, without credentials, on a unix socket."""
    async with serving(plane, roots["runtime_dir"]) as server:
        yield server


@pytest_asyncio.fixture
async def producer(gateway: GatewayServer) -> AsyncIterator[AsyncProducer]:
    """A producer of the gateway."""
    async with AsyncProducer(address_of(gateway)) as it:
        yield it


@pytest_asyncio.fixture
async def scripted(roots: dict[str, Path]) -> AsyncIterator[ScriptedGateway]:
    """A gateway that does what a test says."""
    async with ScriptedGateway(roots["runtime_dir"] / "scripted.sock") as it:
        yield it


@pytest.fixture
def partition(request: pytest.FixtureRequest) -> str:
    """A partition name that no other test uses."""
    return request.node.name


def address_of(gateway: GatewayServer) -> str:
    """Where producers reach a gateway."""
    return gateway.addresses[0]


Settings = dict[str, Any]
