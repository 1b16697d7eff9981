"""Records of a spool's files: a put, or what has become of one.

    record = magic "DPSR" | kind u8 | number u64 | length u64 | crc32 of these u32
             | body | crc32 of the body u32                               (little endian)

Owns what is believed of a file. Whoever dies while writing leaves a record that is cut off at the
end of the file, and that was promised to nobody; anything else that is wrong is damage, which is
told and kept apart, and what comes after it is found again by its magic.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple
from zlib import crc32

from dataplane.errors import InvalidRequest
from dataplane.producer.puts import Put, Whole
from dataplane.v1 import dataplane_pb2 as pb

MAGIC: Final = b"DPSR"
_HEAD: Final = struct.Struct("<4sBQQI")
_CRC: Final = struct.Struct("<I")
_LENGTH: Final = struct.Struct("<I")
OVERHEAD: Final = _HEAD.size + _CRC.size
MAX_BODY_BYTES: Final = 1 << 32


class Kind(IntEnum):
    """What a record says."""

    TRAJECTORIES = 1
    """A put: the body is a PutTrajectoriesRequest."""
    TAGS = 2
    """A put: the body is a PutTagsRequest."""
    ROWS = 3
    """A put: the body is the length of a PutRowsHeader (u32), that, and the bytes of its cells."""
    SENT = 4
    """The put of this number may have arrived from now on. No body."""
    DONE = 5
    """It was answered, or set aside. No body."""
    AGAIN = 6
    """It had no effect and never will; it goes on as a new put, whose number is the body (u64)."""


_KINDS: Final = frozenset(Kind)
PUTS: Final = (Kind.TRAJECTORIES, Kind.TAGS, Kind.ROWS)


class Record(NamedTuple):
    """A record as it lies in a file."""

    kind: Kind
    number: int
    at: int
    """Where it begins."""
    body: int
    """Where its body begins, and how long that is."""
    length: int

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.body + self.length + _CRC.size


@dataclass(slots=True)
class Scan:
    """What a file holds."""

    records: list[Record] = field(default_factory=list[Record])
    damaged: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Begin and end of what is no record and was not just cut off."""
    end: int = 0
    """Where the next record goes: what follows was cut off while it was written."""


def pack(kind: Kind, number: int, body: Sequence[bytes | memoryview] = ()) -> list[bytes]:
    """The pieces of a record. InvalidRequest if it is too large for one."""
    length = sum(len(piece) for piece in body)
    if length >= MAX_BODY_BYTES:
        raise InvalidRequest(f"a put of {length} bytes; under {MAX_BODY_BYTES} can be spooled")
    head = _HEAD.pack(MAGIC, kind, number, length, 0)[: -_CRC.size]
    crc = 0
    for piece in body:
        crc = crc32(piece, crc)
    pieces = [head + _CRC.pack(crc32(head))]
    pieces += [bytes(piece) for piece in body]
    pieces.append(_CRC.pack(crc))
    return pieces


def scan(data: memoryview) -> Scan:
    """What a file's bytes hold."""
    found = Scan()
    at, size = 0, len(data)
    while at < size:
        record = _record(data, at)
        if record is None:
            if size - at < _HEAD.size and _may_begin(data[at:]):
                break  # cut off in its head
            found.damaged.append((at, at := _next(data, at + 1)))
            continue
        if record.end > size:
            break  # cut off: what it says of its length is right
        if body_of(data, record) is None:
            found.damaged.append((at, record.end))
        else:
            found.records.append(record)
        at = record.end
    found.end = at
    return found


def body_of(data: memoryview, record: Record) -> memoryview | None:
    """A record's body, or None if it is not as it was written."""
    body = data[record.body : record.body + record.length]
    (crc,) = _CRC.unpack(data[record.body + record.length : record.end])
    return body if crc32(body) == crc else None


def _record(data: memoryview, at: int) -> Record | None:
    """The record whose head is there; its body may be anything, or not be there."""
    if at + _HEAD.size > len(data):
        return None
    magic, kind, number, length, crc = _HEAD.unpack_from(data, at)
    head = data[at : at + _HEAD.size - _CRC.size]
    if magic != MAGIC or crc32(head) != crc or kind not in _KINDS or length >= MAX_BODY_BYTES:
        return None
    return Record(Kind(kind), number, at, at + _HEAD.size, length)


def _may_begin(data: memoryview) -> bool:
    begun = bytes(data[: len(MAGIC)])
    return MAGIC.startswith(begun)


def _next(data: memoryview, begin: int) -> int:
    """Where the next head is, or the end of the data."""
    text = bytes(data[begin:])
    at = text.find(MAGIC)
    while at >= 0:
        if _record(data, begin + at) is not None:
            return begin + at
        at = text.find(MAGIC, at + 1)
    return len(data)


# -- puts as bodies ------------------------------------------------------------------------------


def body_of_put(put: Put) -> tuple[Kind, list[bytes]]:
    """A put as the kind and the body of a record."""
    message = put.message
    packed = message.SerializeToString()
    if isinstance(message, pb.PutRowsHeader):
        assert put.cells is not None
        chunks = [data for _, data in put.cells.chunks(1 << 20)]
        return Kind.ROWS, [_LENGTH.pack(len(packed)), packed, *chunks]
    if isinstance(message, pb.PutTagsRequest):
        return Kind.TAGS, [packed]
    return Kind.TRAJECTORIES, [packed]


def put_of_body(kind: Kind, body: memoryview) -> Put:
    """The put again. ValueError if the body is none."""
    if kind is Kind.TRAJECTORIES:
        return Put(_parsed(pb.PutTrajectoriesRequest(), body))
    if kind is Kind.TAGS:
        return Put(_parsed(pb.PutTagsRequest(), body))
    if kind is not Kind.ROWS or len(body) < _LENGTH.size:
        raise ValueError(f"no put: kind {kind}, {len(body)} bytes")
    (length,) = _LENGTH.unpack_from(body)
    begin = _LENGTH.size + length
    header = _parsed(pb.PutRowsHeader(), body[_LENGTH.size : begin])
    if begin + header.total_bytes != len(body):
        raise ValueError(f"a put of {header.total_bytes} bytes, of which {len(body) - begin} came")
    return Put(header, Whole(body[begin:]))


def _parsed(message: Any, data: memoryview) -> Any:
    try:
        message.ParseFromString(bytes(data))
    except Exception:  # protobuf's own class of it differs by its implementation
        raise ValueError("the bytes are no message") from None
    return message
