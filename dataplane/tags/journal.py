"""The journal: every change of the tag store, appended before it is acknowledged.

A file of records behind a header: bytes u32, crc32 u32, then a msgpack record. A change that could
not be written whole was not made: the file is cut back to the last whole record, and the store
takes no further change until a restart.

Replay of a journal at start, and snapshots that bound it, are not part of this version.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from pathlib import Path
from typing import Any, Protocol

import msgpack

from dataplane.errors import InternalError

MAGIC = b"DPJRNL\0"
VERSION = 1
_RECORD = struct.Struct("<II")

PUT = 1
CLEAR = 2
REPACK = 3
STORE = 5
CLAIM = 6
COMMIT = 7
RELEASE = 8
BEGIN = 9
END = 10
PARTITION = 11
RESTORE = 12


class Journal(Protocol):
    """Where changes go before they happen."""

    def append(self, kind: int, n: int, at: float, body: Any) -> None:
        """Write one change. InternalError: it was not written and must not be made."""
        ...

    def close(self) -> None: ...


class FileJournal:
    """A journal in one file. Survives the death of the process, not of the machine: no fsync."""

    def __init__(self, path: Path, plane_id: str, epoch: int) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        head = msgpack.packb({"plane_id": plane_id, "epoch": epoch})
        start = MAGIC + bytes([VERSION]) + _RECORD.pack(len(head), zlib.crc32(head)) + head
        if os.write(self._fd, start) < len(start):
            raise InternalError(f"the journal {path} could not be begun: the disk is full")
        self._end = len(start)
        self._broken: str | None = None
        self._pack = msgpack.Packer(autoreset=True).pack

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self._end

    def append(self, kind: int, n: int, at: float, body: Any) -> None:
        if self._broken is not None:
            raise InternalError(f"the journal {self.path} takes no more changes: {self._broken}")
        record: bytes = self._pack((kind, n, at, body))
        data = _RECORD.pack(len(record), zlib.crc32(record)) + record
        try:
            written = os.write(self._fd, data)
            reason = "the disk took only part of a record" if written < len(data) else None
        except OSError as error:
            reason = str(error)
        if reason is not None:
            self._broken = reason
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise InternalError(
                f"the change was not made: the journal {self.path} could not be written: {reason}"
            )
        self._end += len(data)

    def close(self) -> None:
        os.close(self._fd)
