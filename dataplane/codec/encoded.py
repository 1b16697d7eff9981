"""A block that is ready to leave: its template and lengths, and where its bytes still lie.

Owns which rows are handed on where they are and which are copied into one piece, and how. Never
sees what a caller put (columns.py); the bytes stay the caller's until they are sent or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch

from dataplane.codec.dtypes import array_bytes, as_tensor, byte_view, integers
from dataplane.codec.shapes import Column
from dataplane.codec.template import ALIGN, Template

Array: TypeAlias = npt.NDArray[Any]
Chunks: TypeAlias = "list[torch.Tensor] | list[Array] | list[bytes]"

JOIN_BELOW_BYTES: Final = 2 * 1024
"""Rows smaller than this on average are copied into one piece: handing a row on by itself costs
a microsecond, as much as copying it."""

SERIAL_ITEMS: Final = 32_768
"""Torch copies fewer elements than this on the calling thread, and more on a pool, for which it
waits several times the copy's length where the cores are busy with other processes."""

PADDING: Final = [bytes(n) for n in range(ALIGN)]
"""What fills the gap behind a column, by its size."""


class Part(NamedTuple):
    """One column as encoded: what the template says of it, and where its bytes are."""

    column: Column
    lengths: list[Array]  # [free dims] of [B]
    chunks: Chunks  # the whole column in one, or one per row
    nbytes: int


class Encoded:
    """A block that is ready to be sent or written; its bytes are still the caller's tensors."""

    __slots__ = ("_parts", "_pieces", "lengths", "nbytes", "rows", "template")

    def __init__(
        self,
        template: Template,
        lengths: bytes,
        rows: int,
        nbytes: int,
        parts: Sequence[Part] = (),
        pieces: list[bytes | memoryview] | None = None,
    ) -> None:
        self.template = template
        self.lengths = lengths
        """int32 [F, B], little endian: what `Template.layout` takes."""
        self.rows = rows
        self.nbytes = nbytes
        """Bytes of the whole block, padding included."""
        self._parts = parts
        self._pieces = pieces

    @property
    def pieces(self) -> list[bytes | memoryview]:
        """Flat byte buffers that make up the block when joined, padding included."""
        if self._pieces is None:
            pieces: list[bytes | memoryview] = [self.template.front(self.lengths, self.rows)]
            for part in self._parts:
                if part.nbytes:
                    pieces.extend(_pieces_of(part))
                    if gap := -part.nbytes % ALIGN:
                        pieces.append(PADDING[gap])
            self._pieces = pieces
        return self._pieces

    def write_into(self, target: memoryview) -> None:
        """Writes the block to the start of a writable buffer of at least `nbytes`.

        Other threads of the process run while it copies.
        """
        block = np.frombuffer(target, np.uint8)
        if len(block) < self.nbytes:
            raise ValueError(f"{self.nbytes} bytes do not fit in {len(block)}")
        if self._pieces is not None:
            at = 0
            for piece in self._pieces:
                block[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
            return
        front = self.template.front(self.lengths, self.rows)
        block[: len(front)] = np.frombuffer(front, np.uint8)
        at = len(front)
        for part in self._parts:
            end = at + part.nbytes
            if part.nbytes:
                _copy_part(part, block[at:end])
            at = end + -part.nbytes % ALIGN
            block[end:at] = 0


def _pieces_of(part: Part) -> list[bytes | memoryview]:
    chunks, name = part.chunks, part.column.name
    if len(chunks) > 1 and part.nbytes < JOIN_BELOW_BYTES * len(chunks):
        if _are_bytes(chunks):
            return [b"".join(chunks)]
        joined = np.empty(part.nbytes, np.uint8)
        _copy_part(part, joined)
        return [array_bytes(joined)]
    views: list[bytes | memoryview] = []
    for chunk in chunks:
        if isinstance(chunk, torch.Tensor):
            view = byte_view(chunk, f"field {name!r}")
        else:
            view = chunk if isinstance(chunk, bytes) else array_bytes(chunk)
        if view:
            views.append(view)
    return views


def _are_bytes(chunks: Chunks) -> TypeGuard[list[bytes]]:
    return isinstance(chunks[0], bytes)


def _copy_part(part: Part, target: npt.NDArray[np.uint8]) -> None:
    """Writes a column's rows back to back, in one copy and from any strides or device."""
    chunks, dtype = part.chunks, part.column.dtype
    first = chunks[0]
    if isinstance(first, bytes):
        target[:] = np.frombuffer(b"".join(cast("list[bytes]", chunks)), np.uint8)
        return
    if isinstance(first, np.ndarray):
        np.copyto(target.view(first.dtype).reshape(first.shape), first)
        return
    out = integers(as_tensor(target, dtype))
    rows = cast("list[torch.Tensor]", chunks)
    with torch.no_grad():
        if len(rows) == 1:
            _copy_tensor(first, target, out)
            return
        if out.dtype is not first.dtype:
            rows = [integers(row) for row in rows]
        if first.ndim == 1:
            lengths = cast("list[int]", part.lengths[0].tolist())
        else:
            rows = [row.reshape(-1) for row in rows]
            lengths = [row.shape[0] for row in rows]
        _join(rows, lengths, target, out)


def _copy_tensor(source: torch.Tensor, target: npt.NDArray[np.uint8], out: torch.Tensor) -> None:
    if source.is_contiguous() and source.is_cpu:
        target[:] = np.frombuffer(byte_view(source, "value"), np.uint8)
    else:
        out.view(source.shape).copy_(integers(source))


def _join(
    rows: list[torch.Tensor], lengths: list[int], target: npt.NDArray[np.uint8], out: torch.Tensor
) -> None:
    """Writes flat rows back to back, in runs that torch copies on this thread."""
    size = out.element_size()
    first = begin = end = 0
    for i, length in enumerate(lengths):
        if end + length - begin >= SERIAL_ITEMS:
            if i > first:
                torch.cat(rows[first:i], out=out[begin:end])
            first, begin = i, end
            if length >= SERIAL_ITEMS:
                end += length
                _copy_tensor(rows[i], target[begin * size : end * size], out[begin:end])
                first, begin = i + 1, end
                continue
        end += length
    if first < len(rows):
        torch.cat(rows[first:], out=out[begin:end])
