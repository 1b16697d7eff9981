"""The life of a blocking producer: where its verbs run, and how it ends.

Owns what must not outlive its process: a forked child leaves it alone, and at exit, or when nobody
has the producer any more, it is closed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from dataplane.errors import InvalidRequest, PlaneLost
from dataplane.producer.aio import AsyncProducer
from dataplane.producer.loop import calling_loop

Result = TypeVar("Result")

log = logging.getLogger("dataplane.producer")


class Life:
    """One asyncio producer on the loop of this process."""

    def __init__(self, producer: AsyncProducer) -> None:
        self.producer = producer
        self._loop = calling_loop()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._used = self._ended = False

    def run(self, verb: Coroutine[Any, Any, Result]) -> Result:
        """The result of a verb. Whoever is interrupted while it waits gives the verb up.

        InvalidRequest if it is called by a callback, which would wait for itself.
        """
        if self._loop.is_here:
            verb.close()
            raise InvalidRequest(
                "a callback of a producer cannot wait for a verb of one: hand that to another "
                "thread"
            )
        self._used = True
        future = self._loop.start(verb)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def end(self) -> None:
        """Close the producer. Repeatable; does nothing in a forked child."""
        with self._lock:
            if self._ended or self._pid != os.getpid():
                return
            self._ended = True
        if not self._used:
            self.producer.close_unused()
            return
        try:
            future = self._loop.start(self.producer.close())
        except PlaneLost:
            return  # the process is ending, and the loop has gone first
        if self._loop.is_here:
            return  # it was collected there, and is closed behind this
        try:
            future.result()
        except Exception as error:
            log.warning("a producer did not end well: %s", error)
