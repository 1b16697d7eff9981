"""One direction of a connection as frames, while its bytes pass. Pure.

Bytes are told apart by the part of the frame they belong to, as soon as they are there: a frame
need not be whole to pass. What is no frame (TLS, or damaged before) is one that never ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from dataplane.errors import InvalidRequest
from dataplane.wire.frames import PREFIX, Header, parse_header, parse_prefix

Part = Literal["prefix", "header", "payload"]

LARGEST = 1 << 32
"""Any header length that a prefix can say: who receives it judges."""


class Piece(NamedTuple):
    """Bytes of one part of one frame."""

    part: Part
    at: int
    """Where in the part they begin."""
    of: int
    """How long the part is."""
    data: bytes
    begins: bool
    """Whether the frame begins with them."""
    ends: bool
    """Whether it ends with them."""


class Stream:
    """Where in which frame the next byte is."""

    def __init__(self) -> None:
        self.head = bytearray()
        """Prefix and header of the frame that passes, as far as they have come."""
        self._sizes = [PREFIX.size, 0, 0]
        self._part = 0
        self._at = 0
        self._opaque = False

    def header(self) -> Header | None:
        """The header of the frame that passes; None if it is not there, or none of ours."""
        if self._opaque or len(self.head) < PREFIX.size + self._sizes[1]:
            return None
        try:
            return parse_header(memoryview(self.head)[PREFIX.size :])
        except InvalidRequest:
            return None

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The bytes in order, cut where parts end."""
        while data:
            if self._opaque:
                yield Piece("payload", self._at, self._at + len(data), data, False, False)
                self._at += len(data)
                return
            part, at = self._part, self._at
            piece, data = data[: self._sizes[part] - at], data[self._sizes[part] - at :]
            begins = part == 0 and at == 0
            if begins:
                self.head.clear()
            if part < 2:
                self.head += piece
            self._at += len(piece)
            size = self._sizes[part]
            if self._at == size:
                self._next()
            ends = not self._opaque and self._part == self._at == 0
            yield Piece(_PARTS[part], at, size, piece, begins, ends)

    def _next(self) -> None:
        if self._part == 0:
            try:
                header_bytes, payload_bytes = parse_prefix(self.head, LARGEST)
            except InvalidRequest:
                self._opaque = True
                self._at = 0
                return
            self._sizes[1:] = [header_bytes, payload_bytes]
        self._at = 0
        self._part = (self._part + 1) % 3
        while self._part and not self._sizes[self._part]:
            self._part = (self._part + 1) % 3


_PARTS: tuple[Part, Part, Part] = ("prefix", "header", "payload")
