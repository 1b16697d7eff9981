"""The planes that are killed here: one process for both stores, or one for each under Ray."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataplane.client.core import Joined
from dataplane.client.sync import Client
from dataplane.config import Config
from dataplane.errors import DataplaneError
from dataplane.host import embedded
from dataplane.host.folders import plane_folders
from dataplane.testing import switches
from tests.deadline import eventually
from tests.history.workload import SETTINGS

BACK_S = 10.0
"""Within which a plane that lost a process answers again."""
KILLED: dict[str, Any] = {**SETTINGS, "snapshot_bytes": 64 << 10, "timeout_s": 20.0}


@dataclass
class Killed:
    """A plane whose processes die, and a client that must not notice."""

    name: str
    joined: Joined
    config: Config
    client: Client
    kills: int = 0
    back_s: list[float] = field(default_factory=list[float])
    """How long it took each time until the plane had answered again."""

    @property
    def runtime(self) -> Path:
        """Its runtime folder."""
        folders = plane_folders(
            self.name, self.joined.plane_id, self.config.runtime_dir, self.config.shm_dir
        )
        return folders.runtime

    @property
    def segments(self) -> Path:
        """The folder of its segments."""
        folders = plane_folders(
            self.name, self.joined.plane_id, self.config.runtime_dir, self.config.shm_dir
        )
        return folders.segments

    def elsewhere(self) -> Joined:
        """How another process joins it, which knows nothing of Ray."""
        return embedded.attach_address(str(self.runtime), self.config)

    def values(self) -> dict[str, Any]:
        """What the value store says of itself, as soon as it is there."""

        def told() -> dict[str, Any]:
            (values,) = self.client.status()["values"].values()
            return values if "blocks" in values else {}

        return eventually(told, "the value store is there")

    def another(self, **settings: Any) -> Client:
        """One more client, of this process."""
        return Client(self.joined, self.config.model_copy(update=settings))

    def pid(self, role: str) -> int | None:
        """The process of a store; None while it is away."""
        status = self.client.status()
        if role == "tags":
            return status["pid"]
        (values,) = status["values"].values()
        return values.get("pid")

    def kill(self, role: str) -> None:
        """Kill the process of a store that is there, and wait until another one answers."""
        pid = eventually(lambda: self.pid(role), f"{role} is there")
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        eventually(lambda: self.pid(role) not in (pid, None), f"{role} is back", within_s=BACK_S)
        self.back_s.append(time.monotonic() - began)
        self.kills += 1

    def arm(self, point: str, nth: int) -> None:
        """Have the process kill itself when it comes to a point for the nth time."""
        switches.arm(self.runtime, point, nth)

    def fired(self) -> bool:
        """Whether it has. It is armed no more either way."""
        fired = switches.armed(self.runtime) is None
        switches.disarm(self.runtime)
        self.kills += fired
        return fired

    def is_back(self, since: float) -> None:
        """Wait until the plane answers, after a kill that was due since then."""
        eventually(self._answers, "the plane is back", within_s=BACK_S)
        self.back_s.append(time.monotonic() - since)

    def _answers(self) -> bool:
        try:
            return self.pid("tags") is not None and self.pid("values") is not None
        except DataplaneError:
            return False

    def is_empty(self) -> None:
        """Wait until nothing is in use any more, once everything was cleared."""

        def empty() -> bool:
            status = self.client.status()
            (values,) = status["values"].values()
            return not status["dead_blocks"] and not any(
                values.get(name, 1)
                for name in ("used_bytes", "held_bytes", "blocks", "blocks_reserved", "pins")
            )

        eventually(empty, f"nothing is in use: {self.client.status()}")


def nth_of(verb: str, seed: int) -> int:
    """For the how-manieth time a point counts in the trial of a seed. Some verbs come once."""
    once = verb.startswith(("save_", "load_", "snapshot"))
    return 1 if once else random.Random(seed).randint(1, 5)
