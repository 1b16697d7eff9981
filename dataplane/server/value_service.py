"""The value store behind a socket: blocks in, publication at the tag store, blocks out.

The store publishes a put itself: the writer's answer comes only after the tag store has the rows,
so a writer that dies half-way leaves nothing. Keys and tags pass through unread.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from dataplane.codec.template import Templates
from dataplane.errors import DataplaneError, InvalidRequest
from dataplane.server.connection import Connection, Payload, Verb
from dataplane.server.repacking import IN_DOUBT, Repacking
from dataplane.server.slices import Slices, WorstSlice
from dataplane.values.blocks import Extent
from dataplane.values.holds import Draw
from dataplane.values.store import ValueStore
from dataplane.wire.frames import Body, Header
from dataplane.wire.messages import LONGEST_WAIT_S

log = logging.getLogger("dataplane.values")

READ_TIMEOUT_S = 30.0
"""How long a read keeps its blocks when its request names no deadline."""
MAX_READ_RUNS = 1 << 20
BLOCKS_STEP = 1024
"""Blocks that are listed before others may run."""
_NONE = set[int]()

Published = Callable[[Any, DataplaneError | None], None]


class TagPort(Protocol):
    """The tag store as a value store sees it."""

    def publish(
        self,
        client_id: str,
        meta: bytes,
        tags: bytes | None,
        block: Body,
        token: int,
        done: Published,
    ) -> None:
        """Ask for a put's publication; `done` gets the answer or the error. `token` is the one
        of its `begun`, or one of its own if it arrived whole."""
        ...

    def begun(self, token: int) -> None:
        """Tell, on the way that publications take, that a put has begun and is not here yet:
        what is cleared from now on, it must not bring back."""
        ...

    def forget(self, token: int) -> None:
        """The put that `begun` told of will not be published, or need not be any more."""
        ...

    def begin(self, done: Published) -> None:
        """Ask for the present revision, on the way that publications take."""
        ...

    async def repack_candidates(self, limit: int, segment: int | None = None) -> list[Any]:
        """Mostly dead blocks of this store, the emptiest first; or those in one segment."""
        ...

    async def repack(self, old: int, block: Body, moves: list[Any]) -> None: ...

    @property
    def is_joined(self) -> bool:
        """Whether the tag store can be asked now."""
        ...


class ValueService:
    def __init__(self, store: ValueStore, tags: TagPort) -> None:
        self.store = store
        self.tags = tags
        self.repacking = Repacking(store, tags)
        store.repack = self.repacking.repack
        store.evacuate = self.repacking.evacuate
        self.metrics: str | None = None
        """Where this process serves metrics, if it does."""
        self._templates = Templates()
        self._last_token = 0
        self._publishing: dict[Connection, set[int]] = {}
        """Publications that are not answered yet, by the connection that asked for them."""
        self.verbs: dict[str, Verb] = {
            "reserve": self._reserve,
            "commit": self._commit,
            "abort": self._abort,
            "pin": self._pin,
            "unpin": self._unpin,
            "read": self._read,
            "value_status": self._status,
            "holdings": self._holdings,
        }

    # -- put ---------------------------------------------------------------------------------

    def accept(
        self, connection: Connection, header: Header, nbytes: int
    ) -> Payload | asyncio.Future[Payload]:
        """Memory for the payload of a put that comes through the socket."""
        if header.kind != "put_block":
            raise InvalidRequest(f"the verb {header.kind!r:.80} takes no payload")
        _, _, blob, rows, lengths, timeout_s, draw = header.body
        expected = self._block_bytes(blob, lengths, rows)
        if expected != nbytes:
            raise InvalidRequest(
                f"a block of {nbytes} bytes where its template and row lengths say {expected}"
            )
        place = self.store.allocate(nbytes, connection, _patience(timeout_s), _draw(draw))
        if isinstance(place, Extent):
            return _Incoming(self, connection, header, place)
        granted: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
        token = self.begun()

        def on_room(done: asyncio.Future[Extent]) -> None:
            error = done.exception()
            if error is not None:
                self.tags.forget(token)
                granted.set_exception(error)
            else:
                granted.set_result(_Incoming(self, connection, header, done.result(), token))

        place.add_done_callback(on_room)
        return granted

    def _block_bytes(self, blob: object, lengths: bytes, rows: int) -> int:
        """What a block should have; InvalidRequest if there can be no such block."""
        template = self._templates.parse(blob)
        if not template.columns:
            raise InvalidRequest("a block has one field at least; a put of tags carries none")
        return template.block_bytes(lengths, rows)

    def begun(self) -> int:
        """Tell the tag store that a put has begun; the token that its publication names."""
        token = self._new_token()
        self.tags.begun(token)
        return token

    def _new_token(self) -> int:
        self._last_token += 1
        return self._last_token

    def publish(
        self,
        connection: Connection,
        number: int,
        extent: Extent,
        put: Sequence[Any],
        token: int = 0,
    ) -> None:
        """Publish a whole block and answer its writer."""
        meta, tags, blob, rows, lengths = put[:5]
        block = extent.block
        token = token or self._new_token()
        self.store.blocks.seal(block, connection)
        under_way = True

        def done(answer: Any, error: DataplaneError | None) -> None:
            nonlocal under_way
            under_way = False
            self._publishing.get(connection, _NONE).discard(token)
            if error is None:
                self.store.published(block)
                self.store.bytes_in += extent.nbytes
                connection.reply(number, answer)
                return
            if isinstance(error, IN_DOUBT):
                # It may be live. If not, it ends when the stores agree the next time.
                self.store.published(block)
            else:
                self.store.abort(block)
            connection.fail(number, error)

        placement = (block, extent.segment, extent.offset, extent.nbytes, blob, rows, lengths)
        self.tags.publish(connection.client_id, meta, tags, placement, token, done)
        if under_way:
            self._publishing.setdefault(connection, set()).add(token)

    async def _reserve(self, connection: Connection, number: int, body: Body) -> None:
        nbytes, timeout_s, draw = body
        if type(nbytes) is not int or nbytes <= 0:
            raise InvalidRequest(f"a block has one byte or more, not {nbytes!r:.80}")
        _only_local(connection)
        place = self.store.allocate(nbytes, connection, _patience(timeout_s), _draw(draw))
        extent = place if isinstance(place, Extent) else await place
        if connection.closed:
            self.store.abort(extent.block, connection)
            return

        def begun(stamp: Any, error: DataplaneError | None) -> None:
            if error is not None:
                self.store.abort(extent.block, connection)
                connection.fail(number, error)
            else:
                connection.reply(number, [extent.block, extent.segment, extent.offset, stamp])

        self.tags.begin(begun)

    def _commit(self, connection: Connection, number: int, body: Body) -> None:
        block, *put = body
        extent = self.store.blocks.extent(block)
        if extent is None:
            raise InvalidRequest(f"block {block!r:.80} is not reserved by this client: put again")
        _, _, blob, rows, lengths = put
        expected = self._block_bytes(blob, lengths, rows)
        if expected != extent.nbytes:
            # The writer has stopped copying, so what it reserved can go.
            self.store.abort(block, connection)
            raise InvalidRequest(
                f"a block of {extent.nbytes} bytes where template and row lengths say {expected}"
            )
        self.publish(connection, number, extent, put)

    def _abort(self, connection: Connection, number: int, body: Body) -> None:
        (block,) = body
        self.store.abort(block, connection)
        connection.reply(number, None)

    # -- read --------------------------------------------------------------------------------

    def _pin(self, connection: Connection, number: int, body: Body) -> None:
        (blocks,) = body
        _only_local(connection)
        connection.reply(number, self.store.blocks.pin(_ids(blocks), connection))

    def _unpin(self, connection: Connection, number: int, body: Body) -> None:
        (handle,) = body
        self.store.unpin(handle, connection)
        connection.reply(number, None)

    async def _read(self, connection: Connection, number: int, body: Body) -> None:
        """Bytes of runs of blocks, in the order asked for: the way of other nodes."""
        blocks, which, starts, sizes, timeout_s = body
        ids = _ids(blocks)
        block_of = np.frombuffer(which, np.int32)
        start = np.frombuffer(starts, np.int64)
        size = np.frombuffer(sizes, np.int64)
        if not len(block_of) == len(start) == len(size) <= MAX_READ_RUNS:
            raise InvalidRequest(f"a read names at most {MAX_READ_RUNS} runs in arrays of one size")
        pinned = self.store.blocks.pin(ids, connection)
        if pinned.gone:
            connection.reply(number, [pinned.gone])
            return
        try:
            extents = [self.store.blocks.extent(block) for block in ids]
            limit = np.array([extent.nbytes if extent else 0 for extent in extents], np.int64)
            if len(block_of) and (
                block_of.min() < 0
                or block_of.max() >= len(ids)
                or start.min() < 0
                or size.min() < 0
                or ((start > limit[block_of]) | (size > limit[block_of] - start)).any()
            ):
                raise InvalidRequest("a read reaches beyond its blocks")
            memory = [self.store.memory(extent) for extent in extents if extent]
            parts: list[memoryview] = [
                memory[b][s : s + n]
                for b, s, n in zip(block_of.tolist(), start.tolist(), size.tolist(), strict=True)
                if n
            ]
            # The store ends the pin at the request's deadline, whatever the reader does.
            patience_s = _patience(timeout_s)
            async with asyncio.timeout(READ_TIMEOUT_S if patience_s is None else patience_s):
                nbytes = int(size.sum())
                await connection.reply_with(number, [[]], parts, nbytes)
                self.store.bytes_out += nbytes
        except TimeoutError:
            # What is still on its way must not leave once its pin has ended.
            connection.abort("a read was not taken before its deadline")
        finally:
            self.store.unpin(pinned.handle, connection)

    # -- what the tag store asks ---------------------------------------------------------------

    async def free(self, blocks: Sequence[int]) -> None:
        """The tag store says that these blocks are dead."""
        self.store.kill(blocks)

    def hold(self, attempt: Any, nbytes: Any, timeout_s: Any) -> asyncio.Future[None] | None:
        """The tag store wants room held for an attempt: it is, or is when the future has ended."""
        if type(attempt) is not int or type(nbytes) is not int or nbytes <= 0:
            raise InvalidRequest(f"room of {nbytes!r:.80} bytes for attempt {attempt!r:.80}")
        return self.store.hold(attempt, nbytes, _patience(timeout_s) or 0.0)

    def gone(self, connection: Connection, *, stopped: bool) -> None:
        """A client's connection ended."""
        for token in self._publishing.pop(connection, ()):
            # It may wait for room under a quota; what comes again waits on a connection of its own.
            self.tags.forget(token)
        self.store.drop(connection, stopped=stopped)

    def _status(self, connection: Connection, number: int, body: Body) -> None:
        connection.reply(number, {**self.store.counts(), "metrics": self.metrics})

    async def _holdings(self, connection: Connection, number: int, body: Body) -> None:
        """What is in use, who holds it, and which blocks are published, with their bytes."""
        if body != []:
            raise InvalidRequest("holdings takes nothing")
        blocks = self.store.blocks
        slices = Slices(WorstSlice())
        held: list[Any] = []
        for owner, *rest in blocks.held():
            if isinstance(owner, Connection):  # else it is what groups have reserved
                held.append((owner.client_id, owner.label, *rest))
            await slices.breathe()
        published, sizes = array("q"), array("q")
        for at, extent in enumerate(blocks.published(), 1):
            published.append(extent.block)
            sizes.append(extent.nbytes)
            if not at % BLOCKS_STEP:
                await slices.breathe()
        connection.reply(number, [self.store.counts(), held, published.tobytes(), sizes.tobytes()])


