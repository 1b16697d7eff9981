"""Puts that come in parts: what has come of each, and who brings it. Pure.

Owns when a part is taken: nothing before the header was checked, every chunk where the last one
ended, and not a byte more than the header says. What breaks off is kept for a while, so that
another stream can go on with it; of two streams with the same put the later one has it. What has
come stays in the pieces in which it came.

Time and memory are others': they are told when to forget, and what an upload holds is let go of by
what it was given for that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from dataplane.codec.shapes import MAX_ROWS, OBJECT
from dataplane.codec.tags import pack_tags_many
from dataplane.errors import InvalidRequest, OutOfRange
from dataplane.gateway.calls.arguments import flags_of
from dataplane.protocol.cells import Shape, shape_from
from dataplane.protocol.values import tags_from
from dataplane.tags.keys import check_keys, check_name
from dataplane.v1 import dataplane_pb2 as pb

SMALL_BYTES: Final = 16 << 10
"""Chunks below this are copied together: each by itself would cost more memory than it brings."""
JOINED_BYTES: Final = 128 << 10
"""And a piece of such is full from here on."""

HEADER_FACTOR: Final = 4
"""What a header takes in memory, of its size on the wire."""


class Owner(NamedTuple):
    """Whose put it is, and which of its effects."""

    principal: str
    client_id: str
    number: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a put is to write, checked."""

    partition_id: str
    keys: list[str]
    tags: list[dict[str, Any]] | None
    packed_tags: bytes | None
    shape: Shape
    flags: int
    """But for whether it is a repetition."""
    attempt: int | None
    total_bytes: int
    memory_bytes: int
    """What the whole put may hold: its chunks and this."""
    digest: bytes
    """Equal for equal headers; where a stream goes on, and what was seen meanwhile, are no part of
    it."""


def header_of(message: pb.PutRowsHeader, *, max_put_bytes: int, max_object_bytes: int) -> Header:
    """The header, before anything of its put is taken. InvalidRequest says what is wrong."""
    partition_id = check_name(message.partition_id, "partition")
    keys = list(message.keys)
    if not 0 < len(keys) <= MAX_ROWS:
        raise InvalidRequest(f"a put has 1 to {MAX_ROWS} keys, not {len(keys)}: split it")
    check_keys(keys)
    flags = flags_of(message.mode, return_tags=message.return_tags, request=pb.Request())
    if message.attempt < 0:
        raise InvalidRequest(f"an attempt is what BeginGroup answered, or 0, not {message.attempt}")
    shape = shape_from(message.columns, len(keys))
    _check_bytes(message, shape, max_put_bytes, max_object_bytes)
    tags: list[dict[str, Any]] | None = None
    if message.tags:
        if len(message.tags) != len(keys):
            raise InvalidRequest(
                f"{len(keys)} keys and {len(message.tags)} tags: none, or one for each key"
            )
        tags = [tags_from(each) for each in message.tags]
    if tags is None and not shape.columns:
        raise InvalidRequest("a put brings fields, tags or both")
    return Header(
        partition_id,
        keys,
        tags,
        None if tags is None else pack_tags_many(tags),
        shape,
        flags,
        message.attempt or None,
        message.total_bytes,
        message.total_bytes + HEADER_FACTOR * message.ByteSize(),
        _digest(message),
    )


def _check_bytes(
    message: pb.PutRowsHeader, shape: Shape, max_put_bytes: int, max_object_bytes: int
) -> None:
    if message.total_bytes != shape.nbytes:
        raise InvalidRequest(
            f"the header says {message.total_bytes} bytes, and its columns have {shape.nbytes}"
        )
    if shape.nbytes > max_put_bytes:
        raise InvalidRequest(
            f"a put of {shape.nbytes} bytes; this gateway takes {max_put_bytes} (max_put_bytes): "
            "split it"
        )
    for column, sizes in zip(shape.columns, shape.row_bytes, strict=True):
        if column.dtype == OBJECT and int(sizes.max()) > max_object_bytes:
            raise InvalidRequest(
                f"field {column.name!r} of key {message.keys[int(sizes.argmax())]!r:.200}: an "
                f"object of {int(sizes.max())} bytes; this gateway takes {max_object_bytes} "
                "(max_message_bytes)"
            )


def _digest(message: pb.PutRowsHeader) -> bytes:
    same = pb.PutRowsHeader()
    same.CopyFrom(message)
    same.ClearField("request")
    same.ClearField("resume_offset")
    return hashlib.blake2b(same.SerializeToString(deterministic=True), digest_size=16).digest()


