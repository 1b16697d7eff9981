"""Chunks as they lie on the wire, which are neither parsed nor made by way of a message.

A message keeps its own copy of its bytes, and gives away another: between a socket and a store that
is most of the work. A chunk has one form that every client writes, and it is read and written here
as that; whatever looks different is parsed as the message that it is.

`PutRowsRequest` and `GetRowsResponse` have their chunk under the same number, and so one form:

    0x12 <length>  [0x08 <offset>]  0x12 <length> <data>
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from google.protobuf.message import DecodeError

from dataplane.v1 import dataplane_pb2 as pb

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_CHUNK: Final = 0x12
"""Field 2, of either message and of a chunk: a length and so many bytes."""
_OFFSET: Final = 0x08
"""Field 1 of a chunk: a number."""
_LONGEST: Final = 9
"""Bytes of a number below 1 << 63."""


class Chunk(NamedTuple):
    """A chunk that came; its data lies in the message that brought it."""

    offset: int
    data: memoryview


class Malformed:
    """What came instead of a message."""

    __slots__ = ()


MALFORMED: Final = Malformed()


def parse_put(message: bytes) -> pb.PutRowsRequest | Chunk | Malformed:
    """What a message of a put is."""
    found = _chunk(message)
    if found is not None:
        return found
    try:
        return pb.PutRowsRequest.FromString(message)
    except DecodeError:
        return MALFORMED


def parse_get(message: bytes) -> pb.GetRowsResponse | Chunk | Malformed:
    """What a message of a get is."""
    found = _chunk(message)
    if found is not None:
        return found
    try:
        return pb.GetRowsResponse.FromString(message)
    except DecodeError:
        return MALFORMED


def chunk_bytes(offset: int, parts: Sequence[Buffer]) -> bytes:
    """The message of a chunk, copied once."""
    size = sum(map(len, parts))
    inner = b"\x08" + _varint(offset) if offset else b""
    inner += b"\x12" + _varint(size)
    return b"".join((b"\x12", _varint(len(inner) + size), inner, *parts))


def chunks_of(pieces: Sequence[Buffer], size: int, offset: int = 0) -> Iterator[bytes]:
    """The messages of chunks of `size` bytes that hold the pieces one after the other, from an
    offset on."""
    parts: list[Buffer] = []
    at, begin, room = 0, offset, size
    for piece in pieces:
        view = memoryview(piece).cast("B")
        skipped = max(0, min(len(view), offset - at))
        at += len(view)
        view = view[skipped:]
        while view:
            took = view[:room]
            parts.append(took)
            view = view[len(took) :]
            room -= len(took)
            if not room:
                yield chunk_bytes(begin, parts)
                begin, room = begin + size, size
                parts.clear()
    if parts:
        yield chunk_bytes(begin, parts)


def _chunk(message: bytes) -> Chunk | None:
    """The chunk, where the message is one in its usual form."""
    if len(message) < 4 or message[0] != _CHUNK:
        return None
    size, at = _number(message, 1)
    if at < 0 or size != len(message) - at:
        return None
    offset = 0
    if at < len(message) and message[at] == _OFFSET:
        offset, at = _number(message, at + 1)
    if at < 0 or at >= len(message) or message[at] != _CHUNK:
        return None
    size, at = _number(message, at + 1)
    if at < 0 or size != len(message) - at:
        return None
    return Chunk(offset, memoryview(message)[at:])


def _number(message: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends; that is below 0 if there is none of at most 63 bits."""
    number = shift = 0
    for byte in message[at : at + _LONGEST]:
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    return 0, -1


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
