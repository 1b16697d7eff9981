"""The systemd units: systemd takes them, they are closed, and what they start is a command."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY, check_command, check_setting

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
PROGRAM = "/opt/rl-dataplane/bin/dataplane"


class _Unit(ConfigParser):
    def optionxform(self, optionstr: str) -> str:
        return optionstr


def _read(path: Path) -> _Unit:
    unit = _Unit(interpolation=None, strict=False, delimiters=("=",), comment_prefixes=("#",))
    unit.read(path)
    return unit


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_it_is_closed(path: Path) -> None:
    service = _read(path)["Service"]
    for name in ("NoNewPrivileges", "PrivateTmp", "ProtectHome", "RestrictNamespaces"):
        assert service[name] == "yes", name
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert service["User"] == "dataplane"
    assert service["KillMode"] == "mixed", "the command ends its child by itself"
    assert service["StateDirectoryMode"] == "0700", "a runtime folder is its user's alone"
    assert "MemoryMax" in service
    assert "LimitNOFILE" in service
    assert "WatchdogSec" not in service, "the commands do not tell systemd that they live"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_what_it_starts_is_a_command(path: Path) -> None:
    service = _read(path)["Service"]
    command = shlex.split(service["ExecStart"])
    assert command[0] == PROGRAM
    check_command(command)
    name, _, value = service["Environment"].partition("=")
    check_setting(name)
    assert value.startswith(f"/var/lib/{service['StateDirectory']}/")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_takes_them(tmp_path: Path) -> None:
    for path in UNITS:
        text = path.read_text().replace(PROGRAM, sys.executable)
        text = text.replace("User=dataplane", "User=root").replace("Group=dataplane", "Group=root")
        (tmp_path / path.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / p.name) for p in UNITS)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    assert done.returncode == 0, done.stderr
    assert not said, said


def test_the_plane_comes_up_and_ends_as_systemd_has_it(runtime_dir: Path) -> None:
    """With the unit's words and nothing of this process's environment; SIGTERM for it alone."""
    service = _read(DEPLOY / "systemd" / "dataplane.service")["Service"]
    command = shlex.split(service["ExecStart"])[1:]
    command = [word if word != "9464" else "0" for word in command]
    name, _, _ = service["Environment"].partition("=")
    folder = runtime_dir / "unit"
    environment = {
        "PATH": os.environ["PATH"],
        name: str(folder),
        "DATAPLANE_CAPACITY_BYTES": str(32 << 20),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "dataplane.cli.main", *command],
        cwd=DEPLOY.parent,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as said:
        assert "serves at unix:" in said.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert [path.name for path in folder.iterdir()] == ["lock"]
    shutil.rmtree(folder)
