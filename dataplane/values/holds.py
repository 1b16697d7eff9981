"""Room that is kept for groups: how much for each, and the pieces of segments that it is. Pure.

Owns the pool: free room taken out of the block table, as blocks that nobody writes, so that what
may not use it cannot even see it. All holds share the pool, and its pieces are moved wherever they
are least in the way. A draw gives a piece back, takes its block, and keeps the rest of the piece.

Guarantee: a draw of at most `largest_draw` bytes within what is held for it finds room at once,
whatever was held, drawn, put and freed before. For n pages always fit into one of k pieces with
t pages held in all if the pieces have t + (k - 1) * (n - 1) pages together, and that is what they
are kept at: each piece but one costs the pool that much beside what is held, and a hold is granted
only if there is room for this too. Larger draws find room at once if some piece has it, or can be
given it by moving others. Three things can leave the pool short until room comes free, which is
its own before anybody else's: write-backs that nobody declared, draws that were given up (their
room comes back as a run of its own), and segments taken out of use with a client that was cut off.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Mapping
from typing import Final, Literal

from dataplane.errors import InternalError, InvalidRequest
from dataplane.values.blocks import BlockTable, Extent
from dataplane.values.extents import PAGE, round_up

Draw = int | Literal[True]
"""What an allocation may use besides free room: what is held for one attempt, or whatever is."""

MAX_MOVED = 64
"""Pieces that are moved to fill the pool: a store of thousands must not stop for it (1 ms here)."""
MAX_ASIDE = 16
"""Pieces that are moved to make way for a block."""
MAX_TAKEN = 2 * MAX_MOVED
"""Pieces that are taken at once; a hold that needs more waits for larger ones."""


class _Hold:
    """What is held for one attempt, in bytes of whole pages."""

    __slots__ = ("blocks", "left", "pending", "told")

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        """What is still to be kept: draws lower it at once, published or not."""
        self.told = nbytes
        """What the tag store says is outstanding: it alone sees puts through other stores, and
        learns later of those through this one."""
        self.pending = 0
        """What was given to blocks of which it cannot have learned."""
        self.blocks: set[int] = set()
        """What was drawn on it and is there."""


class _Drawn:
    """A block that was drawn on a hold."""

    __slots__ = ("given", "hold", "owner", "pending")

    def __init__(self, hold: _Hold, owner: Hashable, given: int) -> None:
        self.hold = hold
        self.owner = owner
        """Whose end would end it; None when nobody's would."""
        self.given = given
        """What the hold gave of its room."""
        self.pending = True
        """Not published yet."""


