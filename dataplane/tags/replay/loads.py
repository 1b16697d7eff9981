"""Loads of checkpoints in a journal: what came of each, until it ended or was given up. Pure.

A load writes down what came before it looks whether that will do; what it then refused it refuses
here again, and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dataplane.tags.history import History
from dataplane.tags.placement import Placement
from dataplane.tags.restoring import (
    Restoring,
    SavedGroup,
    SavedRows,
    packed_ints,
    saved_schema,
)
from dataplane.tags.store import TagStore
from dataplane.types import Quota, Retention, Revision

_REFUSED = (TypeError, ValueError, LookupError)
"""What was refused when it came: InvalidRequest, or what a malformed body raises where it is used,
of which the connection makes one."""


class Loads:
    """The load that is under way, and the last one that ended well."""

    def __init__(self) -> None:
        self.restoring: Restoring | None = None
        self.restore_id = ""
        self.client_id = ""
        """Whose load is under way."""
        self.ended: tuple[str, Revision] | None = None
        """The last load that went well, and what its end was answered."""

    def take(self, store: TagStore, what: str, body: Sequence[Any]) -> None:
        """One step of a load that is neither a block nor its end."""
        if what == "begin":
            self.restore_id, self.client_id, epoch, n = body
            self.restoring = Restoring(epoch, n)
        elif what == "abandon":
            self._current().abandon(store)
            self._forget()
        else:
            step = {"partition": self._partition, "rows": self._rows, "state": self._state}[what]
            load = self._current()
            with suppress(*_REFUSED):
                step(load, *body[1:])

    def add_block(self, partition_id: str, rows: bytes, placement: Placement) -> bool:
        """A block for rows of the load; whether it was taken."""
        load = self._current()
        try:
            load.add_block(partition_id, packed_ints(rows, placement.rows), placement)
        except _REFUSED:
            return False
        return True

    def end(self, store: TagStore, restore_id: str) -> None:
        """Give the store all of it."""
        before = store.history
        history = History(before.max_changes, before.max_age_s)
        self._current().finish(store, history)
        self.ended = restore_id, store.revision()
        self._forget()

    def _current(self) -> Restoring:
        if self.restoring is None:
            raise ValueError("no load is under way")
        return self.restoring

    def _forget(self) -> None:
        self.restoring = None
        self.restore_id = self.client_id = ""

    def _partition(
        self, load: Restoring, partition_id: str, schema: Any, open_schema: bool, groups: Any
    ) -> None:
        saved = [SavedGroup.checked(parts) for parts in groups]
        load.begin(partition_id, saved_schema(schema), open_schema=open_schema)
        load.add_groups(partition_id, saved)

    def _rows(
        self, load: Restoring, partition_id: str, first: int, keys: Any, tags: Any, *rest: Any
    ) -> None:
        *numbers, producers, codes, tasks = rest
        rows = SavedRows.unpacked(keys, tags, numbers, producers, codes, tasks)
        load.add_rows(partition_id, first, rows)

    def _state(
        self,
        load: Restoring,
        partition_id: str,
        sealed: Any,
        quota: Any,
        retention: Any,
        tasks: Any,
    ) -> None:
        load.settle(
            partition_id, sealed=bool(sealed), quota=Quota.of(quota),
            retention=Retention.of(retention), tasks=tasks,
        )  # fmt: skip
