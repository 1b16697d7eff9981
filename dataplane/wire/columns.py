"""Columns of tags as they travel: one typed array per tag name, for a few rows or a million.

A column is encoded per chunk of rows, so that the tag store can keep the encoded pieces of
chunks that did not change. Kinds:

    i int64    f float64    b bool    s string       null = the row has no such tag
    p packed   msgpack per cell; used where a tag is None, a list, a map, or of mixed types

Pure. Arrow arrays do the work on both sides; numpy arrays come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataplane.errors import InternalError, InvalidRequest

Array = npt.NDArray[Any]

_ARROW: dict[str, Any] = {
    "i": pa.int64(),
    "f": pa.float64(),
    "b": pa.bool_(),
    "s": pa.string(),
    "p": pa.binary(),
}
_KINDS: dict[type, str] = {int: "i", float: "f", bool: "b", str: "s"}


class Absent:
    """Stands for a tag that a row does not have; None is a value that a tag can have."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = Absent()


class Column(NamedTuple):
    """One chunk of one column, encoded."""

    kind: str
    rows: int
    buffers: tuple[Any, ...]
    """Arrow's buffers in order; None where there are no nulls."""

    def sizes(self) -> list[int]:
        """Bytes of each buffer; -1 for None."""
        return [-1 if b is None else len(b) for b in self.buffers]


def encode(values: list[Any]) -> Column:
    """The column of these cells; ABSENT marks a row without the tag."""
    types = set(map(type, values))
    absent = Absent in types
    types.discard(Absent)
    kind = _KINDS.get(types.pop(), "p") if len(types) == 1 else ("s" if not types else "p")
    if kind == "i":
        try:
            return _arrow("i", [None if v is ABSENT else v for v in values] if absent else values)
        except (OverflowError, pa.ArrowInvalid):
            kind = "p"  # beyond 64 bits signed
    if kind == "p":
        pack = msgpack.packb
        return _arrow("p", [None if v is ABSENT else pack(v) for v in values])
    return _arrow(kind, [None if v is ABSENT else v for v in values] if absent else values)


def _arrow(kind: str, values: list[Any]) -> Column:
    array = pa.array(values, _ARROW[kind])
    return Column(kind, len(values), tuple(array.buffers()))


def decode(kind: str, rows: int, buffers: Sequence[Any]) -> Any:
    """The Arrow array of one chunk; shares memory with `buffers`.

    InvalidRequest if there is no such kind, or the buffers have not what so many rows need: Arrow
    itself would read on behind their ends.
    """
    arrow = _ARROW.get(kind)
    if arrow is None or len(buffers) != (3 if kind in "sp" else 2):
        raise InvalidRequest(f"a column of unknown kind {kind!r:.80}")
    if not 0 <= rows < 1 << 48:  # so that no number of bytes wraps
        raise InvalidRequest(f"a column of {rows} rows")
    if not rows:  # which may come without buffers, and Arrow looks into them nevertheless
        return pa.array([], arrow)
    try:
        array: Any = pa.Array.from_buffers(
            arrow, rows, [None if b is None else pa.py_buffer(b) for b in buffers]
        )
        array.validate(full=kind in "sp")
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise InvalidRequest(f"a column of {rows} rows is damaged: {error}") from None
    return array


def to_numpy(kind: str, pieces: Sequence[Any]) -> Array:
    """A whole column from its chunks: int64, float64 or bool, or objects where cells vary.

    A row without the tag is NaN in a float column and None among objects; an int or bool
    column with such rows becomes an object column, so that no value is invented.
    """
    array = pieces[0] if len(pieces) == 1 else pa.concat_arrays(list(pieces))
    if kind == "p":
        cells = [None if cell is None else _unpacked(cell) for cell in array.to_pylist()]
        out = np.empty(len(cells), object)
        out[:] = cells
        return out
    return (
        array.to_numpy(zero_copy_only=False)
        if kind != "i" or not array.null_count
        else (np.array(array.to_pylist(), object))
    )


def to_cells(kind: str, piece: Any) -> list[Any]:
    """The cells of one chunk as Python values, ABSENT where the row has no such tag."""
    cells: list[Any] = piece.to_pylist()
    if kind == "p":
        return [ABSENT if cell is None else _unpacked(cell) for cell in cells]
    return [ABSENT if cell is None else cell for cell in cells] if piece.null_count else cells


def _unpacked(cell: bytes) -> Any:
    """The value of a packed cell. InternalError if it is none: whoever listed it has packed it."""
    try:
        return msgpack.unpackb(cell)
    except (ValueError, TypeError) as error:
        raise InternalError(f"a packed cell of a listing was damaged on its way: {error}") from None
