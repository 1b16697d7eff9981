"""What a partition is made of: bytes by field, producer and age, lengths. Pure.

It goes through rows and then through blocks in small steps, between which the store goes on: what
changes meanwhile is counted as it was or as it is.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.tags.explain.clients import Clients
from dataplane.tags.histogram import Lengths
from dataplane.tags.moments import Moments
from dataplane.tags.partition import Partition
from dataplane.tags.placement import Placement
from dataplane.tags.tally import MAX_STATUSES, OTHERS, row_bytes, status_of

STEP = 64
AGES_S = (60, 600, 3600, 6 * 3600, 86_400, 7 * 86_400)
"""Where ages are told apart."""
MAX_PRODUCERS = 100
MAX_FIELDS = 512
"""Fields whose lengths are told; a histogram takes 48 KiB while it is made."""


class Census:
    def __init__(self, partition: Partition, moments: Moments, now: float) -> None:
        self._partition = partition
        self._fields: dict[str, list[int]] = {}
        self._lengths: dict[str, Lengths] = {}
        self._statuses: dict[str, int] = {}
        self._ages = [[0, 0] for _ in range(len(AGES_S) + 1)]
        self._since = [moments.revision_at(now - age_s) for age_s in AGES_S]
        """The last revision that is older than each age."""

    def take(self, placements: list[Placement]) -> Generator[None]:
        """Look at all rows, and at these blocks of the partition."""
        for chunk in self._partition.slots.cut():
            rows = chunk.live_rows()
            for at in range(0, len(rows), STEP):
                for row in rows[at : at + STEP]:
                    status = status_of(row)
                    if status not in self._statuses and len(self._statuses) >= MAX_STATUSES:
                        status = OTHERS
                    self._statuses[status] = self._statuses.get(status, 0) + 1
                    age = self._ages[self._age_of(row.revision)]
                    age[0] += 1
                    age[1] += row_bytes(row) + row.tag_bytes
                yield
        for placement in placements:
            if placement.partition_id != self._partition.partition_id or not placement.live:
                continue
            if placement.rows == 1:
                self._add_one(placement)
            elif placement.live == placement.rows * len(placement.template.columns):
                self._add_whole(placement)
            else:
                yield from self._add_rest(placement)
            yield

    def _age_of(self, revision: int) -> int:
        """Which of the ages a revision has."""
        for at, since in enumerate(self._since):
            if revision > since:
                return at
        return len(self._since)

    # -- blocks ------------------------------------------------------------------------------

    def _add_one(self, placement: Placement) -> None:
        """The block of one row: most blocks are of single puts."""
        template, partition = placement.template, self._partition
        live = None
        if placement.live < len(template.columns):
            found = partition.live_rows_of(placement)
            live = found[0][2] if found else frozenset[str]()
        lengths = memoryview(placement.lengths).cast("i")
        for c, nbytes in enumerate(placement.one_row_bytes()):
            name = template.names[c]
            if live is not None and name not in live:
                continue
            self._count(name, 1, nbytes)
            free = self._ragged(placement, c)
            if free is not None:
                of = self._lengths_of(name)
                if of is not None:
                    of.add(lengths[free] if free >= 0 else -1 - free)

    def _add_whole(self, placement: Placement) -> None:
        """A block all of whose cells are live."""
        for c, name in enumerate(placement.template.names):
            self._count(name, placement.rows, int(placement.cell_bytes[c].sum()))
            self._add_lengths(placement, c, None)

    def _add_rest(self, placement: Placement) -> Generator[None]:
        """A block of which cells have died."""
        rows_of: dict[str, list[int]] = {}
        for number, (row, _, names) in enumerate(self._partition.live_rows_of(placement), 1):
            for name in names:
                rows_of.setdefault(name, []).append(row)
            if not number % STEP:
                yield
        for name, rows in rows_of.items():
            c = placement.template.index[name]
            at = np.array(rows, np.int64)
            self._count(name, len(rows), int(placement.cell_bytes[c, at].sum()))
            self._add_lengths(placement, c, at)
            yield

    def _add_lengths(
        self, placement: Placement, c: int, rows: npt.NDArray[np.int64] | None
    ) -> None:
        free = self._ragged(placement, c)
        of = None if free is None else self._lengths_of(placement.template.names[c])
        if free is None or of is None:
            return
        if free < 0:
            count = placement.rows if rows is None else len(rows)
            of.add_all(np.full(count, -1 - free, np.int32))
            return
        lengths = np.frombuffer(placement.lengths, np.int32).reshape(-1, placement.rows)[free]
        of.add_all(lengths if rows is None else lengths[rows])

    def _ragged(self, placement: Placement, c: int) -> int | None:
        """Which of the free dimensions of a block is the ragged one of a column; -1 - n where it is
        n in all rows, None where the field has none."""
        column = placement.template.columns[c]
        schema = self._partition.schema.get(column.name)
        if schema is None:
            return None
        same = schema.rank == len(column.dims)
        ragged_dim = schema.ragged_dim if same else column.ragged_dim
        if ragged_dim is None:
            return None
        size = column.dims[ragged_dim]
        if size >= 0:
            return -1 - size
        return placement.template.first_free[c] + column.free.index(ragged_dim)

    def _count(self, name: str, rows: int, nbytes: int) -> None:
        of = self._fields.setdefault(name, [0, 0])
        of[0] += rows
        of[1] += nbytes

    def _lengths_of(self, name: str) -> Lengths | None:
        of = self._lengths.get(name)
        if of is None and len(self._lengths) < MAX_FIELDS:
            of = self._lengths[name] = Lengths()
        return of

    # -- telling -----------------------------------------------------------------------------

    def told(self, clients: Clients) -> dict[str, Any]:
        """All of it, for the wire."""
        partition = self._partition
        fields = sorted(self._fields.items(), key=lambda item: -item[1][1])
        return {
            "partition_id": partition.partition_id,
            "keys": len(partition),
            "payload_bytes": partition.payload_bytes,
            "extent_bytes": partition.account.extent_bytes + partition.prompts.extent_bytes,
            "tag_bytes": partition.tag_bytes,
            "held_bytes": partition.account.held_bytes,
            "fields": {name: {"rows": rows, "bytes": nbytes} for name, (rows, nbytes) in fields},
            "statuses": dict(sorted(self._statuses.items(), key=lambda item: -item[1])),
            "producers": self._producers(clients),
            "ages": [
                {
                    "from_s": 0 if at == 0 else AGES_S[at - 1],
                    "to_s": AGES_S[at] if at < len(AGES_S) else None,
                    "rows": rows,
                    "bytes": nbytes,
                }
                for at, (rows, nbytes) in enumerate(self._ages)
            ],
            "lengths": {name: of.told() for name, of in sorted(self._lengths.items())},
        }

    def _producers(self, clients: Clients) -> list[dict[str, Any]]:
        partition = self._partition
        found: dict[str, list[int]] = {}
        for of in (partition.producers, partition.prompters):
            for client_id, account in of.items():
                if account.rows or account.extent_bytes:
                    entry = found.setdefault(client_id, [0, 0])
                    entry[0] += account.rows
                    entry[1] += account.used_bytes
        most = sorted(found.items(), key=lambda item: -item[1][1])[:MAX_PRODUCERS]
        return [
            {**clients.about(client_id), "rows": rows, "bytes": nbytes}
            for client_id, (rows, nbytes) in most
        ]
