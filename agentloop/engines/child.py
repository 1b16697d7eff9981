"""An owner's hold on the process of an engine: started, asked, ended. See `process.py`.

Owns the process and the socket to it. A process that dies fails what was asked of it with
`ChildDied`; starting another one is up to the owner.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

from agentloop.engines.messages import DONE, error_of, read_frame, write_frame
from agentloop.engines.types import EngineError

_END_S: Final = 5.0
"""Granted to a process whose socket was closed before it is killed."""


class ChildDied(Exception):
    """The process ended before it answered."""

    def __init__(self, ending: str, *, asked: bool) -> None:
        super().__init__(ending)
        self.asked = asked
        """Whether it can have been this that killed it."""


class Child:
    """A running process. Belongs to one event loop."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_death: Callable[[Child], None],
    ) -> None:
        self._process = process
        self._writer = writer
        self._on_death = on_death
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self.alive = True
        self.ending: str | None = None
        """How it ended, once it has."""
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def spawn(cls, folder: str, on_death: Callable[[Child], None]) -> Child:
        """A process with nothing in it yet; `on_death` is called once when it has ended."""
        ours, theirs = socket.socketpair()
        try:
            _inherited.add(ours)
            with theirs:
                process = subprocess.Popen(  # noqa: ASYNC220 (a vfork, and never left half done)
                    [
                        sys.executable, "-m", "agentloop.engines.process",
                        str(theirs.fileno()), folder,
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    # Ctrl-C is for the owner, which ends it in order.
                    start_new_session=True,
                )  # fmt: skip
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()  # which ends the process too
            raise
        return cls(process, reader, writer, on_death)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def call(self, verb: str, arguments: Any = None) -> Any:
        """Ask, and wait for the answer.

        Raises:
            ChildDied: the process ended first.
            EngineError: what the engine said, or the request does not travel.
        """
        if not self.alive:
            await asyncio.wait({self._reading})
            raise ChildDied(self.ending or "", asked=False)
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            write_frame(self._writer, [number, verb, arguments])
        except TypeError as error:
            raise EngineError(f"{verb} is not plain data: {error}") from error
        self._pending[number] = answer
        try:
            return await answer
        except asyncio.CancelledError:
            if self.alive:
                write_frame(self._writer, [0, "cancel", number])
            raise
        finally:
            self._pending.pop(number, None)

    def kill(self) -> None:
        """End it now; its death is noticed as any other."""
        if self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """Let it end by itself, or kill it. It is gone afterwards."""
        self._writer.close()
        await asyncio.wait({self._reading}, timeout=_END_S * 2)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, outcome, value = await read_frame(reader)
                answer = self._pending.pop(number, None)
                if answer is None or answer.done():
                    continue
                if outcome == DONE:
                    answer.set_result(value)
                else:
                    answer.set_exception(error_of(outcome, value))
        except EOFError:
            pass
        except Exception:
            self.kill()  # what it said made no sense
        finally:
            self.alive = False
            await asyncio.shield(self._bury())

    async def _bury(self) -> None:
        self._writer.close()
        await asyncio.to_thread(self._reap)
        code = self._process.returncode
        self.ending = (
            f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        )
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(ChildDied(self.ending, asked=True))
        self._on_death(self)

    def _reap(self) -> None:
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_inherited: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    """A copy of the socket in another process would keep an engine alive after its owner."""
    for ours in list(_inherited):
        try:
            os.close(ours.fileno())
        except OSError:
            pass  # it was closed before


os.register_at_fork(after_in_child=_close_in_forked_child)
