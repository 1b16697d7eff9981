"""What a checkpoint consists of: every file with size and checksum, written last, checked first.

Owns the format of `manifest.json` and what makes a checkpoint whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.checkpoint import disk
from trainer.checkpoint.errors import CheckpointUnusable

MANIFEST: Final = "manifest.json"
FORMAT: Final = "trainer-checkpoint"
VERSION: Final = 1
"""Version n reads n and n - 1."""
HASHED_BYTES: Final = 256 << 20
"""Larger files are known by their size alone: reading them once more takes minutes."""
_CHUNK: Final = 1 << 20

Count = Annotated[int, Field(ge=0)]


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class FileEntry(_Entry):
    """One file, by its way from the checkpoint's folder."""

    name: Annotated[str, Field(min_length=1)]
    nbytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None


class Manifest(_Entry):
    """All files of a checkpoint, and whose it is."""

    format: Literal["trainer-checkpoint"] = FORMAT
    version: int = VERSION
    run_id: str
    step: Count
    saved_at: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Seconds since 1970."""
    files: list[FileEntry]


def write_manifest(folder: Path, *, run_id: str, step: int, saved_at: float) -> None:
    """Put down what is in the folder now."""
    entries = [_entry(folder, path) for path in sorted(_files(folder))]
    manifest = Manifest(run_id=run_id, step=step, saved_at=saved_at, files=entries)
    content = disk.json_bytes(manifest.model_dump())
    disk.write(folder / MANIFEST, content)
    disk.write(folder / f"{MANIFEST}.sha256", _checksum_line(content))


def read_manifest(folder: Path) -> Manifest:
    """The manifest by itself, unchanged since it was written.

    Raises:
        CheckpointUnusable: it is missing, damaged, or of a version that is not read here.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
        checksum = (folder / f"{MANIFEST}.sha256").read_bytes()
    except OSError as error:
        reason = f"its manifest cannot be read: {error.strerror or error}"
        raise CheckpointUnusable(folder, reason) from None
    if checksum != _checksum_line(content):
        raise CheckpointUnusable(folder, "its manifest is not what was written")
    try:
        data: Any = json.loads(content)
        version = data.get("version") if isinstance(data, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if version != VERSION:
            raise CheckpointUnusable(
                folder, f"it has version {version}, and this program reads version {VERSION}"
            )
        return Manifest.model_validate(data)
    except (ValueError, ValidationError) as error:
        raise CheckpointUnusable(folder, f"its manifest makes no sense: {error}") from None


def verify(folder: Path) -> Manifest:
    """The manifest of a whole checkpoint: every file is there, as it was saved.

    Raises:
        CheckpointUnusable: something is not; the reason names the first file.
    """
    manifest = read_manifest(folder)
    for entry in manifest.files:
        path = folder / entry.name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CheckpointUnusable(folder, f"{entry.name} lies outside of it")
        try:
            there = _entry(folder, path)
        except OSError as error:
            reason = f"{entry.name} cannot be read: {error.strerror or error}"
            raise CheckpointUnusable(folder, reason) from None
        if there.nbytes != entry.nbytes:
            raise CheckpointUnusable(
                folder, f"{entry.name} has {there.nbytes} bytes and was saved with {entry.nbytes}"
            )
        if entry.sha256 is not None and there.sha256 != entry.sha256:
            raise CheckpointUnusable(folder, f"{entry.name} has changed since it was saved")
    return manifest


def _files(folder: Path) -> Iterator[Path]:
    for at, _, names in os.walk(folder):
        yield from (Path(at) / name for name in names)


def _entry(folder: Path, path: Path) -> FileEntry:
    nbytes = path.stat().st_size
    sha256 = None
    if nbytes <= HASHED_BYTES:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        sha256 = digest.hexdigest()
    return FileEntry(name=path.relative_to(folder).as_posix(), nbytes=nbytes, sha256=sha256)


def _checksum_line(content: bytes) -> bytes:
    """As `sha256sum -c` reads it."""
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode()
