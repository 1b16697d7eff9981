"""Room that is kept for groups: who may use it, and that it is really there."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dataplane.errors import InvalidRequest
from dataplane.values.blocks import BlockTable, Extent, State
from dataplane.values.extents import PAGE, round_up
from dataplane.values.holds import Holds

X = 4 * PAGE
"""The largest draw that is guaranteed, in these tests."""


def store(*segments: int) -> tuple[BlockTable, Holds]:
    """A table with segments that have room for so many pages, and its holds."""
    table = BlockTable()
    for number, pages in enumerate(segments):
        table.add_segment(number, (pages + 1) * PAGE)
    return table, Holds(table, X)


def plain(table: BlockTable, pages: int) -> int | None:
    """A published block that is not drawn on anything; its number, or None without room."""
    extent = table.allocate(pages * PAGE, "plain")
    if extent is None:
        return None
    table.seal(extent.block, "plain")
    table.publish(extent.block)
    return extent.block


def free_pages(table: BlockTable) -> int:
    """What plain allocations find, page by page."""
    found: list[int] = []
    while (block := plain(table, 1)) is not None:
        found.append(block)
    table.kill(found)
    return len(found)


# -- what is held ----------------------------------------------------------------------------


def test_what_is_held_is_whole_pages_and_nobody_elses() -> None:
    table, holds = store(10)
    assert holds.grant(1, 2 * PAGE + 1)
    assert (holds.of(1), holds.held_bytes, len(holds)) == (3 * PAGE, 3 * PAGE, 1)
    assert free_pages(table) == 7
    assert plain(table, 8) is None
    assert holds.draw(3 * PAGE, "a", 1) is not None
    assert (holds.of(1), holds.pooled_bytes) == (0, 0)


def test_a_hold_is_granted_whole_or_not_at_all() -> None:
    table, holds = store(10)
    assert plain(table, 4) is not None
    assert not holds.grant(1, 7 * PAGE)
    assert (len(holds), holds.held_bytes, holds.pooled_bytes) == (0, 0, 0)
    assert free_pages(table) == 6
    assert holds.grant(1, 6 * PAGE)
    assert free_pages(table) == 0
    assert not holds.grant(2, 1)
    assert 2 not in holds


def test_holds_of_one_segment_lie_side_by_side_and_cost_nothing_more() -> None:
    table, holds = store(20)
    for attempt in range(1, 11):
        assert holds.grant(attempt, PAGE)
    assert (holds.pieces, holds.pooled_bytes) == (1, 10 * PAGE)
    assert free_pages(table) == 10


def test_a_hold_of_several_segments_keeps_what_the_largest_draw_may_leave_in_each() -> None:
    table, holds = store(10, 10)
    assert not holds.grant(1, 18 * PAGE)  # 2 + 3 pages are too few: 7 + 7 leave 3 in each
    assert holds.grant(1, 17 * PAGE)
    assert (holds.pieces, holds.pooled_bytes) == (2, 20 * PAGE)
    # The worst order there is: draws that leave as much as can be in each piece.
    sizes = [4, 3, 4, 3, 2, 1]
    assert sum(sizes) == 17
    for pages in sizes:
        assert holds.draw(pages * PAGE, "a", 1) is not None, pages
    assert (holds.of(1), holds.pooled_bytes) == (0, 0)
    assert free_pages(table) == 3


def test_an_attempt_is_held_for_once_and_under_a_token_until_it_is_known() -> None:
    _, holds = store(10)
    assert holds.grant(-1, PAGE)
    with pytest.raises(InvalidRequest, match="attempt -1 already"):
        holds.grant(-1, PAGE)
    holds.bind(-1, 7)
    assert (-1 in holds, holds.of(7)) == (False, PAGE)
    for token, attempt in ((-1, 8), (7, 7)):
        with pytest.raises(InvalidRequest):
            holds.bind(token, attempt)


# -- draws -----------------------------------------------------------------------------------


def test_a_draw_finds_what_is_held_for_its_attempt_and_not_what_is_held_for_others() -> None:
    table, holds = store(10)
    assert holds.grant(1, 4 * PAGE)
    assert holds.grant(2, 3 * PAGE)
    while plain(table, 1) is not None:
        pass
    assert holds.draw(5 * PAGE, "a", 1) is None
    assert holds.draw(PAGE, "a", 3) is None
    assert holds.draw(4 * PAGE, "a", 1) is not None
    assert holds.draw(1, "a", 1) is None
    assert holds.draw(3 * PAGE, "a", 2) is not None
    assert table.used_bytes == 10 * PAGE


def test_a_draw_beyond_what_is_held_uses_that_and_free_room() -> None:
    table, holds = store(10)
    assert holds.grant(1, 3 * PAGE)
    assert holds.grant(2, 2 * PAGE)
    assert holds.draw(9 * PAGE, "a", 1) is None
    assert (holds.of(1), holds.of(2), free_pages(table)) == (3 * PAGE, 2 * PAGE, 5)
    assert holds.draw(8 * PAGE, "a", 1) is not None
    assert (holds.of(1), holds.of(2), free_pages(table)) == (0, 2 * PAGE, 0)


def test_a_write_back_uses_whatever_is_held_and_what_comes_free_makes_up_for_it() -> None:
    table, holds = store(10)
    for attempt in (1, 2, 3):
        assert holds.grant(attempt, 2 * PAGE)
    other = plain(table, 4)
    assert other is not None
    assert holds.draw(5 * PAGE, "trainer", True) is not None
    assert (holds.held_bytes, holds.pooled_bytes, holds.short_bytes) == (
        6 * PAGE, PAGE, 5 * PAGE,
    )  # fmt: skip
    holds.tell(1, 0)
    assert holds.short_bytes == 3 * PAGE
    table.kill([other])
    holds.refill()
    assert (holds.short_bytes, holds.pooled_bytes, free_pages(table)) == (0, 4 * PAGE, 1)


def test_a_write_back_uses_free_room_first() -> None:
    _, holds = store(10)
    assert holds.grant(1, 6 * PAGE)
    assert holds.draw(4 * PAGE, "trainer", True) is not None
    assert (holds.short_bytes, holds.pooled_bytes) == (0, 6 * PAGE)


def test_holds_are_moved_where_a_block_would_not_fit_between_them() -> None:
    table, holds = store(10)
    first = plain(table, 3)
    assert holds.grant(1, 4 * PAGE)  # pages 3 to 6
    assert first is not None
    table.kill([first])
    assert table.largest == 3 * PAGE
    assert holds.allocate(7 * PAGE, "a") is None
    assert (holds.pooled_bytes, table.largest) == (4 * PAGE, 6 * PAGE)
    table, holds = store(10)
    first = plain(table, 3)
    assert holds.grant(1, 4 * PAGE)
    assert first is not None
    table.kill([first])
    assert holds.allocate(6 * PAGE, "a") is not None
    assert holds.draw(4 * PAGE, "a", 1) is not None


def test_what_does_not_move_is_not_robbed() -> None:
    table, holds = store(10)
    first = plain(table, 3)
    assert holds.grant(1, 4 * PAGE)
    assert first is not None
    table.kill([first])
    assert holds.draw(6 * PAGE, "a", 1, move=False) is None
    assert holds.draw(6 * PAGE, "a", 1) is not None
    assert (holds.of(1), holds.pooled_bytes) == (0, 0)


# -- what ends a hold, and a draw ------------------------------------------------------------


def test_what_the_tag_store_tells_lowers_a_hold_and_never_raises_it() -> None:
    table, holds = store(10)
    assert holds.grant(1, 8 * PAGE)
    holds.tell(1, 5 * PAGE + 1)
    assert (holds.of(1), free_pages(table)) == (6 * PAGE, 4)
    holds.tell(1, 8 * PAGE)
    assert (holds.of(1), free_pages(table)) == (6 * PAGE, 4)
    holds.tell(1, 0)
    assert (1 in holds, free_pages(table)) == (False, 10)
    holds.tell(1, PAGE)
    holds.tell(2, 0)
    assert (len(holds), holds.held_bytes) == (0, 0)


@pytest.mark.parametrize("told_first", [True, False])
def test_a_draw_counts_once_whether_the_tag_store_tells_of_it_or_not(told_first: bool) -> None:
    _, holds = store(10)
    assert holds.grant(1, 8 * PAGE)
    extent = holds.draw(3 * PAGE, "a", 1)
    assert extent is not None
    assert holds.of(1) == 5 * PAGE
    if told_first:
        holds.tell(1, 5 * PAGE)
    assert holds.of(1) == 5 * PAGE
    # Through another store the same group has put two pages.
    holds.tell(1, 3 * PAGE)
    assert holds.of(1) == 3 * PAGE
    assert holds.draw(PAGE, "a", 1) is not None
    assert holds.of(1) == 2 * PAGE


def test_a_draw_that_was_given_up_is_held_again() -> None:
    table, holds = store(10)
    assert holds.grant(1, 8 * PAGE)
    extent = holds.draw(3 * PAGE, "a", 1)
    assert extent is not None
    assert table.abort(extent.block, "a")
    holds.ended([extent.block])
    holds.refill()
    assert (holds.of(1), holds.pooled_bytes, free_pages(table)) == (8 * PAGE, 8 * PAGE, 2)


def test_a_draw_that_died_after_the_tag_store_counted_it_is_not() -> None:
    table, holds = store(10)
    assert holds.grant(1, 8 * PAGE)
    extent = holds.draw(3 * PAGE, "a", 1)
    assert extent is not None
    other = holds.draw(2 * PAGE, "b", 1)
    table.seal(extent.block, "a")
    table.publish(extent.block)
    holds.published(extent.block)
    holds.tell(1, 5 * PAGE)
    assert other is not None
    table.kill([extent.block])
    holds.ended([extent.block])
    assert (holds.of(1), free_pages(table)) == (3 * PAGE, 5)


def test_a_put_that_was_repeated_has_its_room_held_again() -> None:
    table, holds = store(10)
    assert holds.grant(1, 8 * PAGE)
    blocks: list[int] = []
    for _ in range(2):
        extent = holds.draw(3 * PAGE, "a", 1)
        assert extent is not None
        table.seal(extent.block, "a")
        table.publish(extent.block)
        holds.published(extent.block)
        blocks.append(extent.block)
    holds.tell(1, 5 * PAGE)
    assert holds.of(1) == 2 * PAGE
    table.kill(blocks[1:])
    holds.ended(blocks[1:])
    holds.refill()
    assert (holds.of(1), holds.pooled_bytes) == (5 * PAGE, 5 * PAGE)


@pytest.mark.parametrize("stopped", [True, False])
def test_what_a_client_drew_that_is_gone_is_held_again(stopped: bool) -> None:
    table, holds = store(10, 10)
    assert holds.grant(1, 8 * PAGE)
    assert holds.draw(3 * PAGE, "a", 1) is not None
    published = holds.draw(PAGE, "a", 1)
    assert published is not None
    table.seal(published.block, "a")
    retired = table.drop_owner("a", trusted_stopped=stopped)
    holds.dropped("a", retired)
    holds.refill()
    assert (holds.of(1), holds.short_bytes, holds.pooled_bytes) == (7 * PAGE, 0, 7 * PAGE)
    # A segment that somebody may still write into holds nothing for anybody.
    assert all(
        (table.extent(block) or published).segment not in retired for _, block in holds._pieces
    )
    assert [table.extent(published.block)] == [published]


# -- any order of everything -----------------------------------------------------------------

SEGMENTS = st.lists(st.integers(3, 24), min_size=1, max_size=4)
PAGES = st.integers(1, 14)
ATTEMPTS = st.integers(1, 4)
WHICH = st.integers(0, 1 << 16)


class Orderly(RuleBasedStateMachine):
    """Groups whose puts are published, plain puts, clears, in any order, against a plain model.

    Whatever happened: a draw of at most X within what is held finds room at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable()
        self.holds = Holds(self.table, X)
        self.segments = 0
        self.outstanding: dict[int, int] = {}  # as the tag store counts, by attempt
        self.drawn: dict[int, tuple[int, int]] = {}  # block under way -> attempt, bytes taken
        self.unseen: dict[int, int] = {}  # attempt -> bytes taken by blocks under way
        self.blocks: dict[int, Extent] = {}  # published
        self.ever = 0

    def left(self, attempt: int) -> int:
        return self.outstanding[attempt] - self.unseen[attempt]

    @initialize(sizes=SEGMENTS)
    def begin(self, sizes: list[int]) -> None:
        for pages in sizes:
            self.add_segment(pages)

    @rule(pages=st.integers(3, 24))
    def add_segment(self, pages: int) -> None:
        if self.segments < 5:
            self.table.add_segment(self.segments, (pages + 1) * PAGE)
            self.segments += 1

    @rule(attempt=ATTEMPTS, pages=PAGES, ragged=st.integers(0, PAGE - 1))
    def grant(self, attempt: int, pages: int, ragged: int) -> None:
        before = self.holds.held_bytes, self.free()
        if attempt in self.outstanding:
            with pytest.raises(InvalidRequest):
                self.holds.grant(attempt, pages * PAGE)
        elif self.holds.grant(attempt, pages * PAGE - ragged):
            self.outstanding[attempt], self.unseen[attempt] = pages * PAGE, 0
        else:
            assert (self.holds.held_bytes, self.free()) >= before
            assert self.table.largest < self.holds.piece_for(pages * PAGE)

    def free(self) -> int:
        return sum(s.free.free_bytes for s in self.table._segments.values() if not s.retired)

    def keep(self, extent: Extent) -> None:
        for other in (*self.blocks.values(), *map(self.table.extent, self.drawn)):
            assert other is not None
            assert (
                extent.segment != other.segment
                or extent.offset >= other.offset + round_up(other.nbytes)
                or other.offset >= extent.offset + round_up(extent.nbytes)
            )

    @rule(attempt=ATTEMPTS, pages=PAGES, ragged=st.integers(0, PAGE - 1))
    def draw(self, attempt: int, pages: int, ragged: int) -> None:
        whole = self.holds.short_bytes == 0
        nbytes = pages * PAGE - ragged
        extent = self.holds.draw(nbytes, "a", attempt)
        if attempt not in self.outstanding:
            if extent is not None:
                self.publish_block(extent)
            return
        left = self.left(attempt)
        if whole and pages * PAGE <= min(left, X):
            assert extent is not None, "a draw within its hold found no room"
        if extent is not None:
            self.keep(extent)
            taken = min(pages * PAGE, left)
            self.drawn[extent.block] = attempt, taken
            self.unseen[attempt] += taken

    def publish_block(self, extent: Extent) -> None:
        self.keep(extent)
        self.table.seal(extent.block, "a")
        self.table.publish(extent.block)
        self.blocks[extent.block] = extent

    @rule(which=WHICH)
    def publish(self, which: int) -> None:
        if not self.drawn:
            return
        block = sorted(self.drawn)[which % len(self.drawn)]
        attempt, taken = self.drawn.pop(block)
        extent = self.table.extent(block)
        assert extent is not None
        self.publish_block(extent)
        self.holds.published(block)
        if attempt in self.outstanding:
            self.unseen[attempt] -= taken
            self.told(attempt, taken)

    def told(self, attempt: int, less: int) -> None:
        self.outstanding[attempt] = max(0, self.outstanding[attempt] - less)
        self.holds.tell(attempt, self.outstanding[attempt])
        if not self.outstanding[attempt]:
            self.forget(attempt)

    def forget(self, attempt: int) -> None:
        del self.outstanding[attempt], self.unseen[attempt]
        for block, (other, _) in list(self.drawn.items()):
            if other == attempt:
                self.drawn[block] = 0, 0

    @rule(attempt=ATTEMPTS, pages=PAGES)
    def put_elsewhere(self, attempt: int, pages: int) -> None:
        """A put of the group through another store, if nothing of it is under way here."""
        if attempt in self.outstanding and not self.unseen[attempt]:
            self.told(attempt, pages * PAGE)

    @rule(attempt=ATTEMPTS)
    def end(self, attempt: int) -> None:
        self.holds.tell(attempt, 0)
        if attempt in self.outstanding:
            self.forget(attempt)

    @rule(pages=PAGES, move=st.booleans())
    def put(self, pages: int, move: bool) -> None:
        allocate = self.holds.allocate if move else self.table.allocate
        extent = allocate(pages * PAGE, "a")
        if extent is not None:
            self.publish_block(extent)

    @rule(which=st.lists(WHICH, min_size=1, max_size=4))
    def clear(self, which: list[int]) -> None:
        blocks = list({sorted(self.blocks)[i % len(self.blocks)] for i in which if self.blocks})
        for block in blocks:
            del self.blocks[block]
        assert self.table.kill(blocks) == []
        self.holds.ended(blocks)
        self.after_freeing()

    def after_freeing(self) -> None:
        if self.holds.short_bytes:
            self.holds.refill()

    @rule()
    def rebind(self) -> None:
        for attempt in list(self.outstanding):
            self.holds.bind(attempt, -attempt)
            self.holds.bind(-attempt, attempt)

    @invariant()
    def what_is_held_is_the_model(self) -> None:
        for attempt in self.outstanding:
            assert self.holds.of(attempt) == self.left(attempt)
        assert self.holds.held_bytes == sum(map(self.left, self.outstanding))
        assert len(self.holds) == len(self.outstanding)

    @invariant()
    def the_pool_is_blocks_of_the_table(self) -> None:
        extents = [self.table.extent(block) for _, block in self.holds._pieces]
        assert [e and e.nbytes for e in extents] == [nbytes for nbytes, _ in self.holds._pieces]
        assert self.holds.pooled_bytes == sum(nbytes for nbytes, _ in self.holds._pieces)
        mine = [*self.blocks.values(), *map(self.table.extent, self.drawn)]
        used = sum(round_up(e.nbytes) for e in mine if e)
        assert self.table.used_bytes == used + self.holds.pooled_bytes

    @invariant()
    def nothing_is_kept_that_is_not_needed(self) -> None:
        assert self.holds._missing() >= 0
        if not self.holds.held_bytes:
            assert self.holds.pooled_bytes == 0

    @invariant()
    def nothing_is_short(self) -> None:
        assert self.holds.short_bytes == 0

    def teardown(self) -> None:
        for attempt in list(self.outstanding):
            self.end(attempt)
        assert self.holds.pieces == 0
        assert not self.holds._drawn
        assert not self.holds._by_owner


