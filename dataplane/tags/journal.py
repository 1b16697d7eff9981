"""The journal: every change of the tag store, appended before it is acknowledged.

Owns the file. A change that could not be written whole was not made: the file is cut back to the
last whole record, and the store takes no further change until a restart. What records say, and how
they are found again, is for records.py; what comes of them for replay/replay.py.

Starting on a journal that is there, and snapshots that bound it, are not part of this version.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Protocol

import msgpack

from dataplane.errors import InternalError
from dataplane.tags import records
from dataplane.tags.records import Head, Records, framed, head_bytes

PUT, CLEAR, REPACK, STORE = records.PUT, records.CLEAR, records.REPACK, records.STORE
CLAIM, COMMIT, RELEASE, LEAVE = records.CLAIM, records.COMMIT, records.RELEASE, records.LEAVE
BEGIN, END, KEEP = records.BEGIN, records.END, records.KEEP
PARTITION, RESTORE = records.PARTITION, records.RESTORE
ANSWER, FORGET, START = records.ANSWER, records.FORGET, records.START


class Journal(Protocol):
    """Where changes go before they happen."""

    def append(self, kind: int, n: int, at: float, body: Any) -> None:
        """Write one change. InternalError: it was not written and must not be made."""
        ...

    def close(self) -> None: ...


class FileJournal:
    """A journal in one file. Survives the death of the process, not of the machine: no fsync."""

    def __init__(
        self, path: Path, plane_id: str, epoch: int, *, open_schemas: bool = False
    ) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        start = head_bytes(Head(plane_id, epoch, open_schemas))
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
        record: bytes = self._pack((kind, n, float(at), body))
        if len(record) > records.MAX_RECORD_BYTES:
            raise InternalError(
                f"the change was not made: it would be a record of {len(record)} bytes, and at "
                f"most {records.MAX_RECORD_BYTES} are read back; ask for less at a time"
            )
        data = framed(record)
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


@contextlib.contextmanager
def reading(path: Path) -> Generator[Records]:
    """The records of a journal, whose file is open meanwhile and left as it is."""
    with path.open("rb", buffering=1 << 20) as file:
        yield Records(file, str(path))
