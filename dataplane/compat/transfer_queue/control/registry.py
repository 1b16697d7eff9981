"""A partition as the controller sees it: its rows by index, what is produced, who consumed what.

Pure: it is told of listings and answers questions, and says what is to be written to the rows.
All of it lies in the plane, in one reserved tag of each row, so it can be lost and made again.
Indexes are given out in the order in which rows came, and never twice. Letters: N rows, F fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from dataplane.types import Revision

from ..names import KEYLESS, RESERVED_TAG

Tags = dict[str, Any]
INDEX = "index"
CONSUMED = "consumed"
CLAIMS = "claims"


class Told(Protocol):
    """A listing of a partition: all rows, or what changed since the last one."""

    @property
    def revision(self) -> Revision: ...
    @property
    def full(self) -> bool: ...
    @property
    def cleared(self) -> Sequence[str]: ...
    @property
    def keys(self) -> Sequence[str]: ...
    @property
    def fields(self) -> Sequence[tuple[str, ...]]: ...
    @property
    def tags(self) -> Sequence[Tags]: ...


class Place(NamedTuple):
    """By what a row was consumed: so that the same batch can be handed out again."""

    request: str
    """The request that got it."""
    number: int
    """Where in the batch it was; -1 for a row that was not handed out, though consumed."""
    of: int
    """Rows of the batch."""
    draw: str | None = None
    """Which rank's which batch it was, where the sampler remembers that."""


class Row:
    """A row: its key, what it has, and what the controller knows of it."""

    __slots__ = ("claims", "consumed", "fields", "index", "key", "tags")

    def __init__(self, key: str, fields: tuple[str, ...], tags: Tags) -> None:
        self.key = key
        self.fields = fields
        self.index: int = -1
        self.consumed: tuple[str, ...] = ()
        self.claims: dict[str, Place] = {}
        own: Any = tags.pop(RESERVED_TAG, None)
        self.tags = tags
        if type(own) is dict:
            known = cast("Mapping[str, Any]", own)
            self.index = int(known[INDEX])
            self.consumed = tuple(known.get(CONSUMED, ()))
            self.claims = {task: Place(*of) for task, of in known.get(CLAIMS, {}).items()}

    @property
    def shown_key(self) -> str | None:
        """The key as callers know it; None for a row that was put without one."""
        return None if self.key.startswith(KEYLESS) else self.key


def reserved(
    index: int,
    consumed: Iterable[str] = (),
    claims: Mapping[str, Place] | None = None,
) -> Tags:
    """The tags to write to a row, for what the controller knows of it."""
    own: Tags = {INDEX: index, CONSUMED: list(consumed)}
    if claims:
        own[CLAIMS] = {task: list(place) for task, place in claims.items()}
    return {RESERVED_TAG: own}


def keyless(index: int) -> str:
    """The key of the row that was put without one."""
    return f"{KEYLESS}{index}"


