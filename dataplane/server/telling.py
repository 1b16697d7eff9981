"""What waits and watches are answered with: rows of one moment, packed in slices as columns.

The moment is taken at once; whatever happens while its rows are packed does not show in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from dataplane.server.listings import MAX_CLEARED, PIECE_ROWS, Packed
from dataplane.server.slices import Slices, WorstSlice
from dataplane.tags import listing
from dataplane.tags.history import Change
from dataplane.tags.partition import Partition
from dataplane.tags.rows import Row
from dataplane.tags.store import TagStore
from dataplane.tags.views.changes import Latest, Present, Span, first_spans, spans
from dataplane.tags.views.moment import Moment

SMALL_CHANGE = 1024
"""Changed keys that are looked at in one go."""
MAX_CLEARED_CHARS = 16 << 20
"""Characters of cleared keys in one answer; they travel in its header."""

Match = Callable[[Row], bool]


class Packing:
    """The rows of an answer, column by column, packed piece by piece."""

    def __init__(self, schema: listing.Schema, worst: WorstSlice) -> None:
        self.slices = Slices(worst)
        self.rows = 0
        self._schema = schema
        self._counts: list[int] = []
        self._field_sets: list[list[list[str]]] = []
        self._parts: dict[str, list[Any]] = {}
        self._buffers: dict[str, list[Any]] = {}
        self._nbytes = 0

    async def add(self, rows: list[Row]) -> None:
        """The next rows: a few hundred at most."""
        if rows:
            piece = listing.piece_of_rows(rows, None, self._schema)
            self.rows += piece.rows
            for name in piece.columns.keys() - self._parts.keys():
                self._parts[name] = [None] * len(self._counts)
                self._buffers[name] = []
            self._counts.append(piece.rows)
            self._field_sets.append(piece.field_sets)
            for name, parts in self._parts.items():
                column = piece.columns.get(name)
                if column is None:
                    parts.append(None)
                    continue
                sizes = column.sizes()
                parts.append([column.kind, sizes])
                for size, buffer in zip(sizes, column.buffers, strict=False):
                    if size > 0:
                        self._buffers[name].append(buffer)
                        self._nbytes += size
        await self.slices.breathe()

    def packed(self) -> Packed:
        """All of them, as `listings.pack_pieces` says."""
        columns = [[name, parts] for name, parts in self._parts.items()]
        buffers = list(chain.from_iterable(self._buffers.values()))
        return [self._counts, self._field_sets, columns], buffers, self._nbytes


async def pack_moment(moment: Moment, schema: listing.Schema, worst: WorstSlice) -> Packed:
    """All rows of a moment."""
    packing = Packing(schema, worst)
    for rows in moment.portions():
        await packing.add(rows)
    return packing.packed()


class Told(NamedTuple):
    """What a watch is told."""

    upto: int
    """The last revision that was looked at."""
    changes: list[list[Any]]
    """As they travel: [revision, cleared keys, number of rows, whether it is full] of each."""
    packed: Packed
    """Their rows, one change after the other."""


async def changes_since(
    store: TagStore, partition: Partition, after: int, match: Match | None, worst: WorstSlice
) -> Told:
    """Changes of a partition after a revision, of rows that match; not always all that there are.

    Where the revision lies before what history covers, one change is everything there is.
    """
    revision = partition.revision
    if after < partition.born or not store.history.covers(partition.partition_id, after):
        return await _everything(store, partition, match, worst)
    pages = store.history.pages_since(partition.partition_id, after)
    look = Present(partition).look
    found, all_of_them = first_spans(_oldest_first(pages, after), look, SMALL_CHANGE)
    packing = Packing(partition.schema, worst)
    if not found and not all_of_them:
        many = await _many_spans(partition, pages, after, packing.slices)
        if many is None:
            return await _everything(store, partition, match, worst)
        found, all_of_them = many
    upto = revision if all_of_them else found[-1].revision
    changes: list[list[Any]] = []
    left: list[Row] = []  # rows of one span may share a piece with those of the next
    for span in found:
        count = packing.rows + len(left)
        for part in _parts(span.rows):
            left += part if match is None else filter(match, part)
            if len(left) >= PIECE_ROWS:
                await packing.add(left)
                left = []
        count = packing.rows + len(left) - count
        if count or span.cleared:
            changes.append([(store.epoch, span.revision), span.cleared, count, False])
    await packing.add(left)
    return Told(upto, changes, packing.packed())


async def _many_spans(
    partition: Partition, pages: Sequence[Sequence[Change]], after: int, slices: Slices
) -> tuple[list[Span], bool] | None:
    """The spans of more changes than can be looked at in one go, and whether those are all; None
    if the first of them clears more keys than an answer can name."""
    latest = Latest()
    for chunk in partition.slots.cut():
        latest.add_rows([row for row in chunk.live_rows() if row.revision > after])
        await slices.breathe()
    for _ in latest.add_gone(pages, after):
        await slices.breathe()
    found: list[Span] = []
    keys = chars = 0
    for span in spans(_oldest_first(pages, after), latest.look):
        await slices.breathe()
        if span is None:
            continue
        keys += len(span.cleared)
        if keys > MAX_CLEARED:
            return (found, False) if found else None
        for part in _parts(span.cleared):
            chars += sum(map(len, part))
            await slices.breathe()
        if chars > MAX_CLEARED_CHARS:
            return (found, False) if found else None
        found.append(span)
    return found, True


async def _everything(
    store: TagStore, partition: Partition, match: Match | None, worst: WorstSlice
) -> Told:
    """One change that is all there is at this moment."""
    chunks = [(chunk, None) for chunk in partition.slots.cut()]
    moment = Moment(partition.revision, [*chunks], match)
    packed = await pack_moment(moment, partition.schema, worst)
    change: list[Any] = [(store.epoch, moment.revision), [], sum(packed[0][0]), True]
    return Told(moment.revision, [change], packed)


def _oldest_first(pages: Sequence[Sequence[Change]], after: int) -> Iterator[Change]:
    for page in reversed(pages):
        for change in page:
            if change.n > after:
                yield change


def _parts(items: list[Any]) -> Iterator[list[Any]]:
    left = iter(items)
    while part := list(islice(left, PIECE_ROWS)):
        yield part
