"""What entries carry, packed as the journal has it: how it is taken apart in small steps. Pure."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Final, cast

import msgpack
import numpy as np

from dataplane.codec.template import Template
from dataplane.tags.lineage.lineage import Lineage
from dataplane.tags.lineage.ring import Entry

STEP_ROWS: Final = 64
"""Looked at before others may run."""

Steps = Generator[None, None, Any]


def entries_of(lineage: Lineage, since: int) -> Iterator[tuple[int, Entry]]:
    """Entries with their numbers, oldest first; those that come meanwhile are not among them."""
    chunks, stop = lineage.ring.chunks, lineage.ring.next
    for chunk in chunks:
        entries = chunk.entries
        skip = max(0, since - chunk.first)
        for i in range(skip, min(len(entries), stop - chunk.first)):
            yield chunk.first + i, entries[i]


def body_of(entry: Entry) -> Any:
    record: Any = msgpack.unpackb(entry[5])
    return record[3]


def unpacked(tags: bytes) -> Iterator[dict[str, Any]]:
    """The tags of each row of a put."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(tags), 1))
    unpacker.feed(tags)
    return cast("Iterator[dict[str, Any]]", unpacker)


def tags_at(tags: bytes, chosen: list[int]) -> Steps:
    """The tags of some rows of a put, by their places."""
    unpacker: Any = msgpack.Unpacker(max_buffer_size=max(len(tags), 1))
    unpacker.feed(tags)
    found: dict[int, Any] = {}
    at = 0
    for step, i in enumerate(chosen):
        while at < i:
            unpacker.skip()
            at += 1
            if at % STEP_ROWS == 0:
                yield
        found[i] = unpacker.unpack()
        at += 1
        if step % STEP_ROWS == STEP_ROWS - 1:
            yield
    return found


def shapes_of(template: Template, rows: int, lengths: bytes, chosen: list[int]) -> list[Any]:
    """The shape of every field, for some rows of a block."""
    sizes = np.frombuffer(lengths, np.int32).reshape(-1, rows)[:, chosen].T.tolist()
    shapes: list[list[list[int]]] = []
    for free in sizes:
        at = 0
        row: list[list[int]] = []
        for column in template.columns:
            shape: list[int] = []
            for size in column.dims:
                if size < 0:
                    size = free[at]
                    at += 1
                shape.append(size)
            row.append(shape)
        shapes.append(row)
    return shapes


def drops_of(what: str, body: Any) -> list[str]:
    """Partitions that go with a change of partitions."""
    if what == "drop":
        return body[0]
    return body[1] if what == "seal" else []
