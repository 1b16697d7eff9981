"""The journal's format: what is written down of each change, and how it is found again. Pure.

A file is a magic and a version, a header, then records: bytes u32, crc32 u32, then a msgpack list.
`Records` reads them from any stream that can seek; opening files is for journal.py. What it reads
may be damaged in any way: nothing is trusted before its checksum is right, and no length before it
is known to be in the file.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast

import msgpack
from msgpack.exceptions import OutOfData

from dataplane.errors import InvalidRequest, JournalDamaged

MAGIC = b"DPJRNL\0"
VERSION = 3
"""2 was of one file alone, and could not tell that another one was missing or had been cut short; 1
left out who had asked for a change, so that what was answered could not be known again."""

FRAME = struct.Struct("<II")
MAX_RECORD_BYTES = 256 << 20
"""Of one record. The largest claim, clear or put stays well below it."""
MAX_HEAD_BYTES = 64 << 10
_MIN_RECORD_BYTES = 12

# Every record is (kind, n, at, body): n is the number of changes when it is done, at the store's
# clock. `asked` stands for three parts: client_id, number of the request, up to which they settled.
PUT = 1
"""client_id, packed meta, packed tags, store_id, block"""
CLEAR = 2
"""client_id, partition_id, keys | nil, where, retire, number, settled"""
REPACK = 3
"""store_id, old block, new block, moves"""
START = 4
"""epoch: the store starts, with all that is written above"""
STORE = 5
"""store_id, address: a value store registers"""
CLAIM = 6
"""Rows are granted: partition_id, task, client_id, lease_s, grouped, grants, batch | nil, terms |
nil, where a grant is [claim_id, number, rank | nil, keys]; or one more client has a rank's share:
partition_id, task, claim_id, client_id, number, lease_s"""
COMMIT = 7
"""partition_id, task, claim_id, keys, asked"""
RELEASE = 8
"""partition_id, task, claim_id, keys, why; and asked, where somebody did"""
BEGIN = 9
"""client_id, partition_id, uid, n, declared, store_id, number, settled"""
END = 10
"""client_id, attempt, status, number, settled"""
PARTITION = 11
"""'create', partition_id, schema | 'open' | nil, quota, retention, asked; 'seal', partition_id,
versions dropped with it, asked; 'drop', partition_ids, asked"""
RESTORE = 12
"""'begin', id, client_id, epoch, n; 'partition', 'rows', 'state' as they travel; 'block',
client_id, packed meta, rows, store_id, block; 'end', id, partition_ids dropped with it; and
'abandon'"""
ANSWER = 13
"""client_id, number, settled, verb, answer: of a request that changed nothing else"""
KEEP = 14
"""partition_id, uid, attempt, store_id: that store keeps room for the group"""
FORGET = 15
"""client_id: it has been gone for so long that its answers are forgotten"""
LEAVE = 16
"""partition_id, task, claim_id, client_id, number: that request holds the claim no more"""
LOST = 17
"""store_id, blocks | nil: what was in these blocks of a value store, or in all of its, is gone"""


class Head(NamedTuple):
    """What a journal says of itself."""

    plane_id: str
    epoch: int
    """Of the start that began the file."""
    open_schemas: bool
    """Whether partitions that puts make have open schemas."""
    number: int = 1
    """Which file of the journal it is."""
    before: int = 0
    """Bytes of the file before it, none of which may be missing."""


class Record(NamedTuple):
    """One change."""

    kind: int
    n: int
    at: float
    body: Any
    offset: int
    """Where it is in the file."""


class Torn(NamedTuple):
    """What is left of a last record that was never whole. Nobody was told that it had happened."""

    offset: int
    """Where to cut the file: the end of the last whole record."""
    nbytes: int
    """What is cut off."""
    reason: str


def framed(packed: bytes) -> bytes:
    """What was packed as it is in the file."""
    return FRAME.pack(len(packed), zlib.crc32(packed)) + packed


def read_frame(file: BinaryIO, left: int, sizes: range) -> bytes | str:
    """What is packed in the frame that comes next in a file of which so many bytes are left; or in
    words why there is none. Memory is taken for what is there, and of one of these sizes."""
    frame = file.read(FRAME.size)
    if len(frame) < FRAME.size:
        return f"only {len(frame)} bytes of its first {FRAME.size} are there"
    nbytes, checksum = FRAME.unpack(frame)
    left -= FRAME.size
    if nbytes > left:
        return f"it says that it has {nbytes} bytes, and {left} are there"
    if nbytes not in sizes:
        return f"it says that it has {nbytes} bytes, and none has"
    packed = file.read(nbytes)
    if len(packed) < nbytes or zlib.crc32(packed) != checksum:
        return "its checksum is wrong"
    return packed


def damaged(kind: str, path: str, offset: int, size: int, what: str) -> JournalDamaged:
    """The error that says what is wrong where in a file of a journal."""
    return JournalDamaged(
        f"the {kind} {path} is damaged at byte {offset} of {size}: {what}; nothing of it is used: "
        "keep the file, and start from a checkpoint",
        path=path,
        offset=offset,
    )


def check_readable(body: object) -> None:
    """InvalidRequest unless this comes back from a record as it went in. To be asked of what others
    sent and nobody has looked through: a record that cannot be read is the end of a journal."""
    try:
        msgpack.unpackb(msgpack.packb(body), ext_hook=refuse_extension)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"a part of it cannot be kept: {error}") from None


def head_bytes(head: Head) -> bytes:
    """The beginning of a file."""
    return MAGIC + bytes([VERSION]) + framed(msgpack.packb(head._asdict()))


class Records:
    """The records of one journal, in order, once.

    JournalDamaged names the file and the offset of what is not as it was written, unless it is the
    end of the file: then `torn` says so, once all records before it have been read.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.path = path
        self._file = file
        self.size = file.seek(0, 2)
        self.end = 0
        """Where the last whole record ends, of those that were read."""
        self.packed = b""
        """The record that came out last, as it is in the file."""
        self.torn: Torn | None = None
        file.seek(0)
        self.head = self._read_head()

    def __iter__(self) -> Iterator[Record]:
        while self.end < self.size and self.torn is None:
            self._file.seek(self.end)
            found = self._packed()
            if isinstance(found, str):
                self._judge(found)
                return
            record = _record(found, self.end)
            if record is None:
                raise self.damaged(self.end, "its checksum is right, and it is no record")
            self.end += FRAME.size + len(found)
            self.packed = found
            yield record

    def damaged(self, offset: int, what: str) -> JournalDamaged:
        """The error that says what is wrong where."""
        return damaged("journal", self.path, offset, self.size, what)

    # -- what is there -----------------------------------------------------------------------

    def _read_head(self) -> Head:
        start = self._file.read(len(MAGIC) + 1)
        if not start.startswith(MAGIC) or len(start) <= len(MAGIC):
            raise self.damaged(0, "it does not begin as a journal does")
        if start[-1] != VERSION:
            raise InvalidRequest(
                f"the journal {self.path} is of format version {start[-1]}; this release reads "
                f"version {VERSION}: start the plane with the release that wrote it"
            )
        self.end = len(start)
        found = self._packed(MAX_HEAD_BYTES)
        if isinstance(found, str):
            raise self.damaged(self.end, f"its header is not whole ({found})")
        try:
            head = Head(**msgpack.unpackb(found, ext_hook=refuse_extension))
        except (ValueError, TypeError):
            head = None
        if (
            head is None
            or tuple(map(type, head)) != (str, int, bool, int, int)
            or min(head.epoch, head.number) < 1
        ):
            raise self.damaged(self.end, "its header says something else than which plane it is of")
        self.end += FRAME.size + len(found)
        return head

    def _packed(self, limit: int = MAX_RECORD_BYTES) -> bytes | str:
        """What is packed in the next frame; or in words why there is none."""
        return read_frame(self._file, self.size - self.end, range(_MIN_RECORD_BYTES, limit + 1))

    def _judge(self, reason: str) -> None:
        """What is not whole is the torn end of the file only if nothing whole comes after it, and
        it is the beginning of a record: that is what a death in the middle of a write leaves. More
        than that was acknowledged, and damaged since."""
        follows = self._next_whole(self.end + 1)
        if follows is not None:
            raise self.damaged(self.end, f"{reason}, and a whole record follows at {follows}")
        if not self._begins_record():
            raise self.damaged(self.end, f"{reason}, and this is no record that was half written")
        self.torn = Torn(self.end, self.size - self.end, reason)

    def _begins_record(self) -> bool:
        """Whether what is left of the file may be what had been written of a record; zeros too,
        which a file system can leave of what it had not written."""
        self._file.seek(self.end)
        frame = self._file.read(FRAME.size)
        if len(frame) < FRAME.size:
            return True
        if not any(frame):
            return not any(map(any, iter(lambda: self._file.read(_WINDOW), b"")))
        nbytes, _ = FRAME.unpack(frame)
        if not self.size - self.end - FRAME.size < nbytes <= MAX_RECORD_BYTES:
            return False
        unpacker: Any = msgpack.Unpacker(cast("Any", self._file), max_buffer_size=MAX_RECORD_BYTES)
        try:
            unpacker.skip()
        except OutOfData:
            return True
        except (ValueError, RecursionError):
            pass
        return False  # there is all of it, and its length is wrong

    def _next_whole(self, start: int) -> int | None:
        """Where the next whole record is, looking at every byte from here on."""
        at = start + FRAME.size
        while at < self.size:
            self._file.seek(at)
            window = self._file.read(_WINDOW + _MAX_FRONT)
            for match in _FRONT.finditer(window):
                if match.start() < _WINDOW and self._is_whole(at + match.start() - FRAME.size):
                    return at + match.start() - FRAME.size
            at += _WINDOW
        return None

    def _is_whole(self, offset: int) -> bool:
        self._file.seek(offset)
        nbytes, checksum = FRAME.unpack(self._file.read(FRAME.size))
        left = self.size - offset - FRAME.size
        if not _MIN_RECORD_BYTES <= nbytes <= min(left, MAX_RECORD_BYTES):
            return False
        found = 0
        while nbytes > 0:
            part = self._file.read(min(nbytes, _WINDOW))
            if not part:
                return False
            found = zlib.crc32(part, found)
            nbytes -= len(part)
        return found == checksum


_WINDOW = 1 << 20
_FRONT = re.compile(
    rb"(?=\x94[\x01-\x7f](?:[\x00-\x7f]|\xcc.|\xcd.{2}|\xce.{4}|\xcf.{8})\xcb)", re.DOTALL
)
"""How every record begins: a list of four, a kind, an n, and a float."""
_MAX_FRONT = 12


def refuse_extension(code: int, data: bytes) -> object:
    """For whoever unpacks: nothing that is written here has a type of its own."""
    raise ValueError(f"extension type {code}")


def _record(packed: bytes, offset: int) -> Record | None:
    """The record, if it is one."""
    try:
        parts: Any = msgpack.unpackb(packed, ext_hook=refuse_extension)
    except (ValueError, RecursionError):
        return None
    if type(parts) is not list or len(cast("list[Any]", parts)) != 4:
        return None
    kind, n, at, body = cast("list[Any]", parts)
    if type(kind) is not int or type(n) is not int or type(at) is not float or n < 0:
        return None
    return Record(kind, n, at, body, offset)
