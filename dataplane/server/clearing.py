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
) -> int:
    """Remove all rows that match at one revision; how many. `commit` journals and applies.

    It must run to its end once it has committed: what it lets go of nobody else would.
    """
    found = await _scan(store, partition, predicate, Slices(worst))
    if not found:
        return 0
    commit(found)
    # The rows are gone for everybody; their bytes are by the time this is answered.
    slices = Slices(worst)
    for part in found:
        for at in range(0, len(part.rows), RELEASE_ROWS):
            store.release_rows(partition, part.rows[at : at + RELEASE_ROWS])
            await slices.breathe()
    return sum(len(part.rows) for part in found)


async def _scan(
    store: TagStore, partition: Partition, predicate: Predicate, slices: Slices
) -> list[Doomed]:
    found: dict[int, Doomed | None] = {}
    scanned: dict[int, Chunk | None] = {}
    for scan in range(MAX_SCANS):
        chunks = partition.slots.chunks
        stale = [i for i in range(len(chunks)) if i not in scanned or scanned[i] is not chunks[i]]
        last = len(stale) <= LAST_CHUNKS or scan == MAX_SCANS - 1
        for i in stale:
            found[i] = store.scan_clear(partition, i, predicate)
            chunk = scanned[i] = partition.slots.chunks[i]
            if chunk is not None:
                chunk.frozen = True
            if not last:
                await slices.breathe()
        if last:
            return [part for part in found.values() if part is not None]
    raise AssertionError("the last scan returns")
