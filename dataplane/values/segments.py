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

from dataplane.errors import InternalError, InvalidRequest, QuotaExceeded, Unreachable
from dataplane.values.extents import PAGE, round_up

MAGIC = b"DPSEG1\0\0"
FORMAT = 1
_HEADER = struct.Struct("<8sI4x32s64sQQ16s")  # fills the start of the first page
NONCE_BYTES = 16

SEGMENT_BYTES = 64 << 20
"""A segment where there is room for several."""
MIN_SEGMENT_BYTES = 4 << 20
"""Below this a store does not start."""
_MAX_MARGIN_BYTES = 64 << 20

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


class Budget(NamedTuple):
    """How much shared memory a store may take, and in what pieces."""

    capacity_bytes: int
    segment_bytes: int


def shared_memory_budget(
    folder: str | os.PathLike[str],
    setting: int | None,
    reserved_bytes: int = 0,
    *,
    cgroup_root: str | os.PathLike[str] = "/sys/fs/cgroup",
    membership: str | os.PathLike[str] = "/proc/self/cgroup",
) -> Budget:
    """What a store in `folder` can have: the least of the setting, the mount and the cgroup.

    `reserved_bytes` is what others of this node will still take there (Ray's object store).

    Raises:
        InvalidRequest: that is less than one segment of the smallest size. It says what is
            there, and what to mount or to set.
    """
    if setting is not None and setting < MIN_SEGMENT_BYTES:
        raise InvalidRequest(
            f"the shared memory setting of {setting} bytes is less than one segment: "
            f"set at least {_mb(MIN_SEGMENT_BYTES)}, or none"
        )
    mount, free = _mount_room(folder)
    margin = min(free // 16, _MAX_MARGIN_BYTES)
    rooms = {"mount": free - margin - reserved_bytes}
    cgroup = _cgroup_room(Path(cgroup_root), Path(membership))
    if cgroup is not None:
        rooms["cgroup"] = cgroup - reserved_bytes
    if setting is not None:
        rooms["setting"] = setting
    least = min(rooms, key=rooms.__getitem__)
    capacity = rooms[least] // PAGE * PAGE
    if capacity < MIN_SEGMENT_BYTES:
        kept = f" ({_mb(reserved_bytes)} of it kept for others)" if reserved_bytes else ""
        # Twice the smallest segment leaves room for the margin.
        need = _mb(2 * MIN_SEGMENT_BYTES + reserved_bytes)
        raise InvalidRequest(
            f"{mount} has {_mb(free)} free{kept}; the value store needs at least {need}: start "
            f"the container with --shm-size=1g or more, mount a larger tmpfs at {mount}, "
            "or set another folder"
            if least == "mount"
            else f"the memory limit of this cgroup leaves {_mb(cgroup or 0)}{kept}; the value "
            f"store needs at least {need}: raise the container's memory limit"
        )
    segment = max(MIN_SEGMENT_BYTES, min(SEGMENT_BYTES, capacity // 4 // PAGE * PAGE))
    return Budget(capacity, segment)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


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
    mount = _mount_of(path.parent)
    return QuotaExceeded(
        f"{mount} has no room for a segment of {_mb(size)} ({_mb(used)} of {_mb(limit)} used): "
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


def _mount_of(folder: str | os.PathLike[str]) -> Path:
    path = Path(os.path.realpath(folder))
    while not os.path.ismount(path):
        path = path.parent
    return path


def _mount_room(folder: str | os.PathLike[str]) -> tuple[Path, int]:
    try:
        usage = os.statvfs(folder)
    except OSError as error:
        raise InvalidRequest(
            f"the folder for shared memory, {folder!s}, cannot be used: {error.strerror}; "
            "mount a tmpfs there, or set another folder"
        ) from error
    free = usage.f_bavail * usage.f_frsize
    if not usage.f_blocks:
        # A tmpfs mounted without a limit says 0: the machine's memory is the limit.
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _mount_of(folder), free


def _cgroup_room(root: Path, membership: Path) -> int | None:
    """Bytes that this process's cgroup, or one above it, still allows; None without a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    rooms: list[int] = []
    for controller, limit_name, usage_name, cache_names in (
        ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
         ("total_inactive_file", "total_active_file")),
    ):  # fmt: skip
        top = root / controller
        for folder in _cgroup_folders(top, lines, controller):
            limit = _number(folder / limit_name)
            if limit is None or limit >= 1 << 60:  # v1 writes "no limit" as nearly 2^63
                continue
            usage = _number(folder / usage_name) or 0
            rooms.append(limit - max(0, usage - _file_cache(folder, cache_names)))
    return min(rooms, default=None)


def _cgroup_folders(top: Path, lines: list[str], controller: str) -> list[Path]:
    """The folders of this process's cgroup and all above it, as far as they are visible.

    In a container the path may be one of the host, which is not there: then only `top`, which is
    the container's own.
    """
    folders = [top]
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        parts = [part for part in path.split("/") if part]
        if controller in controllers.split(",") and ".." not in parts:
            folders += [top.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)]
    return folders


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _file_cache(folder: Path, names: tuple[str, ...]) -> int:
    """Bytes of file cache, which the kernel drops before it refuses memory to anyone."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(" ", 1) for line in lines if " " in line)
    return sum(int(counts.get(name, 0)) for name in names)
