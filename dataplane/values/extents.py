"""Which bytes of one segment are free: a coalescing free list of 4 KiB pages, best fit.

Owns numbers only: it never touches memory or files. Invariant: free runs and extents in use
never overlap, together they cover the segment, and no two free runs touch.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from dataplane.errors import InternalError

PAGE = 4096
"""Every extent starts at a multiple of this and ends at one."""


def round_up(nbytes: int) -> int:
    """The bytes an extent for `nbytes` takes: whole pages."""
    return -(-nbytes // PAGE) * PAGE


class FreeList:
    """The free runs of one segment, from `start` (after its header) to `size`.

    An allocation takes the smallest run that fits, and of equal runs the one freed last: its
    memory is most likely still in a cache. Free runs are kept by size in `_sizes`, a sorted list
    of the sizes that occur. n pages hold at most sqrt(2n) different sizes (180 in 64 MiB), so a
    bisection and an insertion there cost the same with ten extents as with 100,000.

    Example: `FreeList(20480)` has four pages. `allocate(5000)` is 4096 (two pages),
    `allocate(1)` is 12288; after `free(4096, 5000)` `largest` is 8192.
    """

    __slots__ = ("_bins", "_end", "_ending", "_free_pages", "_pages", "_run", "_sizes", "_used")

    def __init__(self, size: int, start: int = PAGE) -> None:
        if start % PAGE or start < 0:
            raise InternalError(f"a segment's extents cannot start at byte {start}: not a page")
        first, end = start // PAGE, size // PAGE
        if end <= first:
            raise InternalError(f"a segment of {size} bytes has no room after byte {start}")
        self._end = end
        self._pages = self._free_pages = end - first
        self._run: dict[int, int] = {}  # first page of a free run -> pages
        self._ending: dict[int, int] = {}  # page after a free run -> first page
        self._bins: dict[int, dict[int, None]] = {}  # pages -> first pages, freed last at the end
        self._sizes: list[int] = []  # the keys of _bins, sorted
        self._used: dict[int, int] = {}  # first page of an extent in use -> pages
        self._add_run(first, end - first)

    @property
    def free_bytes(self) -> int:
        """Bytes not in use, in however many runs."""
        return self._free_pages * PAGE

    @property
    def used_bytes(self) -> int:
        """Bytes of all extents in use."""
        return (self._pages - self._free_pages) * PAGE

    @property
    def largest(self) -> int:
        """Bytes of the largest free run: what `allocate` can give now."""
        return self._sizes[-1] * PAGE if self._sizes else 0

    @property
    def is_empty(self) -> bool:
        """Whether no extent is in use."""
        return not self._used

    @property
    def runs(self) -> int:
        """How many pieces the free space is in."""
        return len(self._run)

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a new extent of `nbytes`, or None when no free run is that large."""
        if nbytes <= 0:
            raise InternalError(f"an extent of {nbytes} bytes was asked for")
        pages = -(-nbytes // PAGE)
        sizes = self._sizes
        at = bisect_left(sizes, pages)
        if at == len(sizes):
            return None
        size = sizes[at]
        bin_ = self._bins[size]
        start, _ = bin_.popitem()
        if not bin_:
            del self._bins[size], sizes[at]
        del self._run[start], self._ending[start + size]
        if size > pages:
            # The low end is handed out: after a coalescing free that is the part written before.
            self._add_run(start + pages, size - pages)
        self._used[start] = pages
        self._free_pages -= pages
        return start * PAGE

    def claim(self, offset: int, nbytes: int) -> bool:
        """Whether exactly this extent was free and is in use from now on; if not, nothing changed.

        For extents that were given out before this list was made. Each costs the same if they
        come in ascending order, else as much as there are free runs.
        """
        start, rest = divmod(offset, PAGE)
        pages = -(-nbytes // PAGE)
        if rest or pages <= 0:
            return False
        run = self._ending.get(self._end)
        if run is None or start < run:
            holds = (first for first, size in self._run.items() if first <= start < first + size)
            run = next(holds, None)
        if run is None or start + pages > run + self._run[run]:
            return False
        size = self._run[run]
        self._remove_run(run, size)
        if start > run:
            self._add_run(run, start - run)
        if start + pages < run + size:
            self._add_run(start + pages, run + size - start - pages)
        self._used[start] = pages
        self._free_pages -= pages
        return True

    def free(self, offset: int, nbytes: int) -> None:
        """Gives the extent back. It must be one that `allocate` or `claim` gave, whole.

        Raises:
            InternalError: it is not in use with this size (a double free). Nothing changed.
        """
        start, rest = divmod(offset, PAGE)
        pages = -(-nbytes // PAGE)
        if rest or pages <= 0 or self._used.get(start) != pages:
            raise InternalError(
                f"extent of {nbytes} bytes at {offset} was freed but is not in use: "
                "freed twice, or never allocated"
            )
        del self._used[start]
        self._free_pages += pages
        right = self._run.get(start + pages)
        if right is not None:
            self._remove_run(start + pages, right)
            pages += right
        left = self._ending.get(start)
        if left is not None:
            self._remove_run(left, start - left)
            pages += start - left
            start = left
        self._add_run(start, pages)

    def _add_run(self, start: int, pages: int) -> None:
        self._run[start] = pages
        self._ending[start + pages] = start
        bin_ = self._bins.get(pages)
        if bin_ is None:
            self._bins[pages] = {start: None}
            insort(self._sizes, pages)
        else:
            bin_[start] = None

    def _remove_run(self, start: int, pages: int) -> None:
        del self._run[start], self._ending[start + pages]
        bin_ = self._bins[pages]
        del bin_[start]
        if not bin_:
            del self._bins[pages], self._sizes[bisect_left(self._sizes, pages)]


class FirstFit:
    """The lowest slot whose number is at least what is asked, in O(log n): a max tree.

    The block table keeps the largest free run of each segment here. Filling low slots first
    keeps memory warm and leaves late segments empty, to be given back under pressure.
    """

    __slots__ = ("_leaves", "_tree")

    def __init__(self) -> None:
        self._leaves = 1
        self._tree = [0, 0]  # node i has the children 2i and 2i+1; leaves start at _leaves

    def set(self, slot: int, number: int) -> None:
        """Makes `number` (0 = nothing) what the slot offers."""
        while slot >= self._leaves:
            self._grow()
        tree = self._tree
        node = slot + self._leaves
        tree[node] = number
        while node > 1:
            node >>= 1
            best = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == best:
                break
            tree[node] = best

    @property
    def best(self) -> int:
        """The most that any slot offers."""
        return self._tree[1]

    def find(self, number: int) -> int | None:
        """The lowest slot that offers at least `number` (over 0), or None."""
        tree = self._tree
        if tree[1] < number:
            return None
        node = 1
        while node < self._leaves:
            node *= 2
            if tree[node] < number:
                node += 1
        return node - self._leaves

    def _grow(self) -> None:
        leaves = self._tree[self._leaves :]
        self._leaves *= 2
        self._tree = [0] * self._leaves + leaves + [0] * len(leaves)
        for node in range(self._leaves - 1, 0, -1):
            self._tree[node] = max(self._tree[2 * node], self._tree[2 * node + 1])
