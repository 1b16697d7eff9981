"""What one field of a batch looks like: its dtype, and which of its dimensions differ by row.

Owns the names and widths of dtypes and the limits of a column. Imports nothing but
errors: producers outside a cluster use it too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dataplane.errors import InvalidRequest, quote

MAX_COLUMNS = 1024
MAX_RANK = 8
MAX_NAME_BYTES = 256
MAX_ROWS = 65_536
MAX_CELLS = 1 << 22
"""Rows times columns of one batch: what is added up of it before any byte stays within memory."""
MAX_SIZE = 1 << 31
"""Every dimension of a row, and the bytes of a packed value, are below this."""

OBJECT = "object"
"""dtype of a column of msgpack-packed Python values; its one free dimension counts bytes."""

ITEM_BYTES: dict[str, int] = {
    OBJECT: 1,
    "bool": 1,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of one element by dtype name (torch's names without the `torch.` prefix)."""


class Column(NamedTuple):
    """One field of a batch."""

    name: str
    dtype: str
    ragged_dim: int | None
    """Which dimension the writer holds to be ragged; None for rank 0. The partition's schema,
    fixed at the field's first write, decides for readers."""
    dims: tuple[int, ...]
    """Size of each dimension of one row; -1 where it differs by row (a free dimension)."""

    @property
    def free(self) -> tuple[int, ...]:
        """Indices of the free dimensions."""
        return tuple(i for i, size in enumerate(self.dims) if size < 0)


def column_of(item: tuple[Any, ...]) -> Column:
    """The column that a peer described. InvalidRequest says what is wrong with it."""
    if type(item) is not tuple or len(item) != 4:
        raise InvalidRequest("a column of a template is [name, dtype, ragged_dim, dims]")
    dims: tuple[Any, ...]
    name, dtype, ragged_dim, dims = item
    if not isinstance(name, str) or not name or len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidRequest(f"a field name is a string of 1 to {MAX_NAME_BYTES} bytes")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise InvalidRequest(f"field {name!r}: unknown dtype {quote([dtype])}")
    if type(dims) is not tuple or len(dims) > MAX_RANK:
        raise InvalidRequest(f"field {name!r}: at most {MAX_RANK} dimensions")
    for size in dims:
        if type(size) is not int or not -1 <= size < MAX_SIZE:
            raise InvalidRequest(f"field {name!r}: dimension {quote([size])} is not a size")
    if dtype == OBJECT and dims != (-1,):
        raise InvalidRequest(f"field {name!r}: an object column has dims (-1,)")
    if ragged_dim is not None and not (type(ragged_dim) is int and 0 <= ragged_dim < len(dims)):
        raise InvalidRequest(
            f"field {name!r}: ragged_dim {quote([ragged_dim])} of {len(dims)} dimensions"
        )
    if ragged_dim is None and dims:
        raise InvalidRequest(f"field {name!r}: a field of rank {len(dims)} names its ragged_dim")
    return Column(name, dtype, ragged_dim, dims)


def check_cells(rows: int, columns: int) -> None:
    """InvalidRequest if a batch has more cells than are added up at a time."""
    if rows * columns > MAX_CELLS:
        raise InvalidRequest(
            f"{rows} rows of {columns} fields; a batch has at most {MAX_CELLS} cells: put fewer "
            "rows"
        )
