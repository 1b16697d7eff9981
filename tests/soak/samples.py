"""What a plane and its users hold at a moment: samples of a soak."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.soak.planes import Soaked
from tests.soak.processes import Held, bytes_under, held_by

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment."""

    at_s: float
    """Since the load began."""
    servers: Held
    users: Held
    """The processes that use the plane all the time; those that come and go are in none."""
    segment_bytes: int
    segment_files: int
    journal_bytes: int
    journal_files: int
    status: dict[str, Any]

    def count(self, *path: str) -> int:
        """A number of what the plane says of itself: of its tag store, or with `values` first the
        sum over its value stores."""
        if path[0] == "values":
            return sum(store.get(path[1], 0) for store in self.status["values"].values())
        value: Any = self.status
        for name in path:
            value = value[name]
        return int(value)


def take(plane: Soaked, users: Iterable[int], at_s: float) -> Sample:
    """A sample of now."""
    status = plane.client.status()
    stores = [store["pid"] for store in status["values"].values() if "pid" in store]
    journal_bytes, journal_files = bytes_under(plane.journal)
    segment_bytes, segment_files = bytes_under(plane.segments)
    return Sample(
        at_s,
        servers=held_by([status["pid"], *stores]),
        users=held_by(users),
        segment_bytes=segment_bytes,
        segment_files=segment_files,
        journal_bytes=journal_bytes,
        journal_files=journal_files,
        status=status,
    )


COUNTS: dict[str, Callable[[Sample], int]] = {
    "clients": lambda s: s.count("clients"),
    "leases": lambda s: s.count("kept", "leases"),
    "open groups": lambda s: s.count("kept", "groups"),
    "answers kept": lambda s: s.count("kept", "answers"),
    "keys": lambda s: sum(p["keys"] for p in s.status["partitions"].values()),
    "tag bytes": lambda s: sum(p["tag_bytes"] for p in s.status["partitions"].values()),
    "partitions": lambda s: len(s.status["partitions"]),
    "payload bytes": lambda s: s.count("bytes_in_use"),
    "blocks (tag store)": lambda s: s.count("blocks"),
    "dead blocks": lambda s: s.count("dead_blocks"),
    "waiting requests": lambda s: sum(s.status["waiting"].values()),
    "blocks (value store)": lambda s: s.count("values", "blocks"),
    "bytes in use": lambda s: s.count("values", "used_bytes"),
    "bytes held for groups": lambda s: s.count("values", "held_bytes"),
    "reservations": lambda s: s.count("values", "blocks_reserved"),
    "pins": lambda s: s.count("values", "pins"),
    "waiting for room": lambda s: s.count("values", "waiting"),
    "descriptors (besides one for each segment)": (
        lambda s: s.servers.descriptors - s.count("values", "segments")
    ),
    "segment files that nobody knows of": (
        lambda s: s.segment_files - s.count("values", "segments")
    ),
}
"""What has to be as at first once everything was cleared and everybody is gone. Segments stay, for
those who come: they are bounded by the capacity, and threads by the size of a pool."""


def line(sample: Sample) -> str:
    """A sample in one line."""
    s = sample
    return (
        f"{s.at_s:6.0f} s  servers {s.servers.own_bytes / MiB:6.1f} MiB own "
        f"{s.servers.resident_bytes / MiB:6.1f} RSS {s.servers.unique_bytes / MiB:6.1f} USS "
        f"{s.servers.descriptors:3d} fds {s.servers.threads:2d} threads | users "
        f"{s.users.own_bytes / MiB:6.1f} MiB {s.users.descriptors:3d} fds | segments "
        f"{s.segment_bytes / MiB:5.0f} MiB, journal {s.journal_bytes / MiB:5.2f} MiB in "
        f"{s.journal_files} | keys {COUNTS['keys'](s)} groups {COUNTS['open groups'](s)} leases "
        f"{COUNTS['leases'](s)} clients {COUNTS['clients'](s)}/{s.count('kept', 'clients')} "
        f"answers {COUNTS['answers kept'](s)} history {s.count('history_changes')} dead "
        f"{COUNTS['dead blocks'](s)}"
    )
