"""Rows of one moment, oldest revision first, read in small steps while the store goes on. Pure.

A moment holds frozen chunks and places in them, so it costs little to make; rows are looked up and
put in order only when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from heapq import merge
from itertools import chain, islice
from operator import attrgetter

from dataplane.tags.rows import Chunk, Row

PORTION_ROWS = 256
"""Rows handed out in one step."""

_revision_of = attrgetter("revision")


class Moment:
    def __init__(
        self,
        revision: int,
        parts: list[tuple[Chunk, Collection[int] | None]],
        keep: Callable[[Row], bool] | None = None,
    ) -> None:
        self.revision = revision
        """The last change of the partition at that moment."""
        self._parts = parts
        """Frozen chunks, and which places in each: None for every row of it."""
        self._keep = keep
        """Which of those rows are meant; None for all."""

    def portions(self) -> Iterator[list[Row]]:
        """The rows, oldest revision first; those of one revision in the order of their slots.

        Each portion is a step of work. Many are empty: rows are put in order before the first
        of them can be handed out.
        """
        runs: list[_Run] = []
        for chunk, offsets in self._parts:
            rows = self._rows(chunk, offsets)
            if rows:
                # Rows mostly lie in the order of their revisions: then there is but one run.
                if not runs or runs[-1].last > rows[0].revision:
                    runs.append(_Run())
                runs[-1].append(rows)
            yield []
        if len(runs) == 1:
            ordered = chain.from_iterable(runs[0].parts)
        else:
            ordered = merge(*[chain.from_iterable(run.parts) for run in runs], key=_revision_of)
        while portion := list(islice(ordered, PORTION_ROWS)):
            yield portion

    def _rows(self, chunk: Chunk, offsets: Collection[int] | None) -> list[Row]:
        if offsets is None:
            rows = chunk.live_rows().copy()
        else:
            rows = [row for at in sorted(offsets) if type(row := chunk.rows[at]) is Row]
        if self._keep is not None:
            rows = list(filter(self._keep, rows))
        rows.sort(key=_revision_of)
        return rows


class _Run:
    """Rows of chunks that follow each other in the order of revisions."""

    __slots__ = ("last", "parts")

    def __init__(self) -> None:
        self.parts: list[list[Row]] = []
        self.last = 0

    def append(self, rows: list[Row]) -> None:
        self.parts.append(rows)
        self.last = rows[-1].revision
