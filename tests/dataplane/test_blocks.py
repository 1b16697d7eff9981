"""The life of blocks: reservations, publications, pins, and what is never handed out again."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from dataplane.errors import InternalError, InvalidRequest
from dataplane.values.blocks import BlockTable, Extent, State, segment_size_for
from dataplane.values.extents import PAGE, round_up

MIB = 1 << 20


@pytest.fixture
def table() -> BlockTable:
    table = BlockTable()
    table.add_segment(0, 16 * PAGE)
    return table


def published(table: BlockTable, nbytes: int = PAGE, owner: str = "writer") -> int:
    extent = table.allocate(nbytes, owner)
    assert extent is not None
    table.seal(extent.block, owner)
    assert table.publish(extent.block)
    return extent.block


def reserved(table: BlockTable, nbytes: int = PAGE, owner: str = "writer") -> int:
    extent = table.allocate(nbytes, owner)
    assert extent is not None
    return extent.block


# -- the life of a block


def test_a_block_lives_from_reservation_to_free(table: BlockTable) -> None:
    extent = table.allocate(5000, "writer")
    assert extent == Extent(block=1, segment=0, offset=PAGE, nbytes=5000)
    assert table.state(1) is State.RESERVED
    assert table.seal(1, "writer") == extent
    assert table.state(1) is State.PUBLISHING
    assert table.publish(1)
    assert (table.state(1), table.used_bytes) == (State.PUBLISHED, 8192)
    assert table.kill([1]) == []
    assert (table.state(1), table.extent(1), table.used_bytes) == (None, None, 0)


def test_block_ids_start_where_told_and_are_never_reused(table: BlockTable) -> None:
    later = BlockTable(first_block=1000)
    later.add_segment(0, 16 * PAGE)
    ids: list[int] = []
    for _ in range(5):
        ids.append(reserved(later))
        later.abort(ids[-1])
    assert ids == [1000, 1001, 1002, 1003, 1004]


def test_a_full_table_answers_none_until_a_segment_is_added(table: BlockTable) -> None:
    assert table.allocate(16 * PAGE, "w") is None
    assert table.allocate(15 * PAGE, "w") is not None
    assert table.allocate(1, "w") is None
    table.add_segment(1, 16 * PAGE)
    extent = table.allocate(1, "w")
    assert extent is not None
    assert extent.segment == 1


def test_publishing_twice_is_harmless_and_before_sealing_is_our_bug(table: BlockTable) -> None:
    block = reserved(table)
    with pytest.raises(InternalError, match="before it was sealed"):
        table.publish(block)
    table.seal(block, "writer")
    assert table.publish(block)
    assert table.publish(block)


def test_only_the_owner_of_a_reservation_seals_it_and_once(table: BlockTable) -> None:
    block = reserved(table)
    with pytest.raises(InvalidRequest, match="not reserved by this client"):
        table.seal(block, "somebody else")
    with pytest.raises(InvalidRequest):
        table.seal(999, "writer")
    table.seal(block, "writer")
    with pytest.raises(InvalidRequest):
        table.seal(block, "writer")


def test_a_client_gives_back_only_its_own_reservations(table: BlockTable) -> None:
    block = reserved(table)
    assert not table.abort(block, "somebody else")
    assert table.abort(block, "writer")
    assert not table.abort(block, "writer")
    sealed = reserved(table)
    table.seal(sealed, "writer")
    # The tag store may be publishing it: it is not the client's any more.
    assert not table.abort(sealed, "writer")
    assert table.abort(sealed)
    assert table.used_bytes == 0


def test_nothing_but_a_kill_ends_a_published_block(table: BlockTable) -> None:
    block = published(table)
    with pytest.raises(InternalError, match="only the tag store"):
        table.abort(block)
    table.drop_owner("writer", trusted_stopped=True)
    table.drop_owner("writer", trusted_stopped=False)
    assert table.state(block) is State.PUBLISHED


def test_a_kill_that_overtakes_the_news_of_the_publication_wins(table: BlockTable) -> None:
    block = reserved(table)
    table.seal(block, "writer")
    assert table.kill([block]) == []
    assert not table.publish(block)
    assert table.used_bytes == 0


def test_kill_is_idempotent_and_names_what_it_does_not_know(table: BlockTable) -> None:
    block, open_block = published(table), reserved(table)
    assert table.kill([block, 77, open_block]) == [77, open_block]
    assert table.kill([block]) == [block]
    assert table.state(open_block) is State.RESERVED


# -- readers


def test_a_pinned_block_keeps_its_bytes_until_the_last_pin_goes() -> None:
    table = BlockTable()
    table.add_segment(0, 2 * PAGE)
    block = published(table)
    first, second = table.pin([block], "a"), table.pin([block], "b")
    table.kill([block])
    assert (table.state(block), table.used_bytes) == (State.DEAD, PAGE)
    assert table.unpin(first.handle)
    assert table.allocate(1, "w") is None
    assert table.kill([block]) == []  # repeated while it is pinned: known, and nothing happens
    assert table.unpin(second.handle)
    assert (table.state(block), table.used_bytes) == (None, 0)
    assert table.allocate(1, "w") is not None


def test_pins_are_all_or_nothing(table: BlockTable) -> None:
    there, dead = published(table), published(table)
    holder = table.pin([dead], "a")
    table.kill([dead])
    unpublished = reserved(table)
    assert table.pin([there, dead, 99, unpublished], "b") == (0, [dead, 99, unpublished])
    table.kill([there])
    assert table.state(there) is None  # so nothing had been pinned
    assert table.unpin(holder.handle)


def test_one_owner_may_pin_a_block_several_times(table: BlockTable) -> None:
    block = published(table)
    first, second = table.pin([block, block], "a"), table.pin([block], "a")
    assert first.handle != second.handle
    table.kill([block])
    table.unpin(first.handle)
    assert table.state(block) is State.DEAD
    table.unpin(second.handle)
    assert table.state(block) is None


def test_a_block_can_be_pinned_before_this_store_hears_that_it_is_published(
    table: BlockTable,
) -> None:
    block = reserved(table)
    table.seal(block, "writer")
    handle, gone = table.pin([block], "reader")
    assert not gone
    assert table.abort(block)
    assert table.used_bytes == PAGE
    table.unpin(handle)
    assert table.used_bytes == 0


def test_unknown_and_foreign_handles_are_ignored(table: BlockTable) -> None:
    handle, _ = table.pin([published(table)], "a")
    assert not table.unpin(12345)
    assert not table.unpin(handle, "b")
    assert table.unpin(handle, "a")
    assert not table.unpin(handle, "a")


def test_handles_are_never_reused(table: BlockTable) -> None:
    block = published(table)
    handles: list[int] = []
    for _ in range(3):
        handles.append(table.pin([block], "a").handle)
        table.unpin(handles[-1])
    assert handles == [1, 2, 3]


def test_a_pin_of_nothing_is_a_handle_like_any_other(table: BlockTable) -> None:
    handle, gone = table.pin([], "a")
    assert (handle, gone) == (1, [])
    assert table.unpin(handle)


# -- owners that go


def test_when_the_kernel_closed_the_connection_everything_of_the_owner_is_reusable() -> None:
    table = BlockTable()
    table.add_segment(0, 4 * PAGE)
    kept, dead = published(table), published(table)
    reserved(table, owner="crashed")
    table.pin([kept, dead], "crashed")
    table.kill([dead])
    assert table.drop_owner("crashed", trusted_stopped=True) == []
    assert table.used_bytes == PAGE
    assert table.allocate(2 * PAGE, "w") is not None
    assert table.segments_to_unlink() == []
    assert table.drop_owner("crashed", trusted_stopped=True) == []


def test_a_sealed_block_outlives_its_writer(table: BlockTable) -> None:
    block = reserved(table)
    table.seal(block, "writer")
    table.drop_owner("writer", trusted_stopped=True)
    assert table.publish(block)


def test_forced_revocation_retires_the_segment_of_a_reservation() -> None:
    table = BlockTable()
    table.add_segment(0, 4 * PAGE)
    table.add_segment(1, 4 * PAGE)
    lives = published(table)
    reserved(table, owner="stuck")
    assert table.drop_owner("stuck", trusted_stopped=False) == [0]
    # The stuck client may write there still: nothing new comes into this segment.
    extent = table.allocate(1, "w")
    assert extent is not None
    assert extent.segment == 1
    # What lives there stays readable, and the segment goes with it.
    assert table.segments_to_unlink() == []
    handle, _ = table.pin([lives], "r")
    table.kill([lives])
    assert table.segments_to_unlink() == []
    table.unpin(handle)
    assert table.segments_to_unlink() == [0]
    table.remove_segment(0)
    assert table.segment_bytes == 4 * PAGE


def test_forced_revocation_retires_the_segment_of_a_pin_too() -> None:
    """A reader that is cut off may still read: other bytes there would be garbage to it."""
    table = BlockTable()
    table.add_segment(0, 4 * PAGE)
    block = published(table)
    table.pin([block], "slow reader")
    assert table.drop_owner("slow reader", trusted_stopped=False) == [0]
    table.kill([block])
    assert table.allocate(1, "w") is None
    assert table.segments_to_unlink() == [0]


def test_revoking_twice_names_a_segment_once(table: BlockTable) -> None:
    reserved(table, owner="a")
    reserved(table, owner="b")
    assert table.drop_owner("a", trusted_stopped=False) == [0]
    assert table.drop_owner("b", trusted_stopped=False) == []
    assert table.segments_to_unlink() == [0]


# -- segments


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [
        (1, 64 * MIB),
        (64 * MIB - PAGE, 64 * MIB),
        (64 * MIB - PAGE + 1, 64 * MIB + PAGE),
        (300 * MIB, 300 * MIB + PAGE),
    ],
)
def test_a_large_block_gets_a_segment_of_its_own_size(nbytes: int, size: int) -> None:
    assert segment_size_for(nbytes, 64 * MIB) == size
    table = BlockTable()
    table.add_segment(0, size)
    assert table.allocate(nbytes, "w") is not None


def test_a_large_segment_is_reused_for_small_blocks() -> None:
    table = BlockTable()
    table.add_segment(0, segment_size_for(100 * MIB, MIB))
    table.kill([published(table, 100 * MIB)])
    assert {table.extent(published(table)).segment for _ in range(10)} == {0}  # type: ignore[union-attr]


def test_early_segments_fill_first_so_that_late_ones_can_go() -> None:
    table = BlockTable()
    for segment in range(3):
        table.add_segment(segment, 3 * PAGE)
    blocks = [published(table) for _ in range(6)]
    table.kill([blocks[0], blocks[2], blocks[4]])
    assert [table.extent(published(table)).segment for _ in range(2)] == [0, 1]  # type: ignore[union-attr]
    table.kill([blocks[5]])
    assert table.empty_segments() == [2]
    table.remove_segment(2)
    assert table.empty_segments() == []


def test_a_segment_with_blocks_cannot_be_removed(table: BlockTable) -> None:
    block = published(table)
    with pytest.raises(InternalError, match="with blocks in it"):
        table.remove_segment(0)
    table.kill([block])
    table.remove_segment(0)
    assert table.allocate(1, "w") is None
    with pytest.raises(InternalError):
        table.remove_segment(0)


def test_segment_ids_are_never_reused(table: BlockTable) -> None:
    with pytest.raises(InternalError, match="used before"):
        table.add_segment(0, 16 * PAGE)
    table.remove_segment(0)
    with pytest.raises(InternalError, match="used before"):
        table.add_segment(0, 16 * PAGE)


def test_counts_say_how_many_blocks_are_in_each_state(table: BlockTable) -> None:
    reserved(table)
    table.seal(reserved(table), "writer")
    published(table)
    dying = published(table)
    table.pin([dying], "r")
    table.kill([dying])
    assert table.counts() == {
        "reserved": 1, "publishing": 1, "published": 1, "dead": 1, "pins": 1,
    }  # fmt: skip
    assert len(table) == 4


# -- any order of everything

OWNERS = ("a", "b", "c")
SIZES = st.sampled_from([1, 100, PAGE, PAGE + 1, 3 * PAGE, 10 * PAGE])


class BlocksMachine(RuleBasedStateMachine):
    """Any interleaving, against a plain model of who may still touch which bytes.

    `frozen` are extents that a revoked client may still touch: never to be handed out again.
    """

    blocks = Bundle("blocks")
    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(first_block=100)
        self.next_segment = 0
        self.segments: set[int] = set()
        self.extents: dict[int, Extent] = {}  # every block ever made
        self.state: dict[int, State] = {}  # blocks that are there
        self.owner: dict[int, str] = {}
        self.pins: dict[int, tuple[str, frozenset[int]]] = {}
        self.frozen: list[Extent] = []

    def ends(self, block: int) -> None:
        """As the table should: gone at once, or dead until its last pin goes."""
        if any(block in pinned for _, pinned in self.pins.values()):
            self.state[block] = State.DEAD
        else:
            del self.state[block]

    def unpins(self, handle: int) -> None:
        _, pinned = self.pins.pop(handle)
        for block in pinned:
            if self.state[block] is State.DEAD:
                self.ends(block)

    @rule(pages=st.integers(2, 24))
    def add_segment(self, pages: int) -> None:
        self.table.add_segment(self.next_segment, pages * PAGE)
        self.segments.add(self.next_segment)
        self.next_segment += 1

    @rule(target=blocks, nbytes=SIZES, owner=st.sampled_from(OWNERS))
    def allocate(self, nbytes: int, owner: str):
        extent = self.table.allocate(nbytes, owner)
        if extent is None:
            return multiple()
        assert extent.block not in self.extents
        for block in self.state:
            assert not overlap(extent, self.extents[block])
        for other in self.frozen:
            assert not overlap(extent, other)
        self.extents[extent.block] = extent
        self.state[extent.block] = State.RESERVED
        self.owner[extent.block] = owner
        return extent.block

    @rule(block=blocks, owner=st.sampled_from(OWNERS))
    def seal(self, block: int, owner: str) -> None:
        if self.state.get(block) is State.RESERVED and self.owner[block] == owner:
            assert self.table.seal(block, owner) == self.extents[block]
            self.state[block] = State.PUBLISHING
        else:
            with pytest.raises(InvalidRequest):
                self.table.seal(block, owner)

    @rule(block=blocks)
    def publish(self, block: int) -> None:
        state = self.state.get(block)
        if state is State.RESERVED:
            with pytest.raises(InternalError):
                self.table.publish(block)
        else:
            assert self.table.publish(block) == (state not in (None, State.DEAD))
            if state is State.PUBLISHING:
                self.state[block] = State.PUBLISHED

    @rule(block=blocks)
    def abort(self, block: int) -> None:
        state = self.state.get(block)
        if state is State.PUBLISHED:
            with pytest.raises(InternalError):
                self.table.abort(block)
        elif state in (State.RESERVED, State.PUBLISHING):
            assert self.table.abort(block)
            self.ends(block)
        else:
            assert not self.table.abort(block)

    @rule(some=st.lists(blocks, max_size=4))
    def kill(self, some: list[int]) -> None:
        expected = []
        for block in some:
            if self.state.get(block) in (None, State.RESERVED):
                expected.append(block)
            elif self.state[block] is not State.DEAD:
                self.ends(block)
        assert self.table.kill(some) == expected

    @rule(target=handles, some=st.lists(blocks, max_size=4), owner=st.sampled_from(OWNERS))
    def pin(self, some: list[int], owner: str):
        good = (State.PUBLISHING, State.PUBLISHED)
        gone = [b for b in dict.fromkeys(some) if self.state.get(b) not in good]
        handle, reported = self.table.pin(some, owner)
        assert reported == gone
        if gone:
            assert handle == 0
            return multiple()
        assert handle not in self.pins
        self.pins[handle] = (owner, frozenset(some))
        return handle

    @rule(handle=handles)
    def unpin(self, handle: int) -> None:
        assert self.table.unpin(handle) == (handle in self.pins)
        if handle in self.pins:
            self.unpins(handle)

    @rule(owner=st.sampled_from(OWNERS), trusted_stopped=st.booleans())
    def drop_owner(self, owner: str, trusted_stopped: bool) -> None:
        reservations = [
            b for b, s in self.state.items() if s is State.RESERVED and self.owner[b] == owner
        ]
        held = [h for h, (who, _) in self.pins.items() if who == owner]
        if not trusted_stopped:
            touched = set(reservations).union(*(self.pins[h][1] for h in held))
            self.frozen += [self.extents[b] for b in touched]
        self.table.drop_owner(owner, trusted_stopped=trusted_stopped)
        for block in reservations:
            del self.state[block]
        for handle in held:
            self.unpins(handle)

    @rule()
    def unlink(self) -> None:
        for segment in self.table.segments_to_unlink() + self.table.empty_segments():
            assert all(self.extents[b].segment != segment for b in self.state)
            self.table.remove_segment(segment)
            self.segments.discard(segment)

    @invariant()
    def the_table_is_the_model(self) -> None:
        assert len(self.table) == len(self.state)
        for block, state in self.state.items():
            assert self.table.state(block) is state
            assert self.table.extent(block) == self.extents[block]

    @invariant()
    def used_bytes_is_the_sum_of_extents(self) -> None:
        used = sum(round_up(self.extents[b].nbytes) for b in self.state)
        assert self.table.used_bytes == used

    @invariant()
    def what_is_counted_by_state_is_there(self) -> None:
        counts, sizes = self.table.counts(), self.table.state_bytes()
        for state in State:
            there = [self.extents[b].nbytes for b, its in self.state.items() if its is state]
            assert (counts[state.value], sizes[state.value]) == (len(there), sum(there))

    def teardown(self) -> None:
        """When everything ended nothing is left: zero bytes, one run of free space each."""
        for owner in OWNERS:
            self.table.drop_owner(owner, trusted_stopped=True)
        left = self.table.kill(list(self.state))
        assert all(self.table.state(b) is None for b in left)
        assert (len(self.table), self.table.used_bytes) == (0, 0)
        assert set(self.table._segments) == self.segments
        for segment in self.table._segments.values():
            assert (segment.free.is_empty, segment.free.runs) == (True, 1)
        assert not self.table._owners
        assert not self.table._pins


def overlap(one: Extent, other: Extent) -> bool:
    """Whether two extents share a page."""
    return (
        one.segment == other.segment
        and one.offset < other.offset + round_up(other.nbytes)
        and other.offset < one.offset + round_up(one.nbytes)
    )


TestAnyOrder = BlocksMachine.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)


def test_what_is_held_has_the_age_of_the_oldest_of_it() -> None:
    now = [100.0]
    table = BlockTable(clock=lambda: now[0])
    table.add_segment(0, 16 * PAGE)
    first = reserved(table, owner="w")
    now[0] += 5
    second = reserved(table, owner="w")
    now[0] += 1
    (held,) = table.held()
    assert (held.reserved_age_s, held.pinned_age_s) == (6.0, 0.0)
    table.seal(first, "w")
    table.publish(first)
    (held,) = table.held()
    assert held.reserved_age_s == 1.0
    handle = table.pin([first], "r").handle
    now[0] += 2
    table.pin([first], "r")
    now[0] += 1
    ages = {held.owner: (held.reserved_age_s, held.pinned_age_s) for held in table.held()}
    assert ages == {"w": (4.0, 0.0), "r": (0.0, 3.0)}
    table.unpin(handle)
    table.abort(second, "w")
    ages = {held.owner: (held.reserved_age_s, held.pinned_age_s) for held in table.held()}
    assert ages == {"r": (0.0, 1.0)}
