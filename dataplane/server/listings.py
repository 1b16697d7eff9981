"""Answers to `list`: a walk over a cut of a partition, in slices, as columns for the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataplane.errors import InvalidRequest
from dataplane.server.ordering import first_rows, parse_order
from dataplane.server.slices import Slices, WorstSlice
from dataplane.tags import listing
from dataplane.tags.history import Change
from dataplane.tags.partition import Partition
from dataplane.tags.query import Predicate, compile_where
from dataplane.tags.rows import SHARDS, Chunk, Row
from dataplane.tags.store import TagStore
from dataplane.wire.frames import Body
from dataplane.wire.messages import is_revision

MAX_CLEARED = 250_000
"""Cleared keys that one answer names; they travel in its header."""
SMALL_SINCE = 4096
"""Changed keys up to which a listing since a revision gathers their rows in one go."""

PIECE_ROWS = 256
"""Rows of no chunk that are encoded before others may run."""
CLEARED_STEP = 1024
"""Cleared keys that are looked at before others may run."""

Packed = tuple[list[Any], list[Any], int]
"""The body of an answer, the buffers that follow it, and their bytes."""


async def list_partition(store: TagStore, body: Body, worst: WorstSlice) -> Packed:
    """The answer to [partition_id, where, since, columns, limit, order_by (may be left out)]: all
    of one moment."""
    partition_id, where, since, columns, limit, *order_by = body
    partition = store.partition(partition_id)
    predicate = compile_where(where)
    _check(since, columns, limit)
    wanted = None if columns is None else frozenset(columns)
    walk = _Walk(partition, predicate, wanted, limit, worst)
    revision = (store.epoch, partition.revision)
    cleared: list[str] = []
    if order_by:
        order = parse_order(since, limit, *order_by)
        rows = await first_rows(partition, predicate, order, limit, worst)
        walk = _Walk(partition, predicate, wanted, limit, worst)
        await walk.take(rows)
        head, buffers, nbytes = pack_pieces(walk.pieces)
        return [revision, True, cleared, *head], buffers, nbytes
    # What is older than this epoch, or than history, is answered with everything.
    after: int | None = None
    if (
        since is not None
        and since[0] == store.epoch
        and since[1] >= partition.born  # one of this name before was another partition
        and store.history.covers(partition_id, since[1])
    ):
        after = since[1]
    if after is None:
        await walk.chunks(partition.slots.cut())
    else:
        cleared = await _changes(store, partition, after, walk)
        if len(cleared) > MAX_CLEARED:
            # More than a header holds: whoever asks is told everything instead.
            after, cleared = None, []
            revision = (store.epoch, partition.revision)
            walk = _Walk(partition, predicate, wanted, limit, worst)
            await walk.chunks(partition.slots.cut())
        elif walk.cut_short:
            revision = (store.epoch, after)  # what was left out has to come with the next one
    head, buffers, nbytes = pack_pieces(walk.pieces)
    return [revision, after is None, cleared, *head], buffers, nbytes


def _check(since: object, columns: list[Any] | None, limit: object) -> None:
    if columns is not None and not (type(columns) is list and set(map(type, columns)) <= {str}):
        raise InvalidRequest("columns is a list of tag names")
    if limit is not None and (type(limit) is not int or limit < 0):
        raise InvalidRequest(f"limit is a number of rows, not {limit!r:.80}")
    if since is not None and not is_revision(since):
        raise InvalidRequest(f"since is the revision of an earlier answer, not {since!r:.80}")


async def _changes(store: TagStore, partition: Partition, after: int, walk: _Walk) -> list[str]:
    """Take the rows that changed after a revision; the keys that were cleared and stayed so."""
    changes: list[Change] = []
    count = 0
    for change in store.history.since(partition.partition_id, after):
        count += len(change.keys)
        if count > SMALL_SINCE:
            break
        changes.append(change)
    if count <= SMALL_SINCE:
        keys = dict.fromkeys(key for change in reversed(changes) for key in change.keys)
        # In the order in which the rows came, as a full listing has them.
        places = sorted(at for key in keys if (at := partition.index.get(key)) is not None)
        rows = [row for at in places if type(row := partition.slots.at(at)) is Row]
        await walk.take(rows)
        if len(rows) == len(keys):
            return []
        present = {row.key for row in rows}
        return [key for key in keys if key not in present]
    # Too many to gather in one go: the cut keeps the moment while others change the partition.
    pages = store.history.pages_since(partition.partition_id, after)
    seen = await walk.chunks(partition.slots.cut(), newer_than=after)
    cleared: list[str] = []
    for page in pages:
        for change in page:
            if change.positions is None or change.n <= after:
                continue
            for number, key in enumerate(change.keys):
                if seen.add(key):
                    cleared.append(key)
                if not number % CLEARED_STEP:
                    await walk.breathe()
        await walk.breathe()
    return cleared


class _Keys:
    """A set of keys in shards: one set would stall the loop whenever it grows."""

    def __init__(self) -> None:
        self._shards: list[set[str]] = [set() for _ in range(SHARDS)]

    def add(self, key: str) -> bool:
        """Whether the key is new here."""
        shard = self._shards[hash(key) & (SHARDS - 1)]
        if key in shard:
            return False
        shard.add(key)
        return True


class _Walk(Slices):
    """Gathers the pieces of one listing."""

    def __init__(
        self,
        partition: Partition,
        predicate: Predicate,
        wanted: frozenset[str] | None,
        limit: int | None,
        worst: WorstSlice,
    ) -> None:
        super().__init__(worst)
        self.pieces: list[listing.Piece] = []
        self._schema = partition.schema
        self._predicate = predicate
        self._wanted = wanted
        self._left = limit
        self.cut_short = False
        """Whether the limit left a row out."""

    async def chunks(self, cut: Sequence[Chunk], newer_than: int | None = None) -> _Keys:
        """Take the rows of a cut; with `newer_than` only newer ones, whose keys are returned."""
        seen = _Keys()
        whole = self._predicate.matches_all and newer_than is None
        for chunk in cut:
            if self._left is not None and self._left <= 0 and newer_than is None:
                break
            if whole and (self._left is None or chunk.live <= self._left):
                for _ in listing.encode_chunk(chunk, self._wanted, self._schema):
                    await self.breathe()
                piece = listing.piece_of_chunk(chunk, self._wanted, self._schema)
                self.pieces.append(piece)
                if self._left is not None:
                    self._left -= piece.rows
            else:
                rows = chunk.live_rows()
                if newer_than is not None:
                    rows = [row for row in rows if row.revision > newer_than]
                    for row in rows:
                        seen.add(row.key)
                await self.take(rows)
            await self.breathe()
        return seen

    async def take(self, rows: Sequence[Row]) -> None:
        """Take those of these rows that match, up to the limit."""
        if not self._predicate.matches_all:
            rows = [row for row in rows if self._predicate(row.tags)]
        if self._left is not None:
            self.cut_short |= len(rows) > self._left
            rows = rows[: self._left]
            self._left -= len(rows)
        for at in range(0, len(rows), PIECE_ROWS):
            part = rows[at : at + PIECE_ROWS]
            self.pieces.append(listing.piece_of_rows(part, self._wanted, self._schema))
            await self.breathe()


def pack_pieces(pieces: Sequence[listing.Piece]) -> Packed:
    """A listing as [rows of each piece, field sets of each piece, columns] and its buffers.

    A column is [name, [[kind, sizes of its buffers] per piece, or nil where it has none]].
    """
    names = dict.fromkeys(name for piece in pieces for name in piece.columns)
    buffers: list[Any] = []
    columns: list[Any] = []
    total = 0
    for name in names:
        parts: list[Any] = []
        for piece in pieces:
            column = piece.columns.get(name)
            if column is None:
                parts.append(None)
                continue
            sizes = column.sizes()
            for size, buffer in zip(sizes, column.buffers, strict=False):
                if size > 0:
                    buffers.append(buffer)
                    total += size
            parts.append([column.kind, sizes])
        columns.append([name, parts])
    head = [[piece.rows for piece in pieces], [piece.field_sets for piece in pieces], columns]
    return head, buffers, total
