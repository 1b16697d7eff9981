"""The journal: every change of the tag store, appended before it is acknowledged.

Owns the file that is written. A change that could not be written whole was not made: the file is
cut back to its last whole record, and the next change is tried anew, so that a store whose disk was
full goes on once there is room. What records say, and how they are found again, is for records.py;
what comes of them for replay/replay.py; the files before this one, and the snapshots that took
their place, for journal_folder.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgpack

from dataplane.errors import InternalError, QuotaExceeded
from dataplane.tags import records
from dataplane.tags.history import History
from dataplane.tags.lineage.lineage import Lineage
from dataplane.tags.records import Head, Records, framed, head_bytes

PUT, CLEAR, REPACK, STORE = records.PUT, records.CLEAR, records.REPACK, records.STORE
CLAIM, COMMIT, RELEASE, LEAVE = records.CLAIM, records.COMMIT, records.RELEASE, records.LEAVE
BEGIN, END, KEEP = records.BEGIN, records.END, records.KEEP
PARTITION, RESTORE = records.PARTITION, records.RESTORE
ANSWER, FORGET, START = records.ANSWER, records.FORGET, records.START
LOST = records.LOST

NONE, INTERVAL, ALWAYS = "none", "interval", "always"

FLUSH_S = 1.0
"""Time between two flushes of the setting `interval`."""
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class Journal(Protocol):
    """Where changes go before they happen."""

    def append(self, kind: int, n: int, at: float, body: Any) -> None:
        """Write one change. An error: it was not written, and must not be made."""
        ...

    def close(self) -> None: ...


class FileJournal:
    """A journal in files of a folder, of which the last is written.

    What is acknowledged survives the death of the process in any case. `sync` says what survives
    besides:
        none        nothing more: a crash of the operating system or a loss of power can take any
                    of the last changes, and damage the file
        interval    those too, but for the last second: the disk is flushed once a second
        always      those too, whole: the disk is flushed before each change is acknowledged
    """

    def __init__(
        self,
        path: Path,
        plane_id: str,
        epoch: int,
        *,
        open_schemas: bool = False,
        sync: str = NONE,
        number: int = 1,
    ) -> None:
        """Begin a file. FileExistsError if it is there; QuotaExceeded if the disk is full."""
        self.head: Head = Head(plane_id, epoch, open_schemas, number)
        self._opened(*_begun(path, self.head, sync), sync)

    @classmethod
    def resumed(cls, path: Path, head: Head, end: int, sync: str = NONE) -> FileJournal:
        """The journal that goes on in a file that is there; what is in it after `end` is cut off,
        for good."""
        journal = cls.__new__(cls)
        journal.head = head
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.ftruncate(fd, end)
            if sync != NONE:
                os.fdatasync(fd)
        except BaseException:
            os.close(fd)
            raise
        journal._opened(path, fd, end, sync)
        return journal

    def _opened(self, path: Path, fd: int, end: int, sync: str) -> None:
        self.path = path
        self.sync = sync
        self.snapshot = 0
        """The number of the last whole snapshot; 0 if there is none."""
        self.snapshot_bytes = 0
        """Its size."""
        self.loading = False
        """Whether the load of a checkpoint is under way."""
        history = History()
        self.history = (history.max_changes, history.max_age_s)
        """How far back the history reaches of the store whose journal it is."""
        self.lineage: Lineage | None = None
        """Where the last changes are kept to be looked at."""
        self._fd = fd
        self._end = end
        self.closed_bytes = 0
        """Size of the files before this one that no snapshot has taken the place of."""
        self._begin = end if end == len(head_bytes(self.head)) else 0
        self._broken: str | None = None
        self.refused = 0
        """Changes that it could not take."""
        self._always = sync == ALWAYS
        self._pack = msgpack.Packer(autoreset=True).pack
        self._lock = threading.Lock()
        """Held while the descriptor changes, or a copy of it is made."""
        self._stopped = threading.Event()
        self._flushed = end
        if sync == INTERVAL:
            threading.Thread(target=self._flush_often, name="journal", daemon=True).start()

    @property
    def folder(self) -> Path:
        """The folder of all files."""
        return self.path.parent

    @property
    def number(self) -> int:
        """Which file is written, from 1 on."""
        return self.head.number

    @property
    def nbytes(self) -> int:
        """Size of the files that no snapshot has taken the place of."""
        return self.closed_bytes + self._end

    @property
    def is_broken(self) -> bool:
        """Whether it takes no change until it is begun anew."""
        return self._broken is not None

    @property
    def unflushed_bytes(self) -> int:
        """Bytes of the file that is written which no flush of ours has covered."""
        return max(0, self._end - (self._end if self._always else self._flushed))

    def append(self, kind: int, n: int, at: float, body: Any) -> None:
        """Write one change.

        Raises:
            QuotaExceeded: the disk is full, or the user's share of it. Nothing was written; it is
                tried again with the next change.
            InternalError: it cannot be written, or nothing can be written until a restart.
        """
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
            if written < len(data):
                self._refuse(None)
            if self._always:
                os.fdatasync(self._fd)
        except OSError as error:
            self._refuse(error)
        self._end += len(data)
        if self.lineage is not None:
            self.lineage.wrote(kind, n, at, body, record)
        if kind == RESTORE:
            self._note_load(body[0])

    def _note_load(self, step: str) -> None:
        if step in ("begin", "end", "abandon"):
            self.loading = step == "begin"

    def _refuse(self, error: OSError | None) -> NoReturn:
        """Cut off what there is of a change, and say why it was not made. No error stands for a
        disk that took a part of it, as one does that is full."""
        self.refused += 1
        reason = "the disk took only part of a record" if error is None else str(error)
        try:
            os.ftruncate(self._fd, self._end)
        except OSError as cut:
            self._broken = f"{reason}, and what was written of it could not be cut off: {cut}"
        else:
            if error is None or error.errno in _FULL:
                raise disk_full(self.path, "the change was not made", reason, self._fd) from error
            self._broken = reason
        raise InternalError(
            f"the change was not made: the journal {self.path} could not be written: "
            f"{self._broken}; it takes no more changes until the plane is started again"
        ) from error

    # -- files -------------------------------------------------------------------------------

    def turn(self) -> int:
        """Go on in a new file; its number. All that was written before is in the files before it,
        which do not change any more.

        QuotaExceeded or InternalError: it goes on in the file that it had.
        """
        if self._broken is not None:
            raise InternalError(f"the journal {self.path} takes no more changes: {self._broken}")
        if self._end == self._begin:
            return self.number  # there is nothing in it
        head = self.head._replace(number=self.number + 1, before=self._end)
        try:
            if self.sync != NONE:
                os.fdatasync(self._fd)
            path, fd, end = _begun(self.folder / journal_name(head.number), head, self.sync)
        except OSError as error:
            text = f"the journal {self.path} cannot go on in a new file: {error}"
            raise InternalError(text) from error
        with self._lock:
            old, self._fd = self._fd, fd
            self.closed_bytes += self._end
            self.head, self.path = head, path
            self._end = self._begin = self._flushed = end
        os.close(old)
        return head.number

    def replaced(self, snapshot: int, nbytes: int, before: int) -> None:
        """A snapshot of so many bytes has taken the place of the files up to its own number, which
        had `before` bytes."""
        self.snapshot, self.snapshot_bytes = snapshot, nbytes
        self.closed_bytes -= before

    def flush(self) -> None:
        """Have on the disk what was written by now. For threads: it takes as long as it takes."""
        with self._lock:
            if self._stopped.is_set():
                return
            fd, end = os.dup(self._fd), self._end
        try:
            os.fdatasync(fd)
            self._flushed = end
        except OSError as error:
            if error.errno not in _FULL:
                # What the kernel could not write it may have forgotten: it cannot be tried again.
                self._broken = f"it could not be flushed: {error}"
        finally:
            os.close(fd)

    def _flush_often(self) -> None:
        while not self._stopped.wait(FLUSH_S):
            if self._flushed != self._end:
                self.flush()

    def close(self) -> None:
        """Write nothing more. What was written is flushed first where `sync` says so."""
        self._stopped.set()
        with self._lock:
            if self.sync != NONE:
                with contextlib.suppress(OSError):
                    os.fdatasync(self._fd)
            os.close(self._fd)


def journal_name(number: int) -> str:
    """The name of a file of a journal in its folder."""
    return f"journal-{number:08d}"


@contextlib.contextmanager
def reading(path: Path) -> Generator[Records]:
    """The records of a journal's file, which is open meanwhile and left as it is."""
    with path.open("rb", buffering=1 << 20) as file:
        yield Records(file, str(path))


