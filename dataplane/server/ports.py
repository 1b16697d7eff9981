"""How the two stores reach each other: in one process by a call, across processes by a channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dataplane.errors import DataplaneError, InternalError, PlaneLost
from dataplane.server.tag_service import TagService
from dataplane.server.value_service import Published, ValueService
from dataplane.wire.channel import Answer, Channel
from dataplane.wire.frames import Body, Header

log = logging.getLogger("dataplane.server")


class LocalTags:
    """The tag store of the same process."""

    def __init__(self, tags: TagService, store_id: str) -> None:
        self._tags = tags
        self._store_id = store_id

    def publish(
        self,
        client_id: str,
        meta: bytes,
        tags: bytes | None,
        block: Body,
        token: int,
        done: Published,
    ) -> None:
        try:
            answer = self._tags.put(client_id, meta, tags, block, self._store_id, token)
        except DataplaneError as error:
            done(None, error)
        except Exception as error:
            log.exception("a publication failed")
            done(None, InternalError(f"publication failed: {type(error).__name__}: {error}"))
        else:
            done(answer, None)

    def begun(self, token: int) -> None:
        self._tags.begun(self._store_id, token)

    def forget(self, token: int) -> None:
        self._tags.forget(self._store_id, token)

    def begin(self, done: Published) -> None:
        done(self._tags.store.revision(), None)

    async def repack_candidates(self, limit: int) -> list[Any]:
        return await self._tags.repack_candidates(self._store_id, limit)

    async def repack(self, old: int, block: Body, moves: list[Any]) -> None:
        self._tags.repack(self._store_id, old, block, moves)


class LocalValues:
    """The value store of the same process."""

    def __init__(self, values: ValueService, address: Body) -> None:
        self._values = values
        self.store_id = values.store.store_id
        self.address = address

    def free(self, blocks: Sequence[int]) -> Awaitable[None]:
        return self._values.free(blocks)


class RemoteTags:
    """The tag store at the other end of a channel; when it is lost, so is the plane."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._channel: Channel | None = None
        self._values: ValueService | None = None
        self._on_lost = on_lost

    async def join(self, channel: Channel, values: ValueService, address: Body) -> None:
        """Register the value store; publications go through this channel from now on."""
        self._channel = channel
        self._values = values
        channel.on_lost = self._on_lost
        await channel.call("register", [address])

    def on_request(self, channel: Channel, header: Header) -> None:
        """What the tag store asks of this value store."""
        if header.kind == "free" and self._values is not None:
            try:
                self._values.store.kill(header.body[0])
            except Exception as error:
                log.exception("blocks could not be freed")
                text = f"blocks could not be freed: {type(error).__name__}: {error}"
                channel.refuse(header.number, InternalError(text))
            else:
                channel.answer(header.number, None)

    def publish(
        self,
        client_id: str,
        meta: bytes,
        tags: bytes | None,
        block: Body,
        token: int,
        done: Published,
    ) -> None:
        self._send("publish", [client_id, meta, tags, block, token], done)

    def begun(self, token: int) -> None:
        self._joined().tell("begun", [token])

    def forget(self, token: int) -> None:
        self._joined().tell("forget", [token])

    def begin(self, done: Published) -> None:
        self._send("begin", [], done)

    def _send(self, verb: str, body: Body, done: Published) -> None:
        channel = self._joined()

        def answered(future: asyncio.Future[Answer]) -> None:
            error = future.exception()
            if error is None:
                done(future.result().body, None)
            elif isinstance(error, DataplaneError):
                done(None, error)
            else:
                done(None, PlaneLost(f"the tag store of this plane is gone: {error}"))

        try:
            channel.send(verb, body).add_done_callback(answered)
        except DataplaneError as error:
            done(None, error)

    async def repack_candidates(self, limit: int) -> list[Any]:
        return (await self._joined().call("repack_candidates", [limit])).body

    async def repack(self, old: int, block: Body, moves: list[Any]) -> None:
        await self._joined().call("repack", [old, block, moves])

    def _joined(self) -> Channel:
        if self._channel is None:
            raise InternalError("the value store has not joined its tag store yet")
        return self._channel
