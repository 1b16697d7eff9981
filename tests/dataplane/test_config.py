"""Settings: from arguments and the environment, checked once, refused when unknown or absurd."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dataplane.config import Config


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DATAPLANE_")]:
        monkeypatch.delenv(name)


def test_the_defaults_are_those_of_the_design() -> None:
    config = Config()
    assert config.timeout_s == 30.0
    assert config.linger_s == 24 * 3600
    assert config.segment_bytes == 64 << 20
    assert config.small_put_bytes == 256 << 10
    assert (config.history_changes, config.history_age_s) == (1_000_000, 600.0)
    assert config.capacity_bytes is None
    assert config.tcp_host is None


def test_the_environment_fills_what_a_caller_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_TIMEOUT_S", "7.5")
    monkeypatch.setenv("DATAPLANE_CAPACITY_BYTES", "8388608")
    monkeypatch.setenv("DATAPLANE_SAME_NODE_READS", "false")
    monkeypatch.setenv("DATAPLANE_SHM_DIR", "/mnt/shm")
    config = Config(timeout_s=3)
    assert config.timeout_s == 3.0
    assert config.capacity_bytes == 8 << 20
    assert config.same_node_reads is False
    assert config.shm_dir == Path("/mnt/shm")


def test_a_variable_without_the_prefix_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMEOUT_S", "7.5")
    assert Config().timeout_s == 30.0


@pytest.mark.parametrize(
    "settings",
    [
        {"no_such_setting": 1},
        {"host": "kubernetes"},
        {"capacity_bytes": 0},
        {"capacity_bytes": (4 << 20) - 1},
        {"capacity_bytes": "many"},
        {"segment_bytes": 4095},
        {"small_put_bytes": -1},
        {"timeout_s": 0},
        {"timeout_s": -1},
        {"start_timeout_s": 0},
        {"linger_s": 0},
        {"reuse_bytes": -1},
        {"history_changes": 0},
        {"history_age_s": 0},
        {"tls_cert": "a.pem"},
        {"tls_cert": "a.pem", "tls_key": "a.key"},
        {"tls_ca": "ca.pem"},
    ],
    ids=str,
)
def test_a_setting_that_is_unknown_or_absurd_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        Config(**settings)
    assert next(iter(settings)).split("_")[0] in str(error.value)


def test_an_absurd_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_HISTORY_CHANGES", "none")
    with pytest.raises(ValidationError, match="history_changes"):
        Config()


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity_bytes": 4 << 20, "segment_bytes": 4 << 20},
        {"small_put_bytes": 0, "reuse_bytes": 0},
        {"history_changes": 1, "history_age_s": 0.001},
        {"tls_cert": "a.pem", "tls_key": "a.key", "tls_ca": "ca.pem"},
        {"host": "embedded"},
        {"host": "ray"},
    ],
    ids=str,
)
def test_settings_at_their_bounds_are_taken(settings: dict[str, Any]) -> None:
    config = Config(**settings)
    for name, value in settings.items():
        assert getattr(config, name) == (Path(value) if name.startswith("tls") else value)


def test_settings_do_not_change_under_a_running_plane() -> None:
    with pytest.raises(ValidationError):
        Config().timeout_s = 1.0
