"""Planes of these tests, and folders in which they leave nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults import planes
from tests.faults.planes import Plane


@pytest.fixture(scope="module")
def plane(roots: dict[str, Path]) -> Iterator[Plane]:
    """One plane for all tests of a module that leave it as it is."""
    with ExitStack() as stack:
        yield planes.start(stack, "shared", timeout_s=20, **roots)


@pytest.fixture
def own_plane(roots: dict[str, Path]) -> Iterator[Callable[..., Plane]]:
    """Makes planes that one test may break."""
    numbers = itertools.count(1)
    with ExitStack() as stack:

        def make(**settings: Any) -> Plane:
            settings = {"timeout_s": 20, **roots, **settings}
            return planes.start(stack, f"own-{next(numbers)}", **settings)

        yield make


@pytest.fixture
def partition(request: pytest.FixtureRequest) -> str:
    """A partition name that no other test uses."""
    return request.node.nodeid.rpartition("::")[2]
