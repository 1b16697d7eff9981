"""Where the endpoints of a plane are: a small file of each process in the plane's runtime folder.

    <runtime folder>/metrics-<role>.json    [{"targets": ["127.0.0.1:9464"], "labels": {…}}]

The form is that of Prometheus' `file_sd_configs`. The tag store's endpoint says the same of all
nodes, for `http_sd_configs`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from dataplane.errors import DataplaneError
from dataplane.host.folders import read_file, write_file

Group = dict[str, Any]
"""Targets and what is the same of them, as Prometheus takes it."""


def group(target: str, labels: Mapping[str, str]) -> Group:
    """One endpoint."""
    return {"targets": [target], "labels": dict(labels)}


def write_target(runtime: Path, role: str, target: str, labels: Mapping[str, str]) -> Path:
    """Say in a runtime folder where a process has its endpoint; the file."""
    path = runtime / f"metrics-{role}.json"
    write_file(path, json.dumps([group(target, labels)]).encode())
    return path


def forget_target(path: Path) -> None:
    """The process ends."""
    with contextlib.suppress(OSError):
        path.unlink()


def list_targets(runtime: Path) -> list[Group]:
    """The endpoints of the processes of one plane on this node."""
    found: list[Group] = []
    for path in sorted(runtime.glob("metrics-*.json")):
        with contextlib.suppress(DataplaneError, OSError, ValueError):
            found += cast("list[Group]", json.loads(read_file(path)))
    return found
