"""A plane with an endpoint, and gateways before it, which have their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dataplane.gateway.server import GatewayServer
from tests.dataplane.gateway.gateways import Callers, Serve, serving
from tests.faults import planes
from tests.faults.planes import Plane


@pytest.fixture(scope="module")
def shared(roots: dict[str, Path]) -> Iterator[Plane]:
    """One plane for all tests of a module that leave it as it is."""
    with ExitStack() as stack:
        yield planes.start(stack, "measured", timeout_s=20, metrics_port=0, **roots)


@pytest_asyncio.fixture
async def serve(shared: Plane, roots: dict[str, Path]) -> AsyncIterator[Serve]:
    """Starts gateways of that plane."""
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> GatewayServer:
            return await stack.enter_async_context(
                serving(shared, roots["runtime_dir"], **settings)
            )

        yield start


@pytest_asyncio.fixture
async def callers() -> AsyncIterator[Callers]:
    """Makes callers of gateways."""
    async with AsyncExitStack() as stack:
        yield Callers(stack)
