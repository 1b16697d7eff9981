"""Puts the drop-in's folder on the path of these tests, and on nobody else's: child processes of
other tests import the real TransferQueue where it is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplane import compat
from dataplane.config import Config
from dataplane.host import embedded

if compat.folder() not in sys.path:
    sys.path.insert(0, compat.folder())

from tests.dataplane.compat.instances import WAIT_S, Instance, Make

Host = tuple[embedded.EmbeddedHost, Config]


@pytest.fixture(scope="module")
def host(roots: dict[str, Path]) -> Iterator[Host]:
    """A plane, and the settings by which it is joined."""
    config = Config(
        host="embedded", open_schemas=True, capacity_bytes=32 << 20, segment_bytes=4 << 20,
        wait_timeout_s=WAIT_S, start_timeout_s=60.0, **roots,
    )  # fmt: skip
    started = embedded.start(f"tq-{os.getpid()}", config)
    yield started, config
    started.stop()


@pytest.fixture
def instance(host: Host) -> Iterator[Make]:
    """Makes instances on that plane, and ends them."""
    made: list[Instance] = []

    def make(**options: Any) -> Instance:
        made.append(Instance(*host, **options))
        return made[-1]

    yield make
    for one in made:
        for name in one.client.get_partition_list():
            one.client.clear_partition(name)
        one.server.stop()
        for link in one.links:
            link.close()
