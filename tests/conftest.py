"""Settings of the whole suite, the one Ray cluster it starts, and the planes of the contract."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.contract.planes import Plane

# Read when Ray is imported: no usage report, and none of its start-up notices.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

# A shared 2-core machine stalls now and then: an example's own time proves nothing.
settings.register_profile("suite", deadline=None, print_blob=True)
settings.load_profile("suite")

KINDS = ("embedded-sync", "embedded-async", "memory", "ray", "ray-remote")

OUTSIDE = frozenset(
    f"test_{name}.py"
    for name in "claim dtypes errors get groups inspection list objects put wait watch".split()
)
"""What of the contract is tried through a gateway too; the rest is about what lies behind it."""

# Measurements are run by `make bench`, kills at every point by `make faults`.
collect_ignore = ["bench"] if "FAULTS" in os.environ else ["bench", "kills"]

_numbers = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kinds(*names): which planes a test of the contract is for")
    config.addinivalue_line("markers", "inside(why): what cannot hold through a gateway")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a test marked with `kinds` says nothing about."""
    dropped: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker("kinds")
        if mark is not None and isinstance(item, pytest.Function):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            assert set(mark.args) <= {*KINDS, "outside"}, f"{item.name}: there are no such planes"
            if "plane" in params and params["plane"] not in mark.args:
                dropped.append(item)
                continue
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            is_outside = item.callspec.params.get("plane") == "outside"
            tried = item.path.parent.name == "contract" and item.path.name in OUTSIDE
            if is_outside and (item.get_closest_marker("inside") is not None or not tried):
                dropped.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_shared_by(item)))


def _shared_by(item: pytest.Item) -> str:
    """Tests that go to one process where several share the suite: those that use the Ray cluster,
    those of one kind of plane, else those of one file."""
    if item.get_closest_marker("ray") is not None or "ray_cluster" in getattr(
        item, "fixturenames", ()
    ):
        return "ray"
    callspec = getattr(item, "callspec", None)
    return str(item.path if callspec is None else callspec.params.get("plane", item.path))


@pytest.fixture(scope="session")
def runtime_dir() -> Iterator[Path]:
    """Runtime root of the session's planes; at the end nothing may be left in it."""
    # Not pytest's own folder: a path of a unix socket has at most 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="dataplane-"))
    yield root
    left = sorted(path.name for path in root.iterdir())
    shutil.rmtree(root)
    assert left in ([], ["lock"])


@pytest.fixture(scope="module")
def roots() -> Iterator[dict[str, Path]]:
    """Settings that put planes in folders of one test module; at the end nothing is left there."""
    # Not pytest's own folder: a path of a unix socket has at most 107 bytes.
    runtime = Path(tempfile.mkdtemp(prefix="dataplane-"))
    shm = Path(tempfile.mkdtemp(prefix="dataplane-", dir="/dev/shm"))
    yield {"runtime_dir": runtime, "shm_dir": shm}
    left = sorted(os.listdir(runtime)), os.listdir(shm)
    shutil.rmtree(runtime)
    shutil.rmtree(shm)
    assert left in (([], []), (["lock"], []))


@pytest.fixture(scope="session")
def plane_settings(runtime_dir: Path) -> dict[str, Any]:
    """Settings of the session's planes."""
    from tests.contract.planes import SETTINGS

    return {**SETTINGS, "runtime_dir": str(runtime_dir)}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[list[str]]:
    """The session's only Ray cluster, which this process has joined: the ids of its two nodes,
    the own one first."""
    import ray
    from ray.cluster_utils import Cluster

    memory = 80 << 20  # the least that Ray takes
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2, "object_store_memory": memory, "include_dashboard": False,
        },
    )  # fmt: skip
    try:
        other = cluster.add_node(num_cpus=2, object_store_memory=memory)
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        yield [ray.get_runtime_context().get_node_id(), other.node_id]
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(kind, marks=pytest.mark.ray if kind.startswith("ray") else ())
        for kind in (*KINDS, "outside")
    ],
)
def plane(request: pytest.FixtureRequest, plane_settings: dict[str, Any]) -> Iterator[Plane]:
    """A plane of each kind of client."""
    from tests.contract import planes

    kind = request.param
    name = f"contract-{kind}-{os.getpid()}"
    with planes.hosted(kind, name, plane_settings, request) as plane:
        yield plane


@pytest.fixture
def client(plane: Plane) -> Any:
    """The blocking verbs of the plane's client."""
    return plane.client


@pytest.fixture
def partition(request: pytest.FixtureRequest, plane: Plane) -> Iterator[str]:
    """A partition that no other test uses, under a name that can be made longer for more of
    them. It is cleared at the end, after which nothing may be in use."""
    from tests.contract.planes import TwoNodes

    if isinstance(plane.client, TwoNodes):
        plane.client.begin()
    name = f"{request.node.originalname}-{next(_numbers)}"
    yield name
    client = plane.client
    for made in client.status()["partitions"]:
        if made.startswith(name):
            client.kv_clear(None, made, where={}, retire=True)
    status = client.status()
    assert status["bytes_in_use"] == 0
    assert status["held_bytes"] == {}
    assert {p["keys"] + p["tag_bytes"] for p in status["partitions"].values()} <= {0}
