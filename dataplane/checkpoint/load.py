"""A checkpoint that is read: opened as one whole, its manifest checked before anything else.

Its files are opened together, so that a save that replaces it meanwhile changes nothing for who
reads it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from dataplane.checkpoint.files import OpenedFile
from dataplane.checkpoint.manifest import (
    CHECKSUM,
    MANIFEST,
    FileEntry,
    Malformed,
    Manifest,
    checksum_line,
    parse,
)
from dataplane.errors import CheckpointDamaged, InvalidRequest

MAX_MANIFEST_BYTES: Final = 1 << 30


class Checkpoint:
    """The files of a checkpoint, open. CheckpointDamaged names the one that is not as saved."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._files: dict[str, OpenedFile] = {}
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidRequest(f"there is no checkpoint at {self.path!r}: {error}") from None
        try:
            self.manifest = self._read_manifest(folder)
            for entry in self.manifest.files():
                self._files[entry.name] = OpenedFile(self.path, folder, entry)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(folder)

    def _read_manifest(self, folder: int) -> Manifest:
        content = self._content(folder, MANIFEST, MAX_MANIFEST_BYTES)
        line = self._content(folder, CHECKSUM, 1024)
        if line != checksum_line(content):
            raise self._damaged(MANIFEST, f"its checksum is not the one in {CHECKSUM!r}")
        try:
            return parse(content)
        except Malformed as error:
            raise self._damaged(MANIFEST, str(error)) from None

    def _content(self, folder: int, name: str, limit: int) -> bytes:
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(name, flags, dir_fd=folder), "rb") as file:
                # A read takes memory for all that it may bring.
                size = os.fstat(file.fileno()).st_size
                content = file.read(min(size, limit) + 1)
        except OSError as error:
            raise self._damaged(name, f"it cannot be read: {error}") from None
        if len(content) > limit:
            raise self._damaged(name, f"it has over {limit} bytes")
        return content

    def _damaged(self, name: str, what: str) -> CheckpointDamaged:
        return CheckpointDamaged(
            f"file {name!r} of the checkpoint {self.path!r} is damaged: {what}; restore it from a "
            "copy, or load an earlier checkpoint",
            path=self.path,
            file=name,
        )

    def file(self, entry: FileEntry) -> OpenedFile:
        """One of its files."""
        return self._files[entry.name]

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def summary(self) -> dict[str, object]:
        """What it holds, in short."""
        manifest = self.manifest
        return {
            "path": str(Path(self.path)),
            "revision": (manifest.epoch, manifest.n),
            "rows": manifest.rows,
            "bytes": manifest.nbytes,
            "partitions": {p.partition_id: p.rows for p in manifest.partitions},
        }
