"""PutRows and GetPutProgress: rows on their way in, a chunk at a time.

Owns the streams: who brings a put, how long it is waited for, and what is done with one whose
stream ends before it is whole. What of a put is taken is for uploads.py to say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from dataplane.client.put import put_block
from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InvalidRequest,
    OutcomeUnknown,
    Unreachable,
)
from dataplane.gateway.calls.arguments import revision_to
from dataplane.gateway.calls.budget import Budget, room_for
from dataplane.gateway.calls.objects import INLINE_BYTES, bool_bytes, object_bytes, stored_block
from dataplane.gateway.calls.uploads import Header, Owner, Upload, Uploads, header_of
from dataplane.gateway.config import GatewayConfig
from dataplane.gateway.producers import check_client_id
from dataplane.protocol.chunks import Chunk, Malformed
from dataplane.protocol.values import tags_to
from dataplane.tags.keys import check_name
from dataplane.v1 import dataplane_pb2 as pb
from dataplane.wire.messages import RETRY, RETURN_TAGS

if TYPE_CHECKING:
    from dataplane.client.aio import AsyncClient
    from dataplane.codec.foreign import Foreign
    from dataplane.gateway.call import Call
    from dataplane.gateway.service import Handler

Part: TypeAlias = pb.PutRowsRequest | Chunk | Malformed

LARGE_HEADER: Final = 128 << 10
LARGE_BOOLS: Final = 8 << 20
"""Bytes from which on it takes so long to check them that others would notice."""
DISCARD_BYTES: Final = 32 << 20
DISCARD_S: Final = 0.05
"""What is read on of a put that is refused, as long as it keeps coming."""
RESUMABLE: Final = (Unreachable, DeadlineExceeded, OutcomeUnknown)
"""After these the same request may be asked again, and need not be sent again."""


class Puts:
    """PutRows and GetPutProgress."""

    def __init__(
        self,
        config: GatewayConfig,
        uploads: Uploads,
        budget: Budget,
        translating: asyncio.Semaphore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`translating`: held while objects are made of others, of which there is room for one."""
        self._config = config
        self._clock = clock
        self._uploads = uploads
        self._budget = budget
        self._translating = translating
        self.handlers: dict[str, Handler] = {
            "PutRows": self.put_rows,
            "GetPutProgress": self.get_put_progress,
        }

    async def put_rows(self, parts: AsyncIterator[Part], call: Call) -> pb.PutRowsResponse:
        """See the protocol's PutRows."""
        try:
            return await self._put_rows(parts, call)
        except RESUMABLE:
            raise
        except DataplaneError:
            await _read_off(parts)
            raise

    async def _put_rows(self, parts: AsyncIterator[Part], call: Call) -> pb.PutRowsResponse:
        message = await self._first(parts)
        request = message.request
        call.require("put", message.partition_id, [column.name for column in message.columns])
        check_client_id(request.client_id)
        header = await self._header(message)
        owner = Owner(call.principal.name, request.client_id, request.number)
        stream = asyncio.current_task()
        assert stream is not None
        # From here on the producer is present: a put that takes long counts as a call of its.
        async with call.asking(request) as client:
            upload = await self._upload(owner, header, message.resume_offset, stream, call)
            lasts = False
            try:
                if not await self._receive(parts, upload, call):
                    lasts = True  # it looks the same when the connection breaks
                    raise InvalidRequest(
                        f"the stream ended after {upload.received.nbytes} of "
                        f"{header.total_bytes} bytes; it may be resumed there"
                    )
                return await self._apply(upload, request, client, call)
            except asyncio.CancelledError:
                lasts = True
                if upload.stream is stream:
                    raise  # the caller has gone
                stream.uncancel()
                raise Unreachable("another stream goes on with this put") from None
            except RESUMABLE:
                lasts = True
                raise
            finally:
                if lasts:
                    self._uploads.leave(upload, stream, self._clock())
                elif upload.stream is stream:
                    self._uploads.drop(upload)

    async def get_put_progress(
        self, message: pb.GetPutProgressRequest, call: Call
    ) -> pb.GetPutProgressResponse:
        """See the protocol's GetPutProgress."""
        call.require("put", check_name(message.partition_id, "partition"))
        request = message.request
        call.check_plane(request.plane_id)
        check_client_id(request.client_id)
        owner = Owner(call.principal.name, request.client_id, request.number)
        upload = self._uploads.find(owner)
        if upload is None or upload.header.partition_id != message.partition_id:
            return pb.GetPutProgressResponse(state=pb.PUT_STATE_NOT_HELD)
        applying = upload.is_whole and upload.stream is not None
        return pb.GetPutProgressResponse(
            state=pb.PUT_STATE_APPLYING if applying else pb.PUT_STATE_RECEIVING,
            offset=upload.received.nbytes,
        )

    async def _first(self, parts: AsyncIterator[Part]) -> pb.PutRowsHeader:
        """The header that a stream begins with."""
        try:
            async with asyncio.timeout(self._config.stall_s):
                part = await anext(parts, None)
        except TimeoutError:
            raise self._stalled() from None
        if not isinstance(part, pb.PutRowsRequest) or part.WhichOneof("part") != "header":
            raise InvalidRequest("the first message of a put is its header")
        return part.header

    async def _header(self, message: pb.PutRowsHeader) -> Header:
        """The header, checked; a large one in a thread, since it takes a while."""
        check = partial(
            header_of,
            message,
            max_put_bytes=self._config.max_put_bytes,
            max_object_bytes=self._config.max_message_bytes,
        )
        return await asyncio.to_thread(check) if message.ByteSize() > LARGE_HEADER else check()

    async def _upload(
        self, owner: Owner, header: Header, offset: int, stream: asyncio.Task[Any], call: Call
    ) -> Upload:
        """The put that this stream brings from now on, with room for all of it."""
        found = self._uploads.resume(owner, header, offset, stream)
        if found is None:
            release = await room_for(
                self._budget, call, header.memory_bytes, self._config.max_call_s
            )
            found = self._uploads.begin(owner, header, stream, release)
        upload, before = found
        if isinstance(before, asyncio.Task):
            before.cancel()
        return upload

    async def _receive(self, parts: AsyncIterator[Part], upload: Upload, call: Call) -> bool:
        """Take what comes until the stream ends; whether the put is whole then."""
        stall_s = self._config.stall_s
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(stall_s) as patience:
                async for part in parts:
                    if isinstance(part, Chunk):
                        data: bytes | memoryview = part.data
                        offset = part.offset
                    else:
                        offset, data = _chunk_of(part)
                    upload.add(offset, data)
                    wait_s = call.throttle.bytes(len(data))
                    if wait_s:
                        patience.reschedule(None)
                        await asyncio.sleep(wait_s)
                    patience.reschedule(now() + stall_s)
        except DeadlineExceeded:
            raise
        except TimeoutError:
            raise self._stalled() from None
        return upload.is_whole

    async def _apply(
        self, upload: Upload, request: pb.Request, client: AsyncClient, call: Call
    ) -> pb.PutRowsResponse:
        header = upload.header
        block = await self._block(upload) if header.shape.columns else None
        flags = header.flags
        if request.retry or upload.asked:
            flags |= RETRY
        upload.asked = True
        meta = await client.run(
            lambda core, deadline: put_block(
                core,
                header.keys,
                header.partition_id,
                block,
                header.packed_tags,
                header.tags or [{} for _ in header.keys],
                flags,
                deadline,
                header.attempt,
            ),
            call.timeout(self._config.max_call_s),
        )
        return pb.PutRowsResponse(
            revision=revision_to(meta.revision),
            tags=map(tags_to, meta.tags) if flags & RETURN_TAGS else (),
            fields=meta.fields,
        )

    async def _block(self, upload: Upload) -> Foreign:
        header = upload.header
        lay = partial(stored_block, header.shape, header.keys, upload.received.pieces())
        if object_bytes(header.shape) < INLINE_BYTES:
            checked = bool_bytes(header.shape)
            return await asyncio.to_thread(lay) if checked > LARGE_BOOLS else lay()
        async with self._translating:
            return await asyncio.to_thread(lay)

    def _stalled(self) -> DeadlineExceeded:
        stall_s = self._config.stall_s
        return DeadlineExceeded(
            f"nothing of the put came for {stall_s:g} s",
            waited_s=stall_s,
            explanation="its sender stopped; it may be resumed",
        )


async def _read_off(parts: AsyncIterator[Part]) -> None:
    """Take what is on its way already of a put that is refused, and keep nothing of it: a client
    that is refused in the midst of a message is told by its own gRPC that something broke, and not
    why."""
    left = DISCARD_BYTES
    with suppress(Exception):
        while left > 0:
            async with asyncio.timeout(DISCARD_S):
                part = await anext(parts)
            left -= len(part.data) if isinstance(part, Chunk) else 1 << 10


def _chunk_of(part: object) -> tuple[int, bytes]:
    if isinstance(part, pb.PutRowsRequest) and part.WhichOneof("part") == "chunk":
        return part.chunk.offset, part.chunk.data
    if isinstance(part, Malformed):
        raise InvalidRequest("a message of the put is not a PutRowsRequest")
    raise InvalidRequest("what follows the header of a put is chunks")