class Disorderly(Orderly):
    """The same with what may leave the pool short: only while it is may a draw not find room."""

    @rule(which=WHICH)
    def give_up(self, which: int) -> None:
        if not self.drawn:
            return
        block = sorted(self.drawn)[which % len(self.drawn)]
        attempt, taken = self.drawn.pop(block)
        if attempt in self.outstanding:
            self.unseen[attempt] -= taken
        assert self.table.abort(block, "a")
        self.holds.ended([block])
        self.after_freeing()

    @rule(pages=PAGES)
    def write_back(self, pages: int) -> None:
        whole, held = self.holds.short_bytes == 0, self.holds.held_bytes
        extent = self.holds.draw(pages * PAGE, "a", True)
        if whole and pages * PAGE <= min(held, X):
            assert extent is not None, "a write-back within what is held found no room"
        if extent is not None:
            self.publish_block(extent)

    @rule(stopped=st.booleans())
    def drop(self, stopped: bool) -> None:
        """The client that draws is gone; what it reserved in segments that it may still write to
        is never used again."""
        for block, (attempt, taken) in self.drawn.items():
            assert self.table.state(block) is State.RESERVED
            if attempt in self.outstanding:
                self.unseen[attempt] -= taken
        self.drawn.clear()
        retired = self.table.drop_owner("a", trusted_stopped=stopped)
        self.holds.dropped("a", retired)
        self.after_freeing()
        segments = [(self.table.extent(b) or Extent(0, -1, 0, 0)).segment
                    for _, b in self.holds._pieces]  # fmt: skip
        assert all(not self.table._segments[i].retired for i in segments)

    @invariant()
    def nothing_is_short(self) -> None:
        """What is short is made up for as soon as there is room."""
        if self.holds.short_bytes:
            self.holds.refill()
        if self.holds.short_bytes and self.holds.pooled_bytes < self.holds.held_bytes:
            assert self.free() == 0

    @invariant()
    def nothing_is_kept_that_is_not_needed(self) -> None:
        assert self.holds._missing() >= 0
        if not self.holds.held_bytes:
            assert self.holds.pooled_bytes == 0


TestOrderly = Orderly.TestCase
TestOrderly.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestDisorderly = Disorderly.TestCase
TestDisorderly.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
