"""The one embedded plane that this folder's tests share; partitions keep them apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import dataplane


@pytest.fixture(scope="session")
def embedded(plane_settings: dict[str, Any]) -> Iterator[dataplane.Client]:
    """A client of an embedded plane."""
    settings = {**plane_settings, "host": "embedded"}
    client = dataplane.init(settings, name=f"shared-{os.getpid()}")
    yield client
    client.close(destroy=True)
