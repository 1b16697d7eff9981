"""Rows on their way to and from a gateway: in chunks, resumed, checked before memory is taken."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, Protocol

import grpc
import numpy as np

from dataplane.errors import InternalError, InvalidRequest, Unreachable
from dataplane.producer.channel import Channel, Failed
from dataplane.protocol.cells import Shape, shape_from, shape_of
from dataplane.v1 import dataplane_pb2 as pb

CHUNK_BYTES: Final = 1 << 20
"""Where the gateway names no size."""


class Chunked(Protocol):
    """Bytes that can be read from an offset on, as often as they are wanted."""

    def chunks(self, size: int, offset: int = 0) -> Iterator[tuple[int, bytes]]:
        """Parts of at most `size`, each with where it begins."""
        ...


def check_put(header: pb.PutRowsHeader, limits: pb.Limits) -> None:
    """InvalidRequest if a put is more than the gateway takes."""
    if limits.max_rows and len(header.keys) > limits.max_rows:
        raise InvalidRequest(f"a put of {len(header.keys)} rows; at most {limits.max_rows}")
    if limits.max_put_bytes and header.total_bytes > limits.max_put_bytes:
        raise InvalidRequest(
            f"a put of {header.total_bytes} bytes, and the gateway takes {limits.max_put_bytes}: "
            "put fewer rows at a time"
        )
    size = header.ByteSize()
    if limits.max_message_bytes and size > limits.max_message_bytes:
        raise InvalidRequest(
            f"keys, tags and row lengths of {size} bytes, and the gateway takes "
            f"{limits.max_message_bytes} in one message: put fewer rows at a time"
        )


class Upload:
    """A put on its way, which goes on where a broken stream ended."""

    def __init__(
        self,
        channel: Channel,
        header: pb.PutRowsHeader,
        cells: Chunked,
        limits: pb.Limits,
        deadline: float,
    ) -> None:
        self._channel = channel
        self._header = header
        self._cells = cells
        size = limits.chunk_bytes or CHUNK_BYTES
        if limits.max_message_bytes:
            size = min(size, max(1, limits.max_message_bytes - 64))  # around a chunk's bytes
        self._chunk_bytes = size
        self._deadline = deadline

    async def send(self) -> pb.PutRowsResponse:
        """Send what the gateway does not have yet; its answer. The header's request is filled."""
        offset = await self._offset() if self._header.request.retry else 0
        self._header.resume_offset = offset
        try:
            return await self._channel.parts("PutRows", self._messages(offset), self._deadline)
        except Failed as failed:
            if offset and failed.code is grpc.StatusCode.OUT_OF_RANGE:
                # It has let go of what it had since it was asked.
                lost = Unreachable("the gateway does not hold the begin of the put any more")
                raise Failed(lost, grpc.StatusCode.UNAVAILABLE, told=False) from None
            raise

    async def _offset(self) -> int:
        message = pb.GetPutProgressRequest(
            request=self._header.request, partition_id=self._header.partition_id
        )
        progress = await self._channel.unary("GetPutProgress", message, self._deadline)
        if progress.state == pb.PUT_STATE_APPLYING:
            return self._header.total_bytes
        if progress.state == pb.PUT_STATE_RECEIVING:
            return min(max(progress.offset, 0), self._header.total_bytes)
        return 0

    async def _messages(self, offset: int) -> AsyncIterator[pb.PutRowsRequest | bytes]:
        yield pb.PutRowsRequest(header=self._header)
        for begin, data in self._cells.chunks(self._chunk_bytes, offset):
            yield packed_chunk(begin, data)


def packed_chunk(offset: int, data: bytes) -> bytes:
    """A PutRowsRequest with a chunk, as it travels. The bytes are copied once for it, where making
    the messages copies them three times."""
    head = (b"\x08" + _varint(offset) if offset else b"") + b"\x12" + _varint(len(data))
    return b"".join((b"\x12", _varint(len(head) + len(data)), head, data))


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


async def receive(
    answers: AsyncIterator[Any], max_bytes: int
) -> tuple[pb.GetRowsHeader, Shape, bytearray]:
    """The rows of a get, whole.

    InternalError if what comes is not what was announced, or more than the gateway says it sends.
    """
    header: pb.GetRowsHeader | None = None
    shape = shape_of((), np.empty((0, 0), np.int32), 0)
    data = bytearray()
    at = 0
    async for answer in answers:
        if header is None:
            header = answer.header
            shape = _shape_of(answer, max_bytes)
            data = bytearray(shape.nbytes)
            continue
        chunk = answer.chunk
        if chunk.offset != at or at + len(chunk.data) > len(data):
            raise InternalError(
                f"bytes of a get at {chunk.offset}, where {at} of {len(data)} are here"
            )
        data[at : at + len(chunk.data)] = chunk.data
        at += len(chunk.data)
    if header is None or at != len(data):
        raise InternalError(f"a get ended with {at} of {len(data)} bytes")
    return header, shape, data


def _shape_of(answer: pb.GetRowsResponse, max_bytes: int) -> Shape:
    if not answer.HasField("header"):
        raise InternalError("a get began without a header")
    header = answer.header
    if not header.keys:
        return shape_of((), np.empty((0, 0), np.int32), 0)
    try:
        shape = shape_from(header.columns, len(header.keys))
    except InvalidRequest as error:
        raise InternalError(f"a get of columns that cannot be: {error.message}") from None
    if shape.nbytes != header.total_bytes or (max_bytes and shape.nbytes > max_bytes):
        raise InternalError(
            f"a get of {header.total_bytes} bytes, where its columns have {shape.nbytes} and the "
            f"gateway sends at most {max_bytes}"
        )
    return shape
