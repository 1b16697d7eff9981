"""Where the values of one put lie, and how many of its cells are still in use. Pure.

A placement is shared by all rows of its put. A cell (row x field) dies when its row is cleared or
another put overwrites the field; with the last one the block itself is dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.codec.shapes import MAX_ROWS
from dataplane.codec.template import Template
from dataplane.errors import InvalidRequest
from dataplane.tags.accounts import Account
from dataplane.values.extents import round_up


class Placement:
    __slots__ = (
        "_cell_bytes", "block", "charged", "lengths", "live", "nbytes", "offset", "partition_id",
        "positions", "rows", "segment", "store", "template",
    )  # fmt: skip

    def __init__(
        self,
        store: str,
        block: int,
        segment: int,
        offset: int,
        nbytes: int,
        template: Template,
        rows: int,
        lengths: bytes,
    ) -> None:
        self.store = store
        self.block = block
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.template = template
        self.rows = rows
        self.lengths = lengths
        self.live = rows * len(template.columns)
        """Cells still in use."""
        self.charged: Account | dict[Account, int] | None = None
        """Who answers for its extent: one account for all of it, or each for a share in bytes."""
        self.partition_id = ""
        self.positions: Sequence[int] = ()
        """Slot of each row in its partition, so that a repack finds them."""
        self._cell_bytes: npt.NDArray[np.int64] | None = None

    def check(self) -> None:
        """InvalidRequest unless it is a place of so many rows of its template. To be asked before
        a change that names it is written down: what is written down has to be possible."""
        numbers = (self.block, self.segment, self.offset, self.nbytes)
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise InvalidRequest(f"a block lies at numbers, not {numbers!r:.200}")
        if type(self.rows) is not int or not 0 < self.rows <= MAX_ROWS:
            raise InvalidRequest(f"a block has 1 to {MAX_ROWS} rows, not {self.rows!r:.80}")
        due = 4 * self.template.num_free * self.rows
        if type(self.lengths) is not bytes or len(self.lengths) != due:
            raise InvalidRequest(f"{due} bytes of row lengths are due")
        if self.rows == 1:
            self.template.one_row(self.lengths)
        else:
            _ = self.cell_bytes  # kept: it is needed at once

    @property
    def extent_bytes(self) -> int:
        """Bytes that the block takes in its store, whole pages."""
        return round_up(self.nbytes)

    def charge(self, rows_of: dict[Account, int]) -> None:
        """Let the accounts of its rows answer for the extent until the block is dead."""
        total = self.extent_bytes
        if len(rows_of) == 1:
            (account,) = rows_of
            self.charged = account
            account.add_extent(total)
            return
        self.charged = {}
        rows_left = sum(rows_of.values())
        for account, rows in rows_of.items():
            share = total * rows // rows_left  # what rounding leaves over goes to the last
            total -= share
            rows_left -= rows
            self.charged[account] = share
            account.add_extent(share)

    def uncharge(self) -> list[Account]:
        """The block is dead; who answered for it."""
        charged, self.charged = self.charged, None
        if charged is None:
            return []
        if not isinstance(charged, dict):
            charged.add_extent(-self.extent_bytes)
            return [charged]
        for account, share in charged.items():
            account.add_extent(-share)
        return list(charged)

    @property
    def cell_bytes(self) -> npt.NDArray[Any]:  # [C, R] int64
        """Bytes of every cell."""
        if self._cell_bytes is None:
            sizes = np.frombuffer(self.lengths, np.int32).reshape(-1, 1, self.rows)
            self._cell_bytes = self.template.row_bytes_of(sizes)[:, 0, :]
        return self._cell_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of all cells together, padding and front left out."""
        if self.rows == 1:
            return sum(self.one_row_bytes())
        return int(self.cell_bytes.sum())

    def row_bytes(self, row: int) -> int:
        """Bytes of all cells of one row."""
        return self.payload_bytes if self.rows == 1 else int(self.cell_bytes[:, row].sum())

    def one_row_bytes(self) -> list[int]:
        """Bytes of each cell of a one-row block; plain integers, for the path of single puts."""
        template = self.template
        lengths = memoryview(self.lengths).cast("i")
        sizes: list[int] = []
        for i, column in enumerate(template.columns):
            size = template.fixed_bytes[i]
            first = template.first_free[i]
            for k in range(first, first + len(column.free)):
                size *= lengths[k]
            sizes.append(size)
        return sizes

    def field_bytes(self, name: str, row: int) -> int:
        """Bytes of one cell."""
        i = self.template.index[name]
        return self.one_row_bytes()[i] if self.rows == 1 else int(self.cell_bytes[i, row])