class _Incoming:
    """A block that is arriving through the socket."""

    def __init__(
        self,
        service: ValueService,
        connection: Connection,
        header: Header,
        extent: Extent,
        token: int = 0,
    ) -> None:
        self._service = service
        self._connection = connection
        self._number = header.number
        self._put: list[Any] = list(header.body)
        self._extent = extent
        self._token = token
        self.memory = service.store.memory(extent)

    def started(self) -> None:
        if not self._token:
            self._token = self._service.begun()

    def complete(self) -> None:
        self.memory = memoryview(b"")
        service, connection = self._service, self._connection
        if connection.closed:
            self.lost()
            return
        try:
            service.publish(connection, self._number, self._extent, self._put, self._token)
        except DataplaneError as error:
            self._forget()
            connection.fail(self._number, error)

    def lost(self) -> None:
        self.memory = memoryview(b"")
        self._forget()
        # Only this store wrote here, so the bytes are free at once.
        self._service.store.abort(self._extent.block, self._connection)

    def _forget(self) -> None:
        if self._token:
            self._service.tags.forget(self._token)


def _only_local(connection: Connection) -> None:
    # The kernel tells when a process of this node stops; of others it may never be known.
    if not connection.local:
        raise InvalidRequest(
            "only clients of this node, on its unix socket, hold memory of its segments"
        )


def _patience(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= LONGEST_WAIT_S:
        raise InvalidRequest(f"a timeout is seconds up to a day, not {value!r:.80}")
    return float(value)


def _draw(value: Any) -> Draw | None:
    """What an allocation may draw on besides free room."""
    if value is None or value is True or (type(value) is int and 0 < value < 1 << 63):
        return value
    raise InvalidRequest(f"a put draws on an attempt, on any (true) or on none, not {value!r:.80}")


def _ids(blocks: object) -> list[int]:
    """Block ids from packed int64s."""
    if type(blocks) is not bytes:
        raise InvalidRequest("block ids are packed 64-bit integers")
    return np.frombuffer(blocks, np.int64).tolist()
