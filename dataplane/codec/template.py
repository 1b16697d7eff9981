"""The shape of a block: which columns it has and where every row of every column lies.

A block holds the rows of one put, column by column. Its template says what all blocks of such
puts have in common (names, dtypes, dimensions); the int32 `lengths` say what differs. From the
two of them every offset follows, so neither is stored per row. Servers use this file without
torch: to them a value is bytes.

Layout of a block (all starts 64-byte aligned, little endian):

    front    magic u32, version u32, rows u32, free dims u32, then lengths [free, rows] int32
    column 0 row 0, row 1, ... back to back
    column 1 ...

Letters: F free dimensions over all columns, C columns, B blocks, R rows of a block.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from dataplane.codec.shapes import (
    ITEM_BYTES,
    MAX_COLUMNS,
    MAX_ROWS,
    Column,
    check_cells,
    column_of,
)
from dataplane.errors import InvalidRequest

ALIGN = 64
FRONT = struct.Struct("<IIII")
FRONT_MAGIC = 0x314B4C42  # "BLK1"
FRONT_VERSION = 1

MAX_BLOB_BYTES = 1 << 20
MAX_BLOCK_BYTES = 1 << 50

MAX_KNOWN = 4096
"""Templates kept parsed."""


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the next multiple of 64."""
    return (nbytes + ALIGN - 1) & -ALIGN


class Layout(NamedTuple):
    """Where the rows of B blocks with the same template and row count lie."""

    offsets: npt.NDArray[np.int64]  # [C, B, R], from the start of each block
    nbytes: npt.NDArray[np.int64]  # [C, B, R]
    total: npt.NDArray[np.int64]  # [B], bytes of each whole block


