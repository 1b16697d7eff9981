"""The ring keeps the last entries within its bounds, and says how many have fallen out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dataplane.tags.lineage.ring import CHUNK_ENTRIES, CHUNKS, Ring


def entries(ring: Ring) -> list[int]:
    return [entry[0] for chunk in ring.chunks for entry in chunk.entries]


@given(st.lists(st.integers(1, 400), max_size=400), st.integers(100, 5000))
def test_the_last_entries_are_here_within_the_bound(sizes: list[int], limit: int) -> None:
    ring = Ring(limit)
    for number, size in enumerate(sizes):
        ring.append((number,), size)
        assert ring.nbytes <= max(limit, size) + limit // CHUNKS
    assert ring.next == len(sizes)
    assert entries(ring) == list(range(ring.first, len(sizes)))
    assert len(ring) == len(sizes) - ring.first
    assert ring.nbytes == sum(sizes[ring.first :])
    if sum(sizes) <= limit - 2 * (limit // CHUNKS) - 2 * 400:
        assert ring.first == 0


def test_small_entries_fall_out_too() -> None:
    ring = Ring(1 << 20)
    for number in range(10_000):
        ring.append((number,), 300)
    assert ring.nbytes <= 1 << 20
    assert ring.first > 0
    assert all(len(chunk.entries) <= CHUNK_ENTRIES for chunk in ring.chunks)


def test_who_walks_keeps_what_falls_out_meanwhile() -> None:
    ring = Ring(10_000)
    for number in range(50):
        ring.append((number,), 100)
    chunks = ring.chunks
    for number in range(50, 500):
        ring.append((number,), 100)
    assert ring.first >= 50
    assert [entry[0] for chunk in chunks for entry in chunk.entries][:50] == list(range(50))


def test_an_entry_that_is_larger_than_the_ring_falls_out_with_all_others() -> None:
    ring = Ring(1000)
    ring.append((0,), 100)
    ring.append((1,), 5000)
    assert (ring.first, ring.next, ring.nbytes) == (2, 2, 0)
