"""A set of positions, one bit each: which of millions of rows a task has committed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dataplane.tags.rows import CHUNK_BITS, CHUNK_ROWS

_MASK = CHUNK_ROWS - 1


class Marks:
    """Positions in a partition, as one integer of bits for each chunk that has any."""

    __slots__ = ("_bits", "_len")

    def __init__(self) -> None:
        self._bits: dict[int, int] = {}
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __contains__(self, position: int) -> bool:
        return self._bits.get(position >> CHUNK_BITS, 0) >> (position & _MASK) & 1 == 1

    def add(self, position: int) -> None:
        chunk, bit = position >> CHUNK_BITS, 1 << (position & _MASK)
        bits = self._bits.get(chunk, 0)
        if not bits & bit:
            self._bits[chunk] = bits | bit
            self._len += 1

    def discard(self, position: int) -> None:
        chunk, bit = position >> CHUNK_BITS, 1 << (position & _MASK)
        bits = self._bits.get(chunk, 0)
        if not bits & bit:
            return
        self._len -= 1
        if bits == bit:
            del self._bits[chunk]
        else:
            self._bits[chunk] = bits ^ bit

    def by_chunk(self) -> dict[int, int]:
        """The bits of each chunk that has any, as they are now."""
        return self._bits.copy()

    @classmethod
    def of(cls, by_chunk: Mapping[int, int]) -> Marks:
        """The set that had these bits."""
        marks = cls()
        marks._bits = {chunk: bits for chunk, bits in by_chunk.items() if bits}
        marks._len = sum(bits.bit_count() for bits in marks._bits.values())
        return marks

    def __iter__(self) -> Iterator[int]:
        for chunk, bits in sorted(self._bits.items()):
            yield from positions_in(chunk, bits)


def positions_in(chunk: int, bits: int) -> Iterator[int]:
    """The positions of one chunk, ascending."""
    base = chunk << CHUNK_BITS
    while bits:
        low = bits & -bits
        yield base + low.bit_length() - 1
        bits ^= low
