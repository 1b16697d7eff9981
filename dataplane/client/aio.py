"""The asyncio client: the verbs of `Client` as coroutines, many at once on one connection.

May be used from several event loops of one process; each loop has connections of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from dataplane.client.aio_control import AsyncControl
from dataplane.client.aio_inspector import AsyncInspector
from dataplane.client.connection import (
    CONNECT_PAUSE_S,
    LONGEST_CONNECT_PAUSE_S,
    Connection,
    connect,
    look_again,
    not_reached,
    peer_of,
    unanswered,
)
from dataplane.client.core import Core, Joined, StoreView, settle_in_child
from dataplane.client.effects import Ask, Done, Hold, Open, Pause, Run, Tell, Verb
from dataplane.client.get import GetOptions, Layout, Pad, get_batch
from dataplane.client.loops import Loop
from dataplane.client.pins import Pins
from dataplane.client.put import flags_of, put_batch, put_row
from dataplane.client.results import Listing, Rows
from dataplane.client.retry import ask_again
from dataplane.client.tags import Where, clear_rows, list_rows, plane_status
from dataplane.client.view import view_batch
from dataplane.config import Config
from dataplane.errors import (
    DataplaneError,
    DeadlineExceeded,
    InvalidRequest,
    PlaneLost,
    Unreachable,
)
from dataplane.types import KVBatchMeta, Revision
from dataplane.wire.channel import Answer, Channel

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

Result = TypeVar("Result")

GREETING_S = 5.0
"""How long a server may take to greet, before another connection is made."""
INLINE_BYTES = 256 << 10
"""Work on fewer bytes is done on the event loop; more goes to a thread."""


_UNDONE_BY = {"reserve": "abort", "pin": "unpin"}
"""What gives back that which a request takes. The channel stays, so it would be held for ever."""


def _abandon(channel: Channel, verb: str, answer: asyncio.Future[Answer]) -> None:
    """Leave a request whose caller waits no longer: neither its room nor its bytes may linger."""
    if verb == "put_block" and channel.is_sending():
        # What is left to send is nobody's wish, and lies in memory that may change from now on.
        channel.abort()
    undo = _UNDONE_BY.get(verb)
    if undo is None:
        return

    def answered(future: asyncio.Future[Answer]) -> None:
        if not future.cancelled() and future.exception() is None:
            channel.tell(undo, [future.result().body[0]])

    answer.add_done_callback(answered)


def _let_go(pinning: asyncio.Future[tuple[Callable[[], None] | None, list[int]]]) -> None:
    """Release a pin that came too late for who asked for it."""
    if not pinning.cancelled() and pinning.exception() is None:
        release, _ = pinning.result()
        if release is not None:
            release()


class AsyncClient(AsyncControl, AsyncInspector):
    """A client of one plane, for coroutines. Arguments, results and errors are `Client`'s."""

    def __init__(
        self,
        joined: Joined,
        config: Config | None = None,
        *,
        on_close: Callable[[bool], None] | None = None,
        core: Core | None = None,
    ) -> None:
        """`core`: who the client is, where it is not to be somebody new."""
        self._core = core or Core(joined, config or Config())
        self._on_close = on_close
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Loop] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()  # guards the table of loops
        self._closed = False
        self._copies: set[asyncio.Future[Any]] = set()
        self._claimed = False
        """Whether it may hold claims, whose terms run while it has no connection."""
        self._attending: set[asyncio.Task[None]] = set()
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._pins = Pins(self._connect_blocking)
        _clients.add(self)

    # -- verbs -------------------------------------------------------------------------------

    async def kv_put(
        self,
        key: str,
        partition_id: str,
        fields: Mapping[str, object] | None = None,
        tags: Mapping[str, object] | None = None,
        *,
        attempt: int | None = None,
        must_exist: bool = False,
        if_absent: bool = False,
        return_tags: bool = False,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """See `Client.kv_put`."""
        flags = flags_of(must_exist=must_exist, if_absent=if_absent, return_tags=return_tags)
        deadline = self._deadline(timeout)
        return await self._drive(
            put_row(self._core, key, partition_id, fields, tags, flags, deadline, attempt), deadline
        )

    async def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Mapping[str, object] | Sequence[Mapping[str, object]] | TensorDict | None = None,
        tags: Sequence[Mapping[str, object]] | None = None,
        *,
        attempt: int | None = None,
        must_exist: bool = False,
        if_absent: bool = False,
        return_tags: bool = False,
        timeout: float | None = None,
    ) -> KVBatchMeta:
        """See `Client.kv_batch_put`."""
        flags = flags_of(must_exist=must_exist, if_absent=if_absent, return_tags=return_tags)
        deadline = self._deadline(timeout)
        return await self._drive(
            put_batch(self._core, keys, partition_id, fields, tags, flags, deadline, attempt),
            deadline,
        )

    async def kv_batch_get(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Layout = "nested",
        pad: Pad | Mapping[str, Pad] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        total: int | None = None,
        trim: Mapping[str, tuple[int, int]] | None = None,
        on_missing: str = "raise",
        timeout: float | None = None,
    ) -> Rows:
        """See `Client.kv_batch_get`."""
        options = GetOptions(layout, pad, out, total, trim)
        deadline = self._deadline(timeout)
        return await self._drive(
            get_batch(self._core, keys, partition_id, select_fields, options, on_missing, deadline),
            deadline,
        )

    @asynccontextmanager
    async def kv_view(
        self,
        keys: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str] | None = None,
        *,
        layout: Layout = "nested",
        timeout: float | None = None,
    ) -> AsyncGenerator[Rows]:
        """See `Client.kv_view`; WRITING TO A TENSOR OF A VIEW KILLS THIS PROCESS."""
        deadline = self._deadline(timeout)
        rows, close = await self._drive(
            view_batch(self._core, keys, partition_id, select_fields, layout, deadline), deadline
        )
        try:
            yield rows
        finally:
            rows.fields = {}
            close()

    async def kv_list(
        self,
        partition_id: str,
        *,
        where: Where | None = None,
        since: Revision | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        order_by: str | None = None,
        timeout: float | None = None,
    ) -> Listing:
        """See `Client.kv_list`."""
        deadline = self._deadline(timeout)
        return await self._drive(
            list_rows(self._core, partition_id, where, since, columns, limit, deadline, order_by),
            deadline,
        )

    async def kv_clear(
        self,
        keys: Sequence[str] | None,
        partition_id: str,
        *,
        where: Where | None = None,
        retire: bool = False,
        until: Revision | None = None,
        timeout: float | None = None,
    ) -> int:
        """See `Client.kv_clear`."""
        deadline = self._deadline(timeout)
        return await self._drive(
            clear_rows(self._core, keys, partition_id, where, retire, deadline, until), deadline
        )

    async def status(self, *, timeout: float | None = None) -> dict[str, Any]:
        """See `Client.status`."""
        deadline = self._deadline(timeout)
        return await self._drive(plane_status(self._core, deadline), deadline)

    # -- the plane ---------------------------------------------------------------------------

    @property
    def plane_id(self) -> str:
        """The random id of the plane that this client joined; it accepts no other."""
        return self._core.joined.plane_id

    @property
    def client_id(self) -> str:
        """The random id of this client; a forked child has another one."""
        return self._core.client_id

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def attach(self, *, timeout: float | None = None) -> None:
        """See `Client.attach`."""
        await self._channel(None, self._deadline(timeout))

    async def close(self, destroy: bool = False) -> None:
        """See `Client.close`. Connections of other event loops end with their loop."""
        if self._closed:
            return
        try:
            if destroy:
                deadline = self._deadline(5.0)
                try:
                    await self._drive(ask_again(self._core, "destroy", [], deadline), deadline)
                except (PlaneLost, Unreachable, DeadlineExceeded):
                    pass  # it is gone already
        finally:
            self._closed = True
            # The end of a connection ends its reservations, so no thread may still be copying.
            if self._copies:
                await asyncio.wait(set(self._copies))
            for attending in list(self._attending):
                with contextlib.suppress(RuntimeError):  # its loop has ended, and so has it
                    attending.get_loop().call_soon_threadsafe(attending.cancel)
            mine = self._loops.pop(asyncio.get_running_loop(), None)
            if mine is not None:
                await mine.end.aclose()
            self._pins.close()
            for store in self._core.stores.values():
                if store.mappings is not None:
                    store.mappings.close()
            if self._core.spans is not None:
                await asyncio.to_thread(self._core.spans.close)
            if self._on_close is not None:
                self._on_close(destroy)

    def _close_everywhere(self) -> None:
        self._closed = True
        with self._lock:
            loops = list(self._loops.items())
        for loop, mine in loops:
            # A loop that has ended has closed its connections.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(mine.close)
        self._pins.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        core = self._core
        return f"AsyncClient(plane {core.joined.name!r} {core.joined.plane_id}, {core.tags})"

    def __reduce__(self) -> Any:
        raise TypeError("a client does not travel; connect in the other process instead")

    # -- driving verbs -----------------------------------------------------------------------

    async def run(
        self, verb: Callable[[Core, float], Verb[Result]], timeout: float | None = None
    ) -> Result:
        """See `Client.run`."""
        deadline = self._deadline(timeout)
        return await self._drive(verb(self._core, deadline), deadline)

    def _deadline(self, timeout: float | None) -> float:
        if timeout is None:
            timeout = self._core.config.timeout_s
        elif not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):  # pyright: ignore[reportUnnecessaryIsInstance] (user input)
            raise InvalidRequest(f"timeout is a positive number of seconds, not {timeout!r:.80}")
        return time.monotonic() + timeout

    async def _drive(self, verb: Verb[Result], deadline: float) -> Result:
        if self._closed:
            raise PlaneLost("this client was closed; connect again")
        if Core.meter is not None:
            verb = Core.meter.measured(verb)
        value: Any = None
        started = time.monotonic()
        try:
            effect = verb.send(None)
            while True:
                try:
                    value = await self._do(effect, deadline, started)
                except BaseException as error:
                    effect = verb.throw(error)
                else:
                    effect = verb.send(value)
        except StopIteration as end:
            return end.value

    async def _do(self, effect: Any, deadline: float, started: float) -> Any:
        kind = effect.__class__
        if kind is Ask:
            at, verb, body, payload, size, into = effect
            if type(at) is Channel:
                channel = at
            else:
                # A put that waits for room there stops what comes after it on its connection, and
                # one that is given up half-way ends it: with it would go all memory held on it.
                channel = await self._channel(at, deadline, puts=verb == "put_block")
            received = channel.received
            answer = channel.send(verb, body, payload, size, into)
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    return await (asyncio.shield(answer) if verb in _UNDONE_BY else answer)
            except DataplaneError:
                raise  # the answer, which may be a TimeoutError too
            except asyncio.CancelledError:
                _abandon(channel, verb, answer)
                raise
            except TimeoutError:
                if channel.received == received and not channel.local:
                    # Nothing came since: it may be cut off. Others would wait there in vain too.
                    channel.abort()
                _abandon(channel, verb, answer)
                raise unanswered(channel.peer, verb, time.monotonic() - started) from None
        if kind is Open:
            return await self._channel(effect.store, deadline)
        if kind is Done:
            return None  # the channel is shared and stays
        if kind is Tell:
            effect.lane.tell(effect.verb, effect.body)
            return None
        if kind is Run:
            if effect.nbytes < INLINE_BYTES:
                return effect.work()
            return await self._in_thread(effect.work)
        if kind is Hold:
            return await self._hold(effect.store, effect.blocks, deadline)
        assert kind is Pause
        await asyncio.sleep(effect.seconds)
        return None

    async def _channel(
        self, store: StoreView | None, deadline: float, *, puts: bool = False
    ) -> Channel:
        loop = asyncio.get_running_loop()
        with self._lock:
            mine = self._loops.get(loop)
            begins = mine is None
            if mine is None:
                mine = self._loops[loop] = Loop()
        if begins:
            await anext(mine.end)
        address = self._core.tags if store is None else store.address
        task = mine.channels.get((address, puts))
        if task is None or (
            task.done()
            and (task.cancelled() or task.exception() is not None or task.result().closed)
        ):
            task = loop.create_task(self._connect(store))
            mine.channels[address, puts] = task
        if task.done():
            channel = task.result()
        else:
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    channel = await asyncio.shield(task)
            except TimeoutError:
                raise Unreachable(f"{address} did not answer in time") from None
        if store is not None and not store.probed:
            self._core.probe(store, channel.greeting)
        return channel

    async def _connect(self, store: StoreView | None) -> Channel:
        """See `connection.connect`."""
        core = self._core
        # Callers wait for this with deadlines of their own; it ends for the next one's sake.
        deadline = time.monotonic() + core.config.timeout_s
        pause_s = CONNECT_PAUSE_S
        while True:
            address = core.tags if store is None else store.address
            try:
                # One that never greets must not keep all who share this from trying again.
                async with asyncio.timeout(GREETING_S):
                    channel = await Channel.connect(
                        address,
                        core.joined.secret,
                        client_id=core.client_id,
                        plane_id=core.joined.plane_id,
                        tls=core.config.tls,
                        local=core.is_local(store, address),
                        label=core.config.label,
                        stage=core.stage,
                    )
                break
            except (DataplaneError, OSError) as error:
                reason = await asyncio.to_thread(look_again, core, store, error)
            if reason is None:
                continue
            if time.monotonic() + pause_s >= deadline:
                raise not_reached(store, address, reason) from reason
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_CONNECT_PAUSE_S)
        channel.peer = peer_of(store, address)
        if store is None:
            channel.on_lost = self._lost
        if "revision" in channel.greeting:
            core.see(channel.greeting["revision"])
            core.lineage = channel.greeting.get("lineage", "off")
        if store is not None:
            core.probe(store, channel.greeting)
        return channel

    def _stay_attached(self) -> None:
        self._claimed = True

    def _lost(self) -> None:
        """The tag store has ended a connection of this loop."""
        if self._claimed and not self._closed:
            attending = asyncio.get_running_loop().create_task(self._attach_again())
            self._attending.add(attending)
            attending.add_done_callback(self._attending.discard)

    async def _attach_again(self) -> None:
        """Connect anew, though nothing is asked: the term of a lease runs until then."""
        while not self._closed:
            try:
                await self._channel(None, self._deadline(None))
                return
            except PlaneLost:
                return
            except (DataplaneError, OSError):
                await asyncio.sleep(LONGEST_CONNECT_PAUSE_S)

    async def _hold(
        self, store: StoreView, blocks: bytes, deadline: float
    ) -> tuple[Callable[[], None] | None, list[int]]:
        # Not on a channel of this loop: tensors of the view may outlive it.
        pinning = asyncio.get_running_loop().run_in_executor(
            None, self._pins.pin, store, blocks, deadline
        )
        try:
            return await asyncio.shield(pinning)
        except asyncio.CancelledError:
            pinning.add_done_callback(_let_go)
            raise

    def _connect_blocking(self, store: StoreView, deadline: float) -> Connection:
        connection = connect(self._core, store, deadline)
        self._open.add(connection)
        return connection

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """Run work in a thread; a cancelled caller still waits until the thread has stopped.

        The work copies between shared memory and tensors: what it holds there may be given back
        only after it stopped.
        """
        future = asyncio.get_running_loop().run_in_executor(None, work)
        self._copies.add(future)
        future.add_done_callback(self._copies.discard)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    # -- fork --------------------------------------------------------------------------------

    def close_in_child(self) -> None:
        """Become a new client in a forked child; what was inherited stays the parent's."""
        # A transport closes its descriptor once more when it is collected. The number must stay
        # taken until then, or that would be somebody else's.
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for mine in list(self._loops.values()):
            for task in mine.channels.values():
                if task.done() and not task.cancelled() and task.exception() is None:
                    fd = task.result().fileno()
                    if fd >= 0:
                        os.dup2(null, fd, inheritable=False)
        os.close(null)
        for connection in list(self._open):
            connection.close_in_child()
        self._open = weakref.WeakSet()
        self._pins = Pins(self._connect_blocking)
        self._claimed = False
        self._attending = set()
        self._loops = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._core.new_identity()


def close_everywhere(client: AsyncClient) -> None:
    """Let go of the plane from any thread; each event loop that runs closes its connections.

    For who is done with the client on all of its loops at once. Repeatable. Not a verb: a blocking
    client has no loops.
    """
    client._close_everywhere()  # pyright: ignore[reportPrivateUsage] (of this file)


def stay_attached(client: AsyncClient) -> None:
    """Connect the client anew whenever the tag store ends its connection, as one does that has
    claimed: while it is not closed, the terms of its leases hardly run. Not a verb: a client sees
    to it itself when it claims."""
    client._stay_attached()  # pyright: ignore[reportPrivateUsage] (of this file)


_clients: weakref.WeakSet[AsyncClient] = weakref.WeakSet()


def _after_fork() -> None:
    clients = list(_clients)
    for client in clients:
        client.close_in_child()
    if clients:
        settle_in_child()


os.register_at_fork(after_in_child=_after_fork)
