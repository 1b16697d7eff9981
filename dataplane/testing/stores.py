"""Which points the two stores come to: at the journal, in memory, in shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from dataplane.errors import InternalError
from dataplane.tags import records
from dataplane.testing.hits import Switches, replace
from dataplane.testing.points import POINTS

if TYPE_CHECKING:
    from dataplane.server.plane import PlaneServer

_RECORDS = {
    records.PUT: "put",
    records.CLEAR: "clear",
    records.CLAIM: "claim",
    records.COMMIT: "commit",
    records.RELEASE: "release",
    records.BEGIN: "begin_group",
    records.END: "end_group",
    records.REPACK: "repack",
}
_APPLIES = {
    "apply_put": "put",
    "apply_clear": "clear",
    "apply_scanned_clear": "clear",
    "apply_begin": "begin_group",
    "apply_end": "end_group",
    "apply_repack": "repack",
}


def watch_tags(switches: Switches, server: PlaneServer) -> None:
    """Watch the tag store and its journal."""
    tags = server.tags
    if tags is None:
        raise InternalError("this process serves no tag store")
    journal: Any = tags.journal

    def appended(inner: Callable[..., Any]) -> Callable[..., Any]:
        def append(kind: int, n: int, at: float, body: Any) -> None:
            verb = f"load_{body[0]}" if kind == records.RESTORE else _RECORDS.get(kind)
            if verb is None or f"tags.{verb}.torn" not in POINTS:
                inner(kind, n, at, body)
                return
            switches.hit(f"tags.{verb}.unwritten")
            signal = switches.due(f"tags.{verb}.torn")
            if signal is not None:
                _write_half(journal.path, kind, n, at, body)
                switches.act(signal)
            inner(kind, n, at, body)
            switches.hit(f"tags.{verb}.written")

        return append

    replace(journal, "append", appended)
    for method, verb in _APPLIES.items():
        switches.around(tags.store, method, after=f"tags.{verb}.applied")
    switches.around(journal, "turn", "tags.snapshot.unturned", "tags.snapshot.turned")
    switches.around(journal, "replaced", "tags.snapshot.unreplaced", "tags.snapshot.replaced")


def _write_half(path: Path, kind: int, n: int, at: float, body: Any) -> None:
    """What a process leaves that dies while the kernel takes its record."""
    data = records.framed(msgpack.packb((kind, n, float(at), body)))
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(fd, data[: len(data) // 2])
    finally:
        os.close(fd)


def watch_values(switches: Switches, server: PlaneServer) -> None:
    """Watch the value store and its way to the tag store."""
    values = server.values
    if values is None:
        raise InternalError("this process serves no value store")
    store, port = values.store, values.tags
    switches.around(store, "allocate", "values.allocate.asked", "values.allocate.done")
    switches.around(store, "abort", "values.abort.asked", "values.abort.done")
    switches.around(store, "kill", "values.free.asked", "values.free.done")
    switches.around(store, "unpin", "values.unpin.asked", "values.unpin.done")
    switches.around(store, "published", "values.publish.heard", "values.publish.published")
    switches.around(store.blocks, "pin", after="values.pin.held")
    switches.around(values, "hold", "values.hold.asked", "values.hold.done")

    def sealed(inner: Callable[..., Any]) -> Callable[..., Any]:
        def seal(block: int, owner: Any) -> Any:
            extent = inner(block, owner)
            # Blocks of its own the value store makes when it copies what is still live.
            verb = "repack" if owner is values.repacking else "publish"
            switches.hit(f"values.{verb}.sealed")
            return extent

        return seal

    def published(inner: Callable[..., Any]) -> Callable[..., Any]:
        def publish(*args: Any, **named: Any) -> None:
            inner(*args, **named)
            switches.hit_later("values.publish.sent")

        return publish

    def repacked(inner: Callable[..., Any]) -> Callable[..., Any]:
        async def repack(*args: Any, **named: Any) -> None:
            await inner(*args, **named)
            switches.hit("values.repack.done")

        return repack

    replace(store.blocks, "seal", sealed)
    replace(port, "publish", published)
    replace(port, "repack", repacked)
