"""Puts on disk that wait for the gateway: in order, up to so many bytes, across processes.

A folder belongs to one process at a time. It holds who the producer is, the records of `records.py`
in segments, and under `rejected/` what the plane has refused, each with the reason.

What `append` has returned survives the SIGKILL of this process at once, and the loss of the
machine once it was synced: whoever uses the spool calls `sync` now and then. Nothing in here sends
anything.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dataplane.client.numbers import RequestNumbers
from dataplane.errors import DataplaneError, InvalidRequest, QuotaExceeded, to_wire
from dataplane.producer.puts import Put
from dataplane.producer.records import (
    PUTS,
    Kind,
    Record,
    body_of_put,
    pack,
    put_of_body,
    scan,
)
from dataplane.producer.spool_folder import identity_of, lock, sync_folder, write_whole

log = logging.getLogger("dataplane.producer")

SEGMENT_BYTES: Final = 16 << 20
"""A segment that has grown so large is followed by another."""
NUMBERS: Final = 1 << 16
"""Numbers that are set aside with one write: a process that dies leaves the rest unused."""

REJECTED, DAMAGED = "rejected", "damaged"


@dataclass(slots=True)
class Entry:
    """A put that waits."""

    number: int
    segment: int
    at: int
    """Where its record begins in the segment, and how long that is."""
    nbytes: int
    sent: bool = False
    """Whether it may have arrived."""


class SpoolNumbers(RequestNumbers):
    """Numbers that no process uses twice: a bound of them is on disk before they are given out."""

    def __init__(self, spool: Spool, last: int, unsettled: Sequence[int]) -> None:
        super().__init__(last, unsettled)
        self._spool = spool

    def begin(self) -> tuple[int, int]:
        """See `RequestNumbers.begin`."""
        number, settled = super().begin()
        self._spool.set_aside(number)
        return number, settled


class Spool:
    """A folder of puts. Usable from any thread."""

    def __init__(self, folder: str | os.PathLike[str], *, max_bytes: int) -> None:
        """Open a folder, which is made if it is not there, with what an earlier process left.

        `max_bytes`: of what waits, and of what was refused. InvalidRequest if another process has
        the folder, or it is no spool.
        """
        if type(max_bytes) is not int or max_bytes <= 0:
            raise InvalidRequest(f"a spool holds a positive number of bytes, not {max_bytes!r:.80}")
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.damaged = 0
        """Pieces of its files that were found damaged; they are copied to `damaged/`."""
        self.rejected = 0
        """Puts under `rejected/`."""
        self._rejected_bytes = 0
        self._lock = threading.RLock()
        self._waiting: deque[Entry] = deque()
        self._segments: dict[int, int] = {}
        """Bytes of each segment, in order."""
        self._file: int | None = None
        """The last segment, to write to."""
        self._dirty = False
        self._held: int | None = lock(self.folder)
        try:
            self._identity = identity_of(self.folder)
            self._recover()
        except BaseException:
            os.close(self._held)
            raise
        self.numbers: RequestNumbers = SpoolNumbers(
            self, self._identity.numbers_up_to, [entry.number for entry in self._waiting]
        )

    @property
    def client_id(self) -> str:
        """Who the producer of this folder is, in every process."""
        return self._identity.client_id

    @property
    def plane_id(self) -> str:
        """The plane that the puts are for; empty before the gateway was there once."""
        return self._identity.plane_id

    def join(self, plane_id: str) -> None:
        """Remember the plane."""
        with self._lock:
            if plane_id != self.plane_id:
                self._identity.plane_id = plane_id
                self._identity.keep(self.folder)

    def set_aside(self, number: int) -> None:
        """Make sure that no later process uses this number."""
        with self._lock:
            if number > self._identity.numbers_up_to:
                self._identity.numbers_up_to = number + NUMBERS
                self._identity.keep(self.folder)

    # -- what waits --------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def used_bytes(self) -> int:
        """Bytes on disk: of what waits, of what was answered since the oldest of that, and of what
        was refused."""
        return sum(self._segments.values()) + self._rejected_bytes

    def head(self) -> Entry | None:
        """The put that has waited longest; None if none waits."""
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def append(self, put: Put, number: int, *, sent: bool) -> Entry:
        """Keep a put, behind all others. Its message says what the producer had seen.

        QuotaExceeded if there is no room for it; nothing was kept.
        """
        kind, body = body_of_put(put)
        pieces = pack(kind, number, body)
        if sent:
            pieces += pack(Kind.SENT, number)
        nbytes = sum(map(len, pieces))
        with self._lock:
            if self.used_bytes + nbytes > self.max_bytes:
                raise self._full(f"{nbytes} bytes more are too many")
            if not self._segments or self._segments[self._last] >= SEGMENT_BYTES:
                self._begin_segment()
            at = self._segments[self._last]
            self._write(pieces)
            entry = Entry(number, self._last, at, nbytes, sent)
            self._waiting.append(entry)
            return entry

    def read(self, entry: Entry) -> Put:
        """The put that waits. ValueError if its bytes are not what was written."""
        data = memoryview(self._raw(entry))
        found = scan(data)
        if not found.records or found.records[0].at:
            raise ValueError("the record is damaged")
        record = found.records[0]
        return put_of_body(record.kind, data[record.body : record.body + record.length])

    def mark_sent(self, entry: Entry) -> None:
        """From now on it may have arrived."""
        with self._lock:
            if not entry.sent:
                self._write(pack(Kind.SENT, entry.number))
                entry.sent = True

    def renew(self, entry: Entry, number: int) -> None:
        """It had no effect and never will under its number: it goes on under a new one."""
        with self._lock:
            self._write(pack(Kind.AGAIN, entry.number, [number.to_bytes(8, "little")]))
            self.numbers.end(entry.number)
            entry.number, entry.sent = number, False

    def done(self, entry: Entry) -> None:
        """The head was answered: nothing is kept of it."""
        with self._lock:
            self._drop_head(entry)

    def reject(self, entry: Entry, error: DataplaneError) -> Path:
        """Set the head aside with the reason; where it is now."""
        with self._lock:
            reason = json.dumps(to_wire(error), default=str).encode()
            data = self._raw(entry)
            (self.folder / REJECTED).mkdir(mode=0o700, exist_ok=True)
            path = self.folder / REJECTED / f"{entry.number:020d}.put"
            write_whole(path.with_suffix(".json"), reason)
            write_whole(path, data)
            self.rejected += 1
            self._rejected_bytes += len(data) + len(reason)
            self._drop_head(entry)
            return path

    def sync(self) -> None:
        """What was appended survives the loss of the machine when this returns."""
        with self._lock:
            if self._file is None or not self._dirty:
                return
            self._dirty = False
            file = os.dup(self._file)
        try:
            os.fdatasync(file)
        finally:
            os.close(file)

    def close(self) -> None:
        """Sync, and let others have the folder. Repeatable."""
        with self._lock:
            self.sync()
            self.close_in_child()

    def close_in_child(self) -> None:
        """Let go of what a forked child inherited; the folder stays its parent's."""
        for file in (self._file, self._held):
            if file is not None:
                os.close(file)
        self._file = self._held = None

    def __repr__(self) -> str:
        return f"Spool({str(self.folder)!r}, {len(self)} waiting, {self.used_bytes} bytes)"

    # -- files -------------------------------------------------------------------------------

    @property
    def _last(self) -> int:
        return next(reversed(self._segments))

    def _path(self, segment: int) -> Path:
        return self.folder / f"{segment:08d}.spool"

    def _raw(self, entry: Entry) -> bytes:
        with self._path(entry.segment).open("rb") as file:
            return os.pread(file.fileno(), entry.nbytes, entry.at)

    def _begin_segment(self) -> None:
        segment = self._last + 1 if self._segments else 1
        self._close_file()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path(segment), flags, 0o600)
        self._segments[segment] = 0
        sync_folder(self.folder)

    def _close_file(self) -> None:
        if self._file is not None:
            if self._dirty:
                os.fdatasync(self._file)
            os.close(self._file)
        self._file, self._dirty = None, False

    def _write(self, pieces: Sequence[bytes]) -> None:
        """Add to the last segment, all of it or nothing."""
        if self._held is None:
            raise InvalidRequest(f"the spool {str(self.folder)!r} was closed")
        if self._file is None:  # of an earlier process
            flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._path(self._last), flags)
        size = 0
        try:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    written = os.write(self._file, view)
                    size, view = size + written, view[written:]
        except OSError as error:
            os.ftruncate(self._file, self._segments[self._last])
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._full(f"its disk is full ({error.strerror})") from error
        self._segments[self._last] += size
        self._dirty = True

    def _drop_head(self, entry: Entry) -> None:
        if not self._waiting or self._waiting[0] is not entry:
            raise ValueError(f"put {entry.number} is not the one that has waited longest")
        try:
            self._write(pack(Kind.DONE, entry.number))
        except QuotaExceeded:
            # A later process asks again, under the same number, if the file is there still.
            log.warning("that put %d was answered could not be written down", entry.number)
        self._waiting.popleft()
        self.numbers.end(entry.number)
        self._drop_done()

    def _drop_done(self) -> None:
        # A file goes with its last put; what became of that may be said in later files only.
        if not self._segments:
            return
        keep = self._waiting[0].segment if self._waiting else self._last + 1
        for segment in [each for each in self._segments if each < keep]:
            if segment == self._last:
                self._dirty = False
                self._close_file()
            self._path(segment).unlink(missing_ok=True)
            del self._segments[segment]

    def _full(self, why: str) -> QuotaExceeded:
        kept = f", {self.rejected} refused puts under {REJECTED}/ among them" * bool(self.rejected)
        return QuotaExceeded(
            f"the spool {str(self.folder)!r} holds {self.used_bytes} of {self.max_bytes} bytes"
            f"{kept}, and {why}: wait until the gateway is back, give the spool more room, or put "
            "less; nothing was kept of this put",
            used_bytes=self.used_bytes,
            limit_bytes=self.max_bytes,
        )

    # -- what an earlier process left --------------------------------------------------------

    def _recover(self) -> None:
        waiting: dict[int, Entry] = {}
        for path in sorted(self.folder.glob("*.spool")):
            self._recover_segment(int(path.stem), waiting)
        if self.damaged:
            # That it was sent may be what cannot be read any more.
            for entry in waiting.values():
                entry.sent = True
        self._waiting.extend(waiting.values())
        self._drop_done()
        for path in (self.folder / REJECTED).glob("*"):
            self.rejected += path.suffix == ".put"
            self._rejected_bytes += path.stat().st_size

    def _recover_segment(self, segment: int, waiting: dict[int, Entry]) -> None:
        self._segments[segment] = 0
        with self._path(segment).open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return
            with (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
                memoryview(mapped) as data,
            ):
                found = scan(data)
                for begin, end in found.damaged:
                    self._keep_damaged(segment, begin, bytes(data[begin:end]))
                for record in found.records:
                    self._take_up(segment, record, data, waiting)
            if found.end < size:
                os.ftruncate(file.fileno(), found.end)
        self._segments[segment] = found.end

    def _take_up(
        self, segment: int, record: Record, data: memoryview, waiting: dict[int, Entry]
    ) -> None:
        number = record.number
        if record.kind in PUTS:
            waiting[number] = Entry(number, segment, record.at, record.end - record.at)
        elif number not in waiting:
            return
        elif record.kind is Kind.DONE:
            del waiting[number]
        elif record.kind is Kind.SENT:
            waiting[number].sent = True
        else:
            entry = waiting[number]
            entry.number = int.from_bytes(data[record.body : record.body + record.length], "little")
            entry.sent = False
            in_order = list(waiting.values())
            waiting.clear()
            waiting.update({each.number: each for each in in_order})

    def _keep_damaged(self, segment: int, begin: int, data: bytes) -> None:
        folder = self.folder / DAMAGED
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"{segment:08d}-{begin}"
        self.damaged += 1
        if not path.exists():
            write_whole(path, data)
            log.error(
                "%d bytes of the spool %s are damaged and cannot be sent: %s has them",
                len(data), self.folder, path,
            )  # fmt: skip
