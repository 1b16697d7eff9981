"""What becomes of the restarts of planes that this process has started."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import pytest

from dataplane.host import embedded

HELD_S = 60.0
SUPERVISOR = "dataplane-supervisor"


class Restarts:
    """Holds back restarts of children when told to, and counts those that failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failed = 0
        self.waiting = threading.Event()
        """Set once a restart is held back."""
        self._may = threading.Event()
        self._may.set()
        self._spawn = embedded._spawn
        monkeypatch.setattr(embedded, "_spawn", self._spawned)

    def hold(self) -> None:
        """From now on a child that dies is not replaced."""
        self._may.clear()

    def go(self) -> None:
        """What was held back happens."""
        self._may.set()
        self.waiting.clear()

    def _spawned(self, *arguments: Any) -> subprocess.Popen[bytes]:
        # Planes that a test starts meanwhile are not held back.
        if not self._may.is_set() and threading.current_thread().name == SUPERVISOR:
            self.waiting.set()
            assert self._may.wait(HELD_S)
        try:
            return self._spawn(*arguments)
        except BaseException:
            self.failed += 1
            raise
