"""Segment files: shared memory that a value store makes and the clients of its node map.

Owns the header format, how a file is backed before it is used, and how long a mapping lives.
Never decides what lies where (extents.py) nor who may reuse it (blocks.py). Invariant: a segment
that was handed out is backed to its last byte, so touching it cannot raise SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.errors import InternalError, QuotaExceeded, Unreachable
from dataplane.values.budget import mb, mount_of
from dataplane.values.extents import PAGE, round_up

MAGIC = b"DPSEG1\0\0"
FORMAT = 1
_HEADER = struct.Struct("<8sI4x32s64sQQ16s")  # fills the start of the first page
NONCE_BYTES = 16

_MADV_POPULATE_WRITE = 23  # since Linux 5.14; the mmap module has no name for it
_POPULATE_STEP = 1 << 20


class Header(NamedTuple):
    """What the first page of a segment says."""

    plane_id: str
    store_id: str
    segment_id: int
    size: int
    nonce: bytes
    """16 random bytes of the store's incarnation: who reads them is on its node."""

    def pack(self) -> bytes:
        """The header as the file holds it."""
        return _HEADER.pack(
            MAGIC,
            FORMAT,
            _padded("plane_id", self.plane_id, 32),
            _padded("store_id", self.store_id, 64),
            self.segment_id,
            self.size,
            self.nonce,
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Header:
        """The header in `raw`; ValueError, saying why, if it is none of this format."""
        if len(raw) < _HEADER.size or raw[: len(MAGIC)] != MAGIC:
            raise ValueError("it is not a segment file")
        _, version, plane_id, store_id, segment_id, size, nonce = _HEADER.unpack_from(raw)
        if version != FORMAT:
            raise ValueError(f"its format is {version}, this version reads {FORMAT}")
        return cls(
            plane_id.rstrip(b"\0").decode(), store_id.rstrip(b"\0").decode(),
            segment_id, size, nonce,
        )  # fmt: skip


def segment_path(folder: str | os.PathLike[str], segment_id: int) -> Path:
    """Where a store keeps this segment."""
    return Path(folder) / f"segment-{segment_id}"


class Segment:
    """A segment as the store that made it holds it: mapped for reading and writing."""

    def __init__(self, path: Path, header: Header, mapping: mmap.mmap) -> None:
        self.path = path
        self.segment_id = header.segment_id
        self.size = header.size
        self._view: memoryview | None = memoryview(mapping)

    @property
    def view(self) -> memoryview:
        """All bytes, header included, so that offsets of extents index it directly."""
        if self._view is None:
            raise InternalError(f"segment {self.segment_id} was closed")
        return self._view

    def close(self) -> None:
        """Lets go of the mapping; slices of `view` that are still in use keep it mapped."""
        self._view = None

    def unlink(self) -> None:
        """Removes the file. Whoever maps it keeps its pages; the rest is free at once."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def create(
    folder: str | os.PathLike[str],
    segment_id: int,
    size: int,
    *,
    plane_id: str,
    store_id: str,
    nonce: bytes,
) -> Segment:
    """A new segment of `size` bytes (rounded up to pages), backed, mapped and populated.

    Blocks for about 0.5 ms per MiB and lets other threads run: for an executor, not for a loop.

    Raises:
        QuotaExceeded: the mount is full. No file was left behind.
        InternalError: the file exists already, or the system refused it for another reason.
    """
    if len(nonce) != NONCE_BYTES:
        raise InternalError(f"a segment's nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
    header = Header(plane_id, store_id, segment_id, round_up(size), nonce)
    raw = header.pack()
    path = segment_path(folder, segment_id)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _creation_error(error, path, header.size) from error
    try:
        # Backing is what keeps a full mount an error here; a hole would be a SIGBUS later.
        os.posix_fallocate(fd, 0, header.size)
        os.pwrite(fd, raw, 0)
        mapping = mmap.mmap(fd, header.size)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        if isinstance(error, OSError):
            raise _creation_error(error, path, header.size) from error
        raise
    finally:
        os.close(fd)
    _populate(mapping)
    return Segment(path, header, mapping)


class _ReadOnlyPages:
    """Lends a read-only mapping to numpy as if it were writable, and keeps it mapped meanwhile.

    torch warns about every array that is not writable and has no read-only tensors; what protects
    the store is the page table, not the flag.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        address = np.frombuffer(mapping, dtype=np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3,
            "shape": (len(mapping),),
            "typestr": "|u1",
            "data": (address, False),
        }


class Mapping:
    """A segment as a client of its node holds it."""

    def __init__(self, header: Header, mapping: mmap.mmap, *, writable: bool) -> None:
        self.header = header
        self.writable = writable
        self._array: npt.NDArray[np.uint8] | None = (
            np.frombuffer(mapping, dtype=np.uint8)
            if writable
            else np.asarray(_ReadOnlyPages(mapping))
        )

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All bytes of the segment, header included.

        Of a read-only mapping too this array *claims* to be writable, because torch accepts no
        other without a warning. A write into it, or into a tensor over it, kills this process
        with SIGSEGV: it can never change what the store holds.

        The segment stays mapped until this mapping is closed and the last array or tensor over
        its bytes is gone.
        """
        if self._array is None:
            raise InternalError(f"the mapping of segment {self.header.segment_id} was closed")
        return self._array

    def close(self) -> None:
        """Lets go of the mapping; arrays taken from it stay valid."""
        self._array = None


def open_segment(
    path: str | os.PathLike[str],
    *,
    plane_id: str,
    nonce: bytes,
    segment_id: int,
    writable: bool,
) -> Mapping:
    """A mapping of a segment that a store of this node named.

    Raises:
        Unreachable: there is no such file here, or it is another store's: this process does not
            share the store's memory. The caller talks to the store over TCP instead.
    """
    access = os.O_RDWR if writable else os.O_RDONLY
    try:
        # O_NONBLOCK: a fifo put in its place must not hang the open.
        fd = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise Unreachable(f"cannot open segment {path!s}: {error}") from error
    try:
        header = _verified(fd, plane_id, nonce, segment_id)
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(fd, header.size, prot=prot)
    except (OSError, ValueError) as error:
        raise Unreachable(f"cannot use segment {path!s}: {error}") from error
    finally:
        os.close(fd)
    if writable:
        _populate(mapping)
    return Mapping(header, mapping, writable=writable)


def _padded(what: str, text: str, width: int) -> bytes:
    raw = text.encode()
    if len(raw) > width or b"\0" in raw:
        raise InternalError(f"{what} {text!r} does not fit in {width} bytes of a segment header")
    return raw


def _creation_error(error: OSError, path: Path, size: int) -> QuotaExceeded | InternalError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        return InternalError(f"cannot make segment {path}: {error}")
    usage = os.statvfs(path.parent)
    limit = usage.f_blocks * usage.f_frsize
    used = limit - usage.f_bavail * usage.f_frsize
    mount = mount_of(path.parent)
    return QuotaExceeded(
        f"{mount} has no room for a segment of {mb(size)} ({mb(used)} of {mb(limit)} used): "
        f"clear rows, or mount a larger tmpfs at {mount}",
        used_bytes=used,
        limit_bytes=limit,
    )


def _populate(mapping: mmap.mmap) -> None:
    """Maps all pages now, so that the first copy into them runs at full speed.

    In steps of 0.4 ms, because the mmap module holds the GIL: MAP_POPULATE would stop every
    thread for 20 ms per segment. A kernel before 5.14 says EINVAL; there the first touch pays.
    """
    with contextlib.suppress(OSError):
        for start in range(0, len(mapping), _POPULATE_STEP):
            step = min(_POPULATE_STEP, len(mapping) - start)
            mapping.madvise(_MADV_POPULATE_WRITE, start, step)


def _verified(fd: int, plane_id: str, nonce: bytes, segment_id: int) -> Header:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    header = Header.unpack(os.pread(fd, _HEADER.size, 0))
    if header.plane_id != plane_id or header.nonce != nonce:
        raise ValueError("it belongs to another store")
    if header.segment_id != segment_id:
        raise ValueError(f"it is segment {header.segment_id}, not {segment_id}")
    if not PAGE <= header.size <= status.st_size:
        # Mapping beyond the end of the file would be a SIGBUS at the first touch.
        raise ValueError(f"it says {header.size} bytes and has {status.st_size}")
    return header
