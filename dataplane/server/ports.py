"""How the two stores reach each other: in one process by a call, across processes by a channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dataplane.errors import DataplaneError, InternalError, InvalidRequest, PlaneLost
from dataplane.server.putting import when_done
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
        def ended(answer: Any, error: BaseException | None) -> None:
            if error is None or isinstance(error, DataplaneError):
                done(answer, error)
            else:
                log.error("a publication failed", exc_info=error)
                text = f"publication failed: {type(error).__name__}: {error}"
                done(None, InternalError(text))

        try:
            answer = self._tags.putting.put(client_id, meta, tags, block, self._store_id, token)
        except Exception as error:
            ended(None, error)
        else:
            when_done(answer, ended)

    def begun(self, token: int) -> None:
        self._tags.putting.begun(self._store_id, token)

    def forget(self, token: int) -> None:
        self._tags.putting.forget(self._store_id, token)

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

    async def hold(self, attempt: int, nbytes: int, timeout_s: float) -> None:
        try:
            waiting = self._values.hold(attempt, nbytes, timeout_s)
            if waiting is not None:
                await waiting
        except asyncio.CancelledError:
            self.held([(attempt, 0)])  # granted or not, nobody will name it any more
            raise

    async def bind(self, token: int, attempt: int) -> None:
        self._values.store.bind(token, attempt)

    def held(self, updates: Sequence[tuple[int, int]]) -> None:
        self._values.store.held(updates)


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
        number = header.number

        def ended(answer: asyncio.Future[None]) -> None:
            error = answer.exception()
            if error is None:
                channel.answer(number, None)
            else:
                channel.refuse(number, _typed(header.kind, error))

        try:
            waiting = self._do(header.kind, header.body)
        except Exception as error:
            channel.refuse(number, _typed(header.kind, error))
        else:
            if waiting is None:
                channel.answer(number, None)
            else:
                waiting.add_done_callback(ended)  # what comes behind it does not wait

    def _do(self, kind: str | int, body: Body) -> asyncio.Future[None] | None:
        if self._values is None:
            raise InternalError("the value store has not joined its tag store yet")
        if kind == "free":
            self._values.store.kill(body[0])
        elif kind == "hold":
            attempt, nbytes, timeout_s = body
            return self._values.hold(attempt, nbytes, timeout_s)
        elif kind == "bind":
            token, attempt = body
            self._values.store.bind(token, attempt)
        elif kind == "held":
            self._values.store.held([(attempt, nbytes) for attempt, nbytes in body])
        else:
            raise InvalidRequest(f"a value store does not know {kind!r:.80}")
        return None

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


def _typed(kind: str | int, error: BaseException) -> DataplaneError:
    """The error as the tag store is told it."""
    if isinstance(error, DataplaneError):
        return error
    log.error("the tag store's %r failed", kind, exc_info=error)
    return InternalError(f"{kind!r:.80} failed: {type(error).__name__}: {error}")
