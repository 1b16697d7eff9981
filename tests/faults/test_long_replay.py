"""A child of a plane that takes longer to read the journal than a start may take."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.host import embedded

pytestmark = pytest.mark.faults


def test_it_is_waited_for_as_long_as_it_lives(roots: dict[str, Path]) -> None:
    config = Config(capacity_bytes=4 << 20, timeout_s=20, **roots)
    host = embedded.start("slow", config)
    try:
        with Client(host.joined, config) as client:
            client.kv_put("A", "p", None, {"n": 1})
            # No process comes up that soon.
            host._config = config.model_copy(update={"start_timeout_s": 0.001})
            assert host._process is not None
            for _ in range(2):
                host._process.kill()
                assert client.kv_list("p").tags == [{"n": 1}]
    finally:
        host.stop()


def test_it_is_given_up_when_the_plane_is_stopped(roots: dict[str, Path]) -> None:
    host = embedded.start("stopped", Config(capacity_bytes=4 << 20, **roots))
    assert host._process is not None
    host._process.kill()
    began = time.monotonic()
    host.stop()
    assert time.monotonic() - began < 5
