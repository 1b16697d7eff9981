"""How long the stages of one step took."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager


class StepClock:
    """Adds up seconds by the name of a stage; the names are those that are logged as `time/…`."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.times: dict[str, float] = {}

    @contextmanager
    def timed(self, stage: str) -> Generator[None]:
        """Count what happens inside towards this stage, also if it fails."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.times[stage] = self.times.get(stage, 0.0) + time.monotonic() - began

    def stop(self) -> dict[str, float]:
        """The times of all stages, and as `step` that of the whole."""
        return {**self.times, "step": time.monotonic() - self._began}