class PartitionRows:
    """The rows of one partition as of a revision."""

    def __init__(self, partition_id: str) -> None:
        self.partition_id = partition_id
        self.revision: Revision | None = None
        self.fields: dict[str, None] = {}
        """Every field that a row has had, in the order in which they came."""
        self.ahead = range(0)
        """Indexes that were given out before there are rows for them."""
        self._by_key: dict[str, Row] = {}
        self._by_index: dict[int, Row] = {}
        self._unnumbered: dict[str, Row] = {}
        self._ordered: list[Row] | None = None
        """The rows by index, until they change."""

    def __len__(self) -> int:
        return len(self._by_key)

    # -- what is told ------------------------------------------------------------------------

    def take(self, listing: Told) -> None:
        """Come up to the revision of a listing since `self.revision`, whose rows are in the order
        in which they came. Older ones change nothing."""
        if self.revision is not None and listing.revision < self.revision:
            return
        self._ordered = None
        if listing.full:
            self._by_key, self._by_index, self._unnumbered = {}, {}, {}
        for key in listing.cleared:
            self._drop(key)
        for key, fields, tags in zip(listing.keys, listing.fields, listing.tags, strict=True):
            self._set(Row(key, fields, tags))
        self.revision = listing.revision

    def unnumbered(self) -> list[str]:
        """Keys of rows without an index, in the order in which they came."""
        return list(self._unnumbered)

    def number(self, indexes: Mapping[str, int]) -> None:
        """These keys have these indexes from now on."""
        self._ordered = None
        for key, index in indexes.items():
            row = self._unnumbered.pop(key, None)
            if row is not None:
                row.index = index
                self._by_index[index] = row

    def consume(self, task: str, places: Mapping[int, Place]) -> None:
        """The rows with these indexes are consumed from now on."""
        for index, place in places.items():
            row = self._by_index[index]
            row.consumed = (*row.consumed, task)
            row.claims = {**row.claims, task: place}

    def _set(self, row: Row) -> None:
        self._drop(row.key)
        self._by_key[row.key] = row
        self.fields.update(dict.fromkeys(row.fields))
        if row.index >= 0 and row.index not in self._by_index:
            self._by_index[row.index] = row
        else:
            row.index = -1
            self._unnumbered[row.key] = row

    def _drop(self, key: str) -> None:
        row = self._by_key.pop(key, None)
        if row is not None:
            self._by_index.pop(row.index, None)
            self._unnumbered.pop(key, None)

    # -- what is asked -----------------------------------------------------------------------

    @property
    def rows(self) -> list[Row]:
        """The rows that have an index, by index; not to be changed. # [N]"""
        if self._ordered is None:
            self._ordered = [row for _, row in sorted(self._by_index.items())]
        return self._ordered

    @property
    def indexes(self) -> list[int]:
        """The indexes of rows, and those that were given out ahead of rows, ascending."""
        return sorted([*self._by_index, *self.ahead])

    def has(self, index: int) -> bool:
        """Whether a row has this index."""
        return index in self._by_index

    def row(self, index: int) -> Row | None:
        """The row with this index."""
        return self._by_index.get(index)

    def keyed(self, key: str) -> Row | None:
        """The row with this key."""
        return self._by_key.get(key)

    def ready(self, fields: Sequence[str], task: str) -> list[int]:
        """Indexes of the rows that have all of these fields and that the task did not consume."""
        enough = _Enough(fields)
        return [row.index for row in self.rows if task not in row.consumed and enough(row)]

    def claimed(
        self, task: str, *, request: str | None = None, draw: str | None = None
    ) -> list[int]:
        """Indexes of the batch that a request was given, or that was drawn for a rank, in order;
        empty where there is no such batch or rows of it are gone."""
        of = 0
        found: list[tuple[int, int]] = []
        for row in self._by_index.values():
            place = row.claims.get(task)
            if place is None or place.number < 0:
                continue
            if place.request == request or (draw is not None and place.draw == draw):
                of = place.of
                found.append((place.number, row.index))
        return [index for _, index in sorted(found)] if len(found) == of else []

    def consumption(self, task: str) -> tuple[list[int], list[int]]:
        """All indexes, and for each 1 where the task consumed the row."""
        flags = {row.index: int(task in row.consumed) for row in self._by_index.values()}
        indexes = self.indexes
        return indexes, [flags.get(index, 0) for index in indexes]

    def production(self, fields: Sequence[str]) -> tuple[list[int], list[list[int]]] | None:
        """All indexes, and for each a list with 1 where the row has the field; None where no row
        has had one of the fields. # [N], [N, F]"""
        if not fields or any(name not in self.fields for name in fields):
            return None
        flags: dict[tuple[str, ...], list[int]] = {}
        none = [0] * len(fields)
        rows: list[list[int]] = []
        for index in (indexes := self.indexes):
            row = self._by_index.get(index)
            if row is None:
                rows.append(none)
                continue
            if row.fields not in flags:
                flags[row.fields] = [int(name in row.fields) for name in fields]
            rows.append(flags[row.fields])
        return indexes, rows

    def tasks(self) -> list[str]:
        """Every task that consumed a row which is still there; sorted."""
        return sorted({task for row in self._by_key.values() for task in row.consumed})

    def common(self, rows: Iterable[Row]) -> list[str]:
        """The fields that all of these rows have, in the order in which they came."""
        sets = {row.fields for row in rows}
        if not sets:
            return []
        shared = frozenset(next(iter(sets))).intersection(*sets)
        return [name for name in self.fields if name in shared]

    def why_not(self, fields: Sequence[str], task: str, wanted: int) -> str:
        """In words: how many rows are ready, of how many, and what the others lack."""
        rows = self.rows
        ready = len(self.ready(fields, task))
        text = f"{ready} of {wanted} rows are ready, of {len(rows)} in the partition"
        consumed = sum(task in row.consumed for row in rows)
        lacking = {
            name: count
            for name in fields
            if (count := sum(name not in row.fields for row in rows if task not in row.consumed))
        }
        if consumed:
            text += f"; task {task!r} has consumed {consumed}"
        for name, count in lacking.items():
            text += f"; {count} lack field {name!r}"
        return text


class _Enough:
    """Whether rows have all fields; looked at once for each set of fields that rows have."""

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = frozenset(fields)
        self._known: dict[tuple[str, ...], bool] = {}

    def __call__(self, row: Row) -> bool:
        known = self._known.get(row.fields)
        if known is None:
            known = self._known[row.fields] = self._fields.issubset(row.fields)
        return known
