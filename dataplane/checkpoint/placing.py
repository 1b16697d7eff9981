"""A folder that is written beside its place, and put there when all of it is whole.

It is written as `<path>.partial-<random>`, on the disk to the last byte before it is renamed. So a
crash leaves the old one, or the new one. An existing one is exchanged in one step where the file
system can. What crashed saves of the same path left is removed by the next.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dataplane.checkpoint.files import disk_errors
from dataplane.errors import InvalidRequest

PARTIAL: Final = ".partial-"


class Placing:
    """A folder on its way to its place. What is written to `folder` is synced by who writes it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool,
        is_checkpoint: Callable[[Path], bool],
    ) -> None:
        """InvalidRequest where it cannot go: what is there is no folder, or one that has files and
        that `is_checkpoint` does not know; or it may not be overwritten."""
        self.path = Path(os.path.abspath(path))
        self._overwrite = overwrite
        self._is_checkpoint = is_checkpoint
        with disk_errors(self.path):
            self._check_target(overwrite=overwrite)
            self._parent = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with _alone(self._parent):
                    _remove_leftovers(self.path)
                    self.folder = self.path.with_name(
                        f"{self.path.name}{PARTIAL}{secrets.token_hex(6)}"
                    )
                    self.folder.mkdir(mode=0o700)
                    self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    _try_lock(self._lock)
            except BaseException:
                os.close(self._parent)
                raise

    def place(self) -> None:
        """Put the folder in its place; it is there, whole, when this returns."""
        with disk_errors(self.path):
            os.fsync(self._lock)
            self._put_in_place()
            os.fsync(self._parent)
        self._close()

    def abandon(self) -> None:
        """Leave nothing behind. Does nothing once it is in its place."""
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._close()

    def _put_in_place(self) -> None:
        try:
            # A folder that is there and empty is replaced by this, any other is not.
            os.rename(self.folder, self.path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not self._overwrite:
                raise
        self._check_target(overwrite=True)  # it may have become something else since
        if not _exchange(self.folder, self.path):
            aside = self.folder.with_name(self.folder.name + "-old")
            os.rename(self.path, aside)
            os.rename(self.folder, self.path)
            os.rename(aside, self.folder)
        os.fsync(self._parent)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _close(self) -> None:
        for fd in (self._lock, self._parent):
            os.close(fd)
        self._lock = self._parent = -1

    def _check_target(self, *, overwrite: bool) -> None:
        path = self.path
        if not path.parent.is_dir():
            raise InvalidRequest(f"there is no folder {str(path.parent)!r} to save a checkpoint in")
        if not os.path.lexists(path):
            return
        if path.is_symlink() or not path.is_dir():
            raise InvalidRequest(f"{str(path)!r} is there and no folder: name another one")
        if not any(path.iterdir()):
            return
        if not self._is_checkpoint(path):
            raise InvalidRequest(
                f"the folder {str(path)!r} is not empty and holds no checkpoint: name another one"
            )
        if not overwrite:
            raise InvalidRequest(
                f"there is a checkpoint at {str(path)!r}: pass overwrite=True, or name another "
                "folder"
            )


@contextmanager
def _alone(parent: int) -> Generator[None]:
    """While folders are made or removed here, by any process."""
    locked = True
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)
    except OSError:
        locked = False  # a file system without locks
    try:
        yield
    finally:
        if locked:
            fcntl.flock(parent, fcntl.LOCK_UN)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_leftovers(path: Path) -> None:
    """Remove what saves of this path left that ended half-way: nobody holds its lock."""
    for entry in path.parent.iterdir():
        if not entry.name.startswith(path.name + PARTIAL) or entry.is_symlink():
            continue
        try:
            fd = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _try_lock(fd):
                shutil.rmtree(entry, ignore_errors=True)
        finally:
            os.close(fd)


_RENAME_EXCHANGE: Final = 2
_AT_FDCWD: Final = -100


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, which Python has no function for; False where the file
    system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    done = renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    if not done:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
