"""The planes of a soak: in a child process, or in Ray's actors."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.errors import DataplaneError
from dataplane.host import embedded
from dataplane.host.folders import plane_folders
from dataplane.server.plane import JOURNAL
from tests.deadline import eventually

MiB = 1 << 20
NAME = "soak"
SETTINGS: dict[str, Any] = {
    "capacity_bytes": 192 * MiB,
    "segment_bytes": 16 * MiB,
    "small_put_bytes": 64 << 10,
    "snapshot_bytes": 256 << 10,  # one every few seconds
    "history_age_s": 20.0,
    "history_changes": 20_000,
    "reuse_bytes": 16 * MiB,
    "spin_s": 0.0,
    "timeout_s": 30.0,
    "start_timeout_s": 60.0,
}
"""So that all that is bounded comes to its bound within a minute."""
BACK_S = 30.0


@dataclass
class Soaked:
    """A plane, a client of it, and where it lies."""

    client: Client
    address: str
    """By which processes join it."""
    settings: dict[str, Any]
    runtime: Path
    segments: Path
    kills: int = 0

    @property
    def journal(self) -> Path:
        """The folder of its journal."""
        return self.runtime / JOURNAL

    def pids(self) -> set[int]:
        """The processes that serve it."""
        status = self.client.status()
        return {status["pid"], *(v["pid"] for v in status["values"].values() if "pid" in v)}

    def kill(self, number: int) -> None:
        """Kill one of the processes that serve it, and wait until it is whole again."""
        pids = sorted(self.pids())
        os.kill(pids[number % len(pids)], signal.SIGKILL)
        self.kills += 1

        def back() -> bool:
            try:
                return len(self.pids()) == len(pids) and set(pids) != self.pids()
            except DataplaneError:
                return False

        eventually(back, "the plane is back", within_s=BACK_S)


@contextmanager
def running(kind: str) -> Iterator[Soaked]:
    """A plane in folders of its own. At its end it may leave nothing there."""
    # Not a long path: one of a unix socket has at most 107 bytes.
    runtime = Path(tempfile.mkdtemp(prefix="dataplane-"))
    shm = Path(tempfile.mkdtemp(prefix="dataplane-", dir="/dev/shm"))
    settings = {**SETTINGS, "runtime_dir": str(runtime), "shm_dir": str(shm)}
    try:
        with (_by_ray if kind == "ray" else _embedded)(settings) as soaked:
            yield soaked
        eventually(lambda: not _left(runtime, shm), "the plane leaves nothing")
    finally:
        shutil.rmtree(runtime)
        shutil.rmtree(shm)


def _left(*roots: Path) -> list[str]:
    return [name for root in roots for name in os.listdir(root) if name != "lock"]


@contextmanager
def _embedded(settings: dict[str, Any]) -> Iterator[Soaked]:
    config = Config(**settings)
    host = embedded.start(NAME, config)
    client = Client(host.joined, config)
    try:
        yield _soaked(client, config, settings)
    finally:
        client.close()
        host.stop()


@contextmanager
def _by_ray(settings: dict[str, Any]) -> Iterator[Soaked]:
    import ray

    import dataplane

    ray.init(
        address="local", num_cpus=1, object_store_memory=80 * MiB, include_dashboard=False,
        log_to_driver=False, logging_level="error",
    )  # fmt: skip
    try:
        client = dataplane.init({**settings, "host": "ray"}, name=NAME)
        try:
            yield _soaked(client, client._core.config, settings)
        finally:
            client.close(destroy=True)
    finally:
        ray.shutdown()


def _soaked(client: Client, config: Config, settings: dict[str, Any]) -> Soaked:
    folders = plane_folders(NAME, client.plane_id, config.runtime_dir, config.shm_dir)
    return Soaked(client, str(folders.runtime), settings, folders.runtime, folders.segments)
