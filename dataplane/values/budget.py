"""How much shared memory a value store may take: what its mount, its cgroup and its settings leave.

Owns reading those limits and what to do about too little. Reserves nothing: whether a segment gets
its bytes is seen when it is made (segments.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from dataplane.errors import InvalidRequest
from dataplane.values.extents import PAGE

SEGMENT_BYTES = 64 << 20
"""A segment where there is room for several."""
MIN_SEGMENT_BYTES = 4 << 20
"""Below this a store does not start."""

_MARGIN_SHARE = 5
"""Of a small mount, one part in so many stays free: as much as a segment there is large. A store
that was killed while it was full empties its old segments one by one, and needs room for one."""


class Budget(NamedTuple):
    """How much shared memory a store may take, and in what pieces."""

    capacity_bytes: int
    segment_bytes: int


def shared_memory_budget(
    folder: str | os.PathLike[str],
    setting: int | None,
    reserved_bytes: int = 0,
    *,
    own_bytes: int = 0,
    cgroup_root: str | os.PathLike[str] = "/sys/fs/cgroup",
    membership: str | os.PathLike[str] = "/proc/self/cgroup",
) -> Budget:
    """What a store in `folder` can have: the least of the setting, the mount and the cgroup.

    `reserved_bytes` is what others of this node will still take there (Ray's object store);
    `own_bytes` is what this store has there already, of an earlier incarnation. With some of those
    it gets one segment of the smallest size at least, on which it may have to wait.

    Raises:
        InvalidRequest: that is less than one segment of the smallest size. It says what is
            there, and what to mount or to set.
    """
    if setting is not None and setting < MIN_SEGMENT_BYTES:
        raise InvalidRequest(
            f"the shared memory setting of {setting} bytes is less than one segment: "
            f"set at least {mb(MIN_SEGMENT_BYTES)}, or none"
        )
    mount, free = _mount_room(folder)
    margin = min((own_bytes + free) // _MARGIN_SHARE, SEGMENT_BYTES)
    rooms = {"mount": own_bytes + max(0, free - margin) - reserved_bytes}
    cgroup = _cgroup_room(Path(cgroup_root), Path(membership))
    if cgroup is not None:
        rooms["cgroup"] = own_bytes + cgroup - reserved_bytes
    if setting is not None:
        rooms["setting"] = setting
    least = min(rooms, key=rooms.__getitem__)
    capacity = rooms[least] // PAGE * PAGE
    if own_bytes:
        capacity = max(capacity, MIN_SEGMENT_BYTES)
    if capacity < MIN_SEGMENT_BYTES:
        kept = f" ({mb(reserved_bytes)} of it kept for others)" if reserved_bytes else ""
        # Twice the smallest segment leaves room for the margin.
        need = mb(2 * MIN_SEGMENT_BYTES + reserved_bytes)
        raise InvalidRequest(
            f"{mount} has {mb(free)} free{kept}; the value store needs at least {need}: start "
            f"the container with --shm-size=1g or more, mount a larger tmpfs at {mount}, "
            "or set another folder"
            if least == "mount"
            else f"the memory limit of this cgroup leaves {mb(cgroup or 0)}{kept}; the value "
            f"store needs at least {need}: raise the container's memory limit"
        )
    segment = max(MIN_SEGMENT_BYTES, min(SEGMENT_BYTES, capacity // 4 // PAGE * PAGE))
    return Budget(capacity, segment)


def mb(nbytes: int) -> str:
    """A size as errors say it."""
    return f"{nbytes / 1e6:.1f} MB"


def mount_of(folder: str | os.PathLike[str]) -> Path:
    """Where the file system that a folder lies in is mounted."""
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
    return mount_of(folder), free


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
