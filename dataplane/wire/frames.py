"""Frames: how one message lies on a stream. Pure; sockets are elsewhere.

    prefix    magic "DPF", version u8, header bytes u32, payload bytes u64 (little endian)
    header    msgpack: [verb, number, body] asks, [OK | FAILED, number, body] answers
    payload   raw bytes, meaning by verb

A number of 0 asks for no answer. Sizes are checked before anything is allocated for them.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgpack

from dataplane.errors import DataplaneError, InvalidRequest, quote, to_wire

VERSION = 2
MAGIC = b"DPF" + bytes([VERSION])
PREFIX = struct.Struct("<4sIQ")

MAX_HEADER_BYTES = 64 << 20
"""Keys, tags and row lengths of a put travel in the header; values never do."""
MAX_GREETING_BYTES = 4096
"""Header limit of a connection that has not proved the secret yet; it may send no payload."""
MAX_PAYLOAD_BYTES = 1 << 46

OK = 0
FAILED = 1

Body = Any
"""What a verb asks or answers: msgpack's plain types. `wire.messages` names the parts."""


class Header(NamedTuple):
    kind: str | int
    """A verb, or OK / FAILED for an answer."""
    number: int
    body: Body


def parse_prefix(data: bytes | bytearray | memoryview, max_header: int) -> tuple[int, int]:
    """Header and payload bytes of the frame that starts with these 16 bytes.

    InvalidRequest if it is no frame of ours or is larger than allowed; the stream cannot be
    followed any further then.
    """
    magic, header_bytes, payload_bytes = PREFIX.unpack_from(data)
    if magic != MAGIC:
        if magic[:3] == MAGIC[:3]:
            raise InvalidRequest(
                f"frame version {magic[3]}; this side speaks version {VERSION}: "
                "install the same release of rl-dataplane on both sides"
            )
        raise InvalidRequest("these bytes are not a frame of this plane's protocol")
    if header_bytes > max_header:
        raise InvalidRequest(
            f"a frame header of {header_bytes} bytes; at most {max_header} are accepted here: "
            "split the request into smaller ones"
        )
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise InvalidRequest(
            f"a frame payload of {payload_bytes} bytes; at most {MAX_PAYLOAD_BYTES} are accepted"
        )
    return header_bytes, payload_bytes


def parse_header(data: bytes | bytearray | memoryview) -> Header:
    """The header of a frame. InvalidRequest if it is not one."""
    try:
        header: list[Any] = msgpack.unpackb(data, strict_map_key=False)
    except Exception as error:
        raise InvalidRequest(f"the frame header is not msgpack: {error}") from None
    if type(header) is not list or len(header) != 3:
        raise InvalidRequest("a frame header is [kind, number, body]")
    kind, number, body = header
    if type(number) is not int or number < 0 or type(kind) not in (str, int):
        raise InvalidRequest("a frame header is [kind, number, body]")
    return Header(kind, number, body)


def pack(value: object) -> bytes:
    """The value as it travels. InvalidRequest if a part of it is nothing that msgpack can carry."""
    try:
        return msgpack.packb(value)
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{quote([error.object])} holds half a surrogate pair, so it is not valid Unicode"
        ) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"an argument cannot be sent: {error}") from None


def frame(kind: str | int, number: int, body: Body, payload_bytes: int = 0) -> bytes:
    """Prefix and header of one frame; the sender appends `payload_bytes` of payload."""
    header = pack((kind, number, body))
    if len(header) > MAX_HEADER_BYTES:
        raise InvalidRequest(
            f"keys, tags and row lengths of one request take {len(header)} bytes; at most "
            f"{MAX_HEADER_BYTES} fit: split it into smaller ones"
        )
    return PREFIX.pack(MAGIC, len(header), payload_bytes) + header


def failure(number: int, error: DataplaneError) -> bytes:
    """The frame that answers request `number` with an error."""
    return frame(FAILED, number, to_wire(error))
