"""The event loop of a blocking producer, on a thread of its own, and how it ends.

Owns what must not outlive its process: a forked child leaves it alone, and at exit, or when nobody
has the producer any more, it is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from dataplane.errors import InvalidRequest
from dataplane.producer.aio import AsyncProducer

Result = TypeVar("Result")

log = logging.getLogger("dataplane.producer")

JOIN_S: Final = 10.0
"""How long the thread may take to end once its loop was stopped."""


class Life:
    """One asyncio producer and the thread that it runs on."""

    def __init__(self, producer: AsyncProducer) -> None:
        self.producer = producer
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = False

    def run(self, verb: Coroutine[Any, Any, Result]) -> Result:
        """The result of a verb. Whoever is interrupted while it waits gives the verb up.

        InvalidRequest if it is called from this thread, by a callback, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            verb.close()
            raise InvalidRequest(
                "a callback of a producer cannot wait for a verb of it: hand that to another thread"
            )
        future = asyncio.run_coroutine_threadsafe(verb, self._start())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def end(self) -> None:
        """Close the producer, and its thread. Repeatable; does nothing in a forked child."""
        with self._lock:
            if self._ended or self._pid != os.getpid():
                return
            self._ended = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            self.producer.close_unused()
            return
        future = asyncio.run_coroutine_threadsafe(self._close(loop), loop)
        if thread is threading.current_thread():
            return  # it was collected there; the thread ends behind this
        try:
            future.result()
        except Exception as error:
            log.warning("a producer did not end well: %s", error)
        thread.join(JOIN_S)

    def _start(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_live, args=(self._loop,), name="dataplane-producer", daemon=True
                )
                self._thread.start()
            return self._loop

    async def _close(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            await self.producer.close()
        finally:
            loop.call_soon(loop.stop)


def _live(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
