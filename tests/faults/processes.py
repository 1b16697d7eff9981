"""Client processes that tests stop, kill and question.

Each process is forked from a server that has imported torch once, so it is there in milliseconds.
It runs one function of a test module, which tells its parent things through a pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.deadline import eventually

DEADLINE_S = 20.0

_context = multiprocessing.get_context("forkserver")
# Also what the modules of tests import, for each process imports the one that its function is of.
_context.set_forkserver_preload(
    ["dataplane.client.sync", "dataplane.codec.containers", "pytest", "tests.faults.planes"]
)


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does: T is stopped, Z dead; empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[0]


def is_gone(pid: int) -> bool:
    """Whether a process has ended with all of its threads, reaped or not."""
    try:
        # A first thread that has ended waits as a zombie for the others.
        return state_of(pid) in ("", "Z", "X") and len(os.listdir(f"/proc/{pid}/task")) < 2
    except (FileNotFoundError, ProcessLookupError):
        return True


class Process:
    """A process that runs `function(pipe, *arguments)`; ended at the end of the `with` block."""

    def __init__(self, function: Callable[..., None], *arguments: object) -> None:
        self._ours, theirs = _context.Pipe()
        self._process = _context.Process(
            target=_run, args=(theirs, function, arguments), daemon=True
        )
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def hears(self, message: object) -> None:
        """Send it something."""
        self._ours.send(message)

    def says(self, deadline_s: float = DEADLINE_S) -> Any:
        """The next thing it says; an error that ended it is raised here."""
        if not self._ours.poll(deadline_s):
            raise AssertionError(f"process {self.pid} said nothing for {deadline_s:g} s")
        kind, value = self._ours.recv()
        if kind == "error":
            raise value
        return value

    def stopped(self) -> None:
        """Wait until it has stopped itself."""
        eventually(
            lambda: state_of(self.pid) == "T",
            f"process {self.pid} stops",
            within_s=DEADLINE_S,
        )

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """SIGSTOP, and wait until it took effect."""
        self.signal(signal.SIGSTOP)
        self.stopped()

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has closed what it had open."""
        self.signal(signal.SIGKILL)
        self._process.join(DEADLINE_S)
        assert self._process.exitcode == -signal.SIGKILL

    def ends(self) -> int:
        """Wait for its end; its exit code."""
        self._process.join(DEADLINE_S)
        assert self._process.exitcode is not None, f"process {self.pid} does not end"
        return self._process.exitcode

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.is_alive():
            self._process.kill()
            self._process.join(DEADLINE_S)
        self._process.close()
        self._ours.close()


class Speaker:
    """The child's end."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def say(self, value: object) -> None:
        self._pipe.send(("value", value))

    def hear(self) -> Any:
        return self._pipe.recv()

    def stop_myself(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


def _run(pipe: Pipe, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
    # A suite that runs in the background of a shell is deaf to it, and so would this process be.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        function(Speaker(pipe), *arguments)
    except BaseException as error:
        pipe.send(("error", error))
