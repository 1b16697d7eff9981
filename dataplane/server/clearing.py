"""Clears by predicate: scanned in slices, made at one revision, carried out in slices.

A scan freezes the chunks it has seen, so whatever changes meanwhile shows as another chunk and is
scanned again. The last few are scanned together with the removal: nothing slips by.
"""

from __future__ import annotations

from collections.abc import Callable

from dataplane.server.slices import Slices, WorstSlice
from dataplane.tags.partition import Partition
from dataplane.tags.query import Predicate
from dataplane.tags.rows import Chunk
from dataplane.tags.store import Doomed, TagStore

LAST_CHUNKS = 2
"""Chunks that are scanned in one go with the removal."""
MAX_SCANS = 50
"""Scans until even a partition that never rests is cleared in one go."""
RELEASE_ROWS = 128


async def clear_where(
    store: TagStore,
    partition: Partition,
    predicate: Predicate,
    commit: Callable[[list[Doomed]], None],
    worst: WorstSlice,
    until: int | None = None,
) -> int:
    """Remove all rows that match at one revision; how many. `commit` journals and applies. Rows
    that changed after revision `until` stay.

    It must run to its end once it has committed: what it lets go of nobody else would.
    """
    found = await _scan(store, partition, predicate, until, Slices(worst))
    if not found:
        return 0
    commit(found)
    # The rows are gone for everybody; their bytes are by the time this is answered. What was found
    # goes part by part: to let go of half a million rows at once holds the loop for a while.
    removed = sum(len(part.rows) for part in found)
    slices = Slices(worst)
    found.reverse()
    while found:
        rows = found.pop().rows
        for at in range(0, len(rows), RELEASE_ROWS):
            store.release_rows(partition, rows[at : at + RELEASE_ROWS])
            await slices.breathe()
    return removed


async def _scan(
    store: TagStore,
    partition: Partition,
    predicate: Predicate,
    until: int | None,
    slices: Slices,
) -> list[Doomed]:
    found: dict[int, Doomed | None] = {}
    scanned: dict[int, Chunk | None] = {}
    for scan in range(MAX_SCANS):
        chunks = partition.slots.chunks
        stale = [i for i in range(len(chunks)) if i not in scanned or scanned[i] is not chunks[i]]
        last = len(stale) <= LAST_CHUNKS or scan == MAX_SCANS - 1
        for i in stale:
            found[i] = store.scan_clear(partition, i, predicate, until)
            chunk = scanned[i] = partition.slots.chunks[i]
            if chunk is not None:
                chunk.frozen = True
            if not last:
                await slices.breathe()
        if last:
            return [part for part in found.values() if part is not None]
    raise AssertionError("the last scan returns")
