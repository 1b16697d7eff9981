"""A process dies at every named point, while clients are at work."""

from __future__ import annotations

import pytest

from dataplane.testing.points import POINTS
from tests.kills.planes import Killed
from tests.kills.table import Table
from tests.kills.trial import kill_at

SEEDS = (0, 1, 2)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]


def points_of(role: str) -> list[str]:
    return [point for point, about in POINTS.items() if about.role == role]


@pytest.mark.parametrize("trial", SEEDS)
@pytest.mark.parametrize("point", points_of("tags"))
def test_the_tag_store_dies_at(
    one_process: Killed, point: str, trial: int, seed: int, table: Table
) -> None:
    """The value store is in the same process, and dies with it."""
    kill_at(one_process, point, seed + trial, table)


@pytest.mark.ray
@pytest.mark.parametrize("trial", SEEDS)
@pytest.mark.parametrize("point", points_of("values"))
def test_the_value_store_dies_at(
    two_processes: Killed, point: str, trial: int, seed: int, table: Table
) -> None:
    kill_at(two_processes, point, seed + trial, table)