class Template:
    """Columns of a block, validated; equal templates have equal `blob`s."""

    __slots__ = (
        "blob", "columns", "first_free", "fixed_bytes", "index", "name_set", "names", "num_free",
    )  # fmt: skip

    def __init__(self, columns: tuple[Column, ...], blob: bytes | None = None) -> None:
        self.columns = columns
        self.names = tuple(column.name for column in columns)
        self.name_set = frozenset(self.names)
        self.index = {name: i for i, name in enumerate(self.names)}
        self.fixed_bytes: list[int] = []  # [C], bytes of a row with every free dimension taken as 1
        self.first_free: list[int] = []  # [C], where the column's free dims start among all F
        free = 0
        for column in columns:
            size = ITEM_BYTES[column.dtype]
            for dim in column.dims:
                size *= dim if dim >= 0 else 1
            if size > MAX_BLOCK_BYTES:
                raise InvalidRequest(f"field {column.name!r}: a row is larger than a block can be")
            self.fixed_bytes.append(size)
            self.first_free.append(free)
            free += len(column.free)
        self.num_free = free
        self.blob: bytes = blob if blob is not None else msgpack.packb([list(c) for c in columns])

    @classmethod
    def parse(cls, blob: bytes) -> Template:
        """The template that a peer sent. InvalidRequest says what is wrong with it."""
        try:
            if len(blob) > MAX_BLOB_BYTES:
                raise ValueError(f"{len(blob)} bytes, at most {MAX_BLOB_BYTES}")
            raw: tuple[Any, ...] = msgpack.unpackb(blob, use_list=False)
        except Exception as error:
            raise InvalidRequest(f"the block template is not valid msgpack: {error}") from None
        if type(raw) is not tuple or len(raw) > MAX_COLUMNS:
            raise InvalidRequest(f"a block template is a list of at most {MAX_COLUMNS} columns")
        columns: list[Column] = []
        names: set[str] = set()
        for item in raw:
            column = column_of(item)
            if column.name in names:
                raise InvalidRequest(f"the field {column.name!r} occurs twice in one put")
            names.add(column.name)
            columns.append(column)
        return cls(tuple(columns), blob)

    def front_bytes(self, rows: int) -> int:
        """Bytes before the first column."""
        return align(FRONT.size + 4 * self.num_free * rows)

    def front(self, lengths: bytes, rows: int) -> bytes:
        """The front of a block: header and lengths, padded to the first column."""
        head = FRONT.pack(FRONT_MAGIC, FRONT_VERSION, rows, self.num_free) + lengths
        return head.ljust(self.front_bytes(rows), b"\0")

    def block_bytes(self, lengths: bytes, rows: int) -> int:
        """Bytes of a whole block. InvalidRequest if `lengths` does not fit the template."""
        if type(rows) is not int or not 0 < rows <= MAX_ROWS:
            # 1.0 would do for all arithmetic here, and break whoever lists the rows later.
            raise InvalidRequest(f"a block has 1 to {MAX_ROWS} rows, not {rows!r:.80}")
        check_cells(rows, len(self.columns))
        if len(lengths) != 4 * self.num_free * rows:
            raise InvalidRequest(
                f"{len(lengths)} bytes of row lengths where {self.num_free} free dimensions "
                f"x {rows} rows x 4 bytes are due"
            )
        if rows == 1:
            return self.one_row(lengths)[-1]
        sizes = np.frombuffer(lengths, np.int32).reshape(self.num_free, 1, rows)
        return int(self.layout(sizes, rows).total[0])

    def one_row(self, lengths: bytes) -> list[int]:
        """Start of every column of a one-row block, then the block's end: C + 1 offsets.

        The path of a single put: plain integers cost a tenth of numpy here.
        """
        free = struct.unpack(f"<{self.num_free}i", lengths)
        if free and min(free) < 0:
            raise InvalidRequest("a row length is negative")
        at = self.front_bytes(1)
        starts: list[int] = []
        for i, column in enumerate(self.columns):
            starts.append(at)
            size = self.fixed_bytes[i]
            first = self.first_free[i]
            for k in range(len(column.free)):
                size *= free[first + k]
            at = align(at + size)
        if at > MAX_BLOCK_BYTES:
            raise InvalidRequest(f"a block has at most {MAX_BLOCK_BYTES} bytes")
        starts.append(at)
        return starts

    def row_bytes_of(self, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Bytes of every cell: lengths [F, B, R] to nbytes [C, B, R]."""
        shape = lengths.shape[1:]
        if lengths.size and int(lengths.min()) < 0:
            raise InvalidRequest("a row length is negative")
        nbytes = np.empty((len(self.columns), *shape), np.int64)
        for i, column in enumerate(self.columns):
            nbytes[i] = self.fixed_bytes[i]
            bound = float(self.fixed_bytes[i])
            first = self.first_free[i]
            for k in range(len(column.free)):
                nbytes[i] *= lengths[first + k]
                bound *= float(lengths[first + k].max(initial=0))
            # Integers wrap silently; the same product in floats tells when they would. The product
            # of the largest lengths settles nearly every put without a pass over the rows.
            if bound > MAX_BLOCK_BYTES and self._largest_row(i, lengths) > MAX_BLOCK_BYTES:
                raise InvalidRequest(f"field {column.name!r}: a row is larger than a block can be")
        if nbytes.sum(dtype=np.float64) > MAX_BLOCK_BYTES:
            raise InvalidRequest(f"a block has at most {MAX_BLOCK_BYTES} bytes")
        return nbytes

    def _largest_row(self, i: int, lengths: npt.NDArray[np.int32]) -> float:
        """Bytes of the largest cell of column i, as a float that cannot wrap."""
        first, column = self.first_free[i], self.columns[i]
        free = lengths[first : first + len(column.free)].astype(np.float64)
        return self.fixed_bytes[i] * float(free.prod(axis=0).max(initial=0))

    def layout(self, lengths: npt.NDArray[np.int32], rows: int) -> Layout:
        """Offsets and sizes of every cell of B blocks at once; `lengths` is [F, B, R].

        One call serves a thousand one-row blocks as well as one block of a thousand rows.
        """
        nbytes = self.row_bytes_of(lengths)
        if not len(self.columns):
            blocks = lengths.shape[1]
            empty = np.empty((0, blocks, rows), np.int64)
            return Layout(empty, empty, np.full(blocks, self.front_bytes(rows), np.int64))
        offsets = np.cumsum(nbytes, axis=2)
        sizes = (offsets[:, :, -1] + (ALIGN - 1)) & -ALIGN  # [C, B]
        ends = np.cumsum(sizes, axis=0) + self.front_bytes(rows)
        offsets -= nbytes
        offsets += (ends - sizes)[:, :, None]
        return Layout(offsets, nbytes, ends[-1])


class Templates:
    """The templates that peers sent, each parsed once: producers repeat themselves."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, Template] = {}

    def parse(self, blob: object) -> Template:
        """The template that a peer sent. InvalidRequest says what is wrong with it."""
        if type(blob) is not bytes:
            raise InvalidRequest("a block template is packed bytes")
        template = self._known.get(blob)
        if template is None:
            template = Template.parse(blob)
            if len(self._known) > MAX_KNOWN:
                self._known.clear()  # only a cache: sizes of dense fields make ever new ones
            self._known[blob] = template
        return template
