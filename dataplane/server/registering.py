"""Value stores at the tag store: they come, come again after a restart of either, go and end.

Before it registers, a value store asks which of its blocks are live, takes up or lets go of what it
has, and says then what it has not got. So neither side need remember what the other had heard.

    live      []                                  -> [revision, kept], blocks as int64 arrays
    register  [address, lost blocks, attempts that it has no room for, metrics | nil]  -> nil

`metrics` is where the store's process serves metrics, as `host:port`. `kept` maps the attempts that
the store keeps room for to what is outstanding of each. Of one store,
one connection at a time counts: what an earlier one still had under way is over when the next one
asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.errors import DataplaneError, InvalidRequest
from dataplane.server.connection import Connection, Verb
from dataplane.server.freeing import RemoteValues, Values
from dataplane.server.putting import only_stores
from dataplane.server.slices import Slices
from dataplane.tags import journal as j
from dataplane.tags.records import check_readable
from dataplane.values.store import Live
from dataplane.wire.frames import Body

if TYPE_CHECKING:
    from dataplane.server.tag_service import TagService


STEP_PLACEMENTS = 512
"""Looked at before others may run."""
MAX_TARGET = 300
"""Characters of a host and port."""
LOST_BLOCKS = 2048
"""Lost at one revision, where more of a store are."""


class Registering:
    """The verbs by which value stores join."""

    def __init__(self, service: TagService) -> None:
        self._service = service
        self._connections: dict[str, Connection] = {}
        """Of each store the connection that counts."""
        self.known: dict[str, Body] = {}
        """Addresses of all stores that have registered and were not given up, as said last."""
        self.metrics: dict[str, str] = {}
        """Where each store's process serves metrics, of those that do."""
        self.verbs: dict[str, Verb] = {"live": self._live, "register": self._register}

    def resume(self, stores: dict[str, Body]) -> None:
        """These had registered before the tag store was started again, and have yet to come."""
        self.known.update(stores)

    @property
    def connected(self) -> int:
        """How many of the stores that are known are connected now."""
        here = (self._service.freeing.stores.get(store_id) for store_id in self.known)
        return sum(values is not None and values.is_here for values in here)

    # -- coming ------------------------------------------------------------------------------

    async def _live(self, connection: Connection, number: int, body: Body) -> None:
        only_stores(connection)
        store_id = connection.client_id
        earlier = self._connections.get(store_id)
        self._connections[store_id] = connection
        if earlier is not None and earlier is not connection:
            earlier.abort("its value store has come again")
            self._service.putting.store_gone(store_id)
        live = await self.live(store_id)
        answer = [self._service.store.revision(), self.kept(store_id)]
        arrays = [column.data.cast("B") for column in live if len(column)]
        await connection.reply_with(number, answer, arrays, sum(map(len, arrays)))

    async def live(self, store_id: str) -> Live:
        """The blocks of a store that are in use, or whose death it is not to hear of yet."""
        service = self._service
        slices = Slices(service.worst)
        found: list[tuple[int, int, int, int]] = []
        looked_at = chain(
            list(service.store.placements.values()),
            list(service.store.dead),
            service.checkpointing.restorer.placements(),
        )
        while placements := list(islice(looked_at, STEP_PLACEMENTS)):
            found += [
                (p.block, p.segment, p.offset, p.nbytes) for p in placements if p.store == store_id
            ]
            await slices.breathe()
        columns = np.array(found, np.int64).reshape(-1, 4).T
        return Live(*(np.ascontiguousarray(column) for column in columns))

    def kept(self, store_id: str) -> dict[int, int]:
        """What is outstanding of the attempts that a store keeps room for."""
        return {
            group.attempt: group.outstanding_bytes
            for group in self._service.store.attempts.values()
            if group.store == store_id and group.outstanding_bytes
        }

    def _register(self, connection: Connection, number: int, body: Body) -> None:
        only_stores(connection)
        address, lost, without_room, *metrics = body
        store_id = connection.client_id
        if self._connections.get(store_id) is not connection:
            raise InvalidRequest("a value store asks which of its blocks are live, then registers")
        if not all(type(item) is int for items in (lost, without_room) for item in items):
            raise InvalidRequest("blocks and attempts are numbers")
        self.metrics.pop(store_id, None)
        if metrics and type(metrics[0]) is str and len(metrics[0]) <= MAX_TARGET:
            self.metrics[store_id] = metrics[0]
        self.register(RemoteValues(store_id, address, connection), lost, without_room)
        connection.reply(number, None)

    def register(
        self, values: Values, lost: Sequence[int] = (), without_room: Sequence[int] = ()
    ) -> None:
        """A value store is there, without some of its blocks, and with no room for some groups."""
        service, store_id = self._service, values.store_id
        if self.known.get(store_id) != values.address:
            check_readable(values.address)
            service.write(j.STORE, (store_id, values.address))
            self.known[store_id] = values.address
        if lost:
            service.losing.lose(store_id, lost)  # an error: it registers again, with the same
        service.freeing.register(values)
        if without_room:
            service.in_background(self._find_room(values, without_room))

    async def _find_room(self, values: Values, attempts: Sequence[int]) -> None:
        """Have a store that lost what it kept for groups keep it again, as far as it can."""
        for attempt in attempts:
            group = self._service.store.attempts.get(attempt)
            if group is None or not group.outstanding_bytes:
                continue
            outstanding = group.outstanding_bytes
            try:
                await values.hold(attempt, outstanding, 0.0)
            except (DataplaneError, ConnectionError):
                continue  # its puts wait for room like others
            self._service.grouping.keeping.is_kept(group, values, outstanding)

    # -- going -------------------------------------------------------------------------------

    def gone(self, connection: Connection) -> None:
        """A value store's connection ended; its blocks are there, for all that is known."""
        store_id = connection.client_id
        if self._connections.get(store_id) is connection:
            del self._connections[store_id]
            self._service.putting.store_gone(store_id)

    async def lost(self, store_id: str) -> None:
        """A value store is gone for good, with all that was in it. May be repeated: an error leaves
        what is not lost by then for the next time."""
        service = self._service
        connection = self._connections.pop(store_id, None)
        if connection is not None:
            connection.abort("its node is dead")
        service.freeing.stores.pop(store_id, None)
        service.putting.store_gone(store_id)
        # In parts: each holds the loop for as long as a request of many rows does.
        blocks: list[int] = (await self.live(store_id)).block.tolist()
        for at in range(0, len(blocks), LOST_BLOCKS):
            service.losing.lose(store_id, blocks[at : at + LOST_BLOCKS])
            await asyncio.sleep(0)
        service.losing.lose(store_id, None)
        self.known.pop(store_id, None)
        self.metrics.pop(store_id, None)

    def end(self) -> None:
        """The plane ends: value stores that are there end too."""
        for connection in self._connections.values():
            connection.ask("end", []).add_done_callback(_unheeded)


def _unheeded(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled():
        answer.exception()  # it may have gone before it answered
