"""The blocks of one value store: who reserved them, who reads them, when their bytes return.

Pure: owns states, pins and free lists, and never touches a file or a socket; its clock is for ages
that are told, and decides nothing. Invariant: the extents of blocks in the table never overlap, so
bytes that somebody may still write (reserved) or read (pinned) are not handed out again.

    allocate        seal             publish           kill             last pin gone
    --------> RESERVED ----> PUBLISHING ----> PUBLISHED ----> DEAD (pinned) ----> freed
                  |              |                 `--------- unpinned ---------> freed
                  | abort        | abort (refused by the tag store)
                  | drop_owner   |   or kill (the news of its publication comes later)
                  `-> freed      `-> as kill

Only `kill`, which carries the tag store's word, ends a published block. A store that comes back
adopts what an earlier incarnation published, in segments from which it allocates nothing.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dataplane.errors import InternalError, InvalidRequest
from dataplane.values.extents import PAGE, FirstFit, FreeList, round_up


class State(enum.Enum):
    """Where a block is in its life. A freed block is not in the table."""

    RESERVED = "reserved"
    """Its owner may be writing into it."""
    PUBLISHING = "publishing"
    """Its bytes are final; the tag store has been, or is about to be, told."""
    PUBLISHED = "published"
    """The tag store holds placements into it."""
    DEAD = "dead"
    """No placement names it any more; readers that pinned it keep its bytes."""


class Extent(NamedTuple):
    """Where a block lies."""

    block: int
    segment: int
    offset: int
    nbytes: int
    """What was asked for; the extent takes `round_up(nbytes)`."""


class Pinned(NamedTuple):
    """The answer to `pin`."""

    handle: int
    """What `unpin` takes; 0 when nothing was pinned."""
    gone: list[int]
    """The blocks that are not there. If any is gone, none is pinned."""


class Held(NamedTuple):
    """What one owner holds; bytes are of extents."""

    owner: Hashable
    reserved: int
    reserved_bytes: int
    pinned: int
    pinned_bytes: int
    kept_bytes: int
    """Of what it has pinned, and nothing else would keep."""
    reserved_age_s: float
    """Of the oldest reservation; 0.0 without one."""
    pinned_age_s: float
    """Of the oldest pin; 0.0 without one."""


@dataclass(slots=True)
class _Block:
    extent: Extent
    owner: Hashable
    state: State = State.RESERVED
    pins: int = 0
    round: int = 0
    """In which round it was published; 0 also of what was adopted, whenever."""


@dataclass(slots=True)
class _Segment:
    free: FreeList
    size: int
    slot: int
    retired: bool = False
    adopting: bool = False
    blocks: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class _Owner:
    reserved: dict[int, float] = field(default_factory=dict[int, float])
    """Since when, by the table's clock."""
    handles: set[int] = field(default_factory=set[int])


class _Pin(NamedTuple):
    owner: Hashable
    blocks: tuple[int, ...]
    at_s: float
    """When, by the table's clock."""


def segment_size_for(nbytes: int, standard: int) -> int:
    """The size of a segment that can hold a block of `nbytes`: the standard one, or its own."""
    return max(standard, PAGE + round_up(nbytes))


