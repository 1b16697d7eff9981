"""What a value store is asked at a scrape: memory, blocks by their state, bytes that moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataplane.metrics.reading import Reading

if TYPE_CHECKING:
    from dataplane.server.value_service import ValueService


async def read_values(service: ValueService) -> Reading:
    """All that is told of it."""
    store, reading = service.store, Reading()
    name = store.store_id
    blocks, sizes = store.blocks.counts(), store.blocks.state_bytes()
    # What is held for groups is kept as blocks that nobody writes.
    blocks["reserved"] = max(0, blocks["reserved"] - store.holds.pieces)
    sizes["reserved"] = max(0, sizes["reserved"] - store.holds.pooled_bytes)
    for state in ("reserved", "publishing", "published", "dead"):
        reading.set("store_blocks", blocks[state], name, state)
        reading.set("store_block_bytes", sizes[state], name, state)
    reading.set("store_capacity_bytes", store.budget.capacity_bytes, name)
    reading.set("store_segment_bytes", store.segment_bytes, name)
    reading.set("store_segments", len(store.segments), name)
    reading.set("store_used_bytes", store.used_bytes, name)
    reading.set("store_held_bytes", store.holds.held_bytes, name)
    reading.set("store_holds", len(store.holds), name)
    reading.set("store_pins", store.blocks.pins, name)
    reading.set("store_waiting_requests", store.waiting, name)
    reading.set("store_received_bytes_total", store.bytes_in, name)
    reading.set("store_pinned_bytes_total", store.blocks.pinned_bytes, name)
    reading.set("store_sent_bytes_total", store.bytes_out, name)
    reading.set("store_joined", int(service.tags.is_joined), name)
    return reading
