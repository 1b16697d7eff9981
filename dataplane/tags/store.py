"""The tag store: every key of a plane, its tags, where its values lie, in which order it changed.

Pure: no sockets, no files, no clock. A change is checked first and applied after, so a refused
request leaves nothing behind. The server journals a change between the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from dataplane.errors import PartitionNotFound
from dataplane.tags.history import Chain, Change, History
from dataplane.tags.keys import check_name
from dataplane.tags.partition import Found, Partition, PutRows
from dataplane.tags.placement import Placement
from dataplane.tags.query import Predicate
from dataplane.tags.requests import ClientRequests
from dataplane.tags.rows import CHUNK_BITS, Chunk, Row, Tombstone
from dataplane.types import Revision, Tags

REAP_STEP = 512
"""Tombstones forgotten with each change at most: history is trimmed without a pause."""


class Doomed(NamedTuple):
    """One chunk of a clear by predicate: the chunk as scanned, and what it becomes."""

    number: int
    before: Chunk
    after: Chunk
    rows: list[Row]
    keys: list[str]
    positions: list[int]


class TagStore:
    def __init__(self, epoch: int, history: History | None = None) -> None:
        self.epoch = epoch
        self.n = 0
        """Number of changes so far: the revision of the last one."""
        self.history = history or History()
        self.partitions: dict[str, Partition] = {}
        self.requests: dict[str, ClientRequests] = {}
        self.dead: deque[Placement] = deque()
        """Blocks without a live cell; the server tells their value stores, until they heard."""
        self.placements: dict[tuple[str, int], Placement] = {}
        """Blocks with live cells by (store, block)."""
        self._reaping: deque[Iterator[tuple[str, str, int]]] = deque()

    def revision(self) -> Revision:
        return Revision(self.epoch, self.n)

    def partition(self, partition_id: str) -> Partition:
        """The partition. PartitionNotFound if no put has made it."""
        partition = self.partitions.get(partition_id)
        if partition is None:
            check_name(partition_id, "partition name")
            raise PartitionNotFound(
                f"there is no partition {partition_id!r}; the first put to it creates it",
                partition_id=partition_id,
            )
        return partition

    def client(self, client_id: str) -> ClientRequests:
        """What is remembered of a client's requests."""
        requests = self.requests.get(client_id)
        if requests is None:
            requests = self.requests[client_id] = ClientRequests()
        return requests

    # -- put ---------------------------------------------------------------------------------

    def check_put(self, put: PutRows) -> Found:
        """Raise what is wrong with a put whose keys and tags are well formed already."""
        partition = self.partitions.get(put.partition_id)
        if partition is None:
            check_name(put.partition_id, "partition name")
            partition = Partition(put.partition_id)
        return partition.check_put(put, self.history.floor)

    def apply_put(self, put: PutRows, found: Found, now: float) -> int:
        """Carry out a checked put; its revision."""
        partition = self.partitions.get(put.partition_id)
        if partition is None:
            partition = self.partitions[put.partition_id] = Partition(put.partition_id)
        self.n += 1
        if put.placement is not None:
            self.placements[put.placement.store, put.placement.block] = put.placement
        self._bury(partition.apply_put(put, found, self.n))
        self._record(Change(self.n, now, put.partition_id, put.keys, None))
        return self.n

    def merged_tags(self, partition_id: str, keys: Sequence[str]) -> list[Tags]:
        """The whole tags of keys that exist."""
        partition = self.partition(partition_id)
        return [row.tags if (row := partition.row(key)) else {} for key in keys]

    # -- clear -------------------------------------------------------------------------------

    def apply_clear(self, partition_id: str, keys: Sequence[str], now: float) -> int:
        """Remove these rows at one revision; how many there were. Absent keys are no error."""
        partition = self.partition(partition_id)
        found, positions = partition.present(keys)
        if not found:
            return 0
        self.n += 1
        self._bury(partition.apply_clear(positions, self.n))
        self._record(Change(self.n, now, partition_id, found, positions))
        return len(found)

    def scan_clear(self, partition: Partition, number: int, predicate: Predicate) -> Doomed | None:
        """What a clear by predicate would make of one chunk; None if it touches no row of it."""
        chunk = partition.slots.chunks[number]
        if chunk is None or not chunk.live:
            return None
        tombstone = Tombstone(0)
        rows: list[Row] = []
        positions: list[int] = []
        after: Chunk | None = None
        base = number << CHUNK_BITS
        for i, slot in enumerate(chunk.rows):
            if type(slot) is not Row or not predicate(slot.tags):
                continue
            if after is None:
                chunk.frozen = True
                after = chunk.thawed()
                after.columns.clear()
                after.names = None
            after.rows[i] = tombstone
            rows.append(slot)
            positions.append(base + i)
        if after is None:
            return None
        after.live -= len(rows)
        return Doomed(number, chunk, after, rows, [row.key for row in rows], positions)

    def apply_scanned_clear(
        self, partition: Partition, doomed: Sequence[Doomed], now: float
    ) -> Chain[Row]:
        """Remove all rows of scanned chunks at one revision: a swap per chunk.

        Chunks must be as they were scanned (`Doomed.before`). The rows are returned; their cells
        are released by `release_rows`, in slices.
        """
        self.n += 1
        for part in doomed:
            assert partition.slots.chunks[part.number] is part.before
            partition.swap_clear(part.number, part.after, len(part.rows), self.n)
            tombstone = partition.slots.at(part.positions[0])
            assert type(tombstone) is Tombstone
            tombstone.revision = self.n  # the scan made it before the revision was known
        keys = Chain([part.keys for part in doomed])
        positions = Chain([part.positions for part in doomed])
        self._record(Change(self.n, now, partition.partition_id, keys, positions))
        return Chain([part.rows for part in doomed])

    def release_rows(self, partition: Partition, rows: Sequence[Row]) -> None:
        """Let go of the cells of rows that a scanned clear removed."""
        self._bury(partition.release(rows))

    # -- repack ------------------------------------------------------------------------------

    def apply_repack(
        self, old: Placement, new: Placement, moves: Sequence[tuple[int, int]]
    ) -> None:
        """Point the live cells of a block at their copies in a new one. No revision changes."""
        partition = self.partition(old.partition_id)
        self.placements[new.store, new.block] = new
        self._bury(partition.apply_repack(old, new, moves))

    # -- upkeep ------------------------------------------------------------------------------

    def _bury(self, placements: Sequence[Placement]) -> None:
        for placement in placements:
            # A placement can be reported twice when several of its rows go in one request.
            if self.placements.pop((placement.store, placement.block), None) is not None:
                placement.positions = ()
                self.dead.append(placement)

    def _record(self, change: Change) -> None:
        self.history.append(change)
        self.upkeep(change.at)

    def upkeep(self, now: float, step: int = REAP_STEP) -> None:
        """Trim history to its bounds and forget a bounded number of tombstones."""
        for _ in range(64):
            expired = self.history.expired(now)
            if expired is None:
                break
            if expired.positions is not None:
                self._reaping.append(
                    zip(repeat(expired.partition_id), expired.keys, expired.positions)
                )
        while self._reaping and step > 0:
            for partition_id, key, position in self._reaping[0]:
                partition = self.partitions.get(partition_id)
                if partition is not None:
                    partition.index.forget(key, position)
                    partition.slots.forget(position)
                step -= 1
                if step == 0:
                    break
            else:
                self._reaping.popleft()

    def counts(self) -> dict[str, Any]:
        """Sizes for `status`: per partition rows, bytes and revision; history and blocks."""
        return {
            "revision": [self.epoch, self.n],
            "history_floor": self.history.floor,
            "history_changes": self.history.size,
            "blocks": len(self.placements),
            "dead_blocks": len(self.dead),
            "partitions": {
                partition.partition_id: {
                    "keys": len(partition),
                    "payload_bytes": partition.payload_bytes,
                    "tag_bytes": partition.tag_bytes,
                    "revision": partition.revision,
                    "fields": sorted(partition.schema),
                }
                for partition in self.partitions.values()
            },
        }