class BlockTable:
    """The blocks of one store. For one thread, as the store's loop is.

    Block ids and pin handles count up from `first_block` and 1 and are never reused; a store
    that follows another one on the same plane gives a `first_block` above all of its ids.
    Owners are whatever the caller tells its clients apart by (one per control connection).
    By `clock`, in seconds, it tells ages; without one they are 0.
    """

    def __init__(self, first_block: int = 1, clock: Callable[[], float] = float) -> None:
        self._clock = clock
        self._next_block = first_block
        self._next_handle = 1
        self._blocks: dict[int, _Block] = {}
        self._pins: dict[int, _Pin] = {}
        self._owners: dict[Hashable, _Owner] = {}
        self._segments: dict[int, _Segment] = {}
        self._slots: dict[int, int] = {}  # slot -> segment id
        self._free_slots: list[int] = []  # heap
        self._fit = FirstFit()
        self._known_segments: set[int] = set()
        self._used_bytes = 0
        self._in_state = {state: [0, 0] for state in State}
        """How many blocks are in each state, and their bytes."""
        self.pinned_bytes = 0
        """Bytes of all blocks that were ever pinned, each time that they were."""
        self._round = 0

    # -- segments

    def add_segment(self, segment_id: int, size: int) -> None:
        """Makes the segment's bytes after its header page available. Ids are never reused."""
        if segment_id in self._known_segments:
            # Clients keep segments mapped by id: a second one would be read as the first.
            raise InternalError(f"segment id {segment_id} was used before")
        segment = _Segment(FreeList(size), size, slot=len(self._slots))
        self._known_segments.add(segment_id)
        if self._free_slots:
            segment.slot = heapq.heappop(self._free_slots)
        self._segments[segment_id] = segment
        self._slots[segment.slot] = segment_id
        self._offer(segment)

    def retire_segment(self, segment_id: int) -> None:
        """Ends allocation from the segment, for ever; its blocks live on until they are freed."""
        segment = self._segment(segment_id)
        segment.retired = True
        self._offer(segment)

    def remove_segment(self, segment_id: int) -> None:
        """Forgets an empty segment; the caller unlinks its file."""
        segment = self._segment(segment_id)
        if not segment.free.is_empty:
            raise InternalError(f"segment {segment_id} was removed with blocks in it")
        segment.retired = True
        self._offer(segment)
        del self._segments[segment_id], self._slots[segment.slot]
        heapq.heappush(self._free_slots, segment.slot)

    def empty_segments(self) -> list[int]:
        """Segments in use that hold no block: what can be given back under pressure."""
        return [i for i, s in self._segments.items() if s.free.is_empty and not s.retired]

    def segments_to_unlink(self) -> list[int]:
        """Retired segments that hold no block any more: `remove_segment` and unlink them."""
        return [
            i for i, s in self._segments.items() if s.free.is_empty and s.retired and not s.adopting
        ]

    def retired_segments(self) -> list[tuple[int, int]]:
        """Segments that take no new block and hold some, with their sizes; the emptiest first."""
        found = [
            (segment.free.used_bytes, i, segment.size)
            for i, segment in self._segments.items()
            if segment.retired and not segment.adopting and not segment.free.is_empty
        ]
        return [(i, size) for _, i, size in sorted(found)]

    # -- what an earlier incarnation left

    @property
    def next_block(self) -> int:
        """The id of the block that is made next."""
        return self._next_block

    def skip_to(self, block: int) -> None:
        """Give out no id below this one from now on."""
        self._next_block = max(self._next_block, block)

    def adopt_segment(self, segment_id: int, size: int) -> None:
        """Take in a segment that an earlier incarnation made: for `adopt`, and for nothing new.

        It counts as retired, but stays, empty or not, until `adopted` says that it is complete.
        """
        self.add_segment(segment_id, size)
        self._segments[segment_id].adopting = True
        self.retire_segment(segment_id)

    def adopt(self, extents: Iterable[Extent]) -> list[int]:
        """Take in blocks that are published already; the ids of those that cannot be where they
        are said to be: known here under the same id, beyond the segment's end or in its header,
        or over another block. Cheapest in the order in which they lie.

        InternalError if a segment is not being adopted.
        """
        impossible: list[int] = []
        for extent in extents:
            segment = self._segment(extent.segment)
            if not segment.adopting:
                raise InternalError(f"segment {extent.segment} is not being adopted")
            block = extent.block
            if block in self._blocks or not segment.free.claim(extent.offset, extent.nbytes):
                impossible.append(block)
                continue
            self._blocks[block] = _Block(extent, None, State.PUBLISHED)
            self._count(State.PUBLISHED, 1, extent.nbytes)
            segment.blocks.add(block)
            self._used_bytes += round_up(extent.nbytes)
            self.skip_to(block + 1)
        return impossible

    def adopted(self, segment_id: int) -> None:
        """All that lives in the segment was adopted: it goes when it is empty."""
        self._segment(segment_id).adopting = False

    def next_round(self) -> int:
        """Begin the next round; its number. What is published from now on is not of an earlier
        one."""
        self._round += 1
        return self._round

    def segment_ids(self) -> list[int]:
        """All segments in the table."""
        return list(self._segments)

    def blocks_in(self, segment_id: int) -> list[int]:
        """The blocks in a segment, in whatever state; none if it is not in the table."""
        segment = self._segments.get(segment_id)
        return [] if segment is None else list(segment.blocks)

    def published_before(self, blocks: Iterable[int], round_: int) -> list[int]:
        """Those of the blocks that are published, and were before this round began."""
        found: list[int] = []
        for block in blocks:
            entry = self._blocks.get(block)
            if entry is not None and entry.state is State.PUBLISHED and entry.round < round_:
                found.append(block)
        return found

    @property
    def used_bytes(self) -> int:
        """Bytes of the extents of all blocks in the table, in whole pages."""
        return self._used_bytes

    @property
    def segment_bytes(self) -> int:
        """Bytes of all segments, headers included: what the store takes from its node."""
        return sum(s.size for s in self._segments.values())

    @property
    def largest(self) -> int:
        """Bytes of the largest free run: what `allocate` can give now."""
        return self._fit.best

    # -- the life of a block

    def allocate(self, nbytes: int, owner: Hashable) -> Extent | None:
        """A new block reserved for `owner`, or None when no segment has room: add one."""
        if nbytes <= 0:
            raise InternalError(f"a block of {nbytes} bytes was asked for")
        slot = self._fit.find(round_up(nbytes))
        if slot is None:
            return None
        segment_id = self._slots[slot]
        segment = self._segments[segment_id]
        offset = segment.free.allocate(nbytes)
        if offset is None:
            raise InternalError(f"segment {segment_id} offered {nbytes} bytes it does not have")
        self._offer(segment)
        extent = Extent(self._next_block, segment_id, offset, nbytes)
        self._next_block += 1
        self._blocks[extent.block] = _Block(extent, owner)
        self._count(State.RESERVED, 1, nbytes)
        segment.blocks.add(extent.block)
        self._owner(owner).reserved[extent.block] = self._clock()
        self._used_bytes += round_up(nbytes)
        return extent

    def seal(self, block: int, owner: Hashable) -> Extent:
        """The block's extent, its bytes now final and no longer the owner's to give back.

        From here on the block outlives its writer: whether it is published is the tag store's
        answer, which ends in `publish` or `abort`. It can be pinned, because a reader may hear
        of the publication before this store does.

        Raises:
            InvalidRequest: it is not a reservation of this owner. Nothing changed.
        """
        found = self._blocks.get(block)
        if found is None or found.state is not State.RESERVED or found.owner != owner:
            raise InvalidRequest(
                f"block {block} is not reserved by this client: its reservation ended, or it was "
                "published already; put again"
            )
        self._turn(found, State.PUBLISHING)
        self._release_reservation(found)
        return found.extent

    def publish(self, block: int) -> bool:
        """Whether the block is published now; False if it was killed before this news came."""
        found = self._blocks.get(block)
        if found is None or found.state is State.DEAD:
            return False
        if found.state is State.RESERVED:
            raise InternalError(f"block {block} was published before it was sealed")
        if found.state is State.PUBLISHING:
            self._turn(found, State.PUBLISHED)
            found.round = self._round
        return True

    def abort(self, block: int, owner: Hashable = None) -> bool:
        """Whether a block that will not be published was there to be ended.

        With `owner` (a client gives back what it reserved, after it stopped copying) only a
        reservation of that owner counts. Without, also a block whose publication was refused;
        pins that met it keep its bytes until they go.
        """
        found = self._blocks.get(block)
        if found is None or found.state is State.DEAD:
            return False
        if owner is not None and (found.state is not State.RESERVED or found.owner != owner):
            return False
        if found.state is State.PUBLISHED:
            raise InternalError(f"block {block} is published: only the tag store ends it")
        self._end(found)
        return True

    def kill(self, blocks: Iterable[int]) -> list[int]:
        """The ids of these that are not here. The others are freed, now or with their last pin.

        May be repeated. A reserved block is left alone and counts as not here: the tag store
        never heard of it, and its owner may be writing.
        """
        unknown: list[int] = []
        for block in blocks:
            found = self._blocks.get(block)
            if found is None or found.state is State.RESERVED:
                unknown.append(block)
            elif found.state is not State.DEAD:
                self._end(found)
        return unknown

    # -- readers

    def pin(self, blocks: Iterable[int], owner: Hashable) -> Pinned:
        """A hold on all of these blocks, or, if any is gone, on none.

        A dead block counts as gone even while others hold it: new readers would keep it for ever.
        """
        wanted = dict.fromkeys(blocks)
        found: list[_Block] = []
        gone: list[int] = []
        for block in wanted:
            entry = self._blocks.get(block)
            if entry is None or entry.state is State.RESERVED or entry.state is State.DEAD:
                gone.append(block)
            else:
                found.append(entry)
        if gone:
            return Pinned(0, gone)
        for entry in found:
            entry.pins += 1
            self.pinned_bytes += entry.extent.nbytes
        handle = self._next_handle
        self._next_handle += 1
        self._pins[handle] = _Pin(owner, tuple(wanted), self._clock())
        self._owner(owner).handles.add(handle)
        return Pinned(handle, [])

    def unpin(self, handle: int, owner: Hashable = None) -> bool:
        """Whether the handle was held (by `owner`, if given); its pins are gone now."""
        pin = self._pins.get(handle)
        if pin is None or (owner is not None and pin.owner != owner):
            return False
        del self._pins[handle]
        holder = self._owners[pin.owner]
        holder.handles.discard(handle)
        self._forget_if_idle(pin.owner, holder)
        for block in pin.blocks:
            found = self._blocks[block]
            found.pins -= 1
            if not found.pins and found.state is State.DEAD:
                self._free(found)
        return True

    def drop_owner(self, owner: Hashable, *, trusted_stopped: bool) -> list[int]:
        """The segments retired by ending all reservations and pins of `owner`.

        `trusted_stopped=True`: the kernel closed its control connection, so no thread of it
        copies any more and its bytes may be reused. False: this store closed the connection, and
        the client may still be writing what it reserved and reading what it pinned. Those bytes
        must never hold anything else: their segments are retired (forced revocation).
        """
        dropped = self._owners.get(owner)
        if dropped is None:
            return []
        retired: list[int] = []
        if not trusted_stopped:
            held = set(dropped.reserved)
            for handle in dropped.handles:
                held.update(self._pins[handle].blocks)
            segments = {self._blocks[block].extent.segment for block in held}
            retired = sorted(i for i in segments if not self._segments[i].retired)
            for segment_id in retired:
                self.retire_segment(segment_id)
        for block in list(dropped.reserved):
            self._end(self._blocks[block])
        for handle in list(dropped.handles):
            self.unpin(handle)
        return retired

    # -- looking in

    def __len__(self) -> int:
        return len(self._blocks)

    def extent(self, block: int) -> Extent | None:
        """Where the block lies, or None if it is not here."""
        found = self._blocks.get(block)
        return found.extent if found is not None else None

    def state(self, block: int) -> State | None:
        """The block's state, or None if it is not here."""
        found = self._blocks.get(block)
        return found.state if found is not None else None

    def held(self) -> Iterator[Held]:
        """What each owner holds, of those that hold anything. For walks in slices."""
        for owner in list(self._owners):
            of = self._owners.get(owner)
            if of is None:
                continue
            pinned = {block for handle in of.handles for block in self._pins[handle].blocks}
            kept = [entry for b in pinned if (entry := self._blocks[b]).state is State.DEAD]
            now = self._clock()
            yield Held(
                owner,
                len(of.reserved),
                sum(round_up(self._blocks[block].extent.nbytes) for block in of.reserved),
                len(pinned),
                sum(round_up(self._blocks[block].extent.nbytes) for block in pinned),
                sum(round_up(entry.extent.nbytes) for entry in kept),
                now - min(of.reserved.values(), default=now),
                now - min((self._pins[handle].at_s for handle in of.handles), default=now),
            )

    def published(self) -> Iterator[Extent]:
        """Where the blocks lie that the tag store holds placements into, as far as is known here.
        For walks in slices: what happens to the table meanwhile does not end them."""
        for block in list(self._blocks):
            entry = self._blocks.get(block)
            if entry is not None and entry.state is State.PUBLISHED:
                yield entry.extent

    @property
    def pins(self) -> int:
        """How many handles are held."""
        return len(self._pins)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of the blocks in each state."""
        return {state.value: nbytes for state, (_, nbytes) in self._in_state.items()}

    def counts(self) -> dict[str, int]:
        """How many blocks are in each state, and `pins`: how many handles are held."""
        counts = {state.value: count for state, (count, _) in self._in_state.items()}
        return counts | {"pins": len(self._pins)}

    # -- inside

    def _segment(self, segment_id: int) -> _Segment:
        segment = self._segments.get(segment_id)
        if segment is None:
            raise InternalError(f"segment {segment_id} is not in the table")
        return segment

    def _offer(self, segment: _Segment) -> None:
        self._fit.set(segment.slot, 0 if segment.retired else segment.free.largest)

    def _owner(self, owner: Hashable) -> _Owner:
        found = self._owners.get(owner)
        if found is None:
            found = self._owners[owner] = _Owner()
        return found

    def _forget_if_idle(self, owner: Hashable, found: _Owner) -> None:
        if not found.reserved and not found.handles:
            del self._owners[owner]

    def _release_reservation(self, block: _Block) -> None:
        holder = self._owners[block.owner]
        holder.reserved.pop(block.extent.block, None)
        self._forget_if_idle(block.owner, holder)

    def _count(self, state: State, blocks: int, nbytes: int) -> None:
        of = self._in_state[state]
        of[0] += blocks
        of[1] += nbytes

    def _turn(self, block: _Block, state: State) -> None:
        nbytes = block.extent.nbytes
        self._count(block.state, -1, -nbytes)
        self._count(state, 1, nbytes)
        block.state = state

    def _end(self, block: _Block) -> None:
        if block.state is State.RESERVED:
            self._release_reservation(block)
        self._turn(block, State.DEAD)
        if not block.pins:
            self._free(block)

    def _free(self, block: _Block) -> None:
        extent = block.extent
        segment = self._segments[extent.segment]
        segment.free.free(extent.offset, extent.nbytes)
        segment.blocks.discard(extent.block)
        self._offer(segment)
        del self._blocks[extent.block]
        self._count(block.state, -1, -extent.nbytes)
        self._used_bytes -= round_up(extent.nbytes)
