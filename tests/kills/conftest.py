"""Planes whose processes can be killed at named points, and the table of what came of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.host import embedded
from dataplane.testing.switches import VARIABLE
from tests.deadline import eventually
from tests.faults.conftest import own_plane as own_plane
from tests.kills.planes import KILLED, Killed
from tests.kills.restarts import Restarts
from tests.kills.table import Table, report

TABLE = Path(os.environ.get("FAULTS_TABLE", "faults-table.jsonl"))
SEED = int(os.environ.get("FAULTS_SEED", "0")) or secrets.randbelow(1 << 30)
"""Of what is random here; `FAULTS_SEED` repeats a run."""


def pytest_configure(config: pytest.Config) -> None:
    os.environ[VARIABLE] = "1"
    os.environ["FAULTS_SEED"] = str(SEED)  # the same in processes that share the suite
    if not hasattr(config, "workerinput"):
        TABLE.unlink(missing_ok=True)


def pytest_report_header() -> str:
    return f"faults: FAULTS_SEED={SEED}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    trials = Table(TABLE).trials()
    if trials:
        terminalreporter.section("kills")
        terminalreporter.write_line(f"FAULTS_SEED={SEED}")
        terminalreporter.write_line(report(trials))


@pytest.fixture(scope="session")
def seed() -> int:
    """Of this run."""
    return SEED


@pytest.fixture(scope="session")
def table() -> Table:
    """Where trials are noted."""
    return Table(TABLE)


@pytest.fixture(scope="module")
def one_process(roots: dict[str, Path]) -> Iterator[Killed]:
    """A plane whose stores share a process, which its host starts again."""
    config = Config(**KILLED, **roots)
    host = embedded.start("killed", config)
    client = Client(host.joined, config)
    try:
        yield Killed("killed", host.joined, config, client)
    finally:
        client.close()
        host.stop()


@pytest.fixture(scope="module")
def two_processes(roots: dict[str, Path], ray_cluster: list[str]) -> Iterator[Killed]:
    """A plane whose stores have a process each, which Ray starts again."""
    import dataplane

    settings = {**KILLED, **{name: str(path) for name, path in roots.items()}}
    settings |= {"host": "ray", "start_timeout_s": 60.0, "linger_s": 60.0}
    client = dataplane.init(settings, name="killed")
    core = client._core
    try:
        yield Killed("killed", core.joined, core.config, client)
    finally:
        client.close(destroy=True)
        left = [path / core.joined.plane_id for path in roots.values()]
        left.append(roots["shm_dir"] / f"dataplane-{os.geteuid()}-{core.joined.plane_id}")
        eventually(lambda: not any(path.exists() for path in left), "the plane leaves nothing")


@pytest.fixture(params=["one_process", pytest.param("two_processes", marks=pytest.mark.ray)])
def killed(request: pytest.FixtureRequest) -> Iterator[Killed]:
    """A plane of each kind, which a test may leave rows in: they are cleared, and all is free."""
    plane: Killed = request.getfixturevalue(request.param)
    yield plane
    for partition in plane.client.kv_list_partitions():
        plane.client.kv_drop_partition(partition)
    plane.is_empty()


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Restarts]:
    """Of children of the planes that a test starts after it."""
    restarts = Restarts(monkeypatch)
    yield restarts
    restarts.go()  # before the planes end, which waits for them
