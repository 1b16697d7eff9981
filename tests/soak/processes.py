"""What processes hold, as the kernel says: memory, descriptors, threads. For Linux."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True)
class Held:
    """Sums over some processes."""

    own_bytes: int = 0
    """Resident memory that no file backs and that nobody shares (RssAnon)."""
    resident_bytes: int = 0
    """All resident memory, shared segments as often as they are mapped."""
    unique_bytes: int = 0
    """What would be free if the processes ended (USS); 0 where the kernel does not tell."""
    descriptors: int = 0
    threads: int = 0

    def plus(self, other: Held) -> Held:
        """Both together."""
        return Held(
            self.own_bytes + other.own_bytes,
            self.resident_bytes + other.resident_bytes,
            self.unique_bytes + other.unique_bytes,
            self.descriptors + other.descriptors,
            self.threads + other.threads,
        )


def held_by(pids: Iterable[int]) -> Held:
    """What these processes hold; one that is gone holds nothing."""
    total = Held()
    for pid in set(pids):
        with suppress(*GONE):
            total = total.plus(_held_by(pid))
    return total


def _held_by(pid: int) -> Held:
    process = Path(f"/proc/{pid}")
    status = _numbers(process / "status")
    unique = 0
    with suppress(PermissionError):
        rollup = _numbers(process / "smaps_rollup")
        unique = (rollup["Private_Clean"] + rollup["Private_Dirty"]) << 10
    return Held(
        own_bytes=status.get("RssAnon", 0) << 10,
        resident_bytes=status.get("VmRSS", 0) << 10,
        unique_bytes=unique,
        descriptors=len(os.listdir(process / "fd")),
        threads=status.get("Threads", 0),
    )


def _numbers(path: Path) -> dict[str, int]:
    """`Name: number` by name, of the lines that say that."""
    found: dict[str, int] = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found


def bytes_under(folder: Path) -> tuple[int, int]:
    """Size of the files of a folder and of those below it, and how many there are."""
    size = count = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += os.stat(os.path.join(root, name)).st_size
                count += 1
    return size, count


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that are there, or not yet reaped."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(*GONE):
            found += map(int, path.read_text().split())
    return found
