"""`dataplane doctor`: whether a plane can work here, and what to do where it cannot."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import dataplane
from dataplane import Client
from dataplane.cli.check.surroundings import of_plane
from dataplane.host.folders import claim, plane_folders, remove_unowned
from dataplane.server.process import new_plane_id
from tests.contract.planes import thread_plane
from tests.dataplane.cli.conftest import Operator, environment_of
from tests.dataplane.outside.gateways import gateway


def with_(operator: Operator, **variables: str) -> Operator:
    return Operator({**operator.environment, **variables})


def checked(operator: Operator, *words: str) -> tuple[int, list[dict[str, Any]]]:
    said = operator.ask("doctor", *words, "-o", "json", ok=False)
    return said.code, said.json


def of(found: list[dict[str, Any]], check: str) -> list[tuple[str, str, str]]:
    return [(f["verdict"], f["says"], f["advice"]) for f in found if f["check"].startswith(check)]


def test_all_is_well_on_the_machine_of_a_plane(operator: Operator, plane: Client) -> None:
    code, found = checked(operator)
    assert [f for f in found if f["verdict"] == "fail"] == []
    assert code == 0
    names = {f["check"] for f in found}
    assert {
        "system", "python", "torch", "ray", "pyarrow", "grpcio", "open files", "settings",
        "runtime folder", "shared memory", "stale folders", "plane 'train'", "store local",
    } <= names  # fmt: skip
    ((verdict, says, _), *_) = of(found, "plane 'train'")
    assert (verdict, says.split(",")[0].startswith("answers in")) == ("ok", True)
    text = operator.ask("doctor").out
    assert "0 fail" in text
    assert text.startswith("ok")


def test_settings_that_are_wrong_or_unknown_are_found(operator: Operator) -> None:
    code, found = checked(with_(operator, DATAPLANE_TIMEOUT_S="-1"))
    ((verdict, says, advice),) = of(found, "settings")
    assert (code, verdict) == (1, "fail")
    assert "timeout_s" in says
    assert "--schema" in advice
    code, found = checked(with_(operator, DATAPLANE_TIMEOUT="5"))
    assert code == 0
    assert ("warn", "DATAPLANE_TIMEOUT is no setting") in [
        (verdict, says) for verdict, says, _ in of(found, "settings")
    ]


def test_shared_memory_is_held_against_what_is_asked_for(
    operator: Operator, tmp_path: Path
) -> None:
    size = os.statvfs("/dev/shm")
    free = size.f_bavail * size.f_frsize
    code, found = checked(with_(operator, DATAPLANE_CAPACITY_BYTES=str(2 * free)))
    ((verdict, _, advice),) = of(found, "shared memory")
    assert (code, verdict) == (0, "warn")
    assert "DATAPLANE_CAPACITY_BYTES" in advice
    code, found = checked(with_(operator, DATAPLANE_SEGMENT_BYTES=str(2 * free)))
    ((verdict, _, advice),) = of(found, "shared memory")
    assert (code, verdict) == (1, "fail")
    assert "--shm-size" in advice
    code, found = checked(with_(operator, DATAPLANE_SHM_DIR=str(tmp_path / "none")))
    ((verdict, _, _),) = of(found, "shared memory")
    assert (code, verdict) == (1, "fail")


def test_the_modes_of_folder_and_secret_are_looked_at(here: dict[str, Any]) -> None:
    other = dataplane.init(here, name="modes")
    try:
        operator = Operator(environment_of(here, other))
        root = Path(here["runtime_dir"])
        secret = root / other.plane_id / "secret"
        secret.chmod(0o644)
        code, found = checked(operator)
        assert code == 1
        assert any("others may read its secret" in says for _, says, _ in of(found, "plane 'modes"))
        secret.chmod(0o600)
        root.chmod(0o755)
        try:
            code, found = checked(operator)
        finally:
            root.chmod(0o700)
        ((verdict, _, advice),) = of(found, "runtime folder")
        assert (code, verdict) == (1, "fail")
        assert f"chmod 700 {root}" == advice
        assert checked(operator)[0] == 0
    finally:
        other.close(destroy=True)


def test_a_folder_that_is_not_there_yet_is_fine_and_stays_so(runtime_dir: Path) -> None:
    folder = runtime_dir / "not-there"
    alone = Operator({"DATAPLANE_RUNTIME_DIR": str(folder)})
    code, found = checked(alone)
    assert code == 0
    assert [verdict for verdict, _, _ in of(found, "runtime folder")] == ["ok"]
    ((_, says, _),) = of(found, "planes")
    assert says.startswith("none on this machine")
    assert not folder.exists()


def test_a_root_that_is_too_long_for_sockets_is_found(tmp_path: Path) -> None:
    code, found = checked(Operator({"DATAPLANE_RUNTIME_DIR": str(tmp_path / ("x" * 120))}))
    ((verdict, says, _),) = of(found, "runtime folder")
    assert (code, verdict) == (1, "fail")
    assert "too long" in says


def test_what_a_dead_plane_left_is_found_and_not_touched(
    here: dict[str, Any],
) -> None:
    root = Path(here["runtime_dir"]) / "dead"
    root.mkdir(mode=0o700)
    try:
        plane_id = new_plane_id()
        folders = plane_folders("dead", plane_id, root, here["shm_dir"])
        ownership = claim(folders)
        operator = Operator(
            {"DATAPLANE_RUNTIME_DIR": str(root), "DATAPLANE_SHM_DIR": str(here["shm_dir"])}
        )
        _, found = checked(operator)
        assert of(found, "stale folders") == [("ok", "none", "")]
        ownership.release()
        code, found = checked(operator)
        ((verdict, says, _),) = of(found, "stale folders")
        assert (code, verdict) == (0, "warn")
        assert plane_id in says
        assert folders.runtime.is_dir()
        assert folders.segments.is_dir()
        remove_unowned(folders)
    finally:
        for path in root.iterdir():
            path.unlink()
        root.rmdir()


def test_a_gateway_is_checked_by_its_address(
    operator: Operator, plane: Client, here: dict[str, Any], tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("g")
    with gateway("train", here, listen=(f"unix:{folder}/s",)) as served:
        address = f"grpc+unix://{folder}/s"
        assert served.addresses
        code, found = checked(operator, "--address", address)
        assert code == 0
        assert [verdict for verdict, _, _ in of(found, f"address {address}")] == ["ok"]
    code, found = checked(operator, "--address", address)
    ((verdict, _, _),) = of(found, f"address {address}")
    assert (code, verdict) == (1, "fail")


def test_a_socket_of_nobody_is_a_failure(operator: Operator, tmp_path: Path) -> None:
    code, found = checked(operator, "--address", str(tmp_path / "plane.sock"))
    ((verdict, _, _),) = of(found, "address")
    assert (code, verdict) == (1, "fail")


def test_a_ray_cluster_that_is_not_there_is_a_failure(operator: Operator) -> None:
    for where in (["--ray", "127.0.0.1:1"], []):
        said = operator.run("doctor", *where, "-o", "json", ok=False, RAY_ADDRESS="127.0.0.1:1")
        verdict, says, _ = of(said.json, "ray")[-1]
        assert (said.code, verdict) == (1, "fail")
        assert "nobody listens at '127.0.0.1:1'" in says


@pytest.mark.parametrize("ahead_s", [60.0, -60.0])
def test_a_clock_that_is_wrong_is_said(here: dict[str, Any], ahead_s: float) -> None:
    with thread_plane(here) as made, made.connect() as client:
        assert [each.verdict for each in of_plane("plane", client)] == ["ok", "ok"]
        tags = made.server.tags
        assert tags is not None
        made.call(lambda: setattr(tags, "clock", lambda: time.time() + ahead_s))
        (clock,) = [each for each in of_plane("plane", client) if each.verdict == "warn"]
        said = float(clock.says.removeprefix("its clock is ").partition(" ")[0])
        assert abs(said - ahead_s) < 1.0
        assert "NTP" in clock.advice


def test_few_open_files_are_said(operator: Operator) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        _, found = checked(operator)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    ((verdict, _, advice),) = of(found, "open files")
    assert verdict == "warn"
    assert "ulimit -n" in advice
