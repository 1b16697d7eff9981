"""Where a run's values are logged: the seam to trackers, and several of them off the loop's way.

Owns that a tracker which fails, hangs or is slow costs training nothing: what it cannot take is
dropped and counted, and it is complained of once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

_log = logging.getLogger(__name__)

CAPACITY = 1024
"""Log calls that wait for one tracker, at most."""

CLOSE_S = 10.0
"""How long closing waits for trackers that are behind."""


class Tracker(Protocol):
    """Takes numbers by name. May fail: nobody relies on it."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep these values of a step."""
        ...

    def close(self) -> None:
        """Write out what is kept."""
        ...


class TrackerNotInstalled(ImportError):
    """A tracker was asked for whose package is not installed; the message says which to install."""

    def __init__(self, tracker: str, package: str) -> None:
        super().__init__(
            f"the tracker {tracker!r} needs the package {package!r}: pip install {package}, or "
            "leave it out of the run's trackers",
            name=package,
        )


class Trackers:
    """All trackers of a run, each in a thread of its own; a tracker as well.

    A tracker that is behind by `capacity` calls loses the oldest of them. One that raises is
    called again next time. Neither stops or delays the caller, or another tracker.
    """

    def __init__(self, trackers: Mapping[str, Tracker], *, capacity: int = CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"a tracker's queue holds 1 call or more, not {capacity!r}")
        self._lanes = [_Lane(name, tracker, capacity) for name, tracker in trackers.items()]

    @property
    def dropped(self) -> dict[str, int]:
        """Calls that never reached a tracker, by its name."""
        return {lane.name: lane.dropped for lane in self._lanes}

    @property
    def failures(self) -> dict[str, int]:
        """Calls that a tracker failed at, by its name."""
        return {lane.name: lane.failures for lane in self._lanes}

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Have every tracker log these values. Returns at once and never raises for a tracker."""
        if values:
            entry = (dict(values), step)  # the caller may go on to change its own
            for lane in self._lanes:
                lane.put(entry)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Let trackers finish and close them, within so many seconds; those that hang are left."""
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            lane.join(deadline)


class _Lane:
    """The queue of one tracker, and the thread that empties it."""

    def __init__(self, name: str, tracker: Tracker, capacity: int) -> None:
        self.name = name
        self.dropped = 0
        self.failures = 0
        self._tracker = tracker
        self._capacity = capacity
        self._queue: deque[tuple[dict[str, float], int]] = deque()
        self._ending = False
        self._changed = threading.Condition()  # guards the queue, its counts and `_ending`
        # A daemon: a tracker that hangs must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, entry: tuple[dict[str, float], int]) -> None:
        with self._changed:
            if self._ending:
                self.dropped += 1
                return
            if len(self._queue) == self._capacity:
                self._queue.popleft()
                self.dropped += 1
                if self.dropped == 1:
                    _log.warning("tracker %s is too slow: values are dropped", self.name)
            self._queue.append(entry)
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify()

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():
            return
        with self._changed:
            left = len(self._queue)
            self._queue.clear()
            self.dropped += left
        _log.warning("tracker %s did not end in time: %d calls are lost", self.name, left)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ending)
                if not self._queue:
                    break
                values, step = self._queue.popleft()
            self._try(lambda values=values, step=step: self._tracker.log(values, step))
        self._try(self._tracker.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # a service that calls sys.exit ends its own call only
            self.failures += 1
            if self.failures == 1:
                _log.warning(
                    "tracker %s failed: %s: %s (said once)", self.name, type(error).__name__, error
                )
