"""Keeps a client attached that holds claims, and does not ask for anything for a while.

The term of a lease runs while its client has no connection. A blocking client looks at its
connections only when it is called; so one of its own is watched by a thread, and made anew when the
tag store has been started again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dataplane.client.connection import Connection
from dataplane.client.core import StoreView
from dataplane.errors import DataplaneError, PlaneLost

TRY_S = 1.0
"""Deadline of one try to connect."""
PAUSE_S = 0.2
"""Between two tries."""

Connect = Callable[[StoreView | None, float], Connection]


class Attendance:
    """A connection to the tag store that is there until it is closed."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        # Guards all below. A client may be collected in any thread, within this very lock too.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._connection: Connection | None = None
        self._closed = threading.Event()

    def begin(self) -> None:
        """Be attached from now on. Once more, it does nothing."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(
                    target=self._attend, name="dataplane-attendance", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Be attached no longer. Repeatable, from any thread."""
        with self._lock:
            self._closed.set()
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.end()  # its thread closes it

    def join(self) -> None:
        """Wait until its thread has ended, which it does within a try, once it is closed."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(2 * TRY_S)

    def _attend(self) -> None:
        while not self._closed.is_set():
            try:
                connection = self._connect(None, time.monotonic() + TRY_S)
            except PlaneLost:
                return
            except (DataplaneError, OSError):
                self._closed.wait(PAUSE_S)
                continue
            with self._lock:
                if not self._closed.is_set():
                    self._connection = connection
            if self._connection is connection:
                connection.wait_for_end()
            connection.close()
