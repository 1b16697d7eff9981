"""The free list of one segment: pages, coalescing, best fit; and the tree over segments."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.errors import InternalError
from dataplane.values.extents import PAGE, FirstFit, FreeList, round_up


def test_the_documented_example() -> None:
    free = FreeList(20480)
    assert free.allocate(5000) == 4096
    assert free.allocate(1) == 12288
    free.free(4096, 5000)
    assert free.largest == 8192


@pytest.mark.parametrize(
    ("nbytes", "rounded"), [(1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (0, 0)]
)
def test_extents_take_whole_pages(nbytes: int, rounded: int) -> None:
    assert round_up(nbytes) == rounded


def test_the_header_page_is_never_handed_out() -> None:
    free = FreeList(3 * PAGE)
    assert [free.allocate(1), free.allocate(1), free.allocate(1)] == [PAGE, 2 * PAGE, None]


def test_a_tail_shorter_than_a_page_is_not_used() -> None:
    assert FreeList(3 * PAGE + 100).free_bytes == 2 * PAGE


def test_neighbours_coalesce_in_every_order() -> None:
    for order in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]):
        free = FreeList(4 * PAGE)
        offsets = [free.allocate(PAGE) for _ in range(3)]
        for i in order:
            offset = offsets[i]
            assert offset is not None
            free.free(offset, PAGE)
        assert (free.runs, free.largest, free.is_empty) == (1, 3 * PAGE, True)


def test_the_smallest_run_that_fits_is_taken() -> None:
    free = FreeList(100 * PAGE)
    offsets = [free.allocate(n * PAGE) for n in (5, 1, 3, 1, 9, 1)]
    assert None not in offsets
    for i, pages in ((0, 5), (2, 3), (4, 9)):
        free.free(offsets[i] or 0, pages * PAGE)
    assert free.allocate(3 * PAGE) == offsets[2]
    assert free.allocate(4 * PAGE) == offsets[0]
    assert free.allocate(9 * PAGE) == offsets[4]


def test_of_equal_runs_the_one_freed_last_is_taken() -> None:
    free = FreeList(100 * PAGE)
    offsets = [free.allocate(PAGE) or 0 for _ in range(20)]
    for i in (2, 8, 5):
        free.free(offsets[i], PAGE)
    assert free.allocate(PAGE) == offsets[5]


def test_memory_that_was_written_is_reused_before_memory_that_never_was() -> None:
    free = FreeList(1000 * PAGE)
    first = free.allocate(10 * PAGE)
    for _ in range(100):
        free.free(first or 0, 10 * PAGE)
        assert free.allocate(10 * PAGE) == first


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (PAGE, 2 * PAGE),  # larger than it is
        (PAGE, 1),  # smaller than it is (it has 3 pages)
        (2 * PAGE, PAGE),  # its inside
        (PAGE + 1, 3 * PAGE),  # not a page
        (0, PAGE),  # the header
        (50 * PAGE, PAGE),  # free
        (1 << 40, PAGE),  # outside
        (-PAGE, PAGE),
        (PAGE, 0),
        (PAGE, -PAGE),
    ],
)
def test_freeing_what_is_not_in_use_raises_and_changes_nothing(offset: int, nbytes: int) -> None:
    free = FreeList(100 * PAGE)
    assert free.allocate(3 * PAGE) == PAGE
    with pytest.raises(InternalError):
        free.free(offset, nbytes)
    assert (free.used_bytes, free.runs, free.largest) == (3 * PAGE, 1, 96 * PAGE)


def test_freeing_twice_raises() -> None:
    free = FreeList(10 * PAGE)
    offset = free.allocate(PAGE) or 0
    free.free(offset, PAGE)
    with pytest.raises(InternalError, match="freed twice"):
        free.free(offset, PAGE)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_extent_without_bytes_is_refused(nbytes: int) -> None:
    with pytest.raises(InternalError):
        FreeList(10 * PAGE).allocate(nbytes)


@pytest.mark.parametrize(("size", "start"), [(4096, 4096), (0, 4096), (8192, 100), (8192, -4096)])
def test_a_segment_without_room_is_refused(size: int, start: int) -> None:
    with pytest.raises(InternalError):
        FreeList(size, start)


def test_few_sizes_are_kept_however_many_extents_there_are() -> None:
    """What makes the sorted list of sizes cheap: n pages hold at most sqrt(2n) sizes."""
    rng = random.Random(7)
    free = FreeList(1 << 30)
    extents: list[tuple[int, int]] = []
    while True:
        nbytes = rng.randint(1, 100_000)
        offset = free.allocate(nbytes)
        if offset is None:
            break
        extents.append((offset, nbytes))
    rng.shuffle(extents)
    for offset, nbytes in extents[::2]:
        free.free(offset, nbytes)
    assert free.runs > 4000
    assert len(free._sizes) < 200
    for offset, nbytes in extents[1::2]:
        free.free(offset, nbytes)
    assert (free.runs, free.used_bytes) == (1, 0)


@settings(max_examples=100, deadline=None)
@given(
    pages=st.integers(1, 40),
    steps=st.lists(
        st.tuples(st.booleans(), st.integers(1, 10 * PAGE), st.integers(0, 99)), max_size=80
    ),
)
def test_it_agrees_with_a_map_of_pages(pages: int, steps: list[tuple[bool, int, int]]) -> None:
    """The model is one letter per page; `largest`, `runs` and the sums are read off it."""
    free = FreeList((pages + 1) * PAGE)
    taken = [False] * pages
    live: list[tuple[int, int]] = []

    def free_runs() -> list[int]:
        text = "".join("x" if t else "." for t in taken)
        return [len(run) for run in text.split("x") if run]

    for is_allocation, nbytes, choice in steps:
        if is_allocation:
            wanted = round_up(nbytes) // PAGE
            offset = free.allocate(nbytes)
            fitting = [run for run in free_runs() if run >= wanted]
            assert (offset is None) == (not fitting)
            if offset is None:
                continue
            first = offset // PAGE - 1
            assert offset % PAGE == 0
            assert not any(taken[first : first + wanted])
            assert first + wanted <= pages
            taken[first : first + wanted] = [True] * wanted
            live.append((offset, nbytes))
        elif live:
            offset, nbytes = live.pop(choice % len(live))
            free.free(offset, nbytes)
            first, count = offset // PAGE - 1, round_up(nbytes) // PAGE
            taken[first : first + count] = [False] * count
        runs = free_runs()
        assert free.runs == len(runs)
        assert free.largest == max(runs, default=0) * PAGE
        assert free.free_bytes == sum(runs) * PAGE
        assert free.used_bytes == (pages - sum(runs)) * PAGE
        assert free.is_empty == (not live)


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=60))
def test_first_fit_finds_the_lowest_slot(steps: list[tuple[int, int]]) -> None:
    fit = FirstFit()
    numbers = [0] * 41
    for slot, number in steps:
        fit.set(slot, number)
        numbers[slot] = number
        for asked in range(1, 11):
            expected = next((i for i, n in enumerate(numbers) if n >= asked), None)
            assert fit.find(asked) == expected
