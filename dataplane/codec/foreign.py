"""Blocks made of bytes that came from elsewhere, laid out already: nothing is copied or joined.

Owns how rows that a peer sent column by column become a block: where its columns are cut out of the
pieces that came, and which bytes are no value of their dtype. Imports no torch.

Letters: B rows, F free dimensions over all columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dataplane.codec.shapes import Column
from dataplane.codec.template import ALIGN, Template
from dataplane.errors import InvalidRequest

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_PADDING = [bytes(n) for n in range(ALIGN)]


class Foreign:
    """A block that is ready to be sent or written; its bytes are still those that came."""

    __slots__ = ("lengths", "nbytes", "pieces", "rows", "template")

    def __init__(
        self, template: Template, lengths: bytes, rows: int, pieces: list[bytes | memoryview]
    ) -> None:
        self.template = template
        self.lengths = lengths
        """int32 [F, B], little endian."""
        self.rows = rows
        self.pieces = pieces
        """Flat byte buffers that make up the block when joined, padding included."""
        self.nbytes = sum(map(len, pieces))

    def write_into(self, target: memoryview) -> None:
        """Writes the block to the start of a writable buffer of at least `nbytes`.

        Other threads of the process run while it copies.
        """
        block = np.frombuffer(target, np.uint8)
        if len(block) < self.nbytes:
            raise ValueError(f"{self.nbytes} bytes do not fit in {len(block)}")
        at = 0
        for piece in self.pieces:
            block[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)


def block_of(
    columns: Sequence[Column], lengths: npt.NDArray[np.int32], rows: int, pieces: Iterable[Buffer]
) -> Foreign:
    """The block of these columns, whose bytes are the pieces: rows back to back, columns behind
    each other without a gap.

    Args:
        columns: checked, each name once; `shapes.column_of` does that.
        lengths: [F, B] of the free dimensions.

    Raises:
        InvalidRequest: there are more or fewer bytes than the columns have, or a bool that is
            neither 0 nor 1.
    """
    template = _template(tuple(columns))
    sizes = template.row_bytes_of(lengths.reshape(template.num_free, 1, rows)).sum(axis=(1, 2))
    packed = lengths.astype("<i4", copy=False).tobytes()
    laid: list[bytes | memoryview] = [template.front(packed, rows)]
    source = Cutter(pieces)
    nbytes: list[int] = sizes.tolist()
    for column, size in zip(columns, nbytes, strict=True):
        parts = source.cut(size)
        if column.dtype == "bool":
            _check_bools(column.name, parts)
        laid.extend(parts)
        if gap := -size % ALIGN:
            laid.append(_PADDING[gap])
    if source.left():
        raise InvalidRequest("more bytes came than the columns have")
    return Foreign(template, packed, rows, laid)


class Cutter:
    """Pieces that follow each other, to be cut at other places."""

    def __init__(self, pieces: Iterable[Buffer]) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")

    def cut(self, nbytes: int) -> list[memoryview]:
        """The next so many bytes. InvalidRequest if there are fewer."""
        parts: list[memoryview] = []
        while nbytes:
            if not self._rest and not self._more():
                raise InvalidRequest(f"{nbytes} bytes fewer came than the columns have")
            part = self._rest[:nbytes]
            self._rest = self._rest[len(part) :]
            parts.append(part)
            nbytes -= len(part)
        return parts

    def left(self) -> bool:
        """Whether anything is left."""
        return bool(self._rest) or self._more()

    def _more(self) -> bool:
        for piece in self._pieces:
            if len(piece):
                self._rest = memoryview(piece).cast("B")
                return True
        return False


def _check_bools(name: str, parts: Sequence[memoryview]) -> None:
    for part in parts:
        worst = int(np.frombuffer(part, np.uint8).max())
        if worst > 1:
            raise InvalidRequest(f"field {name!r}: a bool is a byte 0 or 1, not {worst}")


@lru_cache(maxsize=4096)
def _template(columns: tuple[Column, ...]) -> Template:
    """The template of these columns, built once: producers repeat themselves."""
    return Template(columns)
