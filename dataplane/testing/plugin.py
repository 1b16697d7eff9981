"""Fixtures for pytest: a plane in the test's process, a client of it, and proxies that fail.

pytest loads this wherever the package is installed, so it imports nothing of it until a fixture is
used, and does nothing by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dataplane.client.sync import Client
    from dataplane.testing.memory import MemoryPlane
    from dataplane.testing.proxy import FaultProxy
    from dataplane.wire.address import Address


@pytest.fixture
def dataplane_plane() -> Iterator[MemoryPlane]:
    """A plane in this process for one test, which the module-level verbs use meanwhile."""
    from dataplane.testing.memory import plane

    with plane() as made:
        yield made


@pytest.fixture
def dataplane_client(dataplane_plane: MemoryPlane) -> Client:
    """A blocking client of `dataplane_plane`."""
    return dataplane_plane.client


@pytest.fixture
def fault_proxy() -> Iterator[Callable[[Address], FaultProxy]]:
    """Makes fault proxies in front of the addresses of servers; they end with the test."""
    from dataplane.testing.proxy import FaultProxy

    with ExitStack() as stack:
        yield lambda address: stack.enter_context(FaultProxy(address))
