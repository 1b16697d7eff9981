"""A plane and gateways of it, in the process of the tests, and who calls them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dataplane.gateway.server import GatewayServer
from tests.dataplane.gateway.gateways import Caller, Callers, Serve, serving
from tests.faults import planes
from tests.faults.planes import Plane


@pytest.fixture(scope="module")
def plane(roots: dict[str, Path]) -> Iterator[Plane]:
    """One plane for all tests of a module that leave it as it is."""
    with ExitStack() as stack:
        yield planes.start(stack, "gateway", timeout_s=20, **roots)


@pytest_asyncio.fixture
async def serve(plane: Plane, roots: dict[str, Path]) -> AsyncIterator[Serve]:
    """Starts gateways of the module's plane, or of another."""
    async with AsyncExitStack() as stack:

        async def start(of: Plane = plane, **settings: Any) -> GatewayServer:
            return await stack.enter_async_context(serving(of, roots["runtime_dir"], **settings))

        yield start


@pytest_asyncio.fixture
async def gateway(serve: Serve) -> GatewayServer:
    """A gateway without credentials, on a unix socket."""
    return await serve()


@pytest_asyncio.fixture
async def callers() -> AsyncIterator[Callers]:
    """Makes callers."""
    async with AsyncExitStack() as stack:
        yield Callers(stack)


@pytest_asyncio.fixture
async def caller(gateway: GatewayServer, callers: Callers) -> Caller:
    """Somebody who calls the gateway."""
    return await callers(gateway)


@pytest.fixture
def partition(request: pytest.FixtureRequest) -> str:
    """A partition name that no other test uses."""
    return request.node.nodeid.rpartition("::")[2]
