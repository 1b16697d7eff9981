"""A journal read from its file, as its format says, by none of the product's code."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import msgpack


def read(path: Path) -> tuple[dict[str, Any], list[list[Any]]]:
    """The header and records of a journal, every byte of which must belong to one."""
    data = path.read_bytes()
    assert data[:8] == b"DPJRNL\0\3"
    records: list[Any] = []
    at = 8
    while at < len(data):
        size, checksum = struct.unpack_from("<II", data, at)
        record = data[at + 8 : at + 8 + size]
        assert len(record) == size
        assert zlib.crc32(record) == checksum
        records.append(msgpack.unpackb(record))
        at += 8 + size
    return records[0], records[1:]
