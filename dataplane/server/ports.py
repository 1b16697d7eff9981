"""How the two stores reach each other: in one process by a call, across processes by a channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from dataplane.errors import (
    DataplaneError,
    InternalError,
    InvalidRequest,
    PlaneLost,
    Unreachable,
)
from dataplane.server.putting import when_done
from dataplane.server.tag_service import TagService
from dataplane.server.value_service import Published, ValueService
from dataplane.types import Revision
from dataplane.values.store import Live
from dataplane.wire.channel import Answer, Broken, Channel
from dataplane.wire.frames import Body, Header

log = logging.getLogger("dataplane.server")

FIRST_PAUSE_S = 0.02
LAST_PAUSE_S = 0.5
"""Between two tries to find a tag store that is away."""


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

    @property
    def is_joined(self) -> bool:
        return True

    def begun(self, token: int) -> None:
        self._tags.putting.begun(self._store_id, token)

    def forget(self, token: int) -> None:
        self._tags.putting.forget(self._store_id, token)

    def begin(self, done: Published) -> None:
        done(self._tags.store.revision(), None)

    async def repack_candidates(self, limit: int, segment: int | None = None) -> list[Any]:
        return await self._tags.repack_candidates(self._store_id, limit, segment)

    async def repack(self, old: int, block: Body, moves: list[Any]) -> None:
        self._tags.repack(self._store_id, old, block, moves)


class LocalValues:
    """The value store of the same process."""

    def __init__(self, values: ValueService, address: Body) -> None:
        self._values = values
        self.store_id = values.store.store_id
        self.address = address

    @property
    def is_here(self) -> bool:
        return True

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


class _Request:
    """What a value store asked of the tag store, and asks again until it is answered."""

    __slots__ = ("body", "done", "verb")

    def __init__(self, verb: str, body: Body, done: Published) -> None:
        self.verb = verb
        self.body = body
        self.done = done


class RemoteTags:
    """The tag store at the other end of a channel, which may be started again meanwhile.

    What is asked while it is away, and what was not answered when it went, is sent once it is back:
    requests carry the numbers of their clients, so each has one effect. The value store joins it
    again as it did at first.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[Channel, Header], None]], Awaitable[Channel]],
        on_end: Callable[[], None],
    ) -> None:
        self._connect = connect
        """Makes a channel to where the tag store is now. PlaneLost if the plane is no more."""
        self._on_end = on_end
        self._channel: Channel | None = None
        """None while the tag store is away."""
        self._values: ValueService | None = None
        self._address: Body = None
        self._lost: PlaneLost | None = None
        self._behind = False
        """Whether a tag store came back that knows less than it had acknowledged."""
        self._pending: dict[_Request, None] = {}
        self._begun: dict[int, Revision] = {}
        """The last revision seen before each put began that is under way, by its token."""
        self._publishing: set[int] = set()
        """Tokens of publications that are not answered."""
        self._seen = Revision(0, 0)
        """The last revision that any answer carried."""
        self._joining: asyncio.Task[None] | None = None

    async def join(self, values: ValueService, address: Body) -> None:
        """Register the value store, whose clients find it at an address."""
        self._values = values
        self._address = address
        await self._join()

    async def _join(self) -> None:
        """Join the tag store once.

        PlaneLost if it knows less than it has acknowledged: nothing is freed for such a one.
        """
        assert self._values is not None
        store = self._values.store
        channel = await self._connect(self._on_request)
        try:
            self._check(channel.greeting["revision"])
            answer = await channel.call("live", [], into=lambda _, n: memoryview(bytearray(n)))
            revision, kept = answer.body
            self._check(revision)
            columns = np.frombuffer(answer.payload, np.int64).reshape(4, -1)
            lost = await store.reconcile(Live(*columns))
            without_room = store.reconcile_holds(kept)
            about = [self._address, lost, without_room, self._values.metrics]
            await channel.call("register", about)
            self._see(revision)
            for token, since in self._begun.items():
                channel.tell("begun", [token, since])
            self._channel = channel
            for request in list(self._pending):
                self._send(request)
        except BaseException:
            channel.close()
            raise
        channel.on_lost = self._on_lost
        if channel.closed:
            self._on_lost()

    @property
    def is_joined(self) -> bool:
        return self._channel is not None

    def close(self) -> None:
        """The value store ends."""
        if self._joining is not None:
            self._joining.cancel()
        if self._channel is not None:
            self._channel.on_lost = None
            self._channel.close()
        self._fail(PlaneLost("the value store of this node ends, and so does the plane"))

    def _check(self, revision: Body) -> None:
        there = Revision(*revision)
        if there.n < self._seen.n:
            self._behind = True
            raise PlaneLost(
                f"the tag store is at revision {there.n}, and had acknowledged {self._seen.n}: its "
                "journal was cut or replaced, so the rows of this plane cannot be trusted; nothing "
                "was freed; start a new plane from a checkpoint"
            )

    def _see(self, revision: Body) -> None:
        seen = Revision(*revision)
        if seen.n > self._seen.n:
            self._seen = seen

    # -- while it is away --------------------------------------------------------------------

    def _on_lost(self) -> None:
        self._channel = None
        if self._joining is None and self._lost is None:
            log.warning("the tag store is away; its clients wait until it is back")
            self._joining = asyncio.get_running_loop().create_task(self._join_again())

    async def _join_again(self) -> None:
        pause_s = FIRST_PAUSE_S
        while self._channel is None:
            try:
                await self._join()
            except PlaneLost as error:
                self._fail(error)
                if not self._behind:
                    self._on_end()
                return
            except (OSError, DataplaneError) as error:
                log.debug("the tag store is not back yet: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
        self._joining = None
        log.info("the tag store is back, at revision %s", tuple(self._seen))

    # -- what the tag store asks ------------------------------------------------------------

    def _on_request(self, channel: Channel, header: Header) -> None:
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
        elif kind == "end":
            self._fail(PlaneLost("the plane was destroyed, or nobody has used it for long"))
            self._on_end()
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

    # -- what is asked of it -----------------------------------------------------------------

    def publish(
        self,
        client_id: str,
        meta: bytes,
        tags: bytes | None,
        block: Body,
        token: int,
        done: Published,
    ) -> None:
        def answered(answer: Any, error: DataplaneError | None) -> None:
            self._begun.pop(token, None)
            self._publishing.discard(token)
            if error is None:
                self._see(answer[0])
            done(answer, error)

        # One that arrived whole too: sent again, it must not count as younger than it is.
        self._begun.setdefault(token, self._seen)
        self._publishing.add(token)
        self._ask("publish", [client_id, meta, tags, block, token], answered)

    def begun(self, token: int) -> None:
        self._begun[token] = self._seen
        if self._channel is not None:
            self._channel.tell("begun", [token])

    def forget(self, token: int) -> None:
        if token not in self._publishing:
            self._begun.pop(token, None)
        if self._channel is not None:
            self._channel.tell("forget", [token])

    def begin(self, done: Published) -> None:
        def answered(answer: Any, error: DataplaneError | None) -> None:
            if error is None:
                self._see(answer)
            done(answer, error)

        self._ask("begin", [], answered)

    def _ask(self, verb: str, body: Body, done: Published) -> None:
        if self._lost is not None:
            done(None, self._lost)
            return
        request = _Request(verb, body, done)
        self._pending[request] = None
        self._send(request)

    def _send(self, request: _Request) -> None:
        channel = self._channel
        if channel is None:
            return  # it is sent when the tag store is back

        def answered(future: asyncio.Future[Answer]) -> None:
            error = future.exception()
            if isinstance(error, Broken) or request not in self._pending:
                return  # it is sent again, or was given up
            del self._pending[request]
            if error is None:
                request.done(future.result().body, None)
            elif isinstance(error, DataplaneError):
                request.done(None, error)
            else:
                request.done(None, _typed(request.verb, error))

        channel.send(request.verb, request.body).add_done_callback(answered)

    def _fail(self, error: PlaneLost) -> None:
        """Nothing is answered any more."""
        self._lost = error
        pending, self._pending = self._pending, {}
        for request in pending:
            request.done(None, error)

    async def repack_candidates(self, limit: int, segment: int | None = None) -> list[Any]:
        return (await self._joined().call("repack_candidates", [limit, segment])).body

    async def repack(self, old: int, block: Body, moves: list[Any]) -> None:
        # Until it is known whether the tag store points there, the new block may not go.
        repacked: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answered(_: Any, error: DataplaneError | None) -> None:
            if repacked.done():
                return
            if error is None:
                repacked.set_result(None)
            else:
                repacked.set_exception(error)

        self._ask("repack", [old, block, moves], answered)
        await repacked

    def _joined(self) -> Channel:
        if self._channel is None:
            raise Unreachable("the tag store is away; it is started again, or the plane ends")
        return self._channel


def _typed(kind: str | int, error: BaseException) -> DataplaneError:
    """The error as the tag store is told it."""
    if isinstance(error, DataplaneError):
        return error
    log.error("the tag store's %r failed", kind, exc_info=error)
    return InternalError(f"{kind!r:.80} failed: {type(error).__name__}: {error}")