class Holds:
    """The holds of one store, and the pool that backs them. For one thread, like its table."""

    def __init__(self, table: BlockTable, largest_draw: int) -> None:
        self._table = table
        self._slack: Final = round_up(largest_draw) - PAGE
        """What every piece but one may be left with when no draw fits into it any more."""
        self._holds: dict[int, _Hold] = {}
        self._drawn: dict[int, _Drawn] = {}
        self._by_owner: dict[Hashable, set[int]] = {}
        self._pieces: list[tuple[int, int]] = []  # (bytes, block), sorted
        self._held = 0
        self._pooled = 0

    # -- looking in

    def __len__(self) -> int:
        return len(self._holds)

    def __contains__(self, attempt: int) -> bool:
        return attempt in self._holds

    @property
    def held_bytes(self) -> int:
        """What is held in all: granted, and not used yet."""
        return self._held

    @property
    def pooled_bytes(self) -> int:
        """What others cannot use because of it."""
        return self._pooled

    @property
    def pieces(self) -> int:
        """Blocks of the table that are the pool's."""
        return len(self._pieces)

    @property
    def short_bytes(self) -> int:
        """What the pool lacks to keep its guarantee."""
        return max(0, self._missing())

    def of(self, attempt: int) -> int:
        """What is held for an attempt."""
        hold = self._holds.get(attempt)
        return 0 if hold is None else hold.left

    def piece_for(self, nbytes: int) -> int:
        """Bytes in one run with which `grant` would succeed."""
        return round_up(nbytes) + self.short_bytes + (self._slack if self._pieces else 0)

    @property
    def least_piece(self) -> int:
        """A run that is no larger than this does the pool no good."""
        return self._slack

    # -- what the tag store says

    def grant(self, attempt: int, nbytes: int) -> bool:
        """Whether room for so many bytes is held for an attempt from now on; if not, nothing is.

        InvalidRequest if there is a hold of this attempt already.
        """
        if attempt in self._holds:
            raise InvalidRequest(f"room is held for attempt {attempt} already")
        hold = _Hold(round_up(nbytes))
        self._held += hold.left
        if not self._fill():
            self._held -= hold.left
            self._trim()
            return False
        self._holds[attempt] = hold
        return True

    def bind(self, token: int, attempt: int) -> None:
        """Call a hold by its attempt, which was not known yet when it was granted."""
        if token not in self._holds or attempt in self._holds:
            raise InvalidRequest(f"no room is held under {token} that could become {attempt}'s")
        self._holds[attempt] = self._holds.pop(token)

    def tell(self, attempt: int, outstanding: int) -> None:
        """So much of what an attempt declared is outstanding: less than before, or as much.
        With 0 its hold ends. An attempt of which nothing is known has ended before."""
        hold = self._holds.get(attempt)
        if hold is None:
            return
        if outstanding > 0:
            hold.told = min(hold.told, round_up(outstanding))
            self._set(hold, min(hold.left, hold.told))
        else:
            self._set(hold, 0)
            del self._holds[attempt]
            for block in hold.blocks:
                self._disown(block, self._drawn.pop(block))
        self._trim()

    def keep(self, kept: Mapping[int, int]) -> list[int]:
        """End all holds but those of attempts of which this much is outstanding, and lower those
        to that; the attempts with something outstanding for which nothing is held."""
        for attempt in list(self._holds):
            self.tell(attempt, kept.get(attempt, 0))
        return [a for a, nbytes in kept.items() if nbytes > 0 and a not in self._holds]

    # -- blocks

    def draw(self, nbytes: int, owner: Hashable, draw: Draw, *, move: bool = True) -> Extent | None:
        """A block in what is held for an attempt or, with True, in whatever is; else in free room.

        None if there is no room for it, or only such as is held for others. Without `move` the
        pool is left where it is.
        """
        size = round_up(nbytes)
        hold = None if draw is True else self._holds.get(draw)
        given = 0 if hold is None else min(size, hold.left)
        extent = self._from_pool(nbytes, size, owner) if size == given else None
        if extent is None:
            extent = self._table.allocate(nbytes, owner)
        if extent is None and draw is True:
            extent = self._from_pool(nbytes, size, owner)
        if extent is None and move:
            extent = self._beside_pool(nbytes, owner, given, rob=draw is True)
        if extent is not None and hold is not None:
            self._set(hold, hold.left - given)
            hold.pending += given
            hold.blocks.add(extent.block)
            self._drawn[extent.block] = _Drawn(hold, owner, given)
            self._by_owner.setdefault(owner, set()).add(extent.block)
        if extent is not None:
            self._trim()
        return extent

    def allocate(self, nbytes: int, owner: Hashable) -> Extent | None:
        """A block in room that is not held, for which the pool is moved out of the way."""
        extent = self._table.allocate(nbytes, owner)
        return extent or self._beside_pool(nbytes, owner, 0, rob=False)

    def published(self, block: int) -> None:
        """The tag store knows of this block, and tells what is outstanding now."""
        drawn = self._drawn.get(block)
        if drawn is not None and drawn.pending:
            drawn.pending = False
            drawn.hold.pending -= drawn.given
            self._disown(block, drawn)

    def ended(self, blocks: Iterable[int]) -> None:
        """These blocks are not there any more, or will not be when their last reader is gone."""
        for block in blocks:
            drawn = self._drawn.pop(block, None)
            if drawn is None:
                continue
            hold = drawn.hold
            hold.blocks.discard(block)
            self._disown(block, drawn)
            if drawn.pending:
                hold.pending -= drawn.given
            # It is held again unless the tag store counts it: what was given up, and what a
            # repeated put wrote a second time.
            self._set(hold, max(hold.left, min(hold.left + drawn.given, hold.told - hold.pending)))

    def dropped(self, owner: Hashable, retired: Iterable[int]) -> None:
        """A client is gone with what it had reserved, and these segments with it."""
        owned = list(self._by_owner.get(owner, ()))
        self.ended([block for block in owned if self._table.extent(block) is None])
        for block in owned:
            if block in self._drawn:  # it is being published
                self._disown(block, self._drawn[block])
        gone = set(retired)
        if gone:
            self._release([piece for piece in self._pieces if self._segment(piece) in gone])

    def refill(self) -> None:
        """Room came free: take what the pool lacks, all of it or as much as there is."""
        if self._fill():
            return
        # Small draws at least should find what is held for them.
        while self._pooled < self._held and len(self._pieces) < MAX_MOVED:
            largest = self._table.largest
            if not largest:
                return
            self._take(min(largest, self._held - self._pooled))

    # -- inside

    def _set(self, hold: _Hold, left: int) -> None:
        self._held += left - hold.left
        hold.left = left

    def _disown(self, block: int, drawn: _Drawn) -> None:
        if drawn.owner is None:
            return
        owned = self._by_owner[drawn.owner]
        owned.discard(block)
        if not owned:
            del self._by_owner[drawn.owner]
        drawn.owner = None

    def _missing(self) -> int:
        """What the pool lacks, or, negative, has too much."""
        return self._held + max(0, len(self._pieces) - 1) * self._slack - self._pooled

    def _segment(self, piece: tuple[int, int]) -> int:
        extent = self._table.extent(piece[1])
        return -1 if extent is None else extent.segment

    def _take(self, nbytes: int) -> tuple[int, int]:
        extent = self._table.allocate(nbytes, self)
        if extent is None:
            raise InternalError(f"the table offered {nbytes} bytes that it does not have")
        piece = (nbytes, extent.block)
        insort(self._pieces, piece)
        self._pooled += nbytes
        return piece

    def _release(self, pieces: Iterable[tuple[int, int]]) -> None:
        for piece in list(pieces):
            del self._pieces[bisect_left(self._pieces, piece)]
            self._pooled -= piece[0]
            self._table.abort(piece[1], self)

    def _from_pool(self, nbytes: int, size: int, owner: Hashable) -> Extent | None:
        """A block for which the smallest piece is given up that has room for it."""
        at = bisect_left(self._pieces, (size, 0))
        if at == len(self._pieces):
            return None
        piece = self._pieces[at]
        self._release([piece])
        extent = self._table.allocate(nbytes, owner)
        if piece[0] > size:
            self._take(piece[0] - size)
        return extent

    def _take_largest(self) -> list[tuple[int, int]]:
        """Take the largest runs there are until nothing is missing, or they do no good.

        Where pieces were released before, this leaves the pool no worse than it was: each lies in
        one of the runs, and fewer and larger pieces need less beside what is held.
        """
        taken: list[tuple[int, int]] = []
        while (missing := self._missing()) > 0:
            slack = self._slack if self._pieces else 0
            largest = self._table.largest
            if largest <= slack or len(taken) == MAX_TAKEN:
                break
            taken.append(self._take(min(largest, missing + slack)))
        return taken

    def _fill(self) -> bool:
        """Whether the pool has all that it needs now; it moves pieces where that helps."""
        if self._missing() <= 0:
            return True
        for moved in (slice(-1, None), slice(MAX_MOVED)):
            self._release(self._pieces[moved])
            self._take_largest()
            if self._missing() <= 0:
                self._trim()  # of small pieces that larger ones have made needless
                return True
        return False

    def _trim(self) -> None:
        """Give back what the pool has too much, the smallest pieces first."""
        while self._pieces:
            missing = self._missing()
            piece = self._pieces[0]
            without = missing + piece[0] - (self._slack if len(self._pieces) > 1 else 0)
            if without <= max(0, missing) and self._pooled - piece[0] >= self._held:
                self._release([piece])
                continue
            if missing < 0:
                self._release([piece])
                self._take(piece[0] + missing)
            return

    def _beside_pool(self, nbytes: int, owner: Hashable, lower: int, *, rob: bool) -> Extent | None:
        """A block in room that comes together when the pool moves, which keeps all that it needs
        but `lower` bytes, unless it may be robbed."""
        moved = self._pieces[-MAX_ASIDE:]
        if not moved:
            return None
        self._release(moved)
        extent = self._table.allocate(nbytes, owner)
        if extent is not None:
            self._held -= lower
            taken = self._take_largest()
            enough = self._missing() <= 0
            self._held += lower
            if enough:
                return extent
            if rob:
                self.refill()
                return extent
            self._release(taken)
            self._table.abort(extent.block, owner)
        self._take_largest()
        return None
