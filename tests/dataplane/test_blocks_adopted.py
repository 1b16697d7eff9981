"""Blocks of an earlier incarnation: taken over whole, never overlapping, never given out again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dataplane.errors import InternalError
from dataplane.values.blocks import BlockTable, Extent, State
from dataplane.values.extents import PAGE, FreeList, round_up
from dataplane.values.incarnation import Ids, ids_of_new_incarnation


def adopting(pages: int = 16) -> BlockTable:
    """A table that takes over a segment 1 with room for so many pages."""
    table = BlockTable(first_block=1000)
    table.adopt_segment(1, (pages + 1) * PAGE)
    return table


# -- one segment's extents


def test_a_claimed_extent_is_in_use_and_comes_back_like_any_other() -> None:
    free = FreeList(11 * PAGE)
    assert free.claim(3 * PAGE, PAGE + 1)
    assert (free.used_bytes, free.runs, free.largest) == (2 * PAGE, 2, 6 * PAGE)
    assert free.claim(PAGE, 2 * PAGE)
    assert (free.runs, free.largest) == (1, 6 * PAGE)
    free.free(3 * PAGE, PAGE + 1)
    free.free(PAGE, 2 * PAGE)
    assert (free.is_empty, free.runs, free.largest) == (True, 1, 10 * PAGE)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, PAGE), (PAGE + 1, PAGE), (-PAGE, PAGE), (PAGE, 0), (PAGE, -1), (PAGE, 11 * PAGE),
        (11 * PAGE, 1), (10 * PAGE, PAGE + 1), (4 * PAGE, 2 * PAGE), (5 * PAGE, 1), (1 << 62, 1),
    ],
)  # fmt: skip
def test_what_is_not_free_whole_is_not_claimed(offset: int, nbytes: int) -> None:
    free = FreeList(11 * PAGE)
    assert free.claim(5 * PAGE, 2 * PAGE)
    before = (free.used_bytes, free.runs, free.largest)
    assert not free.claim(offset, nbytes)
    assert (free.used_bytes, free.runs, free.largest) == before


@given(
    st.lists(st.tuples(st.integers(-2, 20), st.integers(-PAGE, 6 * PAGE)), min_size=1, max_size=30)
)
@settings(max_examples=200, deadline=None)
def test_claims_in_any_order_never_overlap_and_leave_a_whole_list(
    wanted: list[tuple[int, int]],
) -> None:
    free = FreeList(17 * PAGE)
    pages: dict[int, int] = {}  # page -> which extent has it
    got: list[tuple[int, int]] = []
    for number, (start, nbytes) in enumerate(wanted):
        mine = range(start, start + -(-nbytes // PAGE))
        fits = len(mine) > 0 and all(1 <= p < 17 and p not in pages for p in mine)
        assert free.claim(start * PAGE, nbytes) == fits
        if fits:
            pages.update(dict.fromkeys(mine, number))
            got.append((start * PAGE, nbytes))
    assert free.used_bytes == len(pages) * PAGE
    for offset, nbytes in got:
        free.free(offset, nbytes)
    assert (free.is_empty, free.runs) == (True, 1)


# -- a table that takes over


def test_adopted_blocks_are_published_and_live_until_they_are_killed() -> None:
    table = adopting()
    extents = [Extent(7, 1, PAGE, 100), Extent(9, 1, 4 * PAGE, 2 * PAGE)]
    assert table.adopt(extents) == []
    table.adopted(1)
    assert [table.state(7), table.state(9)] == [State.PUBLISHED] * 2
    assert [table.extent(7), table.extent(9)] == extents
    assert (table.used_bytes, len(table), table.segment_bytes) == (3 * PAGE, 2, 17 * PAGE)
    pin = table.pin([7, 9], "reader")
    assert table.kill([7, 9]) == []
    assert table.segments_to_unlink() == []
    assert table.unpin(pin.handle)
    assert (table.used_bytes, table.segments_to_unlink()) == (0, [1])


def test_nothing_is_allocated_from_a_segment_that_was_taken_over() -> None:
    table = adopting()
    assert table.allocate(1, "w") is None
    table.adopt([Extent(7, 1, PAGE, 100)])
    table.adopted(1)
    assert (table.allocate(1, "w"), table.largest) == (None, 0)
    table.kill([7])
    assert (table.allocate(1, "w"), table.empty_segments()) == (None, [])


def test_a_segment_stays_until_all_that_lives_in_it_was_adopted() -> None:
    """What is adopted first may be killed before the rest comes."""
    table = adopting()
    assert table.segments_to_unlink() == []
    table.adopt([Extent(7, 1, PAGE, 100)])
    table.kill([7])
    assert table.segments_to_unlink() == []
    assert table.adopt([Extent(8, 1, PAGE, 100)]) == []
    table.adopted(1)
    table.kill([8])
    assert table.segments_to_unlink() == [1]


def test_a_block_that_cannot_be_there_is_named_and_the_others_are_adopted() -> None:
    table = adopting(pages=8)
    good = [Extent(10, 1, PAGE, 2 * PAGE), Extent(20, 1, 8 * PAGE, PAGE)]
    bad = [
        Extent(11, 1, 2 * PAGE, PAGE),  # over block 10
        Extent(12, 1, 0, PAGE),  # in the header
        Extent(13, 1, 8 * PAGE, PAGE + 1),  # beyond the end
        Extent(14, 1, 5 * PAGE + 8, 1),  # between pages
        Extent(15, 1, 5 * PAGE, 0),
        Extent(10, 1, 5 * PAGE, PAGE),  # known here already
    ]
    assert table.adopt([good[0], *bad, good[1]]) == [11, 12, 13, 14, 15, 10]
    assert [table.extent(b) for b in (10, 20)] == good
    assert table.used_bytes == 3 * PAGE


def test_blocks_are_adopted_only_into_segments_that_are_taken_over() -> None:
    table = BlockTable()
    table.add_segment(1, 8 * PAGE)
    with pytest.raises(InternalError, match="segment 1 is not being adopted"):
        table.adopt([Extent(7, 1, PAGE, 1)])
    with pytest.raises(InternalError, match="segment 2"):
        table.adopt([Extent(7, 2, PAGE, 1)])
    assert (len(table), table.used_bytes) == (0, 0)


def test_new_ids_are_above_adopted_ones() -> None:
    table = BlockTable()
    table.adopt_segment(1, 8 * PAGE)
    table.adopt([Extent(700, 1, PAGE, 1), Extent(9, 1, 2 * PAGE, 1)])
    table.add_segment(2, 8 * PAGE)
    extent = table.allocate(1, "w")
    assert extent is not None
    assert (extent.block, table.next_block) == (701, 702)
    table.skip_to(5)
    assert table.next_block == 702


def test_what_was_published_before_a_round_is_told_from_what_came_later() -> None:
    table = BlockTable()
    table.add_segment(1, 8 * PAGE)
    blocks: list[int] = []
    for _ in range(4):
        extent = table.allocate(1, "w")
        assert extent is not None
        blocks.append(extent.block)
    old, late, sealed, _reserved = blocks
    for block in (old, late, sealed):
        table.seal(block, "w")
    table.publish(old)
    number = table.next_round()
    table.publish(late)
    table.publish(old)  # said again: that is not when it was published
    assert sorted(table.blocks_in(1)) == blocks
    assert table.blocks_in(2) == []
    assert table.published_before([*blocks, 99], number) == [old]
    assert table.published_before(blocks, table.next_round()) == [old, late]


# -- which ids an incarnation goes on from

NOW = 1_800_000_000.0


def test_ids_of_a_new_incarnation_are_above_all_that_an_earlier_one_can_have_given_out() -> None:
    """Also where nothing says what it gave out, and when the clock was set back."""
    rate = 1_000_000  # more blocks a second than any store makes
    first = ids_of_new_incarnation(Ids(1, 1), NOW)
    assert first.segment == 1
    after_a_day = ids_of_new_incarnation(Ids(1, 1), NOW + 86_400)
    assert after_a_day.block > first.block + rate * 86_400
    at_once = ids_of_new_incarnation(Ids(5, first.block + 77), NOW + 0.001)
    assert at_once.segment == 5
    assert at_once.block > first.block + 77
    set_back = ids_of_new_incarnation(Ids(9, first.block + 77), NOW - 1e6)
    assert set_back.block > first.block + 77 + rate * 3600
    assert ids_of_new_incarnation(Ids(1, 1), 4_294_967_295.0).block < 1 << 63
    assert ids_of_new_incarnation(Ids(1, 1), 0.0).block == 1


# -- any order of everything, over incarnations

SIZES = st.sampled_from([1, PAGE, PAGE + 1, 3 * PAGE])


class IncarnationsMachine(RuleBasedStateMachine):
    """A store that is killed again and again; `live` is what the tag store has."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.table = BlockTable(first_block=ids_of_new_incarnation(Ids(1, 1), self.now).block)
        self.next_segment = 1
        self.given: set[int] = set()  # every block id ever handed out
        self.live: dict[int, Extent] = {}
        self.sealed: dict[int, Extent] = {}
        self.sizes: dict[int, int] = {}  # files that are there
        self.mine: set[int] = set()  # segments of this incarnation
        self.pins: dict[int, list[int]] = {}

    @rule(pages=st.integers(2, 12))
    def add_segment(self, pages: int) -> None:
        self.table.add_segment(self.next_segment, pages * PAGE)
        self.sizes[self.next_segment] = pages * PAGE
        self.mine.add(self.next_segment)
        self.next_segment += 1

    @rule(nbytes=SIZES, fate=st.sampled_from(["publish", "seal", "reserve", "abort"]))
    def put(self, nbytes: int, fate: str) -> None:
        extent = self.table.allocate(nbytes, "w")
        if extent is None:
            return
        assert extent.block not in self.given
        assert extent.block < 1 << 63
        assert extent.segment in self.mine
        self.given.add(extent.block)
        if fate == "abort":
            self.table.abort(extent.block, "w")
        elif fate != "reserve":
            self.table.seal(extent.block, "w")
            self.sealed[extent.block] = extent
        if fate == "publish":
            self.published(extent.block)

    def published(self, block: int) -> None:
        self.live[block] = self.sealed.pop(block)
        self.table.publish(block)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.sealed:
            self.published(data.draw(st.sampled_from(sorted(self.sealed))))

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        if self.live:
            block = data.draw(st.sampled_from(sorted(self.live)))
            del self.live[block]
            assert self.table.kill([block]) == []
            self.unlink()

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        if self.live:
            block = data.draw(st.sampled_from(sorted(self.live)))
            self.pins[self.table.pin([block], "r").handle] = [block]

    @rule()
    def unpin_all(self) -> None:
        for handle in self.pins:
            self.table.unpin(handle)
        self.pins.clear()
        self.unlink()

    @rule(
        seconds=st.sampled_from([0.0, 0.001, 1.0, 1e5, -10.0, -1e6]),
        dies=st.integers(0, 3),
        order=st.randoms(use_true_random=False),
    )
    def kill_and_start(self, seconds: float, dies: int, order: random.Random) -> None:
        """Some rows are cleared and some publications answered while the store is away."""
        self.now += seconds
        for block in sorted(self.live)[:dies]:
            del self.live[block]
        for block in sorted(self.sealed)[:dies]:
            self.live[block] = self.sealed[block]
        self.sealed.clear()
        ids = ids_of_new_incarnation(Ids(self.next_segment, self.table.next_block), self.now)
        self.table = BlockTable(first_block=ids.block)
        self.mine.clear()
        self.pins.clear()
        extents = list(self.live.values())
        order.shuffle(extents)
        for segment in list(self.sizes):
            mine = [e for e in extents if e.segment == segment]
            if not mine:
                del self.sizes[segment]
                continue
            self.table.adopt_segment(segment, self.sizes[segment])
            assert self.table.adopt(mine) == []
            self.table.adopted(segment)

    def unlink(self) -> None:
        for segment in self.table.segments_to_unlink():
            assert all(e.segment != segment for e in self.live.values())
            self.table.remove_segment(segment)
            del self.sizes[segment]

    @invariant()
    def live_blocks_are_there_and_never_overlap(self) -> None:
        pages: set[tuple[int, int]] = set()
        taken = 0
        for block, extent in self.live.items():
            assert self.table.extent(block) == extent
            assert self.table.state(block) is State.PUBLISHED
            assert extent.segment in self.sizes
            first = extent.offset // PAGE
            pages |= {(extent.segment, p) for p in range(first, first + -(-extent.nbytes // PAGE))}
            taken += round_up(extent.nbytes)
        assert len(pages) * PAGE == taken

    @invariant()
    def every_segment_that_is_not_mine_has_something_in_it(self) -> None:
        assert self.table.segments_to_unlink() == []
        assert self.table.segment_bytes == sum(self.sizes.values())

    def teardown(self) -> None:
        self.table.drop_owner("w", trusted_stopped=True)
        for block in self.sealed:
            self.table.abort(block)
        self.table.kill(list(self.live))
        self.live.clear()
        self.unpin_all()
        assert (len(self.table), self.table.used_bytes) == (0, 0)
        assert set(self.sizes) == self.mine


TestOverIncarnations = IncarnationsMachine.TestCase
TestOverIncarnations.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
