"""How a command finds its plane, what it says when there is none, and what it ends with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dataplane
from dataplane import Client, errors
from dataplane.cli.exits import Code, code_of
from dataplane.gateway.child import GatewayChild
from dataplane.gateway.config import GatewayConfig
from tests.dataplane.cli.conftest import Operator
from tests.dataplane.cli.small_run import TRAIN
from tests.deadline import eventually


@pytest.fixture
def stranger(operator: Operator) -> Operator:
    """An operator who was told of no plane."""
    return Operator({n: v for n, v in operator.environment.items() if n != "DATAPLANE_ADDRESS"})


@pytest.fixture(scope="module")
def second(here: dict[str, Any]) -> Iterator[Client]:
    """A second plane of this machine."""
    client = dataplane.init(here, name="eval")
    yield client
    client.close(destroy=True)


def test_the_only_plane_here_is_found_by_itself(stranger: Operator, plane: Client) -> None:
    assert stranger.ask("status", "-o", "json").json["plane_id"] == plane.plane_id


def test_one_of_several_is_found_by_its_name(
    stranger: Operator, plane: Client, second: Client
) -> None:
    said = stranger.ask("status", ok=False)
    assert said.code == Code.USAGE
    assert "2 planes" in said.err
    assert "'eval', 'train'" in said.err
    for name, client in (("train", plane), ("eval", second)):
        found = stranger.ask("status", "--name", name, "-o", "json").json
        assert found["plane_id"] == client.plane_id
    stranger.environment["DATAPLANE_NAME"] = "eval"
    assert stranger.ask("status", "-o", "json").json["name"] == "eval"


def test_an_address_wins(operator: Operator, plane: Client, second: Client) -> None:
    folder = Path(operator.environment["DATAPLANE_ADDRESS"]).parent
    for address in (str(folder), f"unix:{folder}/plane.sock"):
        found = operator.ask("status", "--address", address, "-o", "json").json
        assert found["plane_id"] == plane.plane_id


def test_none_is_found(tmp_path: Path) -> None:
    lost = Operator({"DATAPLANE_RUNTIME_DIR": str(tmp_path), "DATAPLANE_HOST": "embedded"})
    said = lost.run("status", "--name", "train", "-o", "json", ok=False)
    assert said.code == Code.UNREACHABLE
    message = said.error["error"]["message"]
    assert said.error["error"]["type"] == "PlaneLost"
    for part in ("'train'", str(tmp_path), "dataplane serve", "--address", "--ray", "Ray"):
        assert part in message, part


@pytest.mark.parametrize(
    ("address", "code", "said"),
    [
        ("/nowhere/plane.sock", Code.UNREACHABLE, "the file is not there"),
        ("localhost:50051", Code.USAGE, "grpcs://host:port"),
        ("http://localhost:50051", Code.USAGE, "grpcs://host:port"),
        ("grpc+unix:///nowhere/gateway.sock", Code.UNREACHABLE, "/nowhere/gateway.sock"),
    ],
)
def test_an_address_of_nobody(address: str, code: Code, said: str) -> None:
    found = Operator().ask("status", "--address", address, "--timeout", "2", ok=False)
    assert found.code == code
    assert said in found.err
    assert "Traceback" not in found.err


def test_a_deadline_that_is_none(operator: Operator) -> None:
    for text in ("0", "-1", "nan", "inf"):
        assert operator.ask("status", f"--timeout={text}", ok=False).code == Code.USAGE


def test_a_plane_that_has_ended(here: dict[str, Any], operator: Operator) -> None:
    client = dataplane.init(here, name="ended")
    folder = Path(here["runtime_dir"]) / client.plane_id
    client.close(destroy=True)
    eventually(lambda: not folder.exists(), "its folder goes")
    said = operator.ask("status", "--address", str(folder / "plane.sock"), ok=False)
    assert said.code == Code.UNREACHABLE


def test_through_a_gateway(plane: Client, operator: Operator, here: dict[str, Any]) -> None:
    settings = dataplane.Config(**here)
    config = GatewayConfig(listen=["127.0.0.1:0"])
    gateway = GatewayChild(plane._core.joined, config, settings)
    try:
        outside = Operator({"DATAPLANE_ADDRESS": gateway.addresses[0]})
        assert outside.run("status", "-o", "json").json["plane_id"] == plane.plane_id
        rows = outside.ask("keys", TRAIN, "--where", "uid=u1,index=0", "-o", "json").json
        assert [row["key"] for row in rows] == [f"u1_{session}_0" for session in range(4)]
        assert "u2" in outside.ask("why", TRAIN, "--group-by", "uid").out
        assert outside.ask("partitions", "-o", "json").json
        assert (
            len(outside.ask("tail", TRAIN, "--since", "1:0", "--count", "2").out.splitlines()) == 2
        )
    finally:
        gateway.stop()


@pytest.mark.ray
def test_on_ray(ray_cluster: list[str], plane_settings: dict[str, Any], tmp_path: Path) -> None:
    """By Ray, and by the folder of a plane whose tag store is on this machine."""
    import ray

    name = f"cli-{os.getpid()}"
    client = dataplane.init({**plane_settings, "host": "ray"}, name=name)
    try:
        client.kv_put("k", "p", {"x": [1]}, {"a": 1})
        here = Operator({"DATAPLANE_RUNTIME_DIR": str(plane_settings["runtime_dir"])})
        assert here.ask("keys", "p", "--name", name, "-o", "json").json[0]["key"] == "k"
        address = ray.get_runtime_context().gcs_address
        elsewhere = Operator({"DATAPLANE_RUNTIME_DIR": str(tmp_path)})
        said = elsewhere.run("status", "--ray", address, "--name", name, "-o", "json")
        assert said.json["plane_id"] == client.plane_id
        said = elsewhere.run("status", "--ray", address, "--name", "nobody", ok=False)
        assert said.code == Code.UNREACHABLE
    finally:
        client.close(destroy=True)


# -- how commands end ------------------------------------------------------------------------


def test_every_error_has_a_code() -> None:
    expected = {
        "InvalidRequest": 2, "OutOfRange": 2, "KeyNotFound": 3, "PartitionNotFound": 3,
        "ValueLost": 3, "PlaneLost": 4, "Unreachable": 4, "DeadlineExceeded": 5,
        "Unauthenticated": 6, "PermissionDenied": 6, "QuotaExceeded": 7, "StaleWrite": 7,
        "OutcomeUnknown": 7, "RateLimited": 7, "InternalError": 70, "CheckpointDamaged": 1,
        "JournalDamaged": 1,
    }  # fmt: skip
    for name, kind in errors.ERRORS.items():
        code = code_of(kind("x"))
        assert code != Code.FINE
        assert code == expected.get(name, code)


def test_a_fault_of_this_package_ends_with_70(operator: Operator, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import dataplane.cli.reach as reach\n"
        "def broken(*_: object) -> None:\n    raise RuntimeError('a fault')\n"
        "reach._settings = broken\n"
    )
    root = str(Path(__file__).parents[3])
    said = operator.run("status", ok=False, PYTHONPATH=os.pathsep.join([str(tmp_path), root]))
    assert said.code == Code.INTERNAL
    assert "please report it" in said.err


def test_completion_offers_partitions(operator: Operator) -> None:
    said = operator.run(
        ok=False,
        _DATAPLANE_COMPLETE="complete_bash",
        COMP_WORDS="dataplane keys tr",
        COMP_CWORD="2",
    )
    assert said.out.split() == [TRAIN]


def test_the_command_starts_light(operator: Operator) -> None:
    """Tags are looked at without torch; help without the plane's own code either."""
    import subprocess
    import sys

    script = (
        "import sys; sys.argv = ['dataplane', *sys.argv[1:]]\n"
        "from dataplane.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)\n"
    )

    def loaded(*words: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            capture_output=True, text=True, timeout=60, env=operator.variables(),
        )  # fmt: skip
        return set(done.stderr.splitlines()[-1].split())

    heavy = {"torch", "tensordict", "ray", "transformers", "matplotlib"}
    assert not loaded("--help") & (heavy | {"numpy", "pyarrow", "grpc", "pydantic", "rich"})
    for words in (["status"], ["keys", TRAIN], ["why", TRAIN], ["stats", TRAIN], ["top", "--once"]):
        assert not loaded(*words) & heavy, words
