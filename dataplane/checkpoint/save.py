"""Saving: files are written beside the place of the checkpoint, and put there when all are whole.

A checkpoint is written into `<path>.partial-<random>`, on the disk to the last byte before the
folder is renamed. So a crash leaves the old one, or the new one. An existing one is exchanged in
one step where the file system can. What crashed saves of the same path left is removed by the next.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import secrets
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgpack
import numpy as np
import pyarrow.ipc
import pyarrow.parquet as pq

from dataplane.checkpoint import tables, values
from dataplane.checkpoint.files import HashedFile, disk_errors
from dataplane.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    FileEntry,
    Manifest,
    checksum_line,
    is_manifest,
)
from dataplane.errors import InvalidRequest
from dataplane.types import Tags

PARTIAL: Final = ".partial-"
BUFFER_BYTES: Final = 1 << 20
MAX_FILE_BYTES: Final = 1 << 30
"""A values file ends with the batch that reaches it."""
GROUP_ROWS: Final = 65_536
"""Rows of one row group of a tags file ..."""
GROUP_BYTES: Final = 32 << 20
"""... and packed tags of it, about."""
GROUP_CELLS: Final = 4 << 20
"""... and cells, so that many columns of few rows are no burden either."""


class Piece(NamedTuple):
    """Some rows as the tag store sends them."""

    keys: list[str]
    tags: bytes
    """Packed, one map behind the other."""
    revisions: bytes
    cleared_at: bytes
    attempts: bytes
    producers: list[str]
    codes: bytes
    """int32: which of the producers put each row."""
    tasks: dict[str, bytes]
    """int32 for each row and task; see tables.py."""


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool) -> None:
        self.path = Path(os.path.abspath(path))
        with disk_errors(self.path):
            _check_target(self.path, overwrite=overwrite)
            self._overwrite = overwrite
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
        self.nbytes = 0

    def commit(self, manifest: Manifest) -> None:
        """Put the checkpoint in its place; everything is on the disk then."""
        with disk_errors(self.path):
            content = manifest.to_bytes()
            for name, data in ((MANIFEST, content), (CHECKSUM, checksum_line(content))):
                file = HashedFile(self.folder / name)
                with file:
                    file.write(data)
                    os.fsync(file.fileno())
            os.fsync(self._lock)
            self._put_in_place()
            os.fsync(self._parent)
        self._close()

    def _put_in_place(self) -> None:
        try:
            # A folder that is there and empty is replaced by this, any other is not.
            os.rename(self.folder, self.path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not self._overwrite:
                raise
        _check_target(self.path, overwrite=True)  # it may have become something else since
        if not _exchange(self.folder, self.path):
            aside = self.folder.with_name(self.folder.name + "-old")
            os.rename(self.path, aside)
            os.rename(self.folder, self.path)
            os.rename(aside, self.folder)
        os.fsync(self._parent)
        shutil.rmtree(self.folder, ignore_errors=True)

    def abandon(self) -> None:
        """Leave nothing behind. Does nothing after a commit."""
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._close()

    def _close(self) -> None:
        for fd in (self._lock, self._parent):
            os.close(fd)
        self._lock = self._parent = -1


class SavingPartition:
    """The files of one partition, as its rows come."""

    def __init__(self, saving: Saving, number: int, columns: Sequence[values.ValueColumn]) -> None:
        self._saving = saving
        self._number = number
        self._columns = list(columns)
        self._kinds = tables.TagKinds()
        self._tasks: dict[str, None] = {}
        self._has_fields = bool(columns)
        self._values: _ValuesFile | None = None
        self._written: list[FileEntry] = []
        self._spool_path = saving.folder / f"{number}-tags.spool"
        self._spool: BinaryIO | None = None
        self.rows = 0

    def add(self, piece: Piece) -> None:
        """Take rows. Which columns their tags need is known only when the last has come, so they
        are kept in a file of their own until then."""
        with disk_errors(self._saving.path):
            if self._spool is None:
                self._spool = self._spool_path.open("xb", BUFFER_BYTES)
            self._kinds.note(_unpacked(piece.tags, len(piece.keys)))
            self._tasks.update(dict.fromkeys(piece.tasks))
            packed = msgpack.packb(piece)
            self._spool.write(len(packed).to_bytes(8, "little") + packed)
        self.rows += len(piece.keys)

    def add_values(self, cells: Sequence[values.Cells], count: int) -> None:
        """Take the fields of the next so many rows."""
        if not self._has_fields:
            return
        with disk_errors(self._saving.path):
            missing = [of.column for of in cells if of.column not in self._columns]
            if missing:  # another dtype of a field; a file has one set of columns
                self._columns += missing
                self._close_values()
            elif self._values is not None and self._values.nbytes >= MAX_FILE_BYTES:
                self._close_values()
            if self._values is None:
                name = f"{self._number}-values-{len(self._written)}.arrow"
                self._values = _ValuesFile(self._saving.folder, name, self._columns)
            self._values.add(cells, count)

    def finish(self) -> tuple[FileEntry, list[FileEntry]]:
        """Write what is left: the tags file, and the values files."""
        with disk_errors(self._saving.path):
            self._close_values()
            tags = self._write_tags()
        return tags, self._written

    def close(self) -> None:
        """Let go of what is open, whatever came of it."""
        if self._values is not None:
            self._values.abandon()
            self._values = None
        if self._spool is not None:
            try:
                self._spool.close()
            except OSError:
                pass  # the disk is full: it is thrown away
            self._spool = None

    def _close_values(self) -> None:
        if self._values is not None:
            self._written.append(self._values.finish())
            self._values = None

    def _write_tags(self) -> FileEntry:
        schema = self._kinds.schema(list(self._tasks))
        name = f"{self._number}-tags.parquet"
        file = HashedFile(self._saving.folder / name)
        with file:
            buffered = io.BufferedWriter(file, BUFFER_BYTES)
            writer = pq.ParquetWriter(
                buffered, schema, compression="none", use_dictionary=False, write_statistics=False
            )
            try:
                for rows in self._groups(len(schema)):
                    writer.write_batch(tables.encode(rows, schema), row_group_size=len(rows.keys))
                writer.close()
                buffered.flush()
            except BaseException:
                file.given_up = True
                writer.close()
                raise
            return file.finished(name, self.rows)

    def _groups(self, columns: int) -> Iterator[tables.TagRows]:
        """The spooled rows again, in row groups."""
        if self._spool is None:
            return
        self._spool.close()
        self._spool = None
        waiting: list[Piece] = []
        rows = nbytes = 0
        with open(self._spool_path, "rb", BUFFER_BYTES) as spool:
            while head := spool.read(8):
                piece = Piece(*msgpack.unpackb(spool.read(int.from_bytes(head, "little"))))
                waiting.append(piece)
                rows += len(piece.keys)
                nbytes += len(piece.tags)
                if rows >= min(GROUP_ROWS, GROUP_CELLS // columns) or nbytes >= GROUP_BYTES:
                    yield _rows_of(waiting)
                    waiting, rows, nbytes = [], 0, 0
        if waiting:
            yield _rows_of(waiting)
        os.unlink(self._spool_path)


class _ValuesFile:
    """A values file that is being written."""

    def __init__(self, folder: Path, name: str, columns: Sequence[values.ValueColumn]) -> None:
        self._name = name
        self._columns = list(columns)
        self._schema = values.schema_of(columns)
        self._file = HashedFile(folder / name)
        self._buffered = io.BufferedWriter(self._file, BUFFER_BYTES)
        self._writer = pyarrow.ipc.RecordBatchFileWriter(self._buffered, self._schema)
        self._rows = 0

    @property
    def nbytes(self) -> int:
        return self._buffered.tell()

    def add(self, cells: Sequence[values.Cells], count: int) -> None:
        self._writer.write_batch(values.encode(self._schema, self._columns, cells, count))
        self._rows += count

    def finish(self) -> FileEntry:
        self._writer.close()
        self._buffered.flush()
        return self._file.finished(self._name, self._rows)

    def abandon(self) -> None:
        self._file.given_up = True
        self._file.close()


def _unpacked(packed: bytes, count: int) -> list[Tags]:
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(packed), 1))
    unpacker.feed(packed)
    return [unpacker.unpack() for _ in range(count)]


def _rows_of(pieces: Sequence[Piece]) -> tables.TagRows:
    def joined(parts: Sequence[bytes], kind: Any) -> Any:
        return np.frombuffer(b"".join(parts), kind)

    names = dict.fromkeys(task for piece in pieces for task in piece.tasks)
    tasks = {
        name: joined([p.tasks.get(name) or bytes(4 * len(p.keys)) for p in pieces], np.int32)
        for name in names
    }
    return tables.TagRows(
        [key for piece in pieces for key in piece.keys],
        [tags for piece in pieces for tags in _unpacked(piece.tags, len(piece.keys))],
        joined([piece.revisions for piece in pieces], np.int64),
        joined([piece.cleared_at for piece in pieces], np.int64),
        joined([piece.attempts for piece in pieces], np.int64),
        [
            piece.producers[code]
            for piece in pieces
            for code in np.frombuffer(piece.codes, np.int32).tolist()
        ],
        tasks,
    )


# -- the folder ------------------------------------------------------------------------------


def _check_target(path: Path, *, overwrite: bool) -> None:
    if not path.parent.is_dir():
        raise InvalidRequest(f"there is no folder {str(path.parent)!r} to save a checkpoint in")
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise InvalidRequest(f"{str(path)!r} is there and no folder: name another one")
    if not any(path.iterdir()):
        return
    if not _is_checkpoint(path):
        raise InvalidRequest(
            f"the folder {str(path)!r} is not empty and holds no checkpoint: name another one"
        )
    if not overwrite:
        raise InvalidRequest(
            f"there is a checkpoint at {str(path)!r}: pass overwrite=True, or name another folder"
        )


def _is_checkpoint(path: Path) -> bool:
    try:
        with open(path / MANIFEST, "rb") as file:
            return is_manifest(file.read(4096))
    except OSError:
        return False


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
