"""What an earlier incarnation of a value store left in its folder: segments, and which ids it used.

Owns the reading of that folder and the file that says which ids were given out. Never decides which
blocks live (recovery.py). Invariant: no id of a segment or block is given out twice in one plane.

Clients keep segments mapped by their id, and readers ask for blocks by theirs, so an id that came
back would show them the bytes of others. The ids to go on from stand in the name of an empty file,
`ids-<segment>-<block>`, which is renamed before a segment is made: a full mount cannot refuse that.
Segments go on exactly there. Blocks, of which thousands are made a second, go on above all that can
have been given out: a block id begins at 2^31 for every second since 1970 (below 2^63 until 2106),
and no store makes 2^31 blocks in a second. So ids are new also where the folder was lost. Where the
clock was set back they go on 2^34 above the file's: more blocks than a store makes between two
segments in days.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

from dataplane.errors import InternalError
from dataplane.values.extents import PAGE
from dataplane.values.segments import NONCE_BYTES, Header, Segment, segment_path

log = logging.getLogger("dataplane.values")

_SEGMENT = re.compile(r"segment-(0|[1-9][0-9]{0,9})")
_IDS = re.compile(r"ids-([1-9][0-9]{0,9})-([1-9][0-9]{0,18})")
_BLOCKS_A_SECOND = 1 << 31
_BLOCKS_UNSEEN = 1 << 34
_LAST_SEGMENT = (1 << 32) - 1
"""Segment ids travel in 32 bits."""
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
"""What says something about this process and nothing about the file: it is no evidence of loss."""


class Ids(NamedTuple):
    """The ids that a store goes on from."""

    segment: int
    block: int


class Earlier(NamedTuple):
    """What earlier incarnations left in a folder."""

    nonce: bytes | None
    """By which clients know the store; None if no segment is usable."""
    segments: dict[int, int]
    """Bytes of each usable segment, by its id."""
    damaged: dict[int, Path]
    """Files that bear a segment's name and are none, or are cut: nobody can map them."""
    ids: Ids
    """Above all ids that the folder knows of; of blocks it knows no others than `note` named."""

    @property
    def segment_bytes(self) -> int:
        """Bytes of the usable segments."""
        return sum(self.segments.values())


def bytes_left(folder: str | os.PathLike[str]) -> int:
    """Bytes that an earlier incarnation's files take in the folder: a store that comes back has
    them already, and may count them to what it can have. 0 if there is no folder."""
    total = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if _SEGMENT.fullmatch(entry.name):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def find_earlier(folder: str | os.PathLike[str], *, plane_id: str, store_id: str) -> Earlier:
    """What earlier incarnations of this store left in the folder. Changes nothing there.

    Segments of another plane or store are not among it, and each is logged by name, as what is
    damaged. Reads every segment's header: for an executor.

    InternalError if this process has no descriptor or memory left to look.
    """
    folder = Path(folder)
    headers: dict[int, Header] = {}
    damaged: dict[int, Path] = {}
    next_segment = next_block = 1
    for name in os.listdir(folder):
        noted = _IDS.fullmatch(name)
        if noted:
            next_segment = max(next_segment, int(noted[1]))
            next_block = max(next_block, int(noted[2]))
        named = _SEGMENT.fullmatch(name)
        if not named or int(named[1]) >= _LAST_SEGMENT:
            continue
        path, segment_id = folder / name, int(named[1])
        next_segment = max(next_segment, segment_id + 1)
        try:
            header = _header(path, segment_id)
        except (OSError, ValueError) as error:
            _raise_if_passing(path, error)
            log.warning("segment %s cannot be used: %s", path, error)
            damaged[segment_id] = path
            continue
        if (header.plane_id, header.store_id) != (plane_id, store_id):
            log.warning(
                "segment %s is of store %r of plane %r: it is left alone",
                path, header.store_id, header.plane_id,
            )  # fmt: skip
            continue
        headers[segment_id] = header
    nonce = headers[max(headers)].nonce if headers else None
    for segment_id in [i for i, header in headers.items() if header.nonce != nonce]:
        path = segment_path(folder, segment_id)
        log.warning("segment %s cannot be used: its nonce is not that of the newest one", path)
        damaged[segment_id] = path
        del headers[segment_id]
    sizes = {segment_id: headers[segment_id].size for segment_id in sorted(headers)}
    return Earlier(nonce, sizes, damaged, Ids(next_segment, next_block))


