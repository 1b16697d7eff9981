"""What `doctor` looks at on this machine: versions, settings, folders, shared memory, limits."""

from __future__ import annotations

import os
import platform
import re
import resource
import stat
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dataplane.cli.check.findings import Finding, doubtful, fine, wrong
from dataplane.cli.shown import bytes_text, count_text
from dataplane.errors import DataplaneError
from dataplane.release import PACKAGE

if TYPE_CHECKING:
    from dataplane.config import Config

LOOKED_AT: Final = ("torch", "ray", "pyarrow", "grpcio", "numpy", "msgpack", "uvloop", "pydantic")
"""The dependencies that a line is worth."""
PYTHONS: Final = ((3, 11), (3, 13))
ENOUGH_FILES: Final = 4096
FEW_FILES: Final = 512
"""Open files, of which every connection and every segment is one."""

_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*>=\s*([0-9.]+)")


def of_system() -> Iterator[Finding]:
    """The operating system and Python."""
    if sys.platform == "linux":
        yield fine("system", f"Linux {platform.release()} on {platform.machine()}")
    else:
        yield wrong("system", f"this is {sys.platform}", "planes run on Linux only")
    running = sys.version_info[:2]
    says = f"Python {platform.python_version()}"
    if PYTHONS[0] <= running <= PYTHONS[1]:
        yield fine("python", says)
    else:
        lowest, highest = (".".join(map(str, each)) for each in PYTHONS)
        yield wrong("python", says, f"install Python {lowest} to {highest}")


def of_packages() -> Iterator[Finding]:
    """The versions of what this package stands on, against what it asks for."""
    try:
        asked = requires(PACKAGE) or []
    except PackageNotFoundError:
        yield doubtful("packages", f"{PACKAGE} is not installed", f"pip install {PACKAGE}[plane]")
        return
    lowest = {found[1].lower(): found[2] for each in asked if (found := _REQUIREMENT.match(each))}
    for name in LOOKED_AT:
        if name not in lowest:
            continue
        try:
            has = version(name)
        except PackageNotFoundError:
            advice = f"pip install {PACKAGE}[plane], unless this is a producer or a gateway only"
            yield doubtful(name, "not installed", advice)
            continue
        says = f"{has}, {lowest[name]} or later is asked for"
        if _numbers(has) >= _numbers(lowest[name]):
            yield fine(name, says)
        else:
            yield wrong(name, says, f"pip install --upgrade '{name}>={lowest[name]}'")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def of_runtime(root: Path) -> Iterator[Finding]:
    """The folder of sockets, secrets and journals."""
    from dataplane.host.folders import plane_folders

    try:
        plane_folders("default", "0" * 16, root)
    except DataplaneError as error:
        yield wrong("runtime folder", error.message, "set DATAPLANE_RUNTIME_DIR")
        return
    try:
        there = os.lstat(root)
    except FileNotFoundError:
        parent = next(each for each in root.parents if each.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            yield fine("runtime folder", f"{root}, which the first plane makes")
        else:
            yield wrong(
                "runtime folder", f"{root} cannot be made in {parent}", "set DATAPLANE_RUNTIME_DIR"
            )
        return
    mode = stat.S_IMODE(there.st_mode)
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid():
        yield wrong(
            "runtime folder",
            f"{root} is not a folder of uid {os.geteuid()}",
            "remove it, or set DATAPLANE_RUNTIME_DIR",
        )
    elif mode & 0o077:
        yield wrong("runtime folder", f"others may enter {root} ({mode:o})", f"chmod 700 {root}")
    else:
        yield fine("runtime folder", f"{root}, for this user only")


def of_shared_memory(config: Config) -> Iterator[Finding]:
    """Room for the values, against what is asked for."""
    folder = config.shm_dir
    try:
        room = os.statvfs(folder)
    except OSError as error:
        yield wrong("shared memory", f"{folder}: {error.strerror}", "mount a tmpfs there")
        return
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    says = f"{folder}: {bytes_text(free)} free of {bytes_text(total)}"
    if not os.access(folder, os.W_OK | os.X_OK):
        yield wrong("shared memory", f"{folder} may not be written to", "set DATAPLANE_SHM_DIR")
    elif free < config.segment_bytes:
        yield wrong(
            "shared memory",
            f"{says}, under one segment ({bytes_text(config.segment_bytes)})",
            "free some, or mount more (`docker run --shm-size`, a Memory emptyDir in Kubernetes)",
        )
    elif config.capacity_bytes is not None and free < config.capacity_bytes:
        yield doubtful(
            "shared memory",
            f"{says}, under the capacity that is set ({bytes_text(config.capacity_bytes)})",
            "set DATAPLANE_CAPACITY_BYTES lower, or mount more; a running plane has its part of it",
        )
    else:
        yield fine("shared memory", says)


def of_limits() -> Iterator[Finding]:
    """How many files may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"{count_text(soft)} at once (at most {count_text(hard)})"
    advice = f"raise it with `ulimit -n {ENOUGH_FILES}`, or LimitNOFILE of the unit"
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        yield fine("open files", says)
    elif soft >= FEW_FILES:
        yield doubtful("open files", says, advice + ": each client and each segment takes one")
    else:
        yield wrong("open files", says, advice)


def of_remains(root: Path, shm_dir: Path) -> Iterator[Finding]:
    """Folders of planes that nobody runs any more."""
    from dataplane.host.folders import is_owned, plane_ids, ray_session, root_lock, why_kept
    from dataplane.host.presence import session_alive

    if not root.is_dir():
        yield fine("stale folders", "none")
        return
    stale: list[str] = []
    if stat.S_IMODE(root.stat().st_mode) & 0o077:
        return  # which was said already, and nobody uses it
    with root_lock(root):
        for plane_id in plane_ids(root, shm_dir):
            runtime = root / plane_id
            segments = next(shm_dir.glob(f"dataplane-*-{plane_id}"), None)
            why = why_kept(runtime)
            if why is not None:
                yield doubtful(
                    "stale folders",
                    f"{runtime} was kept: {why}",
                    f"look with `dataplane verify {runtime}`, then remove it",
                )
                continue
            # To ask makes a lock file where there is none, and this is only a look.
            folders = [each for each in (runtime, segments) if each and (each / "lock").exists()]
            owned = [is_owned(each) for each in folders]
            session = ray_session(runtime)
            if not any(owned) and not (session is not None and session_alive(session)):
                stale.append(plane_id)
    if stale:
        yield doubtful(
            "stale folders",
            f"of {len(stale)} planes that nobody runs any more: {', '.join(stale[:5])}",
            "the next plane that starts here removes them",
        )
    else:
        yield fine("stale folders", "none")
