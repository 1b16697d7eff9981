"""What a plane's server processes hold: memory of their own, descriptors, segments."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sums over the server processes of a plane."""

    tag_store_bytes: int
    """Memory of the tag store's own; mapped segments are not in it."""
    segment_bytes: int
    """Size of the segment files."""
    all_bytes: int
    """Memory of all servers' own, and their segments."""
    used_bytes: int
    """Bytes of extents in use."""
    descriptors: int


def footprint(status: Mapping[str, Any]) -> Footprint:
    """The footprint of the plane that says this of itself.

    Read from `status()`: `pid` of the tag store at the top; below it, for each value store,
    `pid`, `segments`, `segment_bytes` and `used_bytes`.
    """
    stores = list(_maps_with(status, "segment_bytes"))
    pids = {status["pid"], *(store["pid"] for store in stores)}
    segments = sum(store["segments"] * store["segment_bytes"] for store in stores)
    return Footprint(
        tag_store_bytes=own_bytes(status["pid"]),
        segment_bytes=segments,
        all_bytes=segments + sum(own_bytes(pid) for pid in pids),
        used_bytes=sum(store["used_bytes"] for store in stores),
        descriptors=sum(descriptors(pid) for pid in pids),
    )


def own_bytes(pid: int) -> int:
    """Resident memory of a process that is not backed by a file or shared."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no RssAnon")


def descriptors(pid: int) -> int:
    """How many file descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def _maps_with(value: object, name: str) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if name in value:
            yield value
        for inner in value.values():
            yield from _maps_with(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _maps_with(inner, name)
