"""The rows of a partition at one revision, as listings told them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dataplane import Revision
from trainer.select import Group, Row, group_rows, rows_of
from trainer.select.groups import RowSource


class Changes(RowSource, Protocol):
    """What a listing tells: all rows there are, or those that changed since a revision."""

    @property
    def revision(self) -> Revision: ...
    @property
    def full(self) -> bool: ...
    @property
    def cleared(self) -> Sequence[str]: ...


class Snapshot:
    """Keys, tags and row lengths of a partition; what changes is taken in."""

    def __init__(self) -> None:
        self.revision: Revision | None = None
        """List what has changed since then; None lists everything."""
        self._rows: dict[str, Row] = {}

    def take(self, changes: Changes) -> None:
        """Bring it up to the revision of a listing that was asked for since the last one."""
        if changes.full:
            self._rows.clear()
        for key in changes.cleared:
            self._rows.pop(key, None)
        self._rows.update((row.key, row) for row in rows_of(changes))
        self.revision = changes.revision

    def forget(self) -> None:
        """There is no such partition."""
        self._rows.clear()
        self.revision = None

    def groups(self) -> list[Group]:
        """The groups of its rows, in the order in which each was first told of."""
        return group_rows(self._rows.values())
