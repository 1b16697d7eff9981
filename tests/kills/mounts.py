"""Small and unwritable file systems, real ones: a test that may not mount is skipped."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small(nbytes: int) -> Generator[Path]:
    """An empty tmpfs of so many bytes."""
    with _mounted("-t", "tmpfs", "-o", f"size={nbytes},mode=700", "tmpfs") as path:
        yield path


@contextmanager
def read_only() -> Generator[Path]:
    """An empty folder that even root cannot write to."""
    with _mounted("-t", "tmpfs", "-o", "size=64k,mode=700,ro", "tmpfs") as path:
        yield path


@contextmanager
def _mounted(*arguments: str) -> Generator[Path]:
    # Not pytest's own folder: a path of a unix socket has at most 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="dataplane-"))
    try:
        done = subprocess.run(
            ["mount", *arguments, str(path)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        try:
            yield path
        finally:
            # Lazily: what a test has failed to close must not keep the mount.
            subprocess.run(["umount", "--lazy", str(path)], check=True)
    finally:
        shutil.rmtree(path)


class Filler:
    """Somebody else's file on a file system, which takes the room that there is."""

    def __init__(self, folder: Path, name: str = "others") -> None:
        self._path = folder / name

    def leave(self, nbytes: int = 0) -> None:
        """Take all but so many bytes, to the page."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            size = os.fstat(fd).st_blocks * 512
            there = os.statvfs(self._path)
            size += there.f_bavail * there.f_frsize - nbytes
            os.ftruncate(fd, max(size, 0))
            if size > 0:
                with contextlib.suppress(OSError):  # others were faster: there is no room either
                    os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)

    def go(self) -> None:
        """Give all of it back."""
        self._path.unlink()
