"""What Arrow and Parquet files say of themselves, read without belief and without pyarrow. Pure.

pyarrow acts on a file's word before anybody can look at it: it takes memory for what is compressed
or comes from a dictionary, and some of its questions about a broken footer end the process. So the
few facts that decide whether a file is as plain as a save writes it are read here first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, cast

from dataplane.checkpoint.manifest import Malformed

# -- Arrow -----------------------------------------------------------------------------------

SCHEMA: Final = 1
RECORD_BATCH: Final = 3


class MessageHead:
    """The head of an Arrow message: a flatbuffer of org.apache.arrow.flatbuf.Message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._message = self._number("<I", 0)

    @property
    def kind(self) -> int:
        """Which message it is."""
        at = self._field(self._message, 1)
        return self._number("<B", at) if at else 0

    @property
    def body_bytes(self) -> int:
        """Bytes that follow the head."""
        at = self._field(self._message, 3)
        return self._number("<q", at) if at else 0

    @property
    def is_compressed(self) -> bool:
        """Whether the buffers of a record batch are."""
        at = self._field(self._message, 2)
        return bool(at) and bool(self._field(at + self._number("<I", at), 3))

    def _field(self, table: int, number: int) -> int:
        """Where a field of a table lies; 0 if it is not there."""
        names = table - self._number("<i", table)
        slot = 4 + 2 * number
        if slot + 2 > self._number("<H", names):
            return 0
        offset = self._number("<H", names + slot)
        return table + offset if offset else 0

    def _number(self, kind: str, at: int) -> int:
        if not 0 <= at <= len(self._data) - struct.calcsize(kind):
            raise Malformed("a message's head points outside of it")
        return struct.unpack_from(kind, self._data, at)[0]


# -- Parquet ---------------------------------------------------------------------------------

PARQUET_MAGIC: Final = b"PAR1"
MAX_PAGE_HEAD: Final = 1 << 16
"""Bytes of a page's head; it has statistics at most."""
MAX_DEPTH: Final = 16

_PLAIN, _RLE = 0, 3
_UNCOMPRESSED = 0
_DATA_PAGE = 0

Struct = dict[int, Any]
"""A struct of Thrift by the numbers of its fields."""

Read = Callable[[int, int], bytes]
"""So many bytes of a file from a place on, or Malformed."""


class ChunkHead(NamedTuple):
    """One column of one row group."""

    row_group: int
    rows: int
    name: str
    start: int
    nbytes: int


def parquet_rows(read: Read, size: int) -> list[int]:
    """Rows of each row group of a Parquet file that is as plain in memory as in the file.

    Malformed if anything of it is compressed, from a dictionary, encoded otherwise than plainly,
    or lies outside of the file; or if there are more rows than its keys have room for.
    """
    if size < 12 or read(size - 4, 4) != PARQUET_MAGIC:
        raise Malformed("it is no Parquet file")
    footer = int.from_bytes(read(size - 8, 4), "little")
    metadata, _ = _Thrift(read(size - 8 - footer, footer)).struct()
    groups = [_struct(group) for group in _list(metadata.get(4))]
    counts = [_int(group.get(3)) for group in groups]
    if sum(counts) != _int(metadata.get(3)):
        raise Malformed(f"its row groups have {sum(counts)} rows of {metadata.get(3)}")
    for number, group in enumerate(groups):
        for chunk in _chunks(number, group):
            _check_pages(chunk, read)
    return counts


def _chunks(number: int, group: Struct) -> Iterator[ChunkHead]:
    rows = _int(group.get(3))
    for column in _list(group.get(1)):
        about = _struct(_struct(column).get(3))
        path = _list(about.get(3))
        name = _bytes(path[0]).decode("utf-8", "replace") if len(path) == 1 else ""
        nbytes = _int(about.get(7))
        if (
            1 in _struct(column)  # in another file
            or about.get(4) != _UNCOMPRESSED
            or 11 in about  # a dictionary
            or any(encoding not in (_PLAIN, _RLE) for encoding in _list(about.get(2)))
            or _int(about.get(5)) != rows
            or _int(about.get(6)) != nbytes
        ):
            raise Malformed(f"row group {number}: column {name!r:.80} is not as a save writes it")
        if name == "key" and nbytes < 5 * rows:
            raise Malformed(f"row group {number} has more rows than keys fit in it")
        yield ChunkHead(number, rows, name, _int(about.get(9)), nbytes)


def _check_pages(chunk: ChunkHead, read: Read) -> None:
    """Malformed unless the pages of a column fill its place, and all of them are plain."""
    at, end = chunk.start, chunk.start + chunk.nbytes
    rows = 0
    while at < end:
        page, head = _Thrift(read(at, min(MAX_PAGE_HEAD, end - at))).struct()
        data = _struct(page.get(5, {}))
        size = _int(page.get(3))
        if (
            page.get(1) != _DATA_PAGE
            or data.get(2) != _PLAIN
            or _int(page.get(2)) != size
            or size > end - at - head
        ):
            raise Malformed(
                f"row group {chunk.row_group}: column {chunk.name!r:.80} has a page at byte {at} "
                "that is not as a save writes it"
            )
        rows += _int(data.get(1))
        at += head + size
    if rows != chunk.rows:
        raise Malformed(
            f"row group {chunk.row_group}: column {chunk.name!r:.80} has {rows} of {chunk.rows} "
            "rows"
        )


def _struct(value: Any) -> Struct:
    if type(value) is not dict:
        raise Malformed("its footer is not that of a Parquet file")
    return cast("Struct", value)


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise Malformed("its footer is not that of a Parquet file")
    return cast("list[Any]", value)


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise Malformed("its footer is not that of a Parquet file")
    return value


def _int(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise Malformed("its footer is not that of a Parquet file")
    return value


class _Thrift:
    """Thrift's compact protocol: structs as mappings from the numbers of their fields."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self, depth: int = 0) -> tuple[Struct, int]:
        """The struct that begins here, and how many bytes were read in all."""
        if depth > MAX_DEPTH:
            raise Malformed("a head is nested too deep")
        fields: Struct = {}
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            number = number + step if step else self._zigzag()
            if kind in (1, 2):
                fields[number] = kind == 1
            else:
                fields[number] = self._value(kind, depth)
        return fields, self._at

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (1, 2):  # within a list, a byte
            return self._byte() == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 7:
            return self._bytes(8)
        if kind == 8:
            return self._bytes(self._varint())
        if kind in (9, 10):
            return self._list(depth)
        if kind == 12:
            return self.struct(depth + 1)[0]
        raise Malformed(f"a head has a value of kind {kind}")  # maps are not used by Parquet

    def _list(self, depth: int) -> list[Any]:
        if depth > MAX_DEPTH:
            raise Malformed("a head is nested too deep")
        head = self._byte()
        count, kind = head >> 4, head & 15
        if count == 15:
            count = self._varint()
        if count > len(self._data) - self._at:  # every item takes a byte at least
            raise Malformed("a head has a list that is longer than itself")
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _byte(self) -> int:
        return self._bytes(1)[0]

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise Malformed("a head ends half-way")
        data = self._data[self._at : end]
        self._at = end
        return data

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise Malformed("a head has a number of over 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
