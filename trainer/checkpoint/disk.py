"""The steps by which something gets onto a disk whole, each of them one call.

Owns nothing but these steps; their order is for the callers. A file or folder is renamed to its
name only once it and all that is in it were synced, and the folder around it is synced after that.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any, Final

_BESIDE: Final = re.compile(r"\..+\.[0-9a-f]{12}")


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk, whoever wrote it."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def rename(source: Path, target: Path) -> None:
    """Give a file or folder its name in one step; a file that has the name is replaced."""
    os.replace(source, target)


def write(path: Path, content: bytes) -> None:
    """A new file with this content, in memory of the system: not yet synced."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(file, view) :]
    finally:
        os.close(file)


def remove(path: Path) -> None:
    """Remove a folder and all in it; what is gone already is no error."""
    shutil.rmtree(path, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """Sync all files below a folder, then the folders, inner ones first."""
    for at, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync_file(Path(at) / name)
        sync_folder(Path(at))


def beside(path: Path) -> Path:
    """A name in the same folder for what will be renamed to this path when it is whole."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}")


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what lies `beside` something because of a kill; what was removed."""
    left = [path for path in sorted(folder.glob(".*")) if _BESIDE.fullmatch(path.name)]
    for path in left:
        if path.is_dir():
            remove(path)
        else:
            path.unlink()
    return left


def replace_file(path: Path, content: bytes) -> None:
    """Put this content under the name: whoever reads it finds the old or the new one, whole."""
    partial = beside(path)
    try:
        write(partial, content)
        sync_file(partial)
        rename(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def json_bytes(data: Any) -> bytes:
    """Plain data as JSON; ValueError if a number is not finite, which other readers refuse."""
    return (json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
