"""Room in value stores for groups: found before they begin, told of as it is used, let go at last.

A group that begins is not known to any store yet, so room is held under a token, a number below 0,
and bound to the attempt afterwards. A store is told whenever less of it is outstanding.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dataplane.errors import DataplaneError, QuotaExceeded, Unreachable
from dataplane.tags import journal as j
from dataplane.tags.groups import Group

if TYPE_CHECKING:
    from dataplane.server.freeing import Values
    from dataplane.server.tag_service import TagService

log = logging.getLogger("dataplane.tags")


class Kept(NamedTuple):
    """Room that a store holds for a group that is about to begin."""

    values: Values
    token: int

    def give_back(self) -> None:
        """The group does not begin."""
        self.values.held([(self.token, 0)])


class Keeping:
    """What value stores hold for the groups of a plane."""

    def __init__(self, service: TagService) -> None:
        self._service = service
        self._last_token = 0
        self._binding: set[asyncio.Task[None]] = set()

    async def room(
        self, nbytes: int, home: str | None, deadline: float, *, wait: bool
    ) -> Kept | None:
        """Room in the first store that has it at once, beginning with the home of who asks; else,
        with `wait`, where it comes free first. None if the plane has no store that could hold any.

        QuotaExceeded if none comes free before the deadline (of the loop's clock). Unreachable if
        the stores that there are do not come back before it.
        """
        while True:
            candidates = self._candidates(home)
            if not candidates:
                return None
            self._last_token -= 1
            token = self._last_token
            for values in candidates:
                try:
                    await values.hold(token, nbytes, 0.0)
                except (QuotaExceeded, ConnectionError):
                    continue
                return Kept(values, token)
            if not wait:
                return None
            try:
                return Kept(await _first_to_hold(candidates, token, nbytes, deadline), token)
            except Unreachable:
                # All of them are away; they are started again.
                left = max(0.0, deadline - asyncio.get_running_loop().time())
                if not await self._service.freeing.next_registered(left):
                    raise

    async def bind(self, kept: Kept, group: Group) -> None:
        """From here on the store knows the room by the group's attempt. Once begun it is carried
        through, even if whoever asked for the group goes away."""
        binding = asyncio.get_running_loop().create_task(self._bind(kept, group))
        self._binding.add(binding)
        binding.add_done_callback(self._binding.discard)
        await asyncio.shield(binding)

    async def _bind(self, kept: Kept, group: Group) -> None:
        try:
            await kept.values.bind(kept.token, group.attempt)
        except (DataplaneError, ConnectionError) as error:
            about = _about(group)
            log.warning(
                "room for attempt %d is kept no more: %s", group.attempt, error, extra=about
            )
            return
        self.is_kept(group, kept.values)

    async def room_later(self, group: Group, home: str | None, deadline: float) -> None:
        """Room for a group that has begun already, when it comes free."""
        candidates = self._candidates(home)
        if not candidates:
            return
        try:
            values = await _first_to_hold(candidates, group.attempt, group.declared_bytes, deadline)
        except (DataplaneError, ConnectionError) as error:
            about = _about(group)
            log.warning("no room is kept for attempt %d: %s", group.attempt, error, extra=about)
            return
        self.is_kept(group, values)

    def is_kept(self, group: Group, values: Values, nbytes: int | None = None) -> None:
        """A store has room for a group, for all that it declared or this much of it, and knows it
        by its attempt."""
        service = self._service
        if group.store != values.store_id:
            change = (group.partition_id, group.uid, group.attempt, values.store_id)
            try:
                service.journal.append(j.KEEP, service.store.n, service.clock(), change)
            except DataplaneError as error:
                about = _about(group)
                log.warning("no room is kept for attempt %d: %s", group.attempt, error, extra=about)
                values.held([(group.attempt, 0)])
                return
            group.store = values.store_id
        # It may have used some of it, or ended, before the store knew whose it was.
        group.kept_bytes = group.declared_bytes if nbytes is None else nbytes
        self._service.store.settled[group] = None
        self.tell()

    def _candidates(self, home: str | None) -> list[Values]:
        stores = self._service.freeing.stores.values()
        return sorted(stores, key=lambda values: values.store_id != home)

    def tell(self) -> None:
        """Tell stores of groups that need less room kept than they were told last."""
        settled = self._service.store.settled
        if not settled:
            return
        updates: dict[str, list[tuple[int, int]]] = {}
        for group in settled:
            if group.held_bytes < group.kept_bytes:
                group.kept_bytes = group.held_bytes
                updates.setdefault(group.store, []).append((group.attempt, group.held_bytes))
        settled.clear()
        for store_id, amounts in updates.items():
            values = self._service.freeing.stores.get(store_id)
            if values is not None:
                values.held(amounts)


def _about(group: Group) -> dict[str, object]:
    return {"partition": group.partition_id, "uid": group.uid, "attempt": group.attempt}


async def _first_to_hold(
    candidates: Sequence[Values], token: int, nbytes: int, deadline: float
) -> Values:
    """The store in which room comes free first. The error of the first of them if none does."""
    left = max(0.0, deadline - asyncio.get_running_loop().time())
    tasks = [asyncio.ensure_future(values.hold(token, nbytes, left)) for values in candidates]
    holder: Values | None = None
    try:
        pending = set(tasks)
        while pending and holder is None:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for values, task in zip(candidates, tasks, strict=True):
                if task.done() and task.exception() is None:
                    holder = values
                    break
    finally:
        for values, task in zip(candidates, tasks, strict=True):
            if values is holder:
                continue
            if not task.done():
                task.cancel()  # which leaves nothing held there
            elif task.exception() is None:
                values.held([(token, 0)])
    if holder is not None:
        return holder
    for task in tasks:
        error = task.exception()
        if isinstance(error, DataplaneError):
            raise error
    raise Unreachable("no value store of the plane can be reached; try again in a moment")
