"""A tally of the rows that match: how many, how large, in which status. Pure.

It walks over a cut in small steps, so all of it is of one moment.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from dataplane.tags.groups import Group
from dataplane.tags.partition import Partition
from dataplane.tags.placement import Placement
from dataplane.tags.query import Predicate
from dataplane.tags.rows import Row

STEP = 128
SAMPLE = 20
"""Keys that are named."""
MAX_STATUSES = 64
"""Statuses that are told apart; the others are counted as OTHERS."""
OTHERS = "(others)"


class Tally:
    def __init__(
        self, partition: Partition, predicate: Predicate, until: int | None = None
    ) -> None:
        """`until`: rows that changed after this revision are left out."""
        self.rows = 0
        self.payload_bytes = 0
        self.tag_bytes = 0
        self.statuses: dict[str, list[int]] = {}
        self.sample: list[str] = []
        self.revision = partition.revision
        self._groups: dict[Group, None] = {}
        self._predicate = predicate
        self._until = until
        self._partition = partition
        self._cut = partition.slots.cut()

    def take(self) -> Generator[None]:
        """Look at all rows of the cut."""
        for chunk in self._cut:
            rows = chunk.live_rows()
            for at in range(0, len(rows), STEP):
                for row in rows[at : at + STEP]:
                    if self._predicate(row.tags) and (
                        self._until is None or row.revision <= self._until
                    ):
                        self._add(row)
                yield

    def _add(self, row: Row) -> None:
        nbytes = row_bytes(row)
        self.rows += 1
        self.payload_bytes += nbytes
        self.tag_bytes += row.tag_bytes
        if len(self.sample) < SAMPLE:
            self.sample.append(row.key)
        of = self.statuses.get(status := status_of(row))
        if of is None:
            if len(self.statuses) >= MAX_STATUSES:
                status = OTHERS
            of = self.statuses.setdefault(status, [0, 0])
        of[0] += 1
        of[1] += nbytes + row.tag_bytes
        group = row.account if type(row.account) is Group else None
        if group is None and self._partition.groups:
            group = self._partition.groups.get(row.key)
        if group is not None and group.open:
            self._groups[group] = None

    def told(self) -> dict[str, Any]:
        """All of it, for the wire."""
        statuses = sorted(self.statuses.items(), key=lambda item: -item[1][1])
        return {
            "partition_id": self._partition.partition_id,
            "rows": self.rows,
            "payload_bytes": self.payload_bytes,
            "tag_bytes": self.tag_bytes,
            "statuses": dict(statuses),
            "groups_open": len(self._groups),
            "sample": self.sample,
        }


def status_of(row: Row) -> str:
    """The tag `status` of a row; empty if it has none, or it is no text."""
    status = row.tags.get("status")
    return status if type(status) is str else ""


def row_bytes(row: Row) -> int:
    """Bytes of the live cells of a row."""
    layers = row.layers
    if len(layers) == 2:
        placement: Placement = layers[0]
        return placement.row_bytes(layers[1])
    return sum(nbytes for _, _, _, nbytes in cells_of(row))


def cells_of(row: Row) -> Generator[tuple[str, Placement, int, int]]:
    """The live cells of a row: field, placement, row in it, bytes."""
    seen: set[str] = set()
    layers: tuple[Any, ...] = row.layers
    for k in range(0, len(layers), 2):
        placement: Placement = layers[k]
        for name in placement.template.names:
            if name not in seen:
                seen.add(name)
                yield name, placement, layers[k + 1], placement.field_bytes(name, layers[k + 1])
