"""The files of a checkpoint on disk: written with their checksum, read back without trust.

Owns bytes, sizes and the two containers, Parquet and Arrow IPC; what is in them is for tables.py
and values.py. A file is read with what it says of itself checked against its size, and one that
needs decompression or a dictionary is refused: so nothing in it is larger in memory than on disk.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import struct
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from dataplane.checkpoint import tables, values
from dataplane.checkpoint.heads import RECORD_BATCH, SCHEMA, MessageHead, parquet_rows
from dataplane.checkpoint.manifest import FileEntry, Malformed
from dataplane.errors import CheckpointDamaged, InvalidRequest, PermissionDenied, QuotaExceeded

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BUFFER_BYTES: Final = 1 << 20
BATCH_ROWS: Final = 1024
"""Rows of tags that are read in one go."""

_ARROW_MAGIC: Final = b"ARROW1"
_CONTINUES: Final = struct.Struct("<II")


@contextmanager
def disk_errors(path: Path) -> Generator[None]:
    """What goes wrong with the disk, in our own words: QuotaExceeded where it is full, otherwise
    InvalidRequest or PermissionDenied about the path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            there = os.statvfs(path if path.exists() else path.parent)
            size = there.f_blocks * there.f_frsize
            raise QuotaExceeded(
                f"the checkpoint {str(path)!r} was not saved, the disk is full: {error}; what was "
                "there before is untouched",
                used_bytes=size - there.f_bavail * there.f_frsize,
                limit_bytes=size,
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise PermissionDenied(f"the checkpoint {str(path)!r}: {error}") from error
        raise InvalidRequest(f"the checkpoint {str(path)!r}: {error}") from error


class HashedFile(io.RawIOBase):
    """A new file, whose checksum is known when its last byte is written."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._hash = hashlib.sha256()
        self.nbytes = 0
        self.given_up = False
        """What is still written goes nowhere: some writers write their last words when they end."""

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.nbytes

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        at = len(view) if self.given_up else 0
        while at < len(view):
            at += os.write(self._fd, view[at:])
        self._hash.update(view)
        self.nbytes += len(view)
        return len(view)

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()

    def finished(self, name: str, rows: int) -> FileEntry:
        """Wait until all of it is on the disk; what the manifest says of it."""
        os.fsync(self._fd)
        self.close()
        return FileEntry(name=name, nbytes=self.nbytes, sha256=self._hash.hexdigest(), rows=rows)


class OpenedFile:
    """A file of a checkpoint, open and of the size that the manifest says."""

    def __init__(self, path: str, folder: int, entry: FileEntry) -> None:
        self.path = path
        self.entry = entry
        try:
            # What is no plain file must neither be followed nor be waited for.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self.fd = os.open(entry.name, flags, dir_fd=folder)
        except OSError as error:
            raise self.damaged(f"it cannot be opened: {error}") from None
        there = os.fstat(self.fd)
        if not stat.S_ISREG(there.st_mode) or there.st_size != entry.nbytes:
            self.close()
            raise self.damaged(f"it has {there.st_size} bytes and was saved with {entry.nbytes}")

    def damaged(self, what: str) -> CheckpointDamaged:
        """The error that names this file."""
        return CheckpointDamaged(
            f"file {self.entry.name!r} of the checkpoint {self.path!r} is damaged: {what}; restore "
            "it from a copy, or load an earlier checkpoint",
            path=self.path,
            file=self.entry.name,
        )

    @contextmanager
    def reading(self, where: str) -> Generator[None]:
        """What is wrong with the file, as an error that names it and the place."""
        try:
            yield
        except (Malformed, InvalidRequest, pa.ArrowException, OSError, ValueError) as error:
            raise self.damaged(f"{where}: {error}") from error

    def check_sum(self) -> Iterator[None]:
        """CheckpointDamaged unless every byte is what was written; in steps."""
        found = hashlib.sha256()
        at = 0
        while True:
            with self.reading(f"byte {at}"):
                data = os.pread(self.fd, BUFFER_BYTES, at)
            if not data:
                break
            found.update(data)
            at += len(data)
            yield
        if at != self.entry.nbytes or found.hexdigest() != self.entry.sha256:
            raise self.damaged("its checksum is not the one it was saved with")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # -- tags --------------------------------------------------------------------------------

    def tags(self) -> Iterator[tables.TagRows]:
        """The rows of a tags file, piece by piece."""
        with self.reading("footer"), pa.OSFile(f"/proc/self/fd/{self.fd}") as source:
            counts = parquet_rows(lambda at, n: self._read(at, n).tobytes(), self.entry.nbytes)
            if sum(counts) != self.entry.rows:
                raise Malformed(f"it has {sum(counts)} rows of {self.entry.rows}")
            file = pq.ParquetFile(source, pre_buffer=False)
            tables.check_schema(file.schema_arrow)
            for number in range(len(counts)):
                with self.reading(f"row group {number}"):
                    groups = [number]
                    batches = file.iter_batches(BATCH_ROWS, row_groups=groups, use_threads=False)
                    for batch in batches:
                        batch.validate(full=True)
                        yield tables.decode(batch)

    # -- values ------------------------------------------------------------------------------

    def batches(self) -> Iterator[tuple[list[values.Cells], int]]:
        """The record batches of a values file: their fields, and how many rows each has."""
        schema: pa.Schema | None = None
        columns: list[values.ValueColumn] = []
        rows = number = 0
        for at, message in self._messages():
            with self.reading(f"message at byte {at}"):
                head = MessageHead(memoryview(message.metadata).tobytes())
                if head.kind != (SCHEMA if schema is None else RECORD_BATCH):
                    raise Malformed(f"it is a message of kind {head.kind}")
                if schema is None:
                    schema = pyarrow.ipc.read_schema(message)
                    columns = values.columns_of(schema)
                    if not columns:
                        raise Malformed("it has no column")
                    continue
                if head.is_compressed:
                    raise Malformed("it is compressed")
                batch = pyarrow.ipc.read_record_batch(message, schema)
                rows += batch.num_rows
                number += 1
                yield values.decode(batch, columns), batch.num_rows
        with self.reading("footer"), pa.OSFile(f"/proc/self/fd/{self.fd}") as source:
            # What other readers go by says the same.
            reader = pyarrow.ipc.open_file(source)
            if schema is None or not reader.schema.equals(schema, check_metadata=True):
                raise Malformed("its footer has other columns")
            if (rows, number) != (self.entry.rows, reader.num_record_batches):
                raise Malformed(
                    f"{rows} rows in {number} batches; the manifest says {self.entry.rows} rows "
                    f"and the footer {reader.num_record_batches} batches"
                )

    def _messages(self) -> Iterator[tuple[int, pyarrow.ipc.Message]]:
        """The messages of an Arrow file one after the other, and where each begins."""
        at = 8
        with self.reading("head"):
            if self._read(0, 8)[:6].tobytes() != _ARROW_MAGIC:
                raise Malformed("it is no Arrow file")
        while True:
            with self.reading(f"message at byte {at}"):
                mark, size = _CONTINUES.unpack(self._read(at, _CONTINUES.size).tobytes())
                if mark != 0xFFFFFFFF:
                    raise Malformed("no message begins here")
                if not size:
                    return
                head = MessageHead(self._read(at + _CONTINUES.size, size).tobytes())
                whole = _CONTINUES.size + size + head.body_bytes
                message = pyarrow.ipc.read_message(pa.py_buffer(self._read(at, whole)))
            yield at, message
            at += whole

    def _read(self, at: int, nbytes: int) -> values.Bytes:
        """So many bytes; Malformed, before any memory is taken, if the file has not as many."""
        if at < 0 or not 0 <= nbytes <= self.entry.nbytes - at:
            raise Malformed(f"{nbytes} bytes at {at} of a file of {self.entry.nbytes}")
        data = np.empty(nbytes, np.uint8)
        got = 0
        while got < nbytes:
            step = os.preadv(self.fd, [data[got:].data], at + got)
            if not step:
                raise Malformed(f"it ends at byte {at + got}")
            got += step
        return data
