"""Loading a checkpoint at the tag store: rows and blocks come in, and appear all at once.

One load at a time, into a plane without partitions; or, with the names of those that stay, in place
of all others that are there when it ends. What has come is kept aside (tags/restoring.py) until the
client ends it; given up, at its deadline or a while after its client has gone, nothing of it is
left.

    restore_begin      [id, wait_s, epoch, n, nil or names of partitions that stay]  -> nil
    restore_partition  [id, partition_id, schema, open_schema, groups]               -> nil
    restore_rows       [id, partition_id, first, keys, tags, revisions, clears, attempts,
                        producers, which of those each row has, tasks]               -> nil
    restore_state      [id, partition_id, sealed, quota, retention, tasks]           -> nil
    restore_end        [id]                                                          -> revision
    restore_abort      [id]                        -> revision if it had ended well, else nil

Blocks come as puts with the flag RESTORE, which name rows by number instead of by key. Every
request may be repeated.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from dataplane.errors import DataplaneError, InvalidRequest
from dataplane.server.connection import Connection, Verb
from dataplane.tags import journal as j
from dataplane.tags.history import History
from dataplane.tags.placement import Placement
from dataplane.tags.records import check_readable
from dataplane.tags.replay.loads import Loads
from dataplane.tags.requests import RESTORED
from dataplane.tags.restoring import (
    Restoring,
    SavedGroup,
    SavedRows,
    packed_ints,
    saved_schema,
)
from dataplane.types import Quota, Retention
from dataplane.wire.frames import Body
from dataplane.wire.messages import PutAnswer, PutMeta, check_wait

if TYPE_CHECKING:
    from dataplane.server.tag_service import TagService


class Restorer:
    """The load that is under way, if any."""

    def __init__(self, service: TagService) -> None:
        self._service = service
        self._store = service.store
        self.client_id = ""
        """Whose load it is."""
        self._id = ""
        self._restoring: Restoring | None = None
        self._stay: list[str] | None = None
        """The partitions whose place it does not take; None where there must be none at all."""
        self._timer: asyncio.TimerHandle | None = None
        self._ended: tuple[str, Any] | None = None
        """The last load that went well, and its answer."""
        self.verbs: dict[str, Verb] = {
            "restore_begin": self._begin,
            "restore_partition": self._partition,
            "restore_rows": self._rows,
            "restore_state": self._state,
            "restore_end": self._end,
            "restore_abort": self._abort,
        }

    def resume(self, loads: Loads) -> None:
        """Go on after a start: a load that was under way is given up, as the stores' memory of
        its blocks may be; one that had ended well has."""
        self._ended = loads.ended
        if loads.restoring is not None:
            self._restoring = loads.restoring
            self.abandon()

    def has(self, place: tuple[str, int]) -> bool:
        """Whether a block, by store, is one of the load that is under way."""
        return self._restoring is not None and place in self._restoring.placements

    def placements(self) -> list[Placement]:
        """The blocks of the load that is under way."""
        return [] if self._restoring is None else list(self._restoring.placements.values())

    def _begin(self, connection: Connection, number: int, body: Body) -> None:
        restore_id, wait_s, epoch, n, stay = body
        if self._restoring is not None and (self._id, self.client_id) == (
            restore_id, connection.client_id,
        ):  # fmt: skip
            connection.reply(number, None)
            return
        if type(restore_id) is not str or not 0 < len(restore_id) <= 64:
            raise InvalidRequest(f"a load is named by its client, not {restore_id!r:.80}")
        if not (type(epoch) is type(n) is int and 0 <= epoch < 1 << 62 and 0 <= n < 1 << 62):
            raise InvalidRequest("a revision is (epoch, n)")
        if stay is not None and not (
            type(stay) is list and all(type(name) is str for name in cast("list[Any]", stay))
        ):
            raise InvalidRequest(f"partitions stay by name, not {stay!r:.80}")
        wait_s = check_wait(wait_s)
        if self._restoring is not None:
            raise InvalidRequest("another client is loading a checkpoint into this plane")
        if self._store.partitions and stay is None:
            raise InvalidRequest(
                f"the plane has partitions already ({', '.join(map(repr, self._store.partitions))}"
                "): a checkpoint is loaded into an empty plane; drop them, or start another plane"
            )
        self._write_down(("begin", restore_id, connection.client_id, epoch, n))
        self._restoring = Restoring(epoch, n)
        self._stay = stay
        self._id, self.client_id = restore_id, connection.client_id
        self._timer = asyncio.get_running_loop().call_later(wait_s, self.abandon)
        connection.reply(number, None)

    def _of(self, client_id: str, restore_id: object = None) -> Restoring:
        restoring = self._restoring
        if (
            restoring is None
            or self.client_id != client_id
            or (restore_id is not None and restore_id != self._id)
        ):
            raise InvalidRequest(
                "this load is over: its deadline passed, or its client was gone for too long; the "
                "plane is as it was before; load again with a longer timeout"
            )
        return restoring

    def _write_down(self, change: tuple[Any, ...]) -> None:
        check_readable(change)
        self._service.journal.append(j.RESTORE, self._store.n, self._service.clock(), change)

    # -- what comes in -----------------------------------------------------------------------

    def _partition(self, connection: Connection, number: int, body: Body) -> None:
        restore_id, partition_id, schema, open_schema, groups = body
        restoring = self._of(connection.client_id, restore_id)
        if type(partition_id) is not str or type(open_schema) is not bool:
            raise InvalidRequest("a partition is restored by name, with or without an open schema")
        fields = saved_schema(schema)
        saved = [SavedGroup.checked(parts) for parts in groups]
        self._write_down(("partition", restore_id, partition_id, schema, open_schema, groups))
        restoring.begin(partition_id, fields, open_schema=open_schema)
        restoring.add_groups(partition_id, saved)
        connection.reply(number, None)

    def _rows(self, connection: Connection, number: int, body: Body) -> None:
        restore_id, partition_id, first, keys, tags, *numbers, producers, codes, tasks = body
        restoring = self._of(connection.client_id, restore_id)
        rows = SavedRows.unpacked(keys, tags, numbers, producers, codes, tasks)
        self._write_down(("rows", *body))
        restoring.add_rows(partition_id, first, rows)
        connection.reply(number, None)

    def put(
        self,
        client_id: str,
        meta: PutMeta,
        packed: object,
        rows: object,
        placement: Placement,
        block: Body,
    ) -> PutAnswer:
        """A block for rows that were restored; `rows` are their numbers."""
        repeats = self._service.repeats
        found = repeats.find(client_id, meta.number, meta.settled, RESTORED)
        place = (placement.store, placement.block)
        if found is not None:
            if found.block != place:
                # The repetition was written to a block of its own, which nobody refers to.
                self._service.freeing.drop(*place)
            return found.answer
        restoring = self._of(client_id)
        if place in restoring.placements or place in self._store.placements:
            raise InvalidRequest(f"block {placement.block} is another put's already")
        positions = packed_ints(rows, placement.rows)
        self._write_down(("block", client_id, packed, rows, placement.store, block))
        restoring.add_block(meta.partition_id, positions, placement)
        answer = PutAnswer(self._store.revision(), None, None)
        repeats.remember(client_id, meta.number, RESTORED, answer, place)
        return answer

    def _state(self, connection: Connection, number: int, body: Body) -> None:
        restore_id, partition_id, sealed, quota, retention, tasks = body
        restoring = self._of(connection.client_id, restore_id)
        limits, keep = Quota.of(quota), Retention.of(retention)
        self._write_down(("state", *body))
        restoring.settle(
            partition_id, sealed=bool(sealed), quota=limits, retention=keep, tasks=tasks
        )
        connection.reply(number, None)

    # -- its end -----------------------------------------------------------------------------

    def _end(self, connection: Connection, number: int, body: Body) -> None:
        (restore_id,) = body
        if self._ended is not None and self._ended[0] == restore_id:
            connection.reply(number, self._ended[1])
            return
        restoring = self._of(connection.client_id, restore_id)
        store = self._store
        stay = self._stay
        restoring.check_end(store, stay)
        dropped = [] if stay is None else sorted(store.partitions.keys() - set(stay))
        now = self._service.clock()
        n = restoring.n_after(store.n + len(dropped))
        # In one record: all of it is written, or nothing happens. No request is served between here
        # and the end, so nobody sees a plane without those that are gone.
        self._service.journal.append(j.RESTORE, n, now, ("end", restore_id, dropped))
        self._service.partitioning.take(dropped, now)
        before = store.history
        restoring.finish(store, History(before.max_changes, before.max_age_s))
        self._forget()
        answer = store.revision()
        self._ended = restore_id, answer
        for partition in store.partitions.values():
            self._service.claiming.restored(partition)
            if store.changed is not None:
                store.changed(partition)
        self._service.in_background(self._keep_room())
        connection.reply(number, answer)

    async def _keep_room(self) -> None:
        """Have value stores keep room for the groups that are open again, where one has it."""
        for group in list(self._store.attempts.values()):
            nbytes = group.outstanding_bytes
            for values in list(self._service.freeing.stores.values()):
                if not nbytes or not group.open:
                    break
                try:
                    await values.hold(group.attempt, nbytes, 0.0)
                except (DataplaneError, ConnectionError):
                    continue
                self._service.grouping.keeping.is_kept(group, values, nbytes)
                break

    def _abort(self, connection: Connection, number: int, body: Body) -> None:
        (restore_id,) = body
        if self._id == restore_id and self.client_id == connection.client_id:
            self.abandon()
        ended = self._ended is not None and self._ended[0] == restore_id
        connection.reply(number, self._ended[1] if self._ended and ended else None)

    def abandon(self) -> None:
        """Give the load up: nothing of it is left."""
        restoring = self._restoring
        if restoring is None:
            return
        self._forget()
        self._write_down(("abandon",))
        restoring.abandon(self._store)
        self._service.freeing.run()

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._restoring = self._timer = None
        self._id = self.client_id = ""
