"""The format of a snapshot: a head, framed parts, and an end without which nothing of it counts.

A file is a magic and a version, a head, then parts, each framed like a record of the journal:
bytes u32, crc32 u32, then a msgpack list that begins with its kind. What the parts say is for the
files beside this one. What is read may be damaged in any way: nothing is trusted before its
checksum is right, and no length before it is known to be in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, cast

import msgpack

from dataplane.errors import InternalError, InvalidRequest, JournalDamaged
from dataplane.tags.records import (
    MAX_HEAD_BYTES,
    MAX_RECORD_BYTES,
    damaged,
    framed,
    read_frame,
    refuse_extension,
)

MAGIC = b"DPSNAP\0"
VERSION = 1

# Kinds of parts; what they say is where they are written.
PARTITION = 1
ACCOUNTS = 2
PLACEMENTS = 3
CHUNK = 4
OLD_ROWS = 5
TASK = 6
CLOSED = 7
LEASE = 8
BATCH = 9
SETTLED = 10
HOLDERS = 11
HISTORY = 12
REQUESTS = 13
PLANE = 14
END = 99
"""How many parts there were before this one."""

Part = list[Any]


class SnapshotHead(NamedTuple):
    """What a snapshot says of itself."""

    plane_id: str
    number: int
    """Of the file of the journal that begins at its moment."""
    epoch: int
    n: int
    """The revision of its moment."""
    open_schemas: bool
    """Whether partitions that puts make have open schemas."""


def written(head: SnapshotHead, parts: Iterable[Part]) -> Iterator[bytes]:
    """The bytes of a snapshot, piece by piece. InternalError if a part is too large to be read."""
    yield MAGIC + bytes([VERSION]) + framed(msgpack.packb(head._asdict()))
    pack = msgpack.Packer(autoreset=True).pack
    count = 0
    for part in parts:
        packed: bytes = pack(part)
        if len(packed) > MAX_RECORD_BYTES:
            raise InternalError(f"a part of the snapshot (kind {part[0]}) has {len(packed)} bytes")
        yield framed(packed)
        count += 1
    yield framed(pack([END, count]))


class Parts:
    """The parts of a snapshot, in order, once.

    JournalDamaged names the file and the offset of what is not as it was written.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.path = path
        self._file = file
        self.size = file.seek(0, 2)
        self.offset = 0
        """Where in the file the part is that was read last."""
        self._end = 0
        file.seek(0)
        self.head = self._read_head()

    def __iter__(self) -> Iterator[Part]:
        count = 0
        while True:
            part = self._unpacked(MAX_RECORD_BYTES)
            if type(part) is not list or not part:
                raise self.damaged("its checksum is right, and it is no part of a snapshot")
            part = cast("Part", part)
            if part[0] == END:
                break
            count += 1
            yield part
        if part != [END, count]:
            raise self.damaged(f"its end says {part[1:]!r:.40} parts, and {count} are there")
        if self._end != self.size:
            self.offset = self._end
            raise self.damaged("it goes on after its end")

    def damaged(self, what: str) -> JournalDamaged:
        """The error that says what is wrong with the part that was read last."""
        return damaged("snapshot", self.path, self.offset, self.size, what)

    def _read_head(self) -> SnapshotHead:
        start = self._file.read(len(MAGIC) + 1)
        if not start.startswith(MAGIC) or len(start) <= len(MAGIC):
            raise self.damaged("it does not begin as a snapshot does")
        if start[-1] != VERSION:
            raise InvalidRequest(
                f"the snapshot {self.path} is of format version {start[-1]}; this release reads "
                f"version {VERSION}: start the plane with the release that wrote it"
            )
        self._end = len(start)
        found = self._unpacked(MAX_HEAD_BYTES)
        try:
            head = SnapshotHead(**cast("dict[str, Any]", found))
        except TypeError:
            head = None
        if head is None or tuple(map(type, head)) != (str, int, int, int, bool):
            raise self.damaged("its header says something else than which plane it is of")
        return head

    def _unpacked(self, limit: int) -> Any:
        self.offset = self._end
        found = read_frame(self._file, self.size - self._end, range(2, limit + 1))
        if isinstance(found, str):
            raise self.damaged(found)
        self._end += 8 + len(found)
        try:
            return msgpack.unpackb(found, ext_hook=refuse_extension)
        except (ValueError, RecursionError) as error:
            raise self.damaged(f"its checksum is right, and it is no msgpack: {error}") from None
