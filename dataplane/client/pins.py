"""Pins of views: held on connections of their own, for as long as any tensor of a view lives.

Blocking, and the same for both clients: a tensor may outlive the event loop that it was viewed
from, and then nothing but a plain socket is left to hold its pin and to let go of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from dataplane.client.connection import Connection
from dataplane.client.core import StoreView
from dataplane.errors import DeadlineExceeded
from dataplane.wire.channel import Broken


class _Lane:
    """One connection for the pins of views in one store."""

    __slots__ = ("closing", "connection", "held", "lock", "released")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.lock = threading.Lock()  # guards the connection and `held`
        self.held = 0
        self.released: deque[int] = deque()
        self.closing = False


class Pins:
    """Pins of views: one connection per store that nothing else uses.

    Its end would end the pins, so no request that can time out half-way may travel on it, and it
    outlives the client's close while a tensor of a view is alive. A tensor can die in any thread,
    inside any call; so a release that finds the connection busy is left for whoever uses it.
    """

    def __init__(self, connect: Callable[[StoreView, float], Connection]) -> None:
        self._connect = connect
        self._lanes: dict[str, _Lane] = {}
        self._making = threading.Lock()  # guards the table of lanes

    def pin(
        self, store: StoreView, blocks: bytes, deadline: float
    ) -> tuple[Callable[[], None] | None, list[int]]:
        with _until(self._making, deadline):
            lane = self._lanes.get(store.store_id)
            if lane is None or not lane.connection.usable:
                if lane is not None:
                    lane.closing = True  # with the last pin that it still holds
                    self._flush(lane)
                connection = self._connect(store, deadline)
                lane = self._lanes[store.store_id] = _Lane(connection)
        try:
            with _until(lane.lock, deadline):
                handle, gone = lane.connection.call("pin", [blocks], deadline).body
                lane.held += not gone
        finally:
            self._flush(lane)
        if gone:
            return None, gone

        def release() -> None:
            lane.released.append(handle)
            self._flush(lane)

        return release, []

    def close(self) -> None:
        """Close the lanes, each once nothing of it is looked at any more."""
        with self._making:
            for lane in self._lanes.values():
                lane.closing = True
                self._flush(lane)

    def _flush(self, lane: _Lane) -> None:
        while (lane.released or lane.closing) and lane.lock.acquire(blocking=False):
            try:
                while lane.released:
                    handle = lane.released.popleft()
                    lane.held -= 1
                    with suppress(Broken, TimeoutError):  # the pins ended with the connection
                        lane.connection.tell("unpin", [handle], time.monotonic() + 5.0)
                if lane.closing:
                    if not lane.held:
                        lane.connection.close()
                    return
            finally:
                lane.lock.release()


@contextmanager
def _until(lock: threading.Lock, deadline: float) -> Generator[None]:
    """The lock, which another thread may hold for as long as its own call takes."""
    left = deadline - time.monotonic()
    if not lock.acquire(timeout=max(left, 0.0)):
        raise DeadlineExceeded(
            f"other threads of this client were pinning for {left:.3f} s",
            waited_s=left,
            explanation="pins of views are made one at a time for each store, and the calls of "
            "other threads of this client came first; nothing was pinned",
        )
    try:
        yield
    finally:
        lock.release()
