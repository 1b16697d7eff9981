"""Telling value stores which blocks are dead, again and again until they have heard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any, Protocol

from dataplane.server.connection import Connection
from dataplane.tags.store import TagStore
from dataplane.wire.frames import Body

log = logging.getLogger("dataplane.tags")

RETRY_S = 0.2
STEP_BLOCKS = 512
"""Blocks told of in one go: many die at once when a checkpoint ends or much is cleared, and neither
this loop nor a value store's may be held by them."""


class Values(Protocol):
    """A value store as the tag store sees it."""

    store_id: str
    address: Body

    @property
    def is_here(self) -> bool:
        """Whether it can be told anything now."""
        ...

    def free(self, blocks: Sequence[int]) -> Awaitable[None]:
        """Tell it that these blocks are dead; returns once it has heard."""
        ...

    def hold(self, attempt: int, nbytes: int, timeout_s: float) -> Awaitable[None]:
        """Have it hold room for an attempt; QuotaExceeded if none comes free in time. With 0 it
        makes room, but waits for nobody. Given up meanwhile, it leaves nothing held."""
        ...

    def bind(self, token: int, attempt: int) -> Awaitable[None]:
        """What it holds under a token is an attempt's."""
        ...

    def held(self, updates: Sequence[tuple[int, int]]) -> None:
        """Tell it what is outstanding of what attempts declared: less than before, and with 0
        their holds end. One of which it knows nothing has ended."""
        ...


class RemoteValues:
    """A value store at the other end of a connection."""

    def __init__(self, store_id: str, address: Body, connection: Connection) -> None:
        self.store_id = store_id
        self.address = address
        self.connection = connection

    @property
    def is_here(self) -> bool:
        return not self.connection.closed

    def free(self, blocks: Sequence[int]) -> Awaitable[None]:
        return self.connection.ask("free", [list(blocks)])

    async def hold(self, attempt: int, nbytes: int, timeout_s: float) -> None:
        try:
            await self.connection.ask("hold", [attempt, nbytes, timeout_s])
        except asyncio.CancelledError:
            self.held([(attempt, 0)])  # granted or not, nobody will name it any more
            raise

    async def bind(self, token: int, attempt: int) -> None:
        await self.connection.ask("bind", [token, attempt])

    def held(self, updates: Sequence[tuple[int, int]]) -> None:
        def heard(answer: asyncio.Future[Body]) -> None:
            error = None if answer.cancelled() else answer.exception()
            if error is not None and not isinstance(error, ConnectionError):
                about = {"store": self.store_id}
                log.warning(
                    "value store %s did not take %s: %r", self.store_id, updates, error, extra=about
                )

        self.connection.ask("held", list(updates)).add_done_callback(heard)


class Freeing:
    """The value stores of a plane, and what each has not heard yet."""

    def __init__(self, store: TagStore) -> None:
        self.stores: dict[str, Values] = {}
        self._store = store
        self._unheard: dict[str, list[int]] = {}
        self._holds = 0
        self._telling: dict[str, asyncio.Task[Any]] = {}
        self._registered = asyncio.Event()

    @property
    def unheard(self) -> int:
        """Dead blocks that their stores were not told of, or have not confirmed."""
        return len(self._store.dead) + sum(map(len, self._unheard.values()))

    def untold(self, store_id: str) -> Iterator[int]:
        """Dead blocks of a store that it has not confirmed."""
        yield from list(self._unheard.get(store_id, ()))
        for placement in list(self._store.dead):
            if placement.store == store_id:
                yield placement.block

    def register(self, values: Values) -> None:
        """A value store is there; what it has not heard is told now."""
        self.stores[values.store_id] = values
        self._registered.set()
        self._registered = asyncio.Event()
        self.run()

    async def next_registered(self, timeout_s: float) -> bool:
        """Wait until a value store registers; whether one did in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._registered.wait()
        except TimeoutError:
            return False

    def drop(self, store_id: str, block: int) -> None:
        """Free a block that never had a row."""
        self._unheard.setdefault(store_id, []).append(block)
        self.run()

    def forget(self, store_id: str) -> None:
        """A value store is gone for good: nobody is left to hear what it had not heard."""
        self._unheard.pop(store_id, None)

    def pause(self) -> None:
        """What dies from here on waits until as many `resume` as `pause` have come: somebody reads
        rows of this moment, which may be gone for everybody else."""
        self._holds += 1

    def resume(self) -> None:
        """Undo one `pause`."""
        self._holds -= 1
        self.run()

    def run(self) -> None:
        """Tell stores of what died since the last time."""
        dead = self._store.dead
        for _ in range(0 if self._holds else min(len(dead), STEP_BLOCKS)):
            placement = dead.popleft()
            self._unheard.setdefault(placement.store, []).append(placement.block)
        if dead and not self._holds:
            asyncio.get_running_loop().call_soon(self.run)
        for store_id, blocks in self._unheard.items():
            values = self.stores.get(store_id)
            if blocks and values is not None and store_id not in self._telling:
                task = asyncio.get_running_loop().create_task(self._tell(values))
                self._telling[store_id] = task

    async def _tell(self, values: Values) -> None:
        store_id = values.store_id
        try:
            while True:
                await asyncio.sleep(0)  # gather what this turn of the loop clears
                blocks = self._unheard.get(store_id)
                if not blocks or self.stores.get(store_id) is not values:
                    return
                told = min(len(blocks), STEP_BLOCKS)
                try:
                    await values.free(blocks[:told])
                except ConnectionError:
                    return  # told again when it registers
                except Exception as error:
                    # Whatever failed there: nobody else knows that these bytes are dead.
                    about = {"store": store_id}
                    log.warning("value store %s did not free: %r", store_id, error, extra=about)
                    await asyncio.sleep(RETRY_S)
                else:
                    del blocks[:told]
        finally:
            del self._telling[store_id]
            if self.stores.get(store_id) is not values:
                self.run()  # it registered anew meanwhile, and was not told then
