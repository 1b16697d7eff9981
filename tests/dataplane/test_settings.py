"""Settings that are wrong are refused in words: which, what it may be, and who set it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from dataplane.config import Config
from dataplane.errors import InvalidRequest
from dataplane.gateway.config import GatewayConfig
from dataplane.settings import MOST, checked


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (Config, {"capacity_bytes": 5}, "capacity_bytes: Input should be greater than or equal to"),
        (Config, {"capacity_bytes": "x"}, "not 'x'"),
        (Config, {"capacity": 5}, "there is no setting 'capacity'"),
        (Config, {"tls_cert": "c.pem"}, "tls_cert, tls_key and tls_ca are set together"),
        (Config, {"gateway": {"drain_s": -1}}, "gateway.drain_s: "),
        (GatewayConfig, {"drain_s": "soon"}, "drain_s: "),
    ],
)
def test_what_is_wrong_is_said(kind: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        checked(kind, given, "settings of it")
    text = str(refused.value)
    assert text.startswith("settings of it: ")
    assert says in text
    assert "pydantic" not in text
    assert "\n" not in text


def test_a_variable_that_set_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_TIMEOUT_S", "never")
    with pytest.raises(InvalidRequest, match=r"timeout_s \(DATAPLANE_TIMEOUT_S\): .*not 'never'"):
        checked(Config, {})
    assert checked(Config, {"timeout_s": 3}).timeout_s == 3


def test_a_variable_that_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_GATEWAY", "{")
    with pytest.raises(InvalidRequest, match="gateway"):
        checked(Config, {})


def test_of_many_faults_some_are_told() -> None:
    with pytest.raises(InvalidRequest, match="and 3 more"):
        checked(Config, {f"none_{number}": 1 for number in range(MOST + 3)})


@pytest.mark.parametrize("command", ["serve", "gateway", "status"])
def test_a_command_ends_with_2_and_no_traceback(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dataplane.cli.main", command],
        env={"PATH": "/usr/bin", "DATAPLANE_CAPACITY_BYTES": "much"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "capacity_bytes (DATAPLANE_CAPACITY_BYTES)" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_leaves_the_folder_of_memory_to_the_environment() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dataplane.cli.main", "serve", "--name", "nowhere"],
        env={"PATH": "/usr/bin", "DATAPLANE_SHM_DIR": "/proc/nowhere"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "/proc/nowhere" in done.stderr