class Received:
    """The bytes that have come of a put."""

    __slots__ = ("_open", "_pieces", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self._pieces: list[bytes | bytearray | memoryview] = []
        self._open = False
        """Whether the last piece is ours, to be added to."""

    def add(self, data: bytes | memoryview) -> None:
        """What comes next. It is not copied, unless it is small."""
        self.nbytes += len(data)
        if len(data) >= SMALL_BYTES:
            self._pieces.append(data)
            self._open = False
        elif self._open:
            last = self._pieces[-1]
            assert isinstance(last, bytearray)
            last += data
            self._open = len(last) < JOINED_BYTES
        elif len(data):
            self._pieces.append(bytearray(data))
            self._open = True

    def cut(self, nbytes: int) -> None:
        """Forget all but the first so many bytes."""
        self._open = False
        while self.nbytes > nbytes:
            last = self._pieces.pop()
            self.nbytes -= len(last)
            if self.nbytes < nbytes:
                self._pieces.append(memoryview(last)[: nbytes - self.nbytes])
                self.nbytes = nbytes

    def pieces(self) -> list[bytes | bytearray | memoryview]:
        """All of it, in order. They stay as they are, whatever comes later."""
        self._open = False
        return list(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


class Upload:
    """One put under way."""

    __slots__ = ("asked", "header", "left_at", "owner", "received", "release", "stream")

    def __init__(
        self, owner: Owner, header: Header, stream: object, release: Callable[[], None]
    ) -> None:
        self.owner = owner
        self.header = header
        self.received = Received()
        self.stream: object | None = stream
        """Who brings it now; None while nobody does."""
        self.left_at = 0.0
        """Since when nobody does."""
        self.asked = False
        """Whether the plane was asked for it before."""
        self.release = release

    @property
    def is_whole(self) -> bool:
        """Whether all of its bytes are here."""
        return self.received.nbytes == self.header.total_bytes

    def add(self, offset: int, data: bytes | memoryview) -> None:
        """A chunk.

        Raises:
            OutOfRange: it does not begin where the last one ended.
            InvalidRequest: it goes beyond what the header says.
        """
        at = self.received.nbytes
        if offset != at:
            raise OutOfRange(
                f"a chunk that begins at {offset} where {at} is due: chunks follow each other",
                offset=at,
            )
        if at + len(data) > self.header.total_bytes:
            raise InvalidRequest(
                f"a chunk ends at {at + len(data)}, beyond the {self.header.total_bytes} bytes "
                "that the header says"
            )
        self.received.add(data)


class Uploads:
    """The puts in parts of all clients."""

    def __init__(self, resume_s: float) -> None:
        self._resume_s = resume_s
        self._uploads: dict[Owner, Upload] = {}

    def __len__(self) -> int:
        return len(self._uploads)

    def find(self, owner: Owner) -> Upload | None:
        """What is held of a put."""
        return self._uploads.get(owner)

    def resume(
        self, owner: Owner, header: Header, offset: int, stream: object
    ) -> tuple[Upload, object | None] | None:
        """The put that a stream goes on with from an offset on, and the stream that it was taken
        from. None if it begins at 0: then it is to `begin`.

        Raises:
            OutOfRange: nothing is held of it, or not as much; `.offset` is where to go on.
            InvalidRequest: the header is another one than that of the put that broke off.
        """
        if offset == 0:
            return None
        upload = self._uploads.get(owner)
        held = 0 if upload is None else upload.received.nbytes
        if upload is None or not 0 < offset <= held:
            raise OutOfRange(
                f"the put cannot go on at {offset}: {held} bytes of it are held here", offset=held
            )
        if upload.header.digest != header.digest:
            raise InvalidRequest(
                f"request {owner.number} of this client goes on with another header than it began "
                "with: a number stands for one effect"
            )
        before, upload.stream = upload.stream, stream
        upload.received.cut(offset)
        return upload, before

    def begin(
        self, owner: Owner, header: Header, stream: object, release: Callable[[], None]
    ) -> tuple[Upload, object | None]:
        """A put from its start, and the stream that it was taken from, if there was one: what was
        held of it before is forgotten."""
        upload = Upload(owner, header, stream, release)
        before = self._uploads.pop(owner, None)
        self._uploads[owner] = upload
        if before is None:
            return upload, None
        upload.asked = before.asked
        taken_from, before.stream = before.stream, None
        before.release()
        return upload, taken_from

    def leave(self, upload: Upload, stream: object, now: float) -> None:
        """A stream has ended before its put had: it may be resumed, unless it was already."""
        if upload.stream is stream:
            upload.stream = None
            upload.left_at = now
            if not self._resume_s:
                self.drop(upload)

    def drop(self, upload: Upload) -> None:
        """Forget a put, and let go of what it holds."""
        if self._uploads.get(upload.owner) is upload:
            del self._uploads[upload.owner]
        upload.stream = None
        upload.release()

    def expire(self, now: float) -> int:
        """Forget those that were not resumed in time; how many."""
        before = now - self._resume_s
        late = [each for each in self._left() if each.left_at <= before]
        for upload in late:
            self.drop(upload)
        return len(late)

    def give_up_oldest(self, principal: str | None) -> bool:
        """Forget the put that was left longest ago, of one principal or of any; whether there was
        one."""
        left = [each for each in self._left() if principal in (None, each.owner.principal)]
        if not left:
            return False
        self.drop(min(left, key=lambda each: each.left_at))
        return True

    def close(self) -> None:
        """Forget all."""
        for upload in list(self._uploads.values()):
            self.drop(upload)

    def _left(self) -> list[Upload]:
        return [each for each in self._uploads.values() if each.stream is None]
