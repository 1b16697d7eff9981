"""A plane in one child process, for machines without Ray, tests and single-node jobs.

The child serves both stores and ends when the pipe to its parent closes, whatever ended the
parent. Should it die before, the parent starts another one in the same folders, which goes on from
the journal and the segments there. It leaves nothing behind; should both be killed at once, the
next start sweeps what nobody locks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from dataplane.client.core import Joined
from dataplane.config import Config
from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    JournalDamaged,
    PlaneLost,
    RequestError,
    from_wire,
)
from dataplane.host.folders import (
    Folders,
    Ownership,
    claim,
    keep,
    plane_folders,
    remove_unowned,
    sweep,
)
from dataplane.host.presence import find_by_folder
from dataplane.host.records import Record, find, read_record, read_secret
from dataplane.logs.process import set_up
from dataplane.metrics.targets import list_targets
from dataplane.wire.address import Address

log = logging.getLogger("dataplane.host")

CLOSE_TIMEOUT_S = 10.0
LONGEST_START_S = 3600.0
"""How long a child that takes the place of another may read the journal."""
LOOK_S = 0.1
"""Between two looks at whether it is still wanted."""
YOUNG_S = 1.0
"""Children that die younger, one after the other, are started again with longer pauses."""
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 2.0


class EmbeddedHost:
    """The parent's side of a plane that it started: it owns the folders with the child, and starts
    another one when it dies."""

    def __init__(
        self,
        folders: Folders,
        config: Config,
        ownership: Ownership,
        process: subprocess.Popen[bytes],
    ) -> None:
        self.folders = folders
        self._config = config
        self._ownership = ownership
        self._process: subprocess.Popen[bytes] | None = process
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards which child it is, and whether one may be started
        self._stopping = threading.Event()
        self._supervisor = threading.Thread(
            target=self._supervise, args=(process,), name="dataplane-supervisor", daemon=True
        )
        self.joined = joined_by(read_record(folders), config)
        self._supervisor.start()
        _hosts.add(self)

    @property
    def pid(self) -> int | None:
        """Process id of the child that serves, or served last; None once it was stopped."""
        return self._process.pid if self._process is not None else None

    @property
    def ended(self) -> bool:
        """Whether the plane has ended, by whomever."""
        return not self._supervisor.is_alive()

    def stop(self) -> None:
        """End the plane and wait until its process is gone. Repeatable."""
        if os.getpid() != self._pid:
            return  # a forked child: the plane is the parent's
        with self._lock:
            self._stopping.set()
            process, self._process = self._process, None
        if process is None:
            return
        _end(process)
        self._supervisor.join()
        self._ownership.release()
        remove_unowned(self.folders)

    def _supervise(self, process: subprocess.Popen[bytes]) -> None:
        pause_s = 0.0
        while True:
            began = time.monotonic()
            status = process.wait()
            if self._stopping.is_set():
                return
            if not status:
                log.info("plane %r was ended by a client", self.folders.name)
                break
            log.warning(
                "the process of plane %r ended with status %d; another one goes on from its "
                "journal",
                self.folders.name,
                status,
            )
            if time.monotonic() - began > YOUNG_S:
                pause_s = 0.0
            another = self._start_another(pause_s)
            if another is None:
                break
            pause_s = _longer(pause_s)
            with self._lock:
                if self._stopping.is_set():
                    _end(another)
                    return
                _close_pipes(process)
                self._process = process = another
        # It is over, and not by this process: nobody finds it any more.
        self._ownership.release()
        remove_unowned(self.folders)

    def _start_another(self, pause_s: float) -> subprocess.Popen[bytes] | None:
        """Another child that serves; None if there can be none."""
        while not self._stopping.wait(pause_s):
            try:
                return _spawn(self.folders, self._config, self._stopping)
            except (JournalDamaged, RequestError) as error:
                log.error("plane %r cannot be started again: %s", self.folders.name, error)
                # What was acknowledged is in there: somebody is to look at it.
                with contextlib.suppress(OSError):
                    keep(self.folders, str(error))
                return None
            except (DataplaneError, OSError) as error:
                # A full disk, say, which somebody makes room on.
                log.warning("plane %r did not come up again: %s", self.folders.name, error)
                pause_s = _longer(pause_s)
        return None

    def close_in_child(self) -> None:
        """Close a forked child's copy of the pipe, so that the parent's end is still noticed."""
        process, self._process = self._process, None
        self._ownership.close_in_child()
        if process is None:
            return
        _close_pipes(process)  # nothing is buffered in them, so nothing is written
        # The parent reaps it; a wait here would fail, and Popen would warn.
        process.returncode = 0


def _longer(pause_s: float) -> float:
    return min(max(2 * pause_s, FIRST_PAUSE_S), LAST_PAUSE_S)


def start(name: str, config: Config) -> EmbeddedHost:
    """Start a plane in a child process.

    Raises:
        DeadlineExceeded: it did not come up within `start_timeout_s`; it was stopped.
        InvalidRequest: shared memory is too small; the message says what to mount.
    """
    from dataplane.server.process import new_plane_id  # the servers: nothing for who only joins

    sweep(config.runtime_dir, config.shm_dir)
    folders = plane_folders(name, new_plane_id(), config.runtime_dir, config.shm_dir)
    ownership: Ownership | None = None
    try:
        ownership = claim(folders)
        return EmbeddedHost(folders, config, ownership, _spawn(folders, config))
    except BaseException:
        if ownership is not None:
            ownership.release()
        remove_unowned(folders)
        raise


def serve_until_signalled(name: str, config: Config, announce: Callable[[str], None]) -> None:
    """What `dataplane serve` does: a plane that runs until SIGTERM or SIGINT, or is destroyed."""
    signalled = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        signalled.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    set_up("supervisor", level=config.log_level, form=config.log_format, plane=name)
    host = start(name, config)
    set_up(
        "supervisor", level=config.log_level, form=config.log_format,
        plane=name, plane_id=host.joined.plane_id,
    )  # fmt: skip
    try:
        announce(f"plane {name!r} ({host.joined.plane_id}) serves at {host.joined.tags}")
        for found in list_targets(host.folders.runtime):
            for target in found["targets"]:
                announce(f"metrics are at http://{target}/metrics")
        while not signalled.wait(1.0) and not host.ended:
            pass
    finally:
        host.stop()


def _spawn(
    folders: Folders, config: Config, given_up: threading.Event | None = None
) -> subprocess.Popen[bytes]:
    """A child that serves the plane of these folders. If there is none, none is left.

    One that takes the place of another reads a journal that may be long: it is waited for until it
    is `given_up`, since whoever came in its place would have to read as much.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "dataplane.server.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(),
    )
    assert process.stdin is not None
    settings = {
        "name": folders.name,
        "plane_id": folders.plane_id,
        "config": config.model_dump(mode="json"),
    }
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            process.stdin.flush()
        timeout_s = config.start_timeout_s if given_up is None else LONGEST_START_S
        answer = _answer(process, timeout_s, given_up)
        if "error" in answer:
            raise from_wire(answer["error"])
    except BaseException:
        process.kill()
        process.wait()
        _close_pipes(process)
        raise
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have a child end, and wait until it has."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(b"end")
        process.stdin.close()
    try:
        process.wait(CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _close_pipes(process)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def attach(name: str, config: Config) -> Joined | None:
    """The youngest live plane of this name on this machine, if there is one."""
    records = find(name, config.runtime_dir)
    return joined_by(records[0], config) if records else None


def joined_by(record: Record, config: Config) -> Joined:
    """What a client needs to join the plane of a record."""
    folders = plane_folders(record.name, record.plane_id, config.runtime_dir, config.shm_dir)
    return Joined(
        record.name,
        record.plane_id,
        read_secret(folders),
        Address(record.unix, record.tcp),
        find=partial(find_by_folder, folders),
    )


def attach_address(address: str, config: Config) -> Joined:
    """The plane whose unix socket or runtime folder this is. PlaneLost if there is none."""
    path = address.removeprefix("unix:")
    runtime = os.path.dirname(path) if path.endswith(".sock") else path
    root, plane_id = os.path.split(os.path.abspath(runtime))
    folders = plane_folders("address", plane_id, root, config.shm_dir)
    record = read_record(folders)
    folders = plane_folders(record.name, plane_id, root, config.shm_dir)
    return Joined(
        record.name,
        plane_id,
        read_secret(folders),
        Address(record.unix, record.tcp),
        find=partial(find_by_folder, folders),
    )


def _answer(
    process: subprocess.Popen[bytes], timeout_s: float, given_up: threading.Event | None
) -> dict[str, Any]:
    assert process.stdout is not None
    fd = process.stdout.fileno()
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        left = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([fd], [], [], left if given_up is None else min(left, LOOK_S))
        if not ready and left and given_up is not None and not given_up.is_set():
            continue
        if not ready:
            raise DeadlineExceeded(
                f"the plane did not come up within {timeout_s:g} s", waited_s=timeout_s
            )
        chunk = os.read(fd, 65536)
        if not chunk:
            raise PlaneLost(
                f"the plane's process ended at its start with status {process.wait()}; its "
                "standard error says why"
            )
        line += chunk
    return json.loads(line)


def _environment() -> dict[str, str]:
    """The parent's environment, so that the child imports the same packages."""
    environment = dict(os.environ)
    paths = [path for path in sys.path if path]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


_hosts: weakref.WeakSet[EmbeddedHost] = weakref.WeakSet()


def _after_fork() -> None:
    for host in list(_hosts):
        host.close_in_child()


os.register_at_fork(after_in_child=_after_fork)
