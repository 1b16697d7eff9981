"""Rows of listings as messages: keys, tags, fields and row lengths. No I/O.

A listing is gone through piece by piece, as the store gathered it: a page of a large one costs what
the page costs, and whoever makes many rows lets others run in between.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final

from dataplane.client.results import Listing
from dataplane.errors import InvalidRequest
from dataplane.protocol.values import tags_to
from dataplane.v1 import dataplane_pb2 as pb

FRAME_BYTES: Final = 8
"""What a row takes in its message besides its own bytes, at most."""
SPARE_BYTES: Final = 4096
"""What an answer holds besides its rows, at most."""
STEP: Final = 128
"""Rows that are made before others may run."""


class Listed:
    """The rows of a listing, by their place in it."""

    def __init__(self, listing: Listing) -> None:
        self._parts = listing.parts()
        self._ends = list(accumulate(map(len, self._parts)))
        self._at = -1
        self._part: _Part | None = None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def rows(self, start: int, stop: int) -> Iterator[pb.Row]:
        """The rows from one place up to another."""
        while start < stop:
            at = bisect_right(self._ends, start)
            part = self._part
            if part is None or at != self._at:  # pages follow each other: often it is the same
                part, self._at = _Part(self._parts[at]), at
                self._part = part
            first = self._ends[at - 1] if at else 0
            end = min(stop, self._ends[at])
            yield from map(part.row, range(start - first, end - first))
            start = end

    async def group(self, start: int, stop: int, max_bytes: int) -> tuple[list[pb.Row], int]:
        """The rows from one place on that together have at most so many bytes, at least one if
        there is any before `stop`; and the place at which they end."""
        group: list[pb.Row] = []
        nbytes = 0
        for at, row in enumerate(self.rows(start, stop), start):
            nbytes += row.ByteSize() + FRAME_BYTES
            if group and nbytes > max_bytes:
                return group, at
            group.append(row)
            if not len(group) % STEP:
                await asyncio.sleep(0)
        return group, max(start, stop)

    async def all(self, max_bytes: int, instead: str) -> list[pb.Row]:
        """All rows, for one message. InvalidRequest, saying what to do instead, if they have more
        bytes than that."""
        rows, end = await self.group(0, len(self), max_bytes)
        if end < len(self):
            raise InvalidRequest(
                f"{len(self)} rows with their tags have more than {max_bytes} bytes, which one "
                f"answer may have; {instead}"
            )
        return rows


class _Part:
    """One piece of a listing, its columns decoded."""

    __slots__ = ("_fields", "_keys", "_lengths", "_tags")

    def __init__(self, part: Listing) -> None:
        self._keys = part.keys
        self._tags = part.tags
        self._fields = part.fields
        self._lengths: list[tuple[str, list[Any]]] = [
            (name, part.lengths(name).tolist()) for name in part.ragged
        ]

    def row(self, i: int) -> pb.Row:
        return pb.Row(
            key=self._keys[i],
            tags=tags_to(self._tags[i]),
            fields=self._fields[i],
            lengths={name: sizes[i] for name, sizes in self._lengths if sizes[i] >= 0},
        )
