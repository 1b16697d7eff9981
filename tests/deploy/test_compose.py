"""The compose file: it fits the schema, keeps our rules, and its commands are commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compose_spec.models import ComposeSpecification

from agentloop.run import read_config
from dataplane import Config
from dataplane.gateway.access.token_disk import read_records
from tests.deploy.manifests import DEPLOY, check_command, check_setting, documents, size, words

TEXT = (DEPLOY / "compose.yaml").read_text()
OURS = ("plane", "gateway", "trainer", "rollout", "credentials")
FREE_BYTES = 64 << 20
ONCE = ("credentials", "trainer", "rollout")


@pytest.fixture(scope="module")
def file() -> dict[str, Any]:
    [found] = documents(TEXT)
    return found


@pytest.fixture(scope="module")
def services(file: dict[str, Any]) -> dict[str, Any]:
    return file["services"]


def test_it_fits_the_schema(file: dict[str, Any]) -> None:
    plain = {name: value for name, value in file.items() if not name.startswith("x-")}
    model = ComposeSpecification.model_validate(plain)
    known = model.model_dump(exclude_unset=True, by_alias=True, mode="json")
    assert _names(known) == _names(plain)


def _names(value: Any, at: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """The way to every name: the models drop those that the schema does not have."""
    if isinstance(value, dict):
        names = {(*at, str(name)) for name in value}
        return names.union(*(_names(below, (*at, str(name))) for name, below in value.items()))
    return set()


def test_services_are_hardened(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert int(service["user"].partition(":")[0]) > 0, name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert {"cpus", "memory"} <= service["deploy"]["resources"]["limits"].keys(), name
        assert service["pids_limit"], name
        assert "restart" in service, name
        assert not service["image"].endswith(":latest"), name
        assert ":" in service["image"], name
        health = service["healthcheck"]
        assert ("test" in health) != (name in ONCE), name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name


def test_commands_are_commands(services: dict[str, Any]) -> None:
    for name in ("plane", "gateway", "trainer"):
        check_command(words(services[name]["command"]))
    for name in ("plane", "gateway"):
        check_command(services[name]["healthcheck"]["test"][1:])


def test_variables_are_settings_and_hold_no_secret(services: dict[str, Any]) -> None:
    for name, service in services.items():
        for variable, value in service.get("environment", {}).items():
            if variable.startswith("DATAPLANE_"):
                check_setting(variable)
            if any(word in variable for word in ("TOKEN", "SECRET", "PASSWORD", "KEY")):
                assert value.startswith("/credentials/"), f"{name}: {variable}"


def test_files_and_volumes_are_there(file: dict[str, Any]) -> None:
    used: set[str] = set()
    for name, service in file["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), f"{name}: {source}"
            else:
                used.add(source)
        assert set(service.get("networks", [])) <= file["networks"].keys()
        assert set(service.get("depends_on", {})) <= file["services"].keys()
    assert used == file["volumes"].keys()


def test_shared_memory_fits(services: dict[str, Any]) -> None:
    plane = services["plane"]
    [capacity] = [w for w in plane["command"] if w.startswith("--capacity-bytes=")]
    room = size(plane["shm_size"])
    assert int(capacity.partition("=")[2]) + FREE_BYTES <= room
    assert room + (512 << 20) <= size(plane["deploy"]["resources"]["limits"]["memory"])
    for name in ("gateway", "trainer"):
        assert services[name]["ipc"] == "service:plane"
        assert services[name]["user"] == plane["user"]
        assert "runtime:/run/dataplane" in services[name]["volumes"]


def test_a_producer_outside_has_a_token_and_no_plane(services: dict[str, Any]) -> None:
    rollout = services["rollout"]
    assert "ipc" not in rollout
    assert not any(volume.startswith("runtime") for volume in rollout["volumes"])
    config = read_config(DEPLOY / "compose" / "rollout.yaml")
    Config(**config.plane.settings)
    assert config.plane.address == "grpcs://gateway:50051"


def test_who_is_scraped_has_metrics_there(services: dict[str, Any]) -> None:
    [prometheus] = documents((DEPLOY / "compose" / "prometheus.yaml").read_text())
    targets = {
        target
        for job in prometheus["scrape_configs"]
        for each in job["static_configs"]
        for target in each["targets"]
    }
    for target in targets:
        name, _, port = target.partition(":")
        assert f"--metrics-port={port}" in services[name]["command"]
        assert "--metrics-host=0.0.0.0" in services[name]["command"]
        assert set(services[name]["networks"]) & set(services["prometheus"]["networks"])


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("credentials")
    for name in ("gateway", "inside", "outside", "grafana"):
        (folder / name).mkdir()
    _make(folder)
    return folder


def _make(folder: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = DEPLOY / "compose" / "credentials.sh"
    done = subprocess.run(
        ["sh", str(script), str(folder)],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_credentials_are_made_once(credentials: Path) -> None:
    files = [path for path in credentials.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    _make(credentials)
    assert {path: path.read_bytes() for path in files} == before
    assert len(read_records(credentials / "gateway" / "tokens.json").tokens) == 3


def test_an_old_token_is_made_anew_and_still_holds(credentials: Path) -> None:
    token = credentials / "outside" / "rollout.token"
    before = token.read_text()
    os.utime(token, (0, 0))
    _make(credentials)
    assert token.read_text() != before
    assert len(read_records(credentials / "gateway" / "tokens.json").tokens) == 4


def test_keys_are_their_owners_alone(credentials: Path) -> None:
    for path in credentials.rglob("*"):
        if path.is_file() and path.parent.name != "grafana":
            assert path.stat().st_mode & 0o077 == 0, path
