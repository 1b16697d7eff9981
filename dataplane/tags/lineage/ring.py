"""A bounded ring: what was put in last, so many bytes of it. Pure.

Entries lie in chunks that are only ever added to. Whoever walks keeps the list of chunks, and need
copy nothing to be safe from what comes and goes meanwhile; and what falls out goes by chunks, so
that adding an entry costs an append.
"""

from __future__ import annotations

from typing import Any, Final

Entry = tuple[Any, ...]

CHUNK_ENTRIES: Final = 512
CHUNKS: Final = 32
"""Into how many chunks of equal size the bytes of a full ring go: what falls out at once."""


class Chunk:
    """Entries that came one after the other."""

    __slots__ = ("entries", "first", "nbytes")

    def __init__(self, first: int) -> None:
        self.first = first
        """The number of its first entry."""
        self.entries: list[Entry] = []
        self.nbytes = 0


class Ring:
    """The last entries, `limit_bytes` of them at most, by the sizes that were said of them."""

    __slots__ = ("_chunk_bytes", "_last", "chunks", "limit_bytes", "nbytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._chunk_bytes = max(1, limit_bytes // CHUNKS)
        self._last = Chunk(0)
        self.chunks: list[Chunk] = [self._last]
        """Oldest first. Replaced, never changed, when chunks come or go."""
        self.nbytes = 0

    @property
    def first(self) -> int:
        """The number of the oldest entry that is still here; so many have fallen out."""
        return self.chunks[0].first

    @property
    def next(self) -> int:
        """The number that the next entry will have."""
        return self._last.first + len(self._last.entries)

    def __len__(self) -> int:
        return self.next - self.first

    def append(self, entry: Entry, nbytes: int) -> None:
        """Add an entry of this size; the oldest ones fall out for it."""
        last = self._last
        last.entries.append(entry)
        last.nbytes += nbytes
        self.nbytes += nbytes
        if last.nbytes >= self._chunk_bytes or len(last.entries) >= CHUNK_ENTRIES:
            self._turn()

    def _turn(self) -> None:
        """Begin another chunk, and let the oldest go until the rest fits with what may come."""
        self._last = Chunk(self.next)
        chunks = [*self.chunks, self._last]
        gone = 0
        # A full chunk more may come before the next look at this.
        while gone < len(chunks) - 1 and self.nbytes > self.limit_bytes - self._chunk_bytes:
            self.nbytes -= chunks[gone].nbytes
            gone += 1
        self.chunks = chunks[gone:]
