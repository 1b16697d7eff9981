"""An owner's hold on a child process: started, asked, ended.

Owns the process and the socket to it. The child runs `python -m MODULE FD …` and answers over that
socket with `Calls`; it ends when the socket closes, however that came about. A process that dies
fails what was asked of it with `ChildDied`; starting another one is up to the owner.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

from agentloop.processes.calls import Calls, Disconnected, Errors

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
        calls: Calls,
        on_death: Callable[[Child], None] | None,
    ) -> None:
        self._process = process
        self._calls = calls
        self._on_death = on_death
        self.ending: str | None = None
        """How it ended, once it has."""
        self._burying = asyncio.create_task(self._bury())

    @classmethod
    async def spawn(
        cls,
        module: str,
        *arguments: str,
        errors: Errors | None = None,
        on_death: Callable[[Child], None] | None = None,
    ) -> Child:
        """A process that runs this module; `on_death` is called once when it has ended.

        Ctrl-C is for the owner, which ends it in order.
        """
        ours, theirs = socket.socketpair()
        try:
            _inherited.add(ours)
            with theirs:
                process = subprocess.Popen(  # noqa: ASYNC220 (a vfork, and never left half done)
                    [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            calls = await Calls.over(ours, {}, errors)
        except BaseException:
            ours.close()  # which ends the process too
            raise
        return cls(process, calls, on_death)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._calls.is_gone

    async def call(self, verb: str, body: Any = None) -> Any:
        """Ask, and wait for the answer.

        Raises:
            ChildDied: the process ended first.
            CallFailed: what it said, or the question does not travel; one of `errors` if it was
                that.
        """
        try:
            return await self._calls.ask(verb, body)
        except Disconnected as error:
            await asyncio.wait({self._burying})
            raise ChildDied(self.ending or "", asked=error.asked) from None

    def kill(self) -> None:
        """End it now; its death is noticed as any other."""
        if self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """Let it end by itself, or kill it. It is gone afterwards."""
        await self._calls.close()
        await asyncio.wait({self._burying})

    async def _bury(self) -> None:
        await self._calls.gone()
        await self._calls.close()  # what it may still say makes no sense any more
        await asyncio.to_thread(self._reap)
        code = self._process.returncode
        self.ending = (
            f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        )
        if self._on_death is not None:
            self._on_death(self)

    def _reap(self) -> None:
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_inherited: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    """A copy of the socket in another process would keep a child alive after its owner."""
    for ours in list(_inherited):
        try:
            os.close(ours.fileno())
        except OSError:
            pass  # it was closed before


os.register_at_fork(after_in_child=_close_in_forked_child)
