"""The gateway that `dataplane.init()` starts beside an embedded plane: a child of the same parent.

A process of its own: what comes from outside shares neither a core's time nor a fate with the
stores or with the training process. It is started again when it dies, and ends with the plane, or
when the pipe to its parent closes, whatever ended the parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from typing import Any, Final

from dataplane.client.core import Joined
from dataplane.config import Config
from dataplane.errors import DataplaneError, DeadlineExceeded, PlaneLost, from_wire
from dataplane.gateway.config import GatewayConfig

log = logging.getLogger("dataplane.gateway")

DRAIN_S: Final = 2.0
"""The plane ends right after it: nobody can go on elsewhere."""
CLOSE_S: Final = 5.0
YOUNG_S: Final = 1.0
FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 2.0


class GatewayChild:
    """The parent's side."""

    def __init__(self, joined: Joined, config: GatewayConfig, plane_config: Config) -> None:
        """Start it, and wait until it listens.

        Raises:
            InvalidRequest: it may not or cannot listen where it is told to.
            DeadlineExceeded: it did not come up within `start_timeout_s`; it was stopped.
        """
        config = config.model_copy(update={"drain_s": min(config.drain_s, DRAIN_S)})
        self.addresses: list[str] = []
        """Where clients reach it; another port after it was started again, if any would do."""
        self._settings = {
            "address": joined.tags.unix,
            "config": config.model_dump(mode="json"),
            "plane_config": plane_config.model_dump(mode="json"),
        }
        self._drain_s = config.drain_s
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards which process it is, and whether one may be started
        self._stopping = threading.Event()
        self._told = threading.Event()
        self._error: DataplaneError | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._supervisor = threading.Thread(
            target=self._supervise, name="dataplane-gateway", daemon=True
        )
        _children.add(self)
        self._supervisor.start()
        if not self._told.wait(plane_config.start_timeout_s):
            self.stop()
            raise DeadlineExceeded(
                f"the gateway did not come up within {plane_config.start_timeout_s:g} s",
                waited_s=plane_config.start_timeout_s,
            )
        if self._error is not None:
            raise self._error

    @property
    def pid(self) -> int | None:
        """Process id of the gateway; None once it was stopped."""
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """End it and wait until it is gone. Repeatable."""
        if os.getpid() != self._pid:
            return  # a forked child: the gateway is the parent's
        with self._lock:
            self._stopping.set()
            process = self._process
            if process is not None and process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        if process is not None:
            try:
                process.wait(self._drain_s + CLOSE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._supervisor.join()
        self._process = None

    def _supervise(self) -> None:
        pause_s = 0.0
        while not self._stopping.wait(pause_s):
            began = time.monotonic()
            process = self._spawn()
            if process is None:
                return
            answer = _answer(process)
            first = not self._told.is_set()
            if "addresses" in answer:
                self.addresses = answer["addresses"]
                for address in self.addresses:
                    log.info("the gateway listens at %s", address)
            elif first:
                self._error = from_wire(answer["error"])
            self._told.set()
            status = process.wait()
            _close_pipes(process)
            if self._stopping.is_set() or (first and self._error is not None):
                return
            log.warning("the gateway ended with status %d; another one is started", status)
            if time.monotonic() - began > YOUNG_S:
                pause_s = 0.0
            pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LAST_PAUSE_S)

    def _spawn(self) -> subprocess.Popen[bytes] | None:
        """Another process, which was told its settings; None if there is to be none."""
        with self._lock:
            if self._stopping.is_set():
                return None
            process = subprocess.Popen(
                [sys.executable, "-m", "dataplane.gateway.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            self._process = process
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(self._settings).encode() + b"\n")
                process.stdin.flush()
        return process

    def close_in_child(self) -> None:
        """Close a forked child's copy of the pipe, so that the parent's end is still noticed."""
        process, self._process = self._process, None
        if process is not None:
            _close_pipes(process)  # nothing is buffered in them, so nothing is written
            # The parent reaps it; a wait here would fail, and Popen would warn.
            process.returncode = 0


def _answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What a process says of itself when it is up, or why it is not."""
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        return json.loads(line)
    except ValueError:
        text = "the gateway's process ended at its start; its standard error says why"
        return {"error": {"type": PlaneLost.__name__, "message": text}}


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


_children: weakref.WeakSet[GatewayChild] = weakref.WeakSet()


def _after_fork() -> None:
    for child in list(_children):
        child.close_in_child()


os.register_at_fork(after_in_child=_after_fork)
