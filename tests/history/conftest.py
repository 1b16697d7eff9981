"""Planes of these tests, and threads in which their clients wait."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults import planes
from tests.faults.planes import Plane
from tests.history.workload import SETTINGS


@pytest.fixture(scope="module")
def plane(roots: dict[str, Path]) -> Iterator[Plane]:
    """A plane in a process of its own, for all histories of a module."""
    with ExitStack() as stack:
        yield planes.start(stack, "histories", **SETTINGS, **roots)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that wait for answers which may take their time: one for each client at most."""
    with ThreadPoolExecutor(8, thread_name_prefix="waiting") as pool:
        yield pool
