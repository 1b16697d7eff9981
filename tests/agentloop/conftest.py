"""A plane for the agent loops' tests, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from dataplane import AsyncClient, async_connect
from tests.contract.planes import Plane, embedded_sync


@pytest.fixture(scope="module")
def plane(plane_settings: dict[str, Any]) -> Iterator[Plane]:
    with embedded_sync("agents", plane_settings) as plane:
        yield plane


@pytest.fixture
async def client(plane: Plane) -> AsyncIterator[AsyncClient]:
    client = await async_connect(plane.name, config=plane.settings)
    yield client
    await client.close()


@pytest.fixture
def partition(request: pytest.FixtureRequest) -> str:
    """A partition name that no other test uses."""
    return request.node.nodeid.rpartition("::")[2]
