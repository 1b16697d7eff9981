"""The folder of a spool: who has it, and who the producer is that it belongs to."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dataplane.errors import InvalidRequest

LOCK: Final = "lock"
IDENTITY: Final = "identity.json"
_CLIENT_ID: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(slots=True)
class Identity:
    """Who the producer of a folder is, in every process."""

    client_id: str
    plane_id: str = ""
    """The plane that the puts are for; empty before the gateway was there once."""
    numbers_up_to: int = 0
    """No number above it was ever used."""

    def keep(self, folder: Path) -> None:
        """Write it, whole or not at all; it survives the loss of the machine."""
        write_whole(folder / IDENTITY, json.dumps(asdict(self)).encode())


def identity_of(folder: Path) -> Identity:
    """Who the producer is; somebody new in a folder that is empty.

    InvalidRequest if the folder holds something else, or what says so is damaged.
    """
    path = folder / IDENTITY
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        others = sorted(each.name for each in folder.iterdir() if each.name != LOCK)
        if others:
            raise InvalidRequest(
                f"{str(folder)!r} is no spool, and not empty (it has {others[0]!r:.80}): give an "
                "empty folder, or one that does not exist"
            ) from None
        identity = Identity(secrets.token_hex(16))
        identity.keep(folder)
        return identity
    try:
        told: Any = json.loads(data)
        identity = Identity(**told)
        good = (
            type(identity.client_id) is str
            and _CLIENT_ID.fullmatch(identity.client_id)
            and type(identity.plane_id) is str
            and type(identity.numbers_up_to) is int
            and 0 <= identity.numbers_up_to < 1 << 62
        )
    except (ValueError, TypeError):
        good = False
        identity = Identity("")
    if not good:
        raise InvalidRequest(
            f"{str(path)!r} is damaged: which numbers were used is not known any more. Move the "
            "folder away, and look at its *.spool files by hand"
        )
    return identity


def lock(folder: Path) -> int:
    """Take a folder, which is made if it is not there; closing the file lets it go.

    InvalidRequest names the process that has it.
    """
    try:
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidRequest(f"{str(folder)!r} cannot hold a spool: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(file, 200).decode("utf-8", "replace")
        os.close(file)
        raise InvalidRequest(
            f"the spool {str(folder)!r} is in use by {holder or 'another process'}: each process "
            "needs a folder of its own"
        ) from None
    os.ftruncate(file, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0)
    return file


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole or as it was before, also after the loss of the machine."""
    new = path.with_name(path.name + ".new")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.fdatasync(file)
    finally:
        os.close(file)
    new.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Files that were made in a folder are there after the loss of the machine."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