def sync_folder(folder: Path) -> None:
    """Have on the disk which files are in a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _begun(path: Path, head: Head, sync: str) -> tuple[Path, int, int]:
    """A new file with its header, which is there whole or not at all: open for records, and its
    size."""
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    aside = path.with_name(path.name + ".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    start = head_bytes(head)
    fd = os.open(aside, flags, 0o600)
    try:
        try:
            reason = None
            if os.write(fd, start) < len(start):
                reason = "the disk took only part of its header"
            elif sync != NONE:
                os.fdatasync(fd)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            reason = str(error)
        if reason is not None:
            raise disk_full(path, "a file of the journal could not be begun", reason, fd)
        os.rename(aside, path)
        if sync != NONE:
            sync_folder(path.parent)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    return path, fd, len(start)


def disk_full(path: Path, what: str, reason: str, fd: int | None = None) -> QuotaExceeded:
    """The error that says how full the file system is under a file of a journal, open or not."""
    there = os.statvfs(path.parent if fd is None else fd)
    size = there.f_blocks * there.f_frsize
    return QuotaExceeded(
        f"{what}: {reason}; the file system under the journal {path} is full, or this user's share "
        "of it: make room there, and put again; nothing else need be done",
        used_bytes=size - there.f_bavail * there.f_frsize,
        limit_bytes=size,
        oldest_keys=[],  # no rows are in the way, as they are in a full value store or partition
    )
