"""Rows that would match and are lost: how many, which, with what, and for how long. Pure.

Of ever so many only the few are kept that were lost first.
"""

from __future__ import annotations

from typing import Any

from dataplane.fields import LOST_AT
from dataplane.tags.explain.foremost import Foremost
from dataplane.tags.explain.wording import many, quoted
from dataplane.tags.lost import stores_of
from dataplane.tags.rows import Row

SHOWN = 3
"""Keys that are told."""
MAX_STORES = 64
"""Value stores that are told apart."""
SHOWN_STORES = 5


class Losses:
    """Gathers lost rows of one partition."""

    def __init__(self) -> None:
        self._first: Foremost[str] = Foremost(SHOWN)
        self._stores: set[str] = set()
        self._since = float("inf")

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def count(self) -> int:
        """How many there are."""
        return self._first.count

    def add(self, row: Row) -> None:
        """One more."""
        at: Any = row.tags.get(LOST_AT)
        at = at if type(at) is float else float("inf")
        self._first.offer(-at, row.key)
        self._since = min(self._since, at)
        if len(self._stores) < MAX_STORES:
            self._stores.update(stores_of([row]))

    def told(self, now: float) -> str:
        """All of it in words.

        Example: `2 rows that match are lost with value store 's1', since 12.3 s: 'a', 'b'; clear
        them, and produce them anew`.
        """
        stores = sorted(self._stores)
        names = ", ".join(map(quoted, stores[:SHOWN_STORES]))
        if len(stores) > SHOWN_STORES:
            names += f" and {len(stores) - SHOWN_STORES} more"
        keys = ", ".join(map(quoted, self._first.in_order()))
        if self._first.left_out:
            keys += f" and {self._first.left_out} more"
        return (
            f"{many(self.count, 'row')} that match{'es' * (self.count == 1)} "
            f"{'is' if self.count == 1 else 'are'} lost with value store {names}, since "
            f"{max(0.0, now - self._since):.1f} s: {keys}; clear them, and produce them anew"
        )
