"""A plane in one child process, for machines without Ray, tests and single-node jobs.

The child serves both stores and ends when the pipe to its parent closes, whatever ended the
parent. It leaves nothing behind; should both be killed at once, the next start sweeps what nobody
locks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import weakref
from typing import Any

from dataplane.client.core import Joined
from dataplane.config import Config
from dataplane.errors import DeadlineExceeded, InternalError, PlaneLost, from_wire
from dataplane.host.folders import Folders, plane_folders, remove_unowned, sweep
from dataplane.host.records import Record, find, read_record, read_secret
from dataplane.server.process import new_plane_id
from dataplane.wire.address import Address

CLOSE_TIMEOUT_S = 10.0


class EmbeddedHost:
    """The parent's side of a plane that it started."""

    def __init__(self, joined: Joined, folders: Folders, process: subprocess.Popen[bytes]) -> None:
        self.joined = joined
        self.folders = folders
        self._process: subprocess.Popen[bytes] | None = process
        self._pid = os.getpid()
        _hosts.add(self)

    @property
    def pid(self) -> int | None:
        """Process id of the child; None once it was stopped."""
        return self._process.pid if self._process is not None else None

    def stop(self) -> None:
        """End the plane and wait until its process is gone. Repeatable."""
        process, self._process = self._process, None
        if process is None:
            return
        if os.getpid() != self._pid:
            return  # a forked child: the plane is the parent's
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        remove_unowned(self.folders)

    def close_in_child(self) -> None:
        """Close a forked child's copy of the pipe, so that the parent's end is still noticed."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()  # nothing is buffered in it, so nothing is written
        # The parent reaps it; a wait here would fail, and Popen would warn.
        process.returncode = 0


def start(name: str, config: Config) -> EmbeddedHost:
    """Start a plane in a child process.

    Raises:
        DeadlineExceeded: it did not come up within `start_timeout_s`; it was stopped.
        InvalidRequest: shared memory is too small; the message says what to mount.
    """
    sweep(config.runtime_dir, config.shm_dir)
    folders = plane_folders(name, new_plane_id(), config.runtime_dir, config.shm_dir)
    process = subprocess.Popen(
        [sys.executable, "-m", "dataplane.server.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    settings = {
        "name": name,
        "plane_id": folders.plane_id,
        "config": config.model_dump(mode="json"),
    }
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            process.stdin.flush()
        answer = _answer(process, config.start_timeout_s)
        if "error" in answer:
            raise from_wire(answer["error"])
    except BaseException:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        remove_unowned(folders)
        raise
    records = [r for r in find(name, config.runtime_dir) if r.plane_id == folders.plane_id]
    if not records:
        raise InternalError(f"plane {name!r} came up and wrote no record")
    return EmbeddedHost(joined_by(records[0], config), folders, process)


def attach(name: str, config: Config) -> Joined | None:
    """The youngest live plane of this name on this machine, if there is one."""
    records = find(name, config.runtime_dir)
    return joined_by(records[0], config) if records else None


def joined_by(record: Record, config: Config) -> Joined:
    """What a client needs to join the plane of a record."""
    folders = plane_folders(record.name, record.plane_id, config.runtime_dir, config.shm_dir)
    return Joined(
        record.name, record.plane_id, read_secret(folders), Address(record.unix, record.tcp)
    )


def attach_address(address: str, config: Config) -> Joined:
    """The plane whose unix socket or runtime folder this is. PlaneLost if there is none."""
    path = address.removeprefix("unix:")
    runtime = os.path.dirname(path) if path.endswith(".sock") else path
    root, plane_id = os.path.split(os.path.abspath(runtime))
    folders = plane_folders("address", plane_id, root, config.shm_dir)
    record = read_record(folders)
    folders = plane_folders(record.name, plane_id, root, config.shm_dir)
    return Joined(record.name, plane_id, read_secret(folders), Address(record.unix, record.tcp))


def _answer(process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
    assert process.stdout is not None
    fd = process.stdout.fileno()
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
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
