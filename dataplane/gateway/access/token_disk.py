"""A token file on disk: read only if it is safe, and changed in one step or not at all."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from dataplane.errors import InvalidRequest
from dataplane.gateway.access.token_records import Records

Result = TypeVar("Result")

MAX_FILE_BYTES: Final = 16 << 20
"""Some ten thousand tokens."""


def read_records(path: Path) -> Records:
    """What a token file says. InvalidRequest if it cannot be read or is not right."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            _check_safe(path, os.fstat(file.fileno()))
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(
            f"token file {path} cannot be read: {error.strerror}; make one with "
            "`dataplane token create`"
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequest(f"token file {path} is larger than {MAX_FILE_BYTES} bytes")
    return Records.parse(data, str(path))


def _without_waiting(path: str, flags: int) -> int:
    # A pipe in its place would hold the whole gateway until somebody writes.
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _check_safe(path: Path, found: os.stat_result) -> None:
    """Who may write this file may let in anybody. That others read it does no such harm: it has
    digests, and secrets that are mounted from elsewhere often are readable."""
    if not stat.S_ISREG(found.st_mode):
        raise InvalidRequest(f"token file {path} is not a file")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidRequest(
            f"token file {path} may be written by others (mode {stat.S_IMODE(found.st_mode):o}): "
            "they could let in anybody; `chmod 600` it, and look at what it says"
        )


def state_of(path: Path) -> tuple[int, ...] | None:
    """What changes when a file does; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def change_records(path: Path, change: Callable[[Records], tuple[Records, Result]]) -> Result:
    """Replace what a token file says, and return what `change` adds to it. A file that is not there
    yet is made.

    Whoever reads meanwhile sees either what it said before or what it says afterwards; changes wait
    for each other. InvalidRequest, with the file as it was, if it cannot be read or written.
    """
    path = Path(os.path.realpath(path))  # where it is a link, the file behind it is replaced
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            before = read_records(path) if os.path.lexists(path) else Records()
            after, result = change(before)
            if after != before:
                _replace(path, after.dump())
                os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise InvalidRequest(
            f"token file {path} cannot be written: {error.strerror} (errno {error.errno})"
        ) from None
    return result


def _replace(path: Path, data: bytes) -> None:
    # Made with mode 0600.
    fd, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
