"""Every key with its tags, as `kv_list` returns them, at the price of what changed since last time.

Owns a copy of each partition's tags in this process, brought up to date by the plane's listings
since a revision. What is returned belongs to the caller.
"""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any

from dataplane.client.core import Core
from dataplane.client.effects import Verb
from dataplane.client.partitions import list_partitions
from dataplane.client.results import Listing
from dataplane.client.tags import list_rows
from dataplane.errors import PartitionNotFound
from dataplane.types import Revision

from ..names import HIDDEN, KEYLESS, RESERVED_TAG

Tags = dict[str, Any]
_PLAIN = (str, int, float, bool, type(None))


class _Copy:
    """One partition's tags as of a revision."""

    __slots__ = ("nested", "revision", "rows")

    def __init__(self) -> None:
        self.revision: Revision | None = None
        self.rows: dict[str, Tags] = {}
        self.nested: set[str] = set()
        """Keys with tags that hold lists or maps: copied in depth."""

    def take(self, listing: Listing) -> None:
        if listing.full:
            self.rows = {}
            self.nested = set()
        for key in listing.cleared:
            self.rows.pop(key, None)
            self.nested.discard(key)
        for key, tags in zip(listing.keys, listing.tags, strict=True):
            if key.startswith(KEYLESS):
                continue
            tags.pop(RESERVED_TAG, None)
            self.rows[key] = tags
            if all(type(value) in _PLAIN for value in tags.values()):
                self.nested.discard(key)
            else:
                self.nested.add(key)
        self.revision = listing.revision

    def give(self) -> dict[str, Tags]:
        given = {key: dict(tags) for key, tags in self.rows.items()}
        for key in self.nested:
            given[key] = deepcopy(given[key])
        return given


class Listings:
    """The copies of one process. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[str, _Copy] = {}

    def all(
        self, core: Core, deadline: float, *, partition_id: str | None
    ) -> Verb[dict[str, dict[str, Tags]]]:
        """Partition -> key -> tags; of one partition, or of all. `{}` for one that is not there."""
        if partition_id is not None:
            names = [partition_id]
        else:
            names = list((yield from list_partitions(core, deadline)))
        found: dict[str, dict[str, Tags]] = {}
        for name in names:
            if name == HIDDEN:
                continue
            try:
                found[name] = yield from self._one(core, name, deadline)
            except PartitionNotFound:
                with self._lock:
                    self._copies.pop(name, None)
        return found

    def _one(self, core: Core, name: str, deadline: float) -> Verb[dict[str, Tags]]:
        with self._lock:
            known = self._copies.get(name)
            since = None if known is None else known.revision
        listing = yield from list_rows(core, name, None, since, None, None, deadline)
        with self._lock:
            copy = self._copies.get(name)
            if copy is None:
                if not listing.full:  # dropped and forgotten in between
                    copy = None
                else:
                    copy = self._copies[name] = _Copy()
            # Another thread may have brought it further in the meantime.
            if copy is not None and (copy.revision is None or listing.revision >= copy.revision):
                copy.take(listing)
            if copy is not None:
                return copy.give()
        return (yield from self._one(core, name, deadline))