def ids_of_new_incarnation(earlier: Ids, now_s: float) -> Ids:
    """What a store that starts at this moment goes on from."""
    block = int(now_s * _BLOCKS_A_SECOND)
    if earlier.block > 1:
        block = max(block, earlier.block + _BLOCKS_UNSEEN)
    return Ids(earlier.segment, max(1, block))


def note(folder: str | os.PathLike[str], ids: Ids) -> None:
    """Leave word in the folder that ids below these may have been given out. For an executor.

    Raises:
        InternalError: the folder cannot be written to, or no ids are left; what stood there stands.
    """
    if not 0 < ids.segment <= _LAST_SEGMENT or not 0 < ids.block < 1 << 63:
        raise InternalError(f"no ids are left after segment {ids.segment} and block {ids.block}")
    path = Path(folder) / f"ids-{ids.segment}-{ids.block}"
    try:
        before = _notes(folder)
        if before:
            # One step: a store that is killed here leaves the old name or the new one.
            os.rename(before[0], path)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        raise InternalError(f"cannot note which ids are in use as {path}: {error}") from error


def forget(folder: str | os.PathLike[str]) -> None:
    """Remove that word: for the end of a plane. It may be gone with its folder."""
    with contextlib.suppress(OSError):
        for path in _notes(folder):
            path.unlink()


def open_earlier(
    folder: str | os.PathLike[str],
    segment_id: int,
    *,
    plane_id: str,
    store_id: str,
    nonce: bytes,
) -> Segment:
    """A segment of an earlier incarnation, mapped for reading only: a write into its view raises,
    and one past the view kills the process, but neither changes a byte.

    Raises:
        OSError, ValueError: it is not there any more, or not what `find_earlier` saw.
        InternalError: this process has no descriptor or memory left. It may be tried again.
    """
    path = segment_path(folder, segment_id)
    try:
        fd = _open(path)
        try:
            header = _checked(fd, segment_id)
            if (header.plane_id, header.store_id, header.nonce) != (plane_id, store_id, nonce):
                raise ValueError("it belongs to another store")
            mapping = mmap.mmap(fd, header.size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
    except OSError as error:
        _raise_if_passing(path, error)
        raise
    return Segment(path, header, mapping)


def _raise_if_passing(path: Path, error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in _PASSING:
        raise InternalError(
            f"cannot look into segment {path}: {error}; nothing was given up: raise the limit of "
            "open files, of memory or of vm.max_map_count, and start again"
        ) from error


def _header(path: Path, segment_id: int) -> Header:
    fd = _open(path)
    try:
        return _checked(fd, segment_id)
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    # O_NONBLOCK: a fifo put in its place must not hang the open.
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _checked(fd: int, segment_id: int) -> Header:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    header = Header.unpack(os.pread(fd, PAGE, 0))
    if header.segment_id != segment_id:
        raise ValueError(f"it says that it is segment {header.segment_id}")
    if header.size != status.st_size or header.size % PAGE or header.size < 2 * PAGE:
        raise ValueError(f"it says {header.size} bytes and has {status.st_size}")
    if len(header.nonce) != NONCE_BYTES or not any(header.nonce):
        raise ValueError("it has no nonce")
    return header


def _notes(folder: str | os.PathLike[str]) -> list[Path]:
    """The files that `note` left: one, or none."""
    with os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if _IDS.fullmatch(entry.name)]
