"""A tracker for Prometheus: the last value of each name, on a port of this process.

What the clients of the plane in this process do is told there too. Names stay as they are in other
trackers: `dataplane_run_value{name="time/step"}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import dataplane

STEP_VALUES: Final = "time/"
"""Values of a training step have one of these; optimizer steps count by themselves."""


class Prometheus:
    """A tracker that is scraped."""

    def __init__(self, port: int, host: str) -> None:
        self._metrics = dataplane.serve_metrics(port, host=host)

    @property
    def target(self) -> str:
        """Where it is scraped, as `host:port`."""
        return self._metrics.target

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Show these values from now on."""
        of_step = any(name.startswith(STEP_VALUES) for name in values)
        self._metrics.tell(values, step if of_step else None)

    def close(self) -> None:
        """Stop listening."""
        self._metrics.close()


def prometheus(port: int, host: str = "127.0.0.1") -> Prometheus:
    """A tracker that serves the last values on this port.

    InvalidRequest: there is no such host here.
    """
    return Prometheus(port, host)
