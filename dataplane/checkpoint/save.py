"""Saving: the files of a checkpoint, written into a folder that is put in its place when all are
whole (placing.py).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
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
from dataplane.checkpoint.placing import Placing
from dataplane.types import Tags

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
        self._placing = Placing(path, overwrite=overwrite, is_checkpoint=_is_checkpoint)
        self.path = self._placing.path
        self.folder = self._placing.folder
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
        self._placing.place()

    def abandon(self) -> None:
        """Leave nothing behind. Does nothing after a commit."""
        self._placing.abandon()


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


def _is_checkpoint(path: Path) -> bool:
    try:
        with open(path / MANIFEST, "rb") as file:
            return is_manifest(file.read(4096))
    except OSError:
        return False
